"""Cases of docs/cases.md that touch several parts at once."""

from __future__ import annotations

import subprocess
import sys

import pytest
import safetensors.torch
import torch

from lmoffload.checkpoint import open_checkpoint
from lmoffload.executor import Engine, Request
from tests.executor.plans import make_plan
from tests.executor.reference import greedy, load_reference, prompts
from tests.models import tiny_checkpoint


def changed(folder, change):
    """The checkpoint in `folder` with its tensors changed in place."""
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    return open_checkpoint(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_far_larger_than_a_layer(tmp_path, tied):
    """Case W7: a vocabulary of 100,000 by 64 and two layers, everything on the disk."""
    checkpoint = open_checkpoint(tiny_checkpoint("llama", tmp_path / "m", num_layers=2, vocab_size=100_000, tied=tied))
    texts = prompts(checkpoint.shape.vocab_size, (3, 9))
    with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint, resident=set(), micro_batch=2)) as engine:
        done = engine.generate([Request(str(number), tuple(text), 4) for number, text in enumerate(texts)])
    model = load_reference(checkpoint.path)
    assert [list(completion.token_ids) for completion in done] == [greedy(model, text, 4) for text in texts]


def test_activations_beyond_fp16(tmp_path):
    """Case W8: a bf16 checkpoint whose activations exceed 65,504 runs as transformers runs it in fp32."""

    def enlarge(tensors):
        tensors["model.layers.0.mlp.down_proj.weight"] *= 1e5

    checkpoint = changed(tiny_checkpoint("llama", tmp_path / "m", dtype="bf16"), enlarge)
    model, text = load_reference(checkpoint.path), prompts(checkpoint.shape.vocab_size)[1]
    seen = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: seen.append(float(output.abs().max())))
    expected = greedy(model, text, 6)
    assert max(seen) > 65_504
    with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint)) as engine:
        assert list(engine.generate([Request("a", tuple(text), 6)])[0].token_ids) == expected


def test_an_end_token_inside_the_prompt_is_seen(tiny):
    """Case G4: no pad token, and the end token in the middle of prompts of different lengths: real tokens are never masked."""
    checkpoint = tiny("llama", eos_token_id=7)
    texts = [[5, 7, 6], [7, 9, 7, 7, 11, 12, 13], [7]]
    with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint, micro_batch=3)) as engine:
        logits = engine.first_logits(texts)
    model = load_reference(checkpoint.path)
    for text, found in zip(texts, logits, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(found, model(torch.tensor([text])).logits[0, -1], rtol=1e-4, atol=1e-4)


def test_logits_of_the_last_position_alone(tmp_path):
    """Case M8: a prompt of 2,000 tokens and a vocabulary of 50,000, whose logits would take 400 MB."""
    checkpoint = open_checkpoint(
        tiny_checkpoint("llama", tmp_path / "m", num_layers=1, vocab_size=50_000, max_position_embeddings=4096)
    )
    program = (
        "import sys; from lmoffload.checkpoint import open_checkpoint; from lmoffload.executor import Engine, Request, process\n"
        "from tests.executor.plans import make_plan\n"
        "checkpoint = open_checkpoint(sys.argv[1])\n"
        "plan = make_plan(checkpoint.shape, checkpoint.fingerprint, micro_batch=1, tokens=2048)\n"
        "with Engine(checkpoint, plan) as engine:\n"
        "    engine.generate([Request('a', tuple(range(5, 100)), 1)]); process.reset_peak(); before = process.resident_bytes()\n"
        "    engine.generate([Request('b', tuple(i % 50_000 for i in range(2000)), 1)])\n"
        "    print(process.peak_resident_bytes() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(checkpoint.path)], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < 100e6


def test_a_model_larger_than_its_memory_runs(tmp_path):
    """Case W6: everything on the disk; 100 MB of weights, of which the largest unit takes 34."""
    folder = tiny_checkpoint(
        "llama", tmp_path / "m", dtype="bf16", num_layers=10, hidden_size=512, intermediate_size=2560, vocab_size=512,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    size = sum(file.stat().st_size for file in open_checkpoint(folder).files)
    program = (
        "import gc, sys; from lmoffload.checkpoint import open_checkpoint; from lmoffload.executor import Engine, Request, process\n"
        "from tests.executor.plans import make_plan\n"
        "def generate(resident):\n"
        "    with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint, resident=resident, micro_batch=1)) as engine:\n"
        "        engine.generate([Request('a', (5, 6, 7), 3)])\n"
        "    return process.peak_resident_bytes()\n"
        "checkpoint = open_checkpoint(sys.argv[1])\n"
        "generate(set()); gc.collect(); before = process.resident_bytes()\n"
        "print(generate(set()) - before, generate(None) - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True)
    streamed, resident = map(int, done.stdout.split())
    assert size > 90e6
    assert streamed < size / 2 < size < resident


def test_a_key_channel_far_larger_than_the_others(tmp_path):
    """Case Q1: groups of keys lie along tokens, so that one large channel costs the others nothing."""

    def enlarge(tensors):
        tensors["model.layers.1.self_attn.k_proj.bias"][5] = 200.0

    options = {"num_layers": 2, "initializer_range": 0.1}
    checkpoint = changed(tiny_checkpoint("qwen2", tmp_path / "m", **options), enlarge)
    plain = open_checkpoint(tiny_checkpoint("qwen2", tmp_path / "plain", **options))
    (usual,), (enlarged,) = (_losses(one, ("int4-g32",), 70) for one in (plain, checkpoint))
    assert enlarged < 2 * usual < 0.3


def test_two_hundred_steps_over_quantized_keys_and_values(tiny):
    """Case Q2: probabilities along the way, not the first words alone."""
    checkpoint = tiny("llama", initializer_range=0.1, num_layers=2)
    bf16, int8, int4 = _losses(checkpoint, ("bf16", "int8", "int4-g32"), 210)
    assert 0 < bf16 < int8 < int4 < 0.2
    assert int8 < 0.01


def _losses(checkpoint, kinds, num_decoded):
    """Mean absolute difference of given tokens' log-probabilities from those over fp32 keys and values, for each format."""
    texts = prompts(checkpoint.shape.vocab_size, (num_decoded + 20,))

    def told(kind):
        plan = make_plan(checkpoint.shape, checkpoint.fingerprint, kv=(kind, kind), tokens=256, micro_batch=1)
        with Engine(checkpoint, plan) as engine:
            return engine.score(texts, num_decoded=num_decoded)[0].last(num_decoded).log_probabilities

    exact = told("fp32")
    return [float((told(kind) - exact).abs().mean()) for kind in kinds]
