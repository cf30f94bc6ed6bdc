"""A comparison by hand: this engine, a peer that is faster, one that crashed, one that is not installed."""

from __future__ import annotations

from typing import Any

from lmoffload_solver.comparison import Check, Comparison, Figures, Granted, Row, Run, Span, System
from lmoffload_solver.machine import HostLimits
from lmoffload_solver.plan import Named
from lmoffload_solver.workload import Workload

GIB = 2**30


def figures(prefill_s: float, decode_s: float, **changes: Any) -> Figures:
    """Of 8 prompts of 16 tokens and 5 new ones."""
    known = {
        "load_s": 1.0, "prefill_s": prefill_s, "decode_s": decode_s, "first_token_s": prefill_s, "step_s": (decode_s / 4,) * 4,
        "prefill_tokens_per_s": 128 / prefill_s, "decode_tokens_per_s": 32 / decode_s, "tokens_per_s": 40 / (prefill_s + decode_s),
    }  # fmt: skip
    return Figures(**(known | changes))


def run(prefill_s: float, decode_s: float, **changes: Any) -> Run:
    known: dict[str, Any] = {
        "status": "done", "figures": figures(prefill_s, decode_s), "peak_memory_bytes": GIB // 2, "peak_rss_bytes": GIB // 4,
        "bytes_read": 3 * GIB, "disk_bytes_read": 3 * GIB, "memory": ((0.0, 2**20), (1.0, GIB // 2), (2.0, GIB // 3)),
        "spans": (
            Span(lane="disk_read", name="layer 1 <&>", begin_s=0.0, end_s=0.2), Span(lane="compute", name="layer 0", begin_s=0.1, end_s=0.3)
        ), "wall_s": 3.0,
    }  # fmt: skip
    return Run(**(known | changes))


def row(kind: str, *runs: Run, **settings: Any) -> Row:
    return Row.model_validate({"kind": kind, "settings": settings, "runs": runs})


def comparison(**changes: Any) -> Comparison:
    failed = Run(status="crashed", sentence="exit code 1: <b>no | room</b>")
    equal = Check(status="equal", sentence="all 4 tokens of 2 prompts equal")
    systems = (
        System(name="lmoffload", about="torch 2", weights="bf16", check=equal, rows=(row("only", run(2, 2), run(1, 3), run(4, 4)),)),
        System(
            name="accelerate", weights="as stored",
            check=Check(status="differs", sentence="differs in prompt 1 from token 2 on (7 instead of 8)"),
            trials=(run(8, 8, settings={"batch": 8}), failed.model_copy(update={"settings": {"batch": 4, "threads": None}})),
            rows=(row("default", run(8, 12), batch=8, threads=None), row("best", run(4, 4), run(2, 6), batch=4, threads=2)),
        ),
        System(name="llama.cpp", weights="q4_0", rows=(row("only", run(0.5, 1.5)),), memory_bytes=2 * GIB),
        System(name="zero-inference", weights="as stored", rows=(row("only", failed),)),
        System(name="airllm", weights="as stored", status="not installed", sentence="airllm is not installed in /usr/bin/python3."),
    )  # fmt: skip
    known: dict[str, Any] = {
        "model": Named(name="tiny <model>", digest="0"), "model_bytes": 2 * GIB, "kv_bytes": GIB // 8, "hidden_bytes": GIB // 16,
        "machine": "by-hand", "processor": "by hand",
        "host": HostLimits(
            memory_total_bytes=16 * GIB, memory_usable_bytes=15 * GIB, memory_limited_by="physical", cores=2, cores_limited_by="physical",
            last_level_cache_bytes=0,
        ),
        "versions": {"python": "3.12"}, "made_at": "2026-01-01 00:00:00 +0000", "command": ("lmoffload", "compare", "a model"),
        "workload": Workload.of_lengths([16] * 8, 5), "quality": "exact", "granted": Granted(memory_bytes=GIB, read_bytes_per_s=5 * 10**8),
        "rounds": 3, "measured_tokens": 5, "systems": systems, "remarks": ("Something is odd.",),
    }  # fmt: skip
    return Comparison(**(known | changes))
