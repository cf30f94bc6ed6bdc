"""Run a plan: walk its task graph for real."""

from lmoffload.executor.engine import Engine
from lmoffload.executor.request import Completion, Progress, Request, Sampling, Score

__all__ = ["Completion", "Engine", "Progress", "Request", "Sampling", "Score"]
