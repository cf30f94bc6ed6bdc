"""Runs the commands of docs/tutorial.md, in an empty folder with a home of its own, and writes their real output into the page.

A block that begins with ```console holds one command after `$ ` and its output; one that begins with ```jsonl is written to the file named
after it. Run it while nothing else uses the machine: `make tutorial`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tutorial.md"
BLOCK = re.compile(r"```(console|jsonl (\S+))\n(.*?)```\n", re.DOTALL)


def run_page(text: str, folder: Path) -> str:
    """The page with every command run in `folder` and its output after it.

    Raises:
        SystemExit: a command failed.
    """
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_DATA_HOME": str(folder / ".data"),
        "XDG_CACHE_HOME": str(folder / ".cache"),
    }

    def run_block(match: re.Match[str]) -> str:
        kind, file, body = match.groups()
        if file is not None:
            (folder / file).write_text(body, encoding="utf-8")
            return match[0]
        command = body.splitlines()[0].removeprefix("$ ")
        print(f"$ {command}", file=sys.stderr, flush=True)
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"run_tutorial: `{command}` ended with {done.returncode}:\n{done.stdout}")
        lines = [line.rstrip() for line in done.stdout.splitlines()]
        return "\n".join([f"```{kind}", f"$ {command}", *lines, "```\n"])

    return BLOCK.sub(run_block, text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="lmoffload-tutorial-") as name:
        PAGE.write_text(run_page(PAGE.read_text(encoding="utf-8"), Path(name)), encoding="utf-8")
