"""Parts of `gpu_check`: the machine's profile, and the device's kernels against their references."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_runs import Check
from lmoffload_solver.errors import StatedError

if TYPE_CHECKING:
    import torch


def profiled(check: Check) -> dict[str, Any]:
    """Links, device memory, products, launches: the machine's profile."""
    from lmoffload.profiler.device import Device, measure_device
    from lmoffload.profiler.profile_machine import profile, with_device
    from lmoffload.profiler.store import load_profile, save_profile

    if check.rehearsed:
        import torch

        device = Device(torch.device("cpu"), "torch's CPU", lambda: None, check.memory_bytes, check.memory_bytes, 0)
        base = load_profile("xeon-avx512-2-cores")
        machine = with_device(base, measure_device(device, 2.0)).model_copy(update={"links": load_profile("t4-gcp").links})
    else:
        machine = profile(quick=True, disk_path=check.folder, budget_s=75.0)
    save_profile(machine, check.folder / "machine.json")
    accelerator = machine.accelerator
    assert accelerator is not None and accelerator.name != "emulated", "the profile has no device"
    links = {f"{link.direction}, {'page-locked' if link.page_locked else 'pageable'}": max(link.bytes_per_s.y) for link in machine.links}
    return {"accelerator": accelerator.model_dump(mode="json"), "links": links, "rates": [r.model_dump(mode="json") for r in machine.rates]}


def kernels(check: Check) -> dict[str, Any]:
    """The device's products and attention against the references on the host, Triton's kernels included where there is Triton."""
    import numpy as np
    import torch

    from lmoffload.kernels.decode_attention import reference_decode_attention
    from lmoffload.kernels.device_attention import device_decode_attention
    from lmoffload.kernels.device_linear import DEVICE_KERNELS, device_linear
    from lmoffload.kernels.linear import reference_linear
    from lmoffload.kernels.matrix import Matrix
    from lmoffload.kernels.triton_ready import triton_runs_on
    from lmoffload.profiler.weights import random_blocks
    from lmoffload_solver.formats import KV_LINE_BYTES, QUANTIZED, stored_bytes

    place, generator = torch.device(check.device), torch.Generator().manual_seed(0)
    errors: dict[str, float] = {}
    for name in ("bf16", "fp16", *QUANTIZED):
        size, pattern = stored_bytes((528, 1024), name), random_blocks(name)
        matrix = Matrix(pattern.repeat(-(-size // pattern.numel()))[:size], name, 528, 1024)
        x = torch.randn(20, 1024, generator=generator).to(torch.bfloat16)
        expected = reference_linear(x.float(), matrix)
        for kernel in DEVICE_KERNELS[1:] if name in QUANTIZED else DEVICE_KERNELS[:1]:
            found = device_linear(x.to(place), replace(matrix, data=matrix.data.to(place)), kernel).float().cpu()
            errors[f"{name}, {kernel}"] = float((found - expected).norm() / expected.norm())
    for name in ("bf16", *KV_LINE_BYTES):
        keys, values, lengths = _stored(name, generator)
        q, rows = torch.randn(len(lengths), 8, 64, generator=generator), np.arange(len(lengths))
        expected = reference_decode_attention(q, keys, values, rows, lengths, scaling=0.125)
        on_device = [replace(stored, data=stored.data.to(place)) for stored in (keys, values)]
        found = device_decode_attention(q.to(place), on_device[0], on_device[1], rows, lengths, scaling=0.125).cpu()
        errors[f"decode attention, {name}"] = float((found - expected).norm() / expected.norm())
    wrong = {name: error for name, error in errors.items() if not error < 0.02}
    if wrong:
        raise StatedError(f"Kernels are wrong: {wrong}.")
    return {"relative_errors": errors, "triton": triton_runs_on(place)}


def _stored(name: str, generator: torch.Generator) -> tuple[Any, Any, Any]:
    import numpy as np
    import torch

    from lmoffload.kernels.kv_rows import keys_of, row_bytes, values_of
    from lmoffload_solver.formats import KV_LINE_BYTES, LINE_ELEMENTS

    lengths = np.array([7, 100, 64])
    made = []
    for of in (keys_of, values_of):
        grouped = of is keys_of and name in KV_LINE_BYTES
        rooms = (lengths + 4) // LINE_ELEMENTS if grouped else lengths + 4
        empty = of(name, 2, 64, torch.empty(0, dtype=torch.uint8), np.zeros(1, np.int64), rooms)
        sizes = [row_bytes(empty, int(room)) for room in rooms]
        starts = np.concatenate(([0], np.cumsum(sizes)))[:-1].astype(np.int64)
        rows = of(name, 2, 64, torch.zeros(sum(sizes), dtype=torch.uint8), starts, rooms)
        for row, length in enumerate(lengths.tolist()):
            rows.store_run(row, 0, torch.randn(length, 2, 64, generator=generator))
        made.append(rows)
    return made[0], made[1], lengths
