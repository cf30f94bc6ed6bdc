"""Hidden states between two units: on the device, or parked on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lmoffload.executor.buffers import Slab
from lmoffload.executor.resources import Accelerator


@dataclass(slots=True)
class _Kept:
    """A micro-batch's hidden state."""

    storage: torch.UntypedStorage
    num_bytes: int
    parked: Slab | None = None


class HiddenStates:
    """What suspended forwards keep between units.

    A parked one leaves its storage empty, whoever refers to it: the forward that is suspended finds it filled again when it goes on. A
    queue may run behind the thread that gives it work; so what it uses is kept for it (`Accelerator.keep_for`) before a storage is emptied.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._kept: dict[int, _Kept] = {}
        self._room: dict[int, Slab] = {}
        """On the host, by micro-batch: its largest so far."""

    def keep(self, batch: int, hidden: torch.Tensor) -> None:
        """The forward of a micro-batch goes on with `hidden`; what it went on with before is dropped."""
        self.drop(batch)
        storage = hidden.untyped_storage()
        self._kept[batch] = _Kept(storage, storage.nbytes())
        self._accelerator.memory.charge(storage.nbytes(), "hidden states")

    def drop(self, batch: int, *, empty: bool = False) -> None:
        """Forget what a micro-batch goes on with; empty: give the memory back though the forward still refers to it."""
        kept = self._kept.pop(batch, None)
        if kept is not None and kept.parked is None:
            self._accelerator.memory.release(kept.num_bytes)
            if empty:
                kept.storage.resize_(0)

    def park(self, batch: int) -> None:
        """Move a micro-batch's hidden state down; a task of the download."""
        kept = self._kept.get(batch)
        if kept is None or kept.parked is not None:
            return
        room = self._room.get(batch)
        if room is None or room.num_bytes < kept.num_bytes:
            room = self._room[batch] = self._accelerator.page_locked(kept.num_bytes)
        held = _bytes(kept.storage)
        self._accelerator.to_host(room.bytes[: kept.num_bytes], held)
        self._accelerator.keep_for(held, self._accelerator.download)  # the copy may not have begun when the storage is emptied
        del held
        kept.storage.resize_(0)
        kept.parked = room
        self._accelerator.memory.release(kept.num_bytes)

    def fetch(self, batch: int) -> None:
        """Move a parked hidden state up again; a task of the upload."""
        kept = self._kept.get(batch)
        if kept is None or kept.parked is None:
            return
        self._accelerator.memory.charge(kept.num_bytes, "hidden states")
        kept.storage.resize_(kept.num_bytes)
        held = _bytes(kept.storage)
        self._accelerator.to_device(held, kept.parked.bytes[: kept.num_bytes])
        self._accelerator.keep_for(held, self._accelerator.compute)
        kept.parked = None

    def clear(self) -> None:
        """Forget all."""
        for batch in list(self._kept):
            self.drop(batch)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
