"""Remarks to whoever uses lmoffload."""

from __future__ import annotations

import sys
from collections.abc import Callable

Tell = Callable[[str], None]
"""Takes one remark, a sentence."""


def tell_on_stderr(remark: str) -> None:
    """The default: remarks go to standard error, results to standard output."""
    print(f"lmoffload: {remark}", file=sys.stderr, flush=True)
