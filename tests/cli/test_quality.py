"""`quality`: a table that is true of a random model, kept, found again; stores that leave no trace; limits; bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lmoffload.api.losses import load_losses, losses_path
from lmoffload.checkpoint import importance_path, open_checkpoint, read_importance
from lmoffload.checkpoint.manifest import read_manifest
from lmoffload.jobs.sample import calibration_sample, measured_sample
from lmoffload.jobs.text import Text
from lmoffload.profiler.limits import disk_of
from lmoffload.profiler.store import default_profile_path, save_profile
from lmoffload_solver.loss import Part
from tests.cli.conftest import Call
from tests.cli.machines import machine
from tests.executor.reference import load_reference


def test_losses_are_measured_kept_and_found_again(call: Call, profiled: Path, model: Path) -> None:
    called = call("quality", model, "--tokens", "130", "--json")
    assert called.code == 0, called.err
    document, checkpoint = json.loads(called.out), open_checkpoint(model)
    parts = {(row["what"], row["format"], row["activations"]): row for row in document["losses"]}
    assert {("weights", fmt, x) for fmt in ("int8", "int4-g32", "int4-g64") for x in ("fp32", "int8")} <= set(parts)
    assert {("kv", fmt, "fp32") for fmt in ("bf16", "int8", "int4-g32")} <= set(parts)
    windows = Text(checkpoint).windows(measured_sample().text, 255, 130)
    assert document["text"]["tokens"] == 129 == sum(len(window) - 1 for window in windows)
    with torch.no_grad():
        logits = load_reference(model)(torch.tensor(windows)).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(windows[0][1:])).exp()
    assert document["reference_perplexity"] == pytest.approx(float(expected), rel=1e-4)
    for (what, *_), row in parts.items():
        assert row["loss"] != 0 and 0 < row["equal_tokens"] <= 1
        if what == "weights":
            assert row["loss"] == pytest.approx(row["perplexity"] / document["reference_perplexity"] - 1)
    assert abs(parts["kv", "bf16", "fp32"]["loss"]) < abs(parts["kv", "int4-g32", "fp32"]["loss"])
    assert abs(parts["weights", "int8", "fp32"]["loss"]) < abs(parts["weights", "int4-g64", "fp32"]["loss"])
    assert parts["weights", "int8", "fp32"]["equal_tokens"] > parts["weights", "int4-g64", "int8"]["equal_tokens"]
    table = load_losses(checkpoint.fingerprint)
    assert table is not None and table.by_part[Part("weights", "int8", "int8")].loss == parts["weights", "int8", "int8"]["loss"]
    assert not list((profiled / "xdg_cache_home").rglob("weights-*")), "the stores are gone"

    before = importance_path(checkpoint.fingerprint).stat().st_mtime_ns
    again = call("quality", model, "--tokens", "64")
    assert again.code == 0 and "int4-g64" in again.out and "Keys and values are not measured" in again.err
    assert importance_path(checkpoint.fingerprint).stat().st_mtime_ns == before, "calibrated once"

    importance_path(checkpoint.fingerprint).unlink()
    lost = load_losses(checkpoint.fingerprint)
    assert lost is not None and {loss.format for loss in lost.losses} == {"int8"}, "int4 would be rounded otherwise now"


def test_a_text_of_ones_own_and_what_is_wrong_with_it(call: Call, profiled: Path, model: Path) -> None:
    Path("short.txt").write_text("too short", encoding="utf-8")
    Path("bytes.txt").write_bytes(b"\xff\xfe\x00")
    for arguments, code, words in (
        (["--text", "short.txt"], 1, "short.txt has fewer than 64 tokens"),
        (["--text", "bytes.txt"], 1, "not UTF-8 text"),
        (["--text", "none.txt"], 1, "none.txt cannot be read"),
        (["--tokens", "3"], 2, "at least 64"),
        (["--host-memory", "1MB"], 3, "host"),
    ):
        called = call("quality", model, *arguments)
        assert called.code == code and words in called.err and not called.out, called.err
    assert call("quality", "shape:llama-2-7b").code == 2
    assert not (profiled / "xdg_data_home" / "lmoffload" / "losses").exists()


def test_a_damaged_table_is_told(call: Call, profiled: Path, model: Path) -> None:
    path = losses_path(open_checkpoint(model).fingerprint)
    path.parent.mkdir(parents=True)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(Exception, match="run `lmoffload quality` to measure"):
        load_losses(path.stem)


def test_windows_begin_with_the_start_token_where_there_is_one(model: Path) -> None:
    text = Text(open_checkpoint(model))
    windows = text.windows("a b c d e f g h " * 10, 10, 45)
    assert len({window[0] for window in windows}) == 1 or text.encode("a b")[0] != text._tokenizer.bos_token_id
    assert max(map(len, windows)) == 10 and min(map(len, windows)) >= 2
    start = 1 if text.encode("a b")[0] == text._tokenizer.bos_token_id else 0
    assert sum(map(len, windows)) == 45 + start * len(windows)


def test_texts_that_come_with_it_are_two() -> None:
    measured, calibrated = measured_sample().text, calibration_sample().text
    assert len(measured) > 40_000 and len(calibrated) > 15_000
    assert not set(measured.split("\n\n")) & set(calibrated.split("\n\n"))


def test_a_run_calibrates_before_it_first_rounds_to_4_bits(call: Call, home: Path, model: Path) -> None:
    known = machine(file_system=disk_of(Path.cwd()).mount_point)
    rate = known.linear[0].flops_per_s.model_copy(update={"y": tuple(10 * y for y in known.linear[0].flops_per_s.y)})
    faster = {"kernel": "int8_dot", "format": "int4-g32", "flops_per_s": rate}
    narrow = [curve.model_copy(update=faster) for curve in known.linear if curve.format == "fp32"]
    save_profile(known.model_copy(update={"linear": (*known.linear, *narrow)}), default_profile_path())
    called = call("run", model, "-p", "a b c", "--gen-len", "3", "--quality", "int4", "--weights-memory", "40%")
    fingerprint = open_checkpoint(model).fingerprint
    importance = read_importance(fingerprint)
    assert called.code == 0 and "measuring what their columns count" in called.err and importance is not None, called.err
    manifest = read_manifest(importance_path(fingerprint).parent / "int4-g32")
    assert manifest is not None and manifest.header.rounding == f"weighted-{importance.digest}"
    assert "columns count" not in call("run", model, "-p", "a b c", "--gen-len", "3", "--quality", "int4", "--weights-memory", "40%").err
