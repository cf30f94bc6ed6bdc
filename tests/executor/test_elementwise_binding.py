"""Which modules run our kernels between products: those whose code is Llama's, and no others."""

from collections.abc import Iterator

import pytest
import torch

from lmoffload.kernels.pool import Pool
from lmoffload.modeling.build import build_model
from lmoffload.modeling.elementwise import bind_elementwise
from tests.models import tiny_model


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(2) as threads:
        yield threads


def bound(family: str, pool: Pool):
    model = build_model(tiny_model(family, 2).config)
    bind_elementwise(model, pool)
    return model


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("llama", {"RMSNorm", "MLP", "DecoderLayer", "Attention"}),
        ("qwen3", {"RMSNorm", "MLP", "DecoderLayer", "Attention"}),
        ("qwen3_moe", {"RMSNorm", "MLP", "DecoderLayer", "Attention"}),
        ("gemma2", set()),
        ("gpt_neox", set()),
    ],
)
def test_code_decides(family, parts, pool):
    named = {type(module).__name__ for module in bound(family, pool).modules() if "forward" in vars(module)}
    assert {next(part for part in ("RMSNorm", "MLP", "DecoderLayer", "Attention") if name.endswith(part)) for name in named} == parts


def test_norm_and_feed_forward_agree_with_transformers(pool):
    whole = tiny_model("llama", 2).float()
    model = bound("llama", pool).to_empty(device="cpu")
    model.load_state_dict(whole.state_dict())
    x = torch.randn(1, 9, whole.config.hidden_size, generator=torch.Generator().manual_seed(0))
    for name in ("model.norm", "model.layers.1.mlp"):
        torch.testing.assert_close(model.get_submodule(name)(x), whole.get_submodule(name)(x), rtol=1e-5, atol=1e-6)
