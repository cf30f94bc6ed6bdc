"""PuLP, loaded at its first use: that takes a tenth of a second, and infeasible plans need none."""

from __future__ import annotations

import sys
from importlib import import_module
from threading import Thread
from typing import Any


def load_pulp() -> Any:
    """The package.

    It keeps an error of its own loading, for a solver that is not installed, and with the error's traceback every frame that called, with
    all that those frames hold: an engine's weights, say. So it is loaded by a thread, whose frames hold nothing.
    """
    if "pulp" not in sys.modules:
        loading = Thread(target=import_module, args=("pulp",))
        loading.start()
        loading.join()
    return import_module("pulp")
