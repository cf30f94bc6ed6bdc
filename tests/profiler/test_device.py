"""The figures of a device, taken of torch's CPU."""

from __future__ import annotations

import torch

from lmoffload.profiler.device import BOUND, Device, measure_device, rate_curve
from lmoffload.profiler.profile_machine import with_device
from lmoffload.profiler.samples import Sample
from lmoffload.profiler.store import load_profile
from lmoffload_solver.processing import Processing
from lmoffload_solver.roofline_processing import RooflineProcessing
from lmoffload_solver.runtime import own_runtime

GIB = 2**30


def test_every_figure_that_plans_ask_for():
    device = Device(torch.device("cpu"), "torch's CPU", lambda: None, 4 * GIB, 2 * GIB, GIB)
    profile = with_device(load_profile("xeon-avx512-2-cores"), measure_device(device, 1.0))
    accelerator = profile.accelerator
    assert accelerator.name == "torch's CPU" and accelerator.memory_bytes == 4 * GIB and accelerator.reserved_bytes == GIB
    processing: Processing = RooflineProcessing(profile, accelerator, own_runtime(), 1.0)
    for work in ("attention_prefill", "attention_decode", "quantize", "dequantize"):
        assert processing.rate(work, "device", "fused") > 0
    for work in ("attention_decode", "quantize", "dequantize"):
        assert processing.rate(work, "host", "fused") > 0


def test_products_that_reading_binds_say_nothing_of_flops():
    side, bytes_per_s = 1000, 2e9  # reading takes 1 ms
    seconds = {16: Sample(1e-3, 0.0, 3), 32: Sample(BOUND * 1e-3 * 1.01, 0.0, 3), 64: Sample(4e-3, 0.0, 3)}
    curve = rate_curve(seconds, side, bytes_per_s)
    assert curve.rows == (32.0, 64.0)
    assert curve.flops_per_s[1] == 2 * 64 * side * side / 4e-3
    assert rate_curve({16: seconds[16]}, side, bytes_per_s).rows == (16.0,)
