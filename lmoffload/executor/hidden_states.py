"""Hidden states between two units: on the device, parked on the host, or on their way from one accelerator to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from lmoffload.executor.buffers import Slab
from lmoffload.executor.resources import Accelerator


class Parked(NamedTuple):
    """A hidden state on the host."""

    room: Slab
    num_bytes: int


@dataclass(slots=True)
class _Kept:
    """A micro-batch's hidden state."""

    storage: torch.UntypedStorage
    num_bytes: int
    parked: Parked | None = None


@dataclass(frozen=True)
class HostRooms:
    """Where hidden states are parked: every micro-batch has its place, whichever accelerator parks it."""

    rooms: dict[int, Slab] = field(default_factory=dict)
    """By micro-batch: its largest so far."""
    passed: dict[int, Parked] = field(default_factory=dict)
    """By micro-batch: what an accelerator has handed on, until the next one fetches it."""

    def of(self, batch: int, num_bytes: int, accelerator: Accelerator) -> Slab:
        """The place of a micro-batch."""
        room = self.rooms.get(batch)
        if room is None or room.num_bytes < num_bytes:
            room = self.rooms[batch] = accelerator.page_locked(num_bytes)
        return room


class HiddenStates:
    """What suspended forwards keep between units, on one accelerator.

    A parked one leaves its storage empty, whoever refers to it: the forward that is suspended finds it filled again when it goes on. A
    queue may run behind the thread that gives it work; so what it uses is kept for it (`Accelerator.keep_for`) before a storage is emptied.
    """

    def __init__(self, accelerator: Accelerator, host: HostRooms) -> None:
        self._accelerator, self._host = accelerator, host
        self._kept: dict[int, _Kept] = {}
        self._arrived: dict[int, torch.Tensor] = {}
        """Bytes that came from the accelerator before, until the forward that takes them is there."""

    def keep(self, batch: int, hidden: torch.Tensor) -> None:
        """The forward of a micro-batch goes on with `hidden`; what it went on with before is dropped. What has arrived takes the place of
        what the forward began with here."""
        self.drop(batch)
        arrived = self._arrived.pop(batch, None)
        if arrived is None:
            if not hidden.untyped_storage().resizable():  # memory that is used again (`kernels.pages`)
                hidden.set_(hidden.clone())  # type: ignore[call-overload]
            self._accelerator.memory.charge(hidden.untyped_storage().nbytes(), "hidden states")
        else:
            given = arrived[: hidden.nbytes]  # products of few rows leave room behind them, which is moved too
            hidden.set_(given.view(hidden.dtype).view(hidden.shape))  # type: ignore[call-overload]
        storage = hidden.untyped_storage()
        self._kept[batch] = _Kept(storage, storage.nbytes())

    def drop(self, batch: int, *, empty: bool = False) -> None:
        """Forget what a micro-batch goes on with; empty: give the memory back though the forward still refers to it."""
        kept = self._kept.pop(batch, None)
        if kept is not None and kept.parked is None:
            self._accelerator.memory.release(kept.num_bytes)
            if empty:
                kept.storage.resize_(0)

    def park(self, batch: int, *, hand_on: bool) -> None:
        """Move a micro-batch's hidden state down; a task of the download. hand_on: for the next accelerator."""
        kept = self._kept.get(batch)
        if kept is None or kept.parked is not None:
            return
        room = self._host.of(batch, kept.num_bytes, self._accelerator)
        held = _bytes(kept.storage)
        self._accelerator.to_host(room.bytes[: kept.num_bytes], held)
        self._accelerator.keep_for(held, self._accelerator.download)  # the copy may not have begun when the storage is emptied
        del held
        kept.storage.resize_(0)
        kept.parked = Parked(room, kept.num_bytes)
        self._accelerator.memory.release(kept.num_bytes)
        if hand_on:
            self._host.passed[batch] = self._kept.pop(batch).parked  # type: ignore[assignment]

    def fetch(self, batch: int, *, take_over: bool) -> None:
        """Move a parked hidden state up again; a task of the upload. take_over: what the accelerator before has handed on."""
        if take_over:
            self._take_over(batch)
            return
        kept = self._kept.get(batch)
        if kept is None or kept.parked is None:
            return
        self._accelerator.memory.charge(kept.num_bytes, "hidden states")
        kept.storage.resize_(kept.num_bytes)
        self._bring_up(_bytes(kept.storage), kept.parked)
        kept.parked = None

    def clear(self) -> None:
        """Forget all."""
        for batch in list(self._kept):
            self.drop(batch)
        for arrived in self._arrived.values():
            self._accelerator.memory.release(arrived.numel())
        self._arrived.clear()
        self._host.passed.clear()

    def _take_over(self, batch: int) -> None:
        parked = self._host.passed.pop(batch, None)
        if parked is None:
            return
        self._accelerator.memory.charge(parked.num_bytes, "hidden states")
        arrived = torch.empty(parked.num_bytes, dtype=torch.uint8, device=self._accelerator.device)
        self._bring_up(arrived, parked)
        self._arrived[batch] = arrived

    def _bring_up(self, target: torch.Tensor, parked: Parked) -> None:
        self._accelerator.to_device(target, parked.room.bytes[: parked.num_bytes])
        self._accelerator.keep_for(target, self._accelerator.compute)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
