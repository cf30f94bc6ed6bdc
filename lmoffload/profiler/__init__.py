"""Measure this machine: what it has, what it may use of it, and how fast each part works.

Importing this loads neither torch nor transformers; measuring does.
"""

from lmoffload.profiler.profile_machine import profile

__all__ = ["profile"]
