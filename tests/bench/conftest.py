"""A planted peer and the conditions it runs in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lmoffload.bench.control_groups import ControlGroups, NoGroupsError
from lmoffload.bench.peer import Conditions, Peer
from lmoffload.bench.work import Work
from lmoffload_solver.comparison import Granted

PLANT = Path(__file__).with_name("plants") / "misbehaving.py"
WORK = Work(prompts=((1, 2, 3), (4, 5, 6), (7, 8, 9), (10, 11, 12)), gen_len=5)

Planted = Callable[..., Peer]


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    """A peer that behaves in a way; keyword arguments are more of its settings, or fields of `Peer`."""
    model = tmp_path / "model"
    model.write_bytes(b"weights")

    def make(way: str, name: str = "plant", axes: dict[str, tuple[object, ...]] | None = None, **more: object) -> Peer:
        fields = {key: more.pop(key) for key in ("package", "refusal", "comparable", "memory_bytes") if key in more}
        return Peer(name, PLANT, Path(sys.executable), model, "none", default={"way": way, **more}, axes=axes or {}, **fields)  # type: ignore[arg-type]

    return make


@pytest.fixture
def freely(tmp_path: Path) -> Conditions:
    """No limits, nothing enforced."""
    return Conditions(Granted(enforced=False), tmp_path, timeout_s=60.0, drop_cache=False)


@pytest.fixture
def enforced(tmp_path: Path) -> Conditions:
    """The kernel limits memory to 64 MiB; skipped where it cannot."""
    granted = Granted(memory_bytes=64 * 2**20)
    try:
        with ControlGroups.open(granted, [tmp_path]):
            pass
    except NoGroupsError as error:
        pytest.skip(str(error))
    return Conditions(granted, tmp_path, timeout_s=60.0, drop_cache=False)
