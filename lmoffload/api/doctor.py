"""The doctor: what was found on this machine, and what to change."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from lmoffload.api.model import SHAPE_PREFIX
from lmoffload.checkpoint.hub import find_model
from lmoffload.errors import UsageError
from lmoffload.profiler.diagnosis import Diagnosis, diagnose
from lmoffload.settings import Settings


def examine(model: str | None = None) -> Diagnosis:
    """Look at this machine, its profile, and the places of cache, data and (where one is named) a model.

    Raises:
        StatedError: there is no such model.
        UsageError: it is a shape, which lies nowhere.
    """
    settings = Settings.of_user()
    places = {"current": Path.cwd(), "cache": settings.cache_directory, "data": settings.data_directory}
    if model is not None:
        if model.startswith(SHAPE_PREFIX):
            raise UsageError(f"{model} is a shape, which lies on no disk: name a model, or none.")
        places = {"model": find_model(model), **places}
    return diagnose(places, date.today())
