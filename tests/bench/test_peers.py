"""Planted peers: whatever a peer does is shown as what it is."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from lmoffload.bench.contest import Contest
from lmoffload.bench.peer import Conditions, attempt
from lmoffload_solver.comparison import Granted, System
from tests.bench.conftest import WORK, Planted

MIB = 2**20


def test_a_peer_that_behaves(planted: Planted, freely: Conditions) -> None:
    run = attempt(planted("well"), WORK, {"way": "well"}, freely).run
    assert (run.status, run.sentence) == ("done", None)
    figures = run.figures
    assert figures is not None
    assert figures.prefill_tokens_per_s == pytest.approx(12 / 0.8)
    assert figures.decode_tokens_per_s == pytest.approx(16 / 0.04)
    assert figures.tokens_per_s == pytest.approx(20 / 0.84)
    assert (figures.load_s, figures.first_token_s, len(figures.step_s)) == (0.5, 0.2, 4)
    assert run.peak_rss_bytes is not None and MIB < run.peak_rss_bytes < 100 * MIB
    assert run.spans[0].name == "everything"


@pytest.mark.parametrize(
    ("way", "status", "words"),
    [
        ("short", "too few tokens", "4 prompts of 4 tokens at least; 4 prompts of 5 tokens were asked for"),
        ("fewer", "too few tokens", "3 prompts of 5 tokens"),
        ("crash", "crashed", "exit code 1: ValueError: the planted fault"),
        ("signal", "crashed", "ended by signal 6"),
        ("silent", "crashed", "ended without an answer"),
        ("garbage", "crashed", "ended without an answer"),
    ],
)
def test_misbehaviour_is_told_and_has_no_figures(way: str, status: str, words: str, planted: Planted, freely: Conditions) -> None:
    run = attempt(planted(way), WORK, {"way": way}, freely).run
    assert run.status == status and run.sentence is not None and words in run.sentence
    assert run.figures is None and not run.counts


def test_a_peer_that_hangs_is_ended(planted: Planted, freely: Conditions) -> None:
    begin = time.monotonic()
    run = attempt(planted("hang"), WORK, {"way": "hang"}, replace(freely, timeout_s=0.5)).run
    assert run.status == "timed out" and time.monotonic() - begin < 20


def test_the_kernel_ends_a_peer_that_takes_too_much(planted: Planted, enforced: Conditions) -> None:
    settings = {"way": "large", "mebibytes": 100}
    run = attempt(planted("large", mebibytes=100), WORK, settings, enforced).run
    assert run.status == "over the memory limit"
    assert run.sentence is not None and "64.0 MiB" in run.sentence
    assert run.figures is None
    assert run.peak_memory_bytes is not None and 60 * MIB < run.peak_memory_bytes <= 64 * MIB


def test_a_peer_within_the_limit_is_measured_by_the_kernel(planted: Planted, enforced: Conditions) -> None:
    run = attempt(planted("large", mebibytes=30), WORK, {"way": "large", "mebibytes": 30}, enforced).run
    assert run.status == "done"
    assert run.peak_memory_bytes is not None and 30 * MIB < run.peak_memory_bytes < 64 * MIB
    assert max(size for _, size in run.memory) > 30 * MIB
    assert run.disk_bytes_read is not None


def test_a_peer_may_be_given_its_own_memory(planted: Planted, enforced: Conditions) -> None:
    peer = planted("large", mebibytes=100, memory_bytes=200 * MIB)
    assert attempt(peer, WORK, peer.default, enforced).run.status == "done"


def test_without_the_kernel_what_a_peer_took_is_held_against_the_limit(planted: Planted, freely: Conditions) -> None:
    conditions = replace(freely, granted=Granted(memory_bytes=40 * MIB, enforced=False))
    large = attempt(planted("large", mebibytes=60), WORK, {"way": "large", "mebibytes": 60}, conditions).run
    assert large.status == "over the memory limit" and large.figures is None
    assert attempt(planted("well"), WORK, {"way": "well"}, conditions).run.status == "done"


def test_nothing_of_a_run_is_left_behind(planted: Planted, freely: Conditions, tmp_path: Path) -> None:
    peer = planted("well")
    before = set(tmp_path.rglob("*"))
    attempt(peer, WORK, peer.default, freely)
    attempt(peer, WORK, {"way": "crash"}, freely)
    assert set(tmp_path.rglob("*")) == before


def contest(conditions: Conditions, **more: object) -> Contest:
    return Contest(WORK, conditions, **{"rounds": 2, **more})  # type: ignore[arg-type]


def by_name(systems: tuple[System, ...]) -> dict[str, System]:
    return {system.name: system for system in systems}


def test_a_contest_shows_every_peer_as_what_it_is(planted: Planted, freely: Conditions) -> None:
    told: list[str] = []
    peers = [
        planted("well", "good"),
        planted("short", "short"),
        planted("crash", "crashing"),
        planted("other", "other tokens"),
        planted("well", "absent", package="no_such_package_anywhere"),
        planted("well", "unable", refusal="It reads no such model."),
    ]
    systems = by_name(contest(freely, reference=planted("well"), tell=told.append).run(peers))
    good = systems["good"]
    assert good.check is not None and good.check.status == "equal"
    assert [run.status for run in good.rows[0].runs] == ["done", "done"]
    assert [run.status for run in systems["short"].rows[0].runs] == ["too few tokens"]  # not run again
    assert systems["short"].best is None
    assert [run.status for run in systems["crashing"].rows[0].runs] == ["crashed"]
    check = systems["crashing"].check
    assert check is not None and check.status == "failed" and "planted fault" in check.sentence
    other = systems["other tokens"].check
    assert other is not None and other.status == "differs"
    assert other.sentence == "differs in prompt 1 from token 5 on (6 instead of 5), prompt 2 from token 5 on (9 instead of 8)"
    assert systems["absent"].status == "not installed" and not systems["absent"].rows
    assert "no_such_package_anywhere is not installed" in (systems["absent"].sentence or "")
    assert (systems["unable"].status, systems["unable"].sentence) == ("cannot run it", "It reads no such model.")
    rounds = [line for line in told if line.startswith("Round")]
    assert [line.split(":")[0] + line.split(":")[1].split(",")[0] for line in rounds] == [
        "Round 1 good", "Round 1 short", "Round 1 crashing", "Round 1 other tokens", "Round 2 good", "Round 2 other tokens",
    ]  # fmt: skip


def test_a_sweep_goes_from_one_setting_to_the_next_and_keeps_the_best(planted: Planted, freely: Conditions) -> None:
    """Steps of 10 ms by default; 2 ms is best, and what crashes is a trial that failed. One row is the default, one the best."""
    peer = planted("well", axes={"step_s": (0.01, 0.002, 0.03), "way": ("well", "crash", "short"), "batch": (4, 2)}, step_s=0.01, batch=4)
    (system,) = contest(freely, rounds=1).run([peer])
    tried = [(run.settings["step_s"], run.settings["way"], run.settings["batch"], run.status) for run in system.trials]
    assert tried == [
        (0.01, "well", 4, "projected"),
        (0.002, "well", 4, "projected"),
        (0.03, "well", 4, "projected"),
        (0.002, "crash", 4, "crashed"),
        (0.002, "short", 4, "too few tokens"),
        (0.002, "well", 2, "projected"),
    ]
    assert [(row.kind, row.settings["step_s"]) for row in system.rows] == [("default", 0.01), ("best", 0.002)]
    assert system.best is not None and system.best.kind == "best"
    # Half the prompts were tried; their prefill (0.2 s a prompt) and their steps count twice.
    assert system.trials[-1].figures is not None
    assert system.trials[-1].figures.total_s == pytest.approx(0.8 + 2 * 4 * 0.002)


def test_a_cut_run_is_projected_and_says_so(planted: Planted, freely: Conditions) -> None:
    (system,) = contest(freely, rounds=1, cut=3).run([planted("well")])
    (run,) = system.rows[0].runs
    assert run.status == "projected" and run.counts
    assert run.figures is not None and len(run.figures.step_s) == 2
    assert run.figures.total_s == pytest.approx(0.8 + 4 * 0.01)


def test_a_projection_is_held_against_the_whole_run(planted: Planted, freely: Conditions) -> None:
    (system,) = contest(freely, rounds=1, cut=3, check_projection=True).run([planted("well", growth_s=0.01)])
    (run,) = system.rows[0].runs
    assert run.full is not None and run.full.total_s == pytest.approx(0.8 + 0.01 * (1 + 2 + 3 + 4))
    assert run.figures is not None and run.figures.total_s == pytest.approx(0.8 + 0.01 + 0.02 + 2 * 0.015)  # two steps show no growth
    assert run.projection_error == pytest.approx(0.86 / 0.9 - 1)
