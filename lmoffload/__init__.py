"""Profile a machine once, solve for the best offload plan, run models larger than your memory with it.

The three verbs load lazily, so that `import lmoffload` costs nothing and the threads' environment can be set before torch is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmoffload.api.engine import Engine
    from lmoffload.api.machine import profile
    from lmoffload.api.verbs import plan

__all__ = ["Engine", "__version__", "plan", "profile"]

_HOMES = {"Engine": "lmoffload.api.engine", "plan": "lmoffload.api.verbs", "profile": "lmoffload.api.machine"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("lmoffload")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lmoffload' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
