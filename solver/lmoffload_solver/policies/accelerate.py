"""Hugging Face Accelerate's policy as a decision: a device map filled greedily in the order of the modules.

Source: huggingface/accelerate, infer_auto_device_map and dispatch_model: whole layers go to the device while room is left for the largest
of them, then to the host, then to disk; weights are fetched on demand and dropped after use, nothing overlaps, keys and values stay on the
device.
"""

from __future__ import annotations

from lmoffload_solver import counting
from lmoffload_solver.decision import Decision, KVUnit
from lmoffload_solver.model import ModelShape
from lmoffload_solver.runtime import Runtime
from lmoffload_solver.value import Tier


def accelerate_runtime() -> Runtime:
    """Copies on fetch from pageable memory, one thing after another."""
    return Runtime(
        name="accelerate",
        overlap="none",
        weights_page_locked=False,
        quantizing="eager",
        attending="eager",
        host_attending="eager",
        dequantizes_per="micro_batch",
        stages_disk=True,
    )


def accelerate_decision(model: ModelShape, batch: int, device_bytes: int, host_bytes: int) -> Decision:
    """The greedy map for a batch.

    Args:
        device_bytes: for weights on the device, KV and work already taken off.
        host_bytes: for weights in host memory.
    """
    room: dict[Tier, int] = {"device": device_bytes, "host": host_bytes}
    modules = [[t for t in model.by_layer[layer] if t.is_matrix] for layer in range(model.num_layers)]
    outside = [t for t in model.tensors if t.is_matrix and t.layer is None]
    before, after = [t for t in outside if t.tensor_class == "embedding"], [t for t in outside if t.tensor_class != "embedding"]
    largest = max(sum(counting.tensor_bytes(t) for t in module) for module in modules)
    homes: dict[str, Tier] = {}
    tiers: list[Tier] = ["device", "host", "disk"]
    needs_room_for_more = sum(counting.tensor_bytes(t) for t in model.tensors if t.is_matrix) > device_bytes
    for module in [before, *modules, after]:
        size = sum(counting.tensor_bytes(t) for t in module)
        while tiers[0] != "disk" and size + (largest if tiers[0] == "device" and needs_room_for_more else 0) > room[tiers[0]]:
            tiers.pop(0)
        if tiers[0] != "disk":
            room[tiers[0]] -= size
        homes |= dict.fromkeys((t.name for t in module), tiers[0])
    return Decision(
        micro_batch=batch,
        num_micro_batches=1,
        formats={},
        homes=homes,
        kv_format="fp16",
        kv=((KVUnit("device", "device"),),) * model.num_layers,
        hidden="device",
        prefetch_depth=0,
        runtime=accelerate_runtime(),
    )
