"""A transfer under way: handed to a disk's thread, awaited by the one that computes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Pending:
    """`done` is set when the bytes are there, or when `error` says that they will never be."""

    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    begin_s: float = 0.0
    end_s: float = 0.0

    def wait(self) -> None:
        """Block until the transfer has ended; raises the error of the thread that did it."""
        self.done.wait()
        if self.error is not None:
            raise self.error
