"""What happens once happens before the first step, which is measured."""

from __future__ import annotations

from lmoffload.executor import Engine
from lmoffload.kernels import attention, decode_attention
from tests.executor.plans import make_plan


def test_attention_is_compiled_when_the_engine_is_made(tiny):
    checkpoint = tiny("llama")
    compiled = attention.prefill_kernel, decode_attention.decode_kernel
    for kernel in compiled:
        kernel.cache_clear()
    with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint)):
        assert [kernel.cache_info().currsize for kernel in compiled] == [1, 1]
