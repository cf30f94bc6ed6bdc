"""GGUF files, held against transformers' own loader, on tiny models of every architecture and block format and on a real trained model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lmoffload.checkpoint import Checkpoint, inspect, load_tokenizer, open_checkpoint, transformers_config
from lmoffload.checkpoint.gguf_file import rotary_row_order
from lmoffload.checkpoint.gguf_header import read_gguf_header
from lmoffload_solver.counting import weights_bytes
from lmoffload_solver.errors import StatedError
from tests.models import GGUF_FAMILIES, tiny_gguf

KINDS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1", "Q5_0": "q5_0", "Q5_1": "q5_1"}
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
WIDE = {"hidden_size": 256, "intermediate_size": 256}
"""Rows of whole blocks of K-quants."""


def widened(checkpoint: Checkpoint, name: str) -> np.ndarray[Any, Any]:
    """A tensor as transformers has it: fp32, rows in its order."""
    source = checkpoint.source(name)
    kind = gguf.GGMLQuantizationType[{"fp32": "F32", "fp16": "F16"}.get(source.format, source.format.upper())]
    rows = checkpoint.read_array(name).reshape(source.shape[0], -1) if len(source.shape) > 1 else checkpoint.read_array(name)
    data = gguf.quants.dequantize(rows.view({"fp32": np.float32, "fp16": np.float16}.get(source.format, np.uint8)), kind)
    return data if source.row_order is None else data[source.row_order]


def config_without_names(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key not in ("_name_or_path", "_model_name_or_path")}


def agrees_with_transformers(path: Path) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    assert config_without_names(transformers_config(checkpoint)) == config_without_names(
        AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    )
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    parameters = dict(model.named_parameters())
    assert {t.name: t.shape for t in checkpoint.shape.tensors} == {name: tuple(p.shape) for name, p in parameters.items()}
    for name, parameter in parameters.items():
        assert np.array_equal(widened(checkpoint, name), parameter.detach().float().numpy()), name
    assert checkpoint.shape.tied_head == (model.get_input_embeddings().weight is model.get_output_embeddings().weight)
    assert weights_bytes(checkpoint.shape) == sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
    return checkpoint


@pytest.mark.parametrize("family", GGUF_FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_tiny_models(family: str, tied: bool, tmp_path: Path) -> None:
    checkpoint = agrees_with_transformers(tiny_gguf(family, tmp_path / "tiny.gguf", tied=tied))
    assert checkpoint.shape.tied_head is tied
    assert checkpoint.shape.name == "tiny"


@pytest.mark.parametrize("kind", KINDS)
def test_formats(kind: str, tmp_path: Path) -> None:
    checkpoint = agrees_with_transformers(tiny_gguf("llama", tmp_path / "tiny.gguf", kind, num_layers=2))
    assert {t.format for t in checkpoint.shape.tensors if t.is_matrix} == {KINDS[kind]}
    assert {t.format for t in checkpoint.shape.tensors if not t.is_matrix} == {"fp32"}


def test_a_file_that_mixes_k_quants(tmp_path: Path) -> None:
    """As Q4_K_M does: some matrices in more bits."""
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "attn_q": "Q2_K", "attn_k": "Q3_K", "ffn_up": "Q5_K"}
    checkpoint = agrees_with_transformers(tiny_gguf("llama", tmp_path / "tiny.gguf", "Q4_K", 2, tied=True, kinds=kinds, **WIDE))
    assert {t.format for t in checkpoint.shape.tensors if t.is_matrix} == {kind.lower() for kind in K_QUANTS}
    assert inspect(checkpoint).format_bytes["q6_k"] == 210 * (2 * (128 + 256) + 128)


def rope_factors(head_dim: int, factor: float, theta: float = 10000.0, original: int = 8192) -> np.ndarray[Any, Any]:
    """As `convert_hf_to_gguf.py` of llama.cpp computes them."""
    found = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        smooth = (original / wavelength - 1) / (4 - 1)
        found.append(1 if wavelength < original / 4 else factor if wavelength > original else 1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def test_llama_3_scaling_of_rotary_positions(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    tensors = {"rope_freqs.weight": rope_factors(64, 8.0)}
    path = tiny_gguf("llama", tmp_path / "tiny.gguf", num_layers=1, tensors=tensors, head_dim=64)
    checkpoint = open_checkpoint(path)
    assert transformers_config(checkpoint).rope_parameters == {"rope_theta": 10000.0, **rope}
    assert "rope_freqs.weight" not in checkpoint.sources
    tensors = {"rope_freqs.weight": rope_factors(64, 8.0, original=4096)}
    path = tiny_gguf("llama", tmp_path / "b.gguf", num_layers=1, tensors=tensors, head_dim=64)
    with pytest.raises(StatedError, match=r"scales rotary positions \(rope_freqs\.weight\) in another way than Llama 3"):
        open_checkpoint(path)


def test_row_order_by_hand() -> None:
    """Two heads of four rows: llama.cpp stores rows 0, 2, 1, 3 of each head."""
    assert rotary_row_order(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert rotary_row_order(6, 1).tolist() == [0, 2, 4, 1, 3, 5]


def test_a_head_size_of_its_own(tmp_path: Path) -> None:
    """transformers' loader passes attention.key_length over; a model with other heads than the default would come out wrong."""
    checkpoint = open_checkpoint(tiny_gguf("qwen3", tmp_path / "tiny.gguf", head_dim=32))
    assert checkpoint.shape.layers[0].key_dim == 32
    assert transformers_config(checkpoint).head_dim == 32


def test_the_real_model(trained_file: Path) -> None:
    checkpoint = open_checkpoint(trained_file)
    shape = checkpoint.shape
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size, shape.tied_head) == (30, 576, 49152, True)
    assert shape.embedding.format == "q8_0"
    assert {t.format for t in shape.tensors if t.is_matrix and t.layer is not None} == {"q4_1"}
    reader = gguf.GGUFReader(trained_file)
    offsets = {t.name: (int(t.data_offset), int(t.n_bytes)) for t in reader.tensors}
    header = read_gguf_header(trained_file)
    assert {name: (source.offset_bytes, source.num_bytes) for name, source in header.tensors.items()} == offsets
    assert weights_bytes(shape) == sum(num_bytes for _, num_bytes in offsets.values())
    for field, value in header.metadata.items():
        if not field.endswith(".length"):
            assert reader.fields[field].contents() == value, field
    assert config_without_names(transformers_config(checkpoint)) == config_without_names(
        AutoConfig.from_pretrained(trained_file.parent, gguf_file=trained_file.name)
    )
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_the_real_tokenizer(trained_file: Path) -> None:
    tokenizer: Any = load_tokenizer(open_checkpoint(trained_file))
    theirs: Any = AutoTokenizer.from_pretrained(trained_file.parent, gguf_file=trained_file.name)
    assert tokenizer.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert tokenizer.special_tokens_map == theirs.special_tokens_map
    assert tokenizer.chat_template == theirs.chat_template
    for text in (
        "Hello  world\n\n\tfoo 12345",
        " lead and trail  ",
        "안녕하세요 세계",
        "🎉👩\u200d👩\u200d👧 emoji",
        "naïve café — “quotes”\r\n",
    ):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("Hello  world\n\n\tfoo 123").input_ids == [19556, 216, 905, 1116, 197, 15236, 216, 33, 34, 35]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    assert (ids.count(1), ids.count(2)) == (3, 2)  # <|im_start|> and <|im_end|> are one token each


def test_a_short_file_is_told_with_expected_and_actual_bytes(tmp_path: Path) -> None:
    path = tiny_gguf("llama", tmp_path / "tiny.gguf")
    end = max(source.offset_bytes + source.num_bytes for source in open_checkpoint(path).sources.values())
    with path.open("r+b") as file:
        file.truncate(end - 200)
    with pytest.raises(StatedError, match=rf"tiny\.gguf is cut short: {end} bytes expected, {end - 200} bytes found"):
        open_checkpoint(path)
    with path.open("r+b") as file:
        file.truncate(300)
    with pytest.raises(StatedError, match=r"its header takes at least \d+ bytes, the file has 300"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "scales rotary positions (yarn)"),
        ({"llama.rope.scaling.factor": 4}, "scales rotary positions (rope.scaling.factor)"),
        ({"llama.rope.scale_linear": 2}, "scales rotary positions (rope.scale_linear)"),
        ({"llama.expert_count": 8}, "mixture of 8 experts"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_features_that_do_not_run(tmp_path: Path, metadata: dict[str, Any], said: str) -> None:
    path = tiny_gguf("llama", tmp_path / "tiny.gguf", num_layers=1, metadata=metadata)
    with pytest.raises(StatedError) as caught:
        open_checkpoint(path)
    assert said in str(caught.value)


def test_tensors_that_do_not_run(tmp_path: Path) -> None:
    path = tiny_gguf("llama", tmp_path / "b.gguf", num_layers=1, tensors={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(StatedError, match=r"stores the tensor blk\.0\.attn_sinks\.weight, which a llama model"):
        open_checkpoint(path)
    path = tiny_gguf("llama", tmp_path / "c.gguf", "MXFP4", num_layers=1)
    with pytest.raises(StatedError, match=r"model\.embed_tokens\.weight as MXFP4, which does not run; those that run are .*q4_1"):
        open_checkpoint(path)


def test_an_architecture_that_does_not_run(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "rwkv7")
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(StatedError, match="architecture 'rwkv7', which does not run from GGUF; those that do are llama, qwen2, qwen3"):
        open_checkpoint(tmp_path / "a.gguf")


def test_not_a_gguf_file(tmp_path: Path) -> None:
    for data in (b"", b"GGU", b"PK\3\4 something else"):
        (tmp_path / "a.gguf").write_bytes(data)
        with pytest.raises(StatedError, match="is not a GGUF file"):
            open_checkpoint(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + (99).to_bytes(4, "little") + bytes(16))
    with pytest.raises(StatedError, match="its version is 99"):
        open_checkpoint(tmp_path / "a.gguf")


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_gguf("llama", tmp_path_factory.mktemp("gguf") / "tiny.gguf", num_layers=1).read_bytes()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutated_headers_give_a_model_or_a_stated_error(
    small_file: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    header_bytes = 2000
    mutated = bytearray(small_file)
    for _ in range(data.draw(st.integers(0, 3))):
        position = data.draw(st.integers(0, header_bytes))
        new = data.draw(st.binary(min_size=1, max_size=8))
        mutated[position : position + len(new)] = new
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    path.write_bytes(mutated[: len(mutated) - data.draw(st.sampled_from([0, 0, 1, 4000, len(mutated) - 100]))])
    try:
        checkpoint = open_checkpoint(path)
    except StatedError:
        return
    for source in checkpoint.sources.values():
        assert source.offset_bytes + source.num_bytes <= path.stat().st_size
