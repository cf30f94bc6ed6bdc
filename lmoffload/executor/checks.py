"""What must hold before a plan is run."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lmoffload.executor.block import phase_kernel
from lmoffload.executor.micro_batch import MicroBatch
from lmoffload.executor.stored_weights import StoredWeights
from lmoffload.kernels.device_linear import DEVICE_KERNELS
from lmoffload.kernels.linear import KERNELS, verify_row_invariance
from lmoffload_solver.errors import StatedError
from lmoffload_solver.formats import KV_LINE_BYTES, stored_bytes
from lmoffload_solver.model import ModelShape
from lmoffload_solver.plan import Plan, on_device


def check_kernels(plan: Plan) -> None:
    """
    Raises:
        StatedError: the plan names a kernel, or a format of keys and values, that what computes does not have.
    """
    known: Collection[str] = KERNELS
    if on_device(plan) and plan.limits.emulated_device is None:
        known = DEVICE_KERNELS
        kept = {plan.kv.format.key, plan.kv.format.value}
        if not (kept <= {"fp32", "bf16", "fp16"} or kept <= set(KV_LINE_BYTES)):
            raise StatedError(f"No device attends to keys and values in {' and '.join(sorted(kept))}: plan with the class exact.")
    for kernel in (*plan.kernels.prefill.split("+"), *plan.kernels.decode.split("+")):
        if kernel not in known:
            raise StatedError(f"The plan has the kernel {kernel!r:.40}, which is not one of {', '.join(known)}: make a new plan.")


def check_bytes(stores: Sequence[StoredWeights], shape: ModelShape, plan: Plan) -> None:
    """Bytes in memory are the plan's, exactly: an option that was accepted but has no effect is a fault.

    Raises:
        StatedError: they are not.
    """
    planned = sum(size for tier, size in plan.weights.bytes.items() if tier != "disk")
    tables = [t for t in shape.tensors if t.is_table and plan.weights.tensors[t.name].tier != "disk"]
    planned -= sum(stored_bytes(t.shape, t.format) for t in tables)  # mapped from their file, their rows read as they are looked up
    got = sum(weights.resident_bytes for weights in stores) + stores[0].vector_bytes
    if got != planned:
        raise StatedError(f"The weights in memory take {got} bytes where the plan has {planned}: make a new plan.")


def check_rows(shape: ModelShape, plan: Plan) -> None:
    """Every kernel gives a row the same bits in any batch, for every shape of this model.

    Raises:
        StatedError: one does not, on this machine.
    """
    checked = set()
    for tensor in shape.tensors:
        if not tensor.is_matrix:
            continue
        for kernel in {phase_kernel(planned, tensor.format) for planned in (plan.kernels.prefill, plan.kernels.decode)}:
            case = (kernel, tensor.format, tensor.shape[-1])
            if case not in checked:
                checked.add(case)
                verify_row_invariance(kernel, tensor.format, min(tensor.shape[-2], 512), tensor.shape[-1])


def check_room(plan: Plan, block: Sequence[MicroBatch]) -> None:
    """
    Raises:
        StatedError: the plan keeps less room for keys and values than the block needs.
    """
    in_memory = sum(batch.cache_bytes for batch in block)
    on_disk = sum(spilled.num_bytes for batch in block for spilled in batch.spilled.values())
    planned_bytes = plan.kv.bytes.get("host", 0), plan.kv.bytes.get("disk", 0)
    for needed, planned, where in zip((in_memory, on_disk), planned_bytes, ("KV cache", "KV cache on the disk"), strict=True):
        if needed > planned:
            longest = max(row.room for batch in block for row in batch.rows)
            raise StatedError(
                f"These prompts need {needed} bytes of {where} in a block where the plan has {planned}: "
                f"make a plan for prompts and completions of up to {longest} tokens."
            )
