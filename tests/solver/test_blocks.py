"""Cutting a job into blocks, and sampling its steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmoffload_solver.blocks import Block, JobCosts, Step, blocks_of, decode_steps, lengths_of
from lmoffload_solver.costs import DiskCosts, MachineCosts
from lmoffload_solver.workload import PromptGroup, Workload
from tests.solver.toys import make_machine, make_model


def test_lengths_longest_first() -> None:
    work = Workload(prompts=(PromptGroup(length=3, count=2), PromptGroup(length=9, count=1)), gen_len=2)
    assert lengths_of(work) == (9, 3, 3)


def test_samples_of_one_and_two_tokens() -> None:
    assert decode_steps(1) == ()
    assert decode_steps(2) == (Step(1, 1.0),)


@given(st.integers(2, 400))
def test_samples_stand_for_all_steps(gen_len: int) -> None:
    steps = decode_steps(gen_len)
    assert sum(step.weight for step in steps) == pytest.approx(gen_len - 1)
    linear = sum(step.weight * (3 + 2 * step.step) for step in steps)
    assert linear == pytest.approx(sum(3 + 2 * step for step in range(1, gen_len))), "exact for linear growth"


def test_equal_blocks_are_one() -> None:
    assert blocks_of([5] * 10, 4) == (Block(0, 4, 2), Block(8, 10, 1))
    assert blocks_of([7, 7, 5, 5, 5, 5], 2) == (Block(0, 2, 1), Block(2, 4, 2))
    assert Block(8, 13, 1).micro_batches(2) == ((8, 10), (10, 12), (12, 13))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(1, 40))
def test_blocks_stand_for_all(lengths: list[int], rows: int) -> None:
    lengths.sort(reverse=True)
    blocks = blocks_of(lengths, rows)
    assert sum(block.count for block in blocks) == -(-len(lengths) // rows)
    assert blocks[-1].end_row == len(lengths) or len({lengths[-1], lengths[blocks[-1].first_row]}) == 1
    assert all(0 < block.end_row - block.first_row <= rows for block in blocks)


def test_a_block_is_the_sum_of_its_micro_batches() -> None:
    machine = make_machine()
    work = Workload(prompts=(PromptGroup(length=90, count=2), PromptGroup(length=4, count=3)), gen_len=3)
    job = JobCosts(make_model(windows=(None, 4)), work, MachineCosts(machine, DiskCosts(machine.disks[0], 2), 2))
    assert len(job.kinds) == 2
    for phase, chunk in (("prefill", None), ("prefill", 24), ("decode", None)):
        whole = job.steps_seconds(Block(0, 5, 1), 2, phase, "wide", chunk)
        parts = [job.steps_seconds(Block(first, end, 1), 2, phase, "wide", chunk) for first, end in ((0, 2), (2, 4), (4, 5))]
        for step, one in enumerate(whole):
            assert job.total(one, 3, True) == pytest.approx(sum(job.total(part[step], 3, True) for part in parts))
