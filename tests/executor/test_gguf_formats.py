"""A GGUF file that mixes every block format gives what transformers gives with the weights widened, resident and streamed."""

from __future__ import annotations

from lmoffload.checkpoint import open_checkpoint
from lmoffload.executor import Engine, Request
from lmoffload_solver.formats import FORMATS
from tests.executor.plans import make_plan
from tests.executor.reference import greedy, load_reference, prompts
from tests.models import tiny_gguf, tiny_model

NEW_TOKENS = 6
KINDS = {
    "token_embd": "Q6_K", "output": "Q6_K", "attn_q": "Q2_K", "attn_k": "Q3_K", "attn_v": "Q8_0", "attn_output": "Q5_K",
    "ffn_gate": "Q5_0", "ffn_up": "Q5_1", "ffn_down": "Q4_K",
}  # fmt: skip


def test_greedy_tokens_equal_transformers(tmp_path):
    path = tiny_gguf("llama", tmp_path / "tiny.gguf", num_layers=2, tied=False, kinds=KINDS, hidden_size=256, intermediate_size=256)
    checkpoint = open_checkpoint(path)
    assert {t.format for t in checkpoint.shape.tensors} == set(FORMATS) - {"bf16", "fp16", "q4_0", "q4_1"}
    texts = prompts(checkpoint.shape.vocab_size, (3, 17, 1, 30))
    model = load_reference(path)
    expected = [greedy(model, text, NEW_TOKENS) for text in texts]
    assert len({tuple(tokens) for tokens in expected}) == len(texts)
    for kernel, resident, micro_batch in (("widen_tiles", set(), 2), ("fused_dot", None, 3)):
        plan = make_plan(checkpoint.shape, checkpoint.fingerprint, kernel=kernel, resident=resident, micro_batch=micro_batch)
        with Engine(checkpoint, plan) as engine:
            done = engine.generate([Request(str(i), tuple(text), NEW_TOKENS) for i, text in enumerate(texts)])
        assert [list(completion.token_ids) for completion in done] == expected


def test_experts_of_a_gguf_file(tmp_path):
    """Against the model that was written: transformers' loader takes the size of experts for that of its defaults."""
    options = {"num_layers": 2, "seed": 3, "mlp_only_layers": []}
    checkpoint = open_checkpoint(tiny_gguf("qwen3_moe", tmp_path / "tiny.gguf", **options))
    model = tiny_model("qwen3_moe", **options)
    assert len(checkpoint.source("model.layers.1.mlp.experts.gate_up_proj").runs) == 2 * 8
    texts = prompts(checkpoint.shape.vocab_size, (3, 17, 1, 30))
    plan = make_plan(checkpoint.shape, checkpoint.fingerprint, resident=set(), micro_batch=2)
    with Engine(checkpoint, plan) as engine:
        done = engine.generate([Request(str(i), tuple(text), NEW_TOKENS) for i, text in enumerate(texts)])
    assert [list(completion.token_ids) for completion in done] == [greedy(model, text, NEW_TOKENS) for text in texts]
