"""What happens once happens before the first step, which is measured."""

from __future__ import annotations

from lmoffload.executor import Engine
from lmoffload.kernels import attention
from tests.executor.plans import make_plan


def test_attention_is_compiled_when_the_engine_is_made(tiny):
    checkpoint = tiny("llama")
    attention.attention_kernels.cache_clear()
    with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint)):
        assert attention.attention_kernels.cache_info().currsize == 1
