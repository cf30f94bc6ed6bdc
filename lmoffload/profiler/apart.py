"""Measurements in a process of their own: asked for, heard while they go on, and ended with whoever asked.

What a measurement loads and leaves in its heap would otherwise count as memory of the run that follows it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmoffload.profiler.progress import Progress
from lmoffload_solver.errors import StatedError
from lmoffload_solver.machine import Disk, MachineProfile

Hear = Callable[[dict[str, Any]], None]

WAIT_VARIABLES = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "MKL_NUM_THREADS")
CHILD = "lmoffload.profiler.child"
HANGS_S = 1800.0
"""Nothing that is measured takes as long unless a device hangs."""
GRACE_S = 5.0
"""Given to a measurement that is asked to end."""


def profile_apart(
    *,
    quick: bool,
    disk_path: Path,
    on_progress: Callable[[Progress], None] | None = None,
    on_remark: Callable[[str], None] = lambda remark: None,
    formats: Sequence[str] | None = None,
    budget_s: float | None = None,
) -> MachineProfile:
    """`profile_machine.profile` in a process of its own; the same arguments, and

    Args:
        on_remark: takes sentences about how the other process's threads wait.

    Raises:
        StatedError: something cannot be measured.
    """

    def hear(told: dict[str, Any]) -> None:
        if "remark" in told:
            on_remark(told["remark"])
        elif on_progress is not None:
            on_progress(Progress(**told))

    arguments = {"quick": quick, "disk_path": os.fspath(disk_path), "formats": formats, "budget_s": budget_s}
    answer = ask_child("profile", HANGS_S, arguments, hear=hear)
    return MachineProfile.model_validate_json(answer["profile"])


def measure_disk_apart(path: Path) -> Disk:
    """`disk.measure_disk` in a process of its own.

    Raises:
        StatedError: the disk cannot be measured.
    """
    return Disk.model_validate_json(ask_child("disk", HANGS_S, {"path": os.fspath(path)})["disk"])


def ask_child(
    what: str,
    timeout_s: float,
    arguments: dict[str, Any] | None = None,
    *,
    default_threads: bool = False,
    hear: Hear = lambda told: None,
    module: str = CHILD,
) -> dict[str, Any]:
    """The answer of one of a module's measurements, made in a fresh interpreter; see `started`.

    Args:
        hear: called with what it tells while it goes on.

    Raises:
        StatedError: it failed or took too long.
    """
    with started(what, timeout_s, arguments, default_threads=default_threads, module=module) as answer:
        return answer(hear)


@contextmanager
def started(
    what: str, timeout_s: float, arguments: dict[str, Any] | None = None, *, default_threads: bool = False, module: str = CHILD
) -> Iterator[Callable[[Hear], dict[str, Any]]]:
    """Start a measurement in a fresh interpreter, which ends with this context whatever happens; gives what waits for its answer.

    Args:
        timeout_s: it is killed after that.
        arguments: the measurement's own.
        default_threads: leave out of its environment what tells OpenMP how to wait.
        module: what is run; its main is `child.main`.
    """
    environment = {name: value for name, value in os.environ.items() if not default_threads or name not in WAIT_VARIABLES}
    # The child may have to be killed, so that its files must be ours to remove.
    with tempfile.TemporaryDirectory(prefix="lmoffload-profile-") as folder:
        errors = Path(folder) / "stderr"
        with errors.open("w") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-m", module, what, json.dumps(arguments or {})],
                env=environment | {"TMPDIR": folder}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip
        late = threading.Event()

        def stop() -> None:
            late.set()
            child.kill()

        def wait(hear: Hear) -> dict[str, Any]:
            answer = _listen(child, hear)
            if answer is not None:
                return answer
            if late.is_set():
                raise StatedError(f"The measurement of {what} took more than {timeout_s:.0f} s.")
            last = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise StatedError(f"The measurement of {what} failed: {' '.join(last) or f'exit code {child.wait()}'}")

        watch = threading.Timer(timeout_s, stop)
        watch.daemon = True
        watch.start()
        try:
            yield wait
        finally:
            watch.cancel()
            _end(child)


def _listen(child: subprocess.Popen[str], hear: Hear) -> dict[str, Any] | None:
    """The answer, or None where the child ends without one."""
    assert child.stdout is not None
    for line in child.stdout:
        message: dict[str, Any] = json.loads(line)
        if "stated" in message:
            raise StatedError(message["stated"])
        if "answer" in message:
            found: dict[str, Any] = message["answer"]
            return found
        hear(message["told"])
    return None


def _end(child: subprocess.Popen[str]) -> None:
    """Ask it to end, so that it ends what it has started itself; then make it."""
    assert child.stdout is not None
    child.stdout.close()
    try:
        if child.poll() is None:
            child.terminate()
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        child.kill()
        child.wait()
