"""Python's search for garbage, kept away from what stays as long as an engine."""

from __future__ import annotations

import gc


def set_aside() -> None:
    """Free what is garbage now, and look through nothing that is there when garbage is sought later: torch, transformers and a model are
    some hundred thousand objects, and going through them stops every thread's Python for some 0.2 s in the midst of a step."""
    gc.collect()
    gc.freeze()


def take_back() -> None:
    """Look through everything again."""
    gc.unfreeze()
