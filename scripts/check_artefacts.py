"""Checks what the wheel and the sdist in a folder hold: two import packages, their data, the machine profiles, and nothing else."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROFILES = "lmoffload_solver/profiles/"


def check_wheel(wheel: Path) -> None:
    """Exits with a sentence where the wheel is not what it should be."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    _demand(packages == {"lmoffload", "lmoffload_solver"}, f"the wheel holds the top-level names {sorted(packages)}")
    for source, inside in ((ROOT / "lmoffload", "lmoffload"), (ROOT / "solver" / "lmoffload_solver", "lmoffload_solver")):
        for file in source.rglob("*"):
            if file.is_file() and file.suffix != ".pyc":
                name = f"{inside}/{file.relative_to(source).as_posix()}"
                _demand(name in names, f"the wheel lacks {name}")
    profiles = {f"{PROFILES}{file.name}" for file in (ROOT / "profiles").glob("*.json")}
    shipped = {name for name in names if name.startswith(PROFILES) and name.endswith(".json")}
    _demand(bool(profiles), "profiles/ has no machine profile")
    _demand(profiles == shipped, f"the wheel ships the profiles {sorted(shipped)}, the checkout has {sorted(profiles)}")


def check_sdist(sdist: Path) -> None:
    """Exits with a sentence where the sdist cannot be built and tested from."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    plain = ("pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt")
    for needed in (*plain, "tests/conftest.py", "solver/lmoffload_solver/plan.py", "docs/reference.md"):
        _demand(needed in names, f"the sdist lacks {needed}")


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        sys.exit(f"check_artefacts: {otherwise}.")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for wheel_file in folder.glob("*.whl"):
        check_wheel(wheel_file)
    for sdist_file in folder.glob("*.tar.gz"):
        check_sdist(sdist_file)
    _demand(len(list(folder.glob("*.whl"))) == len(list(folder.glob("*.tar.gz"))) == 1, f"{folder} does not hold one wheel and one sdist")
