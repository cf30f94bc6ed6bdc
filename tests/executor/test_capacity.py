"""What runs take of each tier is what their plans say, or less; `python -m benchmarks.tiers capacity` has fifty plans."""

from __future__ import annotations

from benchmarks.tier_capacity import capacity


def test_random_plans_stay_within_what_they_plan(tiny, tmp_path):
    """Devices are as large as the plan's peak: one byte more would be refused."""
    found = list(capacity(tiny("llama", num_layers=3, dtype="bf16"), 8, tmp_path))
    assert len(found) == 8 and any("waves" in one.choices for one in found)
    for one in found:
        assert one.within, one
        assert one.taken["device"] > 0.5 * one.planned["device"], "a plan that asks for far more is no plan"
