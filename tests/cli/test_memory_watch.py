"""When memory counts as short."""

from __future__ import annotations

import psutil

from lmoffload.jobs.memory_watch import LEAST_RESERVE_BYTES, MemoryWatch

GIB = 2**30


def test_short_is_less_than_a_reserve_and_less_than_the_plan_has_still_to_take() -> None:
    held, left = psutil.Process().memory_info().rss, [0]

    def watch(peak_bytes: int, usable: int) -> bool:
        left[0] = usable
        return MemoryWatch(peak_bytes, lambda: left[0], every_s=0).short()

    far = held + 100 * GIB
    assert watch(far, GIB) and watch(far, int(0.04 * far)) and not watch(far, int(0.06 * far)), "5 % of the plan's peak is the reserve"
    near = held + LEAST_RESERVE_BYTES // 2
    assert watch(near, LEAST_RESERVE_BYTES // 5) and not watch(near, LEAST_RESERVE_BYTES), "the plan takes no more than half of that"
    assert not watch(held // 2, LEAST_RESERVE_BYTES // 2) and watch(held // 2, 1000)


def test_it_looks_now_and_then() -> None:
    looks = []
    watch = MemoryWatch(GIB, lambda: looks.append(0) or 10 * GIB, every_s=3600)
    assert not any(watch.short() for _ in range(5)) and not looks
