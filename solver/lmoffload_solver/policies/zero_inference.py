"""DeepSpeed ZeRO-Inference's policy as a decision: every weight in the slow tier, one batch, no choice but where KV lies.

Source: deepspeedai/DeepSpeedExamples at 45b4b71, inference/huggingface/zero_inference: stage 3 with parameters offloaded, fetched module by
module with a prefetch bucket of 2·hidden² elements, parameters below the persistence threshold kept on the device; with KV offload the
CPU computes attention scores in decode.
"""

from __future__ import annotations

from lmoffload_solver.decision import Decision, KVUnit
from lmoffload_solver.model import ModelShape
from lmoffload_solver.runtime import Runtime
from lmoffload_solver.value import TensorClass, Tier

ZERO_4BIT = "int4-g64"
"""4 bits, groups of 64, asymmetric."""


def zero_runtime() -> Runtime:
    """Page-locked weights; the fetch of the next module overlaps the computing of this one and no more, since the prefetch bucket holds
    less than a layer; a fused kernel dequantizes; keys and values are repeated over the query heads before the CPU attends."""
    return Runtime(
        name="zero-inference",
        overlap="barriers",
        halves=True,
        quantizing="fused",
        attending="eager",
        host_attending="eager",
        dequantizes_per="micro_batch",
        repeats_kv_heads=True,
    )


def zero_decision(model: ModelShape, batch: int, tier: Tier, *, weights_4bit: bool = False, kv_offload: bool = False) -> Decision:
    """The policy for one batch, weights in `tier`."""
    classes: set[TensorClass] = {t.tensor_class for t in model.tensors if weights_4bit and t.is_matrix and t.layer is not None}
    unit = KVUnit("host", "host") if kv_offload else KVUnit("device", "device")
    return Decision(
        micro_batch=batch,
        num_micro_batches=1,
        formats=dict.fromkeys(classes, ZERO_4BIT),
        homes={t.name: tier for t in model.tensors if t.is_matrix},
        kv_format="fp16",
        kv=((unit,),) * model.num_layers,
        hidden="device",
        prefetch_depth=1,
        runtime=zero_runtime(),
    )
