"""Writes docs/reference.md from the commands' own help; with --check, says whether the file is stale instead (exit code 1)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from lmoffload.cli.main import build_app

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
HEAD = """# Command reference

<!-- Written by scripts/write_reference.py (`make docs`) from the commands' own help: change it there. -->

Exit codes: 0 done; 1 a stated error, or a job in which some lines failed; 2 wrong usage; 3 infeasible (nothing was run); 130 interrupted,
results so far kept. Results go to standard output, remarks and progress to standard error. Sizes are written `4GiB` (binary) or `500MB`
(decimal), durations `90s`, `5min`, `1h30m`.

Files: `machine.json` (the profile) and `losses/` in the user's data directory; `weights/` (quantized weights), `kv/` (scratch) and
`errors/` (reports) in the cache directory; beside the output of a job its manifest ([jobs](jobs.md)). Environment: `XDG_DATA_HOME` and
`XDG_CACHE_HOME` move these directories, `HF_HOME` is where hub ids are looked for, `HF_HUB_OFFLINE=1` forbids the network;
`OMP_WAIT_POLICY` is set to `PASSIVE` unless it is set. [Installing](install.md) tells about completion.
"""


def reference() -> str:
    """The whole page."""
    root: Any = typer.main.get_command(build_app())
    parts = [HEAD, "\n".join(_section("", root))]
    for name, command in root.commands.items():
        parts.append("\n".join(_section(name, command)))
    return "\n".join(parts)


def _section(name: str, command: Any) -> Iterator[str]:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option"]
    words = [_metavar(param) if param.required else f"[{_metavar(param)}]" for param in arguments]
    call = " ".join(filter(None, ("lmoffload", name, *words)))
    yield f"## {f'lmoffload {name}'.strip()}\n"
    yield f"    {call} [OPTIONS]{'' if name else ' COMMAND'}\n"
    yield f"{command.help}\n"
    for param in arguments:
        yield f"* `{_metavar(param)}`: {param.help}"
    yield ""
    for panel in dict.fromkeys(_panel(param) for param in options):
        yield f"| {panel} | |\n| --- | --- |"
        yield from (f"| {_spelling(param)} | {param.help} |" for param in options if _panel(param) == panel)
        yield ""


def _panel(param: Any) -> str:
    return param.rich_help_panel or "Options"


def _spelling(param: Any) -> str:
    value = "" if param.is_flag else f" {_metavar(param)}"
    return ", ".join(f"`{name}{value}`".replace("|", "\\|") for name in param.opts)


def _metavar(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def main() -> int:
    """Write or check."""
    page = reference()
    if "--check" in sys.argv[1:]:
        if REFERENCE.exists() and REFERENCE.read_text(encoding="utf-8") == page:
            return 0
        print(f"{REFERENCE} is stale: run `make docs`.", file=sys.stderr)
        return 1
    REFERENCE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
