"""Rules of the house that no linter knows."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "lmoffload").rglob("*.py"), *(ROOT / "solver" / "lmoffload_solver").rglob("*.py")])
MOST_LINES = 330


def test_files_have_one_noun_and_about_300_lines() -> None:
    long = {str(path.relative_to(ROOT)): n for path in SOURCES if (n := len(path.read_text(encoding="utf-8").splitlines())) > MOST_LINES}
    assert not long


def test_every_file_says_what_it_is() -> None:
    mute = [str(path.relative_to(ROOT)) for path in SOURCES if not path.read_text(encoding="utf-8").startswith('"""')]
    assert not mute


def test_packages_are_typed() -> None:
    assert (ROOT / "lmoffload" / "py.typed").exists()
    assert (ROOT / "solver" / "lmoffload_solver" / "py.typed").exists()


def test_no_environment_variable_is_read_outside_its_place() -> None:
    """OMP_WAIT_POLICY in environment.py; user directories in settings.py; what a child process inherits in profiler/apart.py."""
    words = ("os.environ", "getenv(")
    readers = [path.relative_to(ROOT).as_posix() for path in SOURCES if any(w in path.read_text(encoding="utf-8") for w in words)]
    assert set(readers) <= {"lmoffload/environment.py", "lmoffload/settings.py", "lmoffload/profiler/apart.py"}, readers


def test_only_files_named_for_it_mention_cuda() -> None:
    """But for the import of what they hold."""
    named = {"lmoffload/executor/cuda.py"} | {p.relative_to(ROOT).as_posix() for p in SOURCES if p.name.startswith("cuda_")}
    for path in SOURCES:
        if (name := path.relative_to(ROOT).as_posix()) not in named:
            lines = path.read_text(encoding="utf-8").splitlines()
            mentions = [line for line in lines if "cuda" in line and "cuda_device()" not in line and " import " not in line]
            assert not mentions, f"{name}: {mentions}"
