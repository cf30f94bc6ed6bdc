"""The program: commands registered, the environment prepared, every error told in one sentence."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lmoffload.cli.calibrate import calibrate
from lmoffload.cli.compare import compare
from lmoffload.cli.demo import demo
from lmoffload.cli.doctor import doctor
from lmoffload.cli.explain import explain
from lmoffload.cli.inspect import inspect
from lmoffload.cli.make_dummy import make_dummy
from lmoffload.cli.options import Debug, Invocation
from lmoffload.cli.plan import plan
from lmoffload.cli.profile import profile
from lmoffload.cli.quality import quality
from lmoffload.cli.run import run
from lmoffload.cli.what_if import what_if
from lmoffload.environment import prepare_allocator, prepare_signals, prepare_streams, prepare_threads
from lmoffload.errors import StatedError, UsageError, is_foreseen, sentence_of

INTERRUPTED = 130


def build_app() -> typer.Typer:
    """The commands."""
    app = typer.Typer(name="lmoffload", pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(_root)
    app.command("profile")(profile)
    app.command("inspect")(inspect)
    app.command("plan")(plan)
    app.command("explain")(explain)
    app.command("what-if")(what_if)
    app.command("run")(run)
    app.command("quality")(quality)
    app.command("calibrate")(calibrate)
    app.command("compare")(compare)
    app.command("make-dummy")(make_dummy)
    app.command("doctor")(doctor)
    app.command("demo")(demo)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 a stated error, 2 wrong usage, 3 infeasible, 130 interrupted."""
    prepare_streams()
    prepare_signals()
    prepare_threads()
    prepare_allocator()
    invocation = Invocation()
    try:
        code = build_app()(args=arguments, prog_name="lmoffload", standalone_mode=False, obj=invocation)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone; Python would complain of the closed pipe at exit
        return 1
    except Exception as error:
        if invocation.debug:
            traceback.print_exc()
        if isinstance(error, _USAGE_ERROR):
            print(f"lmoffload: {_usage_sentence(error)}", file=sys.stderr)
            return UsageError.exit_code
        print(f"lmoffload: {sentence_of(error, None if is_foreseen(error) else _reported(error, arguments))}", file=sys.stderr)
        return error.exit_code if isinstance(error, StatedError) else 1
    if code == INTERRUPTED:
        print("lmoffload: interrupted; results that were finished are kept.", file=sys.stderr)
    return int(code or 0)


def _reported(error: Exception, arguments: Sequence[str] | None) -> Path | None:
    from lmoffload.report.failure import write_failure

    return write_failure(error, sys.argv[1:] if arguments is None else arguments)


_USAGE_ERROR: Any = typer.BadParameter.__mro__[2]
"""What the parser raises, of which typer exports only this subclass."""


def _usage_sentence(error: Any) -> str:
    command = error.ctx.command_path if getattr(error, "ctx", None) else "lmoffload"
    return f"{error.format_message().rstrip('.')}; see `{command} --help`."


def _show_version(value: bool) -> None:
    if value:
        import lmoffload

        typer.echo(f"lmoffload {lmoffload.__version__}")
        raise typer.Exit


def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")] = False,
    debug: Debug = False,
) -> None:
    """Run language models larger than your memory: profile the machine once, solve for the best offload plan, run it."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
