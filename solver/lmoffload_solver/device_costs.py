"""Seconds of each task of a plan with a device, alone: the machine's transfers, and what its processors compute (`processing`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

from lmoffload_solver.accelerator import EmulatedDevice
from lmoffload_solver.costs import Contention
from lmoffload_solver.curves_processing import CurvesProcessing
from lmoffload_solver.errors import StatedError
from lmoffload_solver.host_cores import HostShare
from lmoffload_solver.lengths import Amount
from lmoffload_solver.machine import Disk, MachineProfile
from lmoffload_solver.model import LayerShape
from lmoffload_solver.processing import Attended, Processing
from lmoffload_solver.roofline_processing import LogCurve, RooflineProcessing, kv_elements
from lmoffload_solver.runtime import Runtime
from lmoffload_solver.value import Resource

Direction: TypeAlias = Literal["upload", "download"]

Pair: TypeAlias = tuple[Resource, Resource]
"""Of resources that slow each other."""

PAIRS: tuple[Pair, ...] = (
    ("upload", "host_attention"),
    ("upload", "device"),
    ("download", "device"),
    ("disk_read", "device"),
    ("disk_read", "host_attention"),
    ("device", "host_attention"),
)


class DeviceCosts:
    """Prices on one machine under one runtime; of one micro-batch, or of arrays of them.

    Raises:
        StatedError: the profile lacks the accelerator or a rate.
    """

    def __init__(self, machine: MachineProfile, disk: Disk, runtime: Runtime, share: HostShare | None = None) -> None:
        if machine.accelerator is None:
            raise StatedError(f"The machine profile {machine.name!r} has no accelerator.")
        self.machine, self.disk, self.runtime = machine, disk, runtime
        self.share = share or HostShare()
        self.num_devices = machine.accelerator.count
        self.processing: Processing
        if isinstance(machine.accelerator, EmulatedDevice):
            self.processing = CurvesProcessing(machine, disk, self.share.compute_threads, self.share.attention_threads)
        else:
            self.processing = RooflineProcessing(machine, machine.accelerator, runtime, self.share.attention)
        self._links = {(link.direction, link.page_locked): LogCurve(link.bytes_per_s.x, link.bytes_per_s.y) for link in machine.links}
        self._read_bytes_per_s = [max(curve.bytes_per_s.y) for curve in disk.read]

    @cached_property
    def contention(self) -> dict[Pair, Contention]:
        """What resources that work at once do to each other: as measured, and where they have more threads than there are cores."""
        found = {pair: Contention.of(self.machine, *pair) for pair in PAIRS}
        if self.share.crowding > 1:
            found["device", "host_attention"] = Contention.clamped(self.share.crowding, self.share.crowding)
        if self.share.among_devices > 1:
            each = 1 + (self.share.among_devices - 1) / (self.num_devices - 1)
            found["device", "device"] = Contention.clamped(each, each)
        return {pair: slow for pair, slow in found.items() if slow != Contention()}

    @cached_property
    def waking(self) -> Callable[[float], float] | None:
        """Seconds that a device on the host's cores loses after it was idle for some; None: nothing."""
        lost = self.machine.overheads.waking
        if not lost or not isinstance(self.machine.accelerator, EmulatedDevice):
            return None
        idle, seconds = zip((0.0, 0.0), *lost, strict=True)
        return lambda waited: float(np.interp(waited, idle, seconds)) if waited > 0 else 0.0

    # Transfers

    def upload_s(self, num_bytes: Amount, page_locked: bool) -> Amount:
        """Host to device."""
        return self._copy_s("upload", num_bytes, page_locked)

    def download_s(self, num_bytes: Amount, page_locked: bool) -> Amount:
        """Device to host."""
        return self._copy_s("download", num_bytes, page_locked)

    def link_rate(self, direction: Direction, page_locked: bool) -> float:
        """Best bytes per second of a direction."""
        return self._link(direction, page_locked).most

    def read_s(self, num_bytes: Amount) -> Amount:
        """Disk to host, in large requests."""
        return num_bytes / self.read_rate

    def write_s(self, num_bytes: Amount, num_writes: Amount = 0.0) -> Amount:
        """Host to disk; as fast as reading where writing was not measured; and what each of small writes takes."""
        return num_bytes / self._write_rate + num_writes * (self.disk.random_write_s or 0.0)

    @cached_property
    def read_rate(self) -> float:
        """Best bytes per second of the disk, as the runtime reads it with the plan's threads."""
        measured = max(self._read_bytes_per_s)
        return min(measured, self.share.read_bytes_per_s or measured, self.runtime.disk_bytes_per_s or measured)

    @cached_property
    def _write_rate(self) -> float:
        return max((max(curve.bytes_per_s.y) for curve in self.disk.write), default=max(self._read_bytes_per_s))

    def _copy_s(self, direction: Direction, num_bytes: Amount, page_locked: bool) -> Amount:
        return num_bytes / self._link(direction, page_locked).at(np.maximum(num_bytes, 1.0))

    def _link(self, direction: Direction, page_locked: bool) -> LogCurve:
        found = self._links.get((direction, page_locked)) or self._links.get((direction, not page_locked))
        if found is None:
            raise StatedError(f"The machine profile {self.machine.name!r} has no {direction} measured; profile it again.")
        return found

    # Attention on the host

    def host_attention_s(self, shape: LayerShape, of: Attended, step: int, kv_format: str) -> Amount:
        """What the host computes; query, new key and value are carried to it, the output back."""
        size = self.processing.activation_bytes
        query = of.rows * shape.num_heads * shape.key_dim * size
        carried = query + of.rows * kv_elements(shape, 1) * size
        attended = self.processing.host_attention_s(shape, of, step, kv_format)
        return attended + self.download_s(carried, True) + self.attention_output_s(shape, of.rows)

    def attention_output_s(self, shape: LayerShape, rows: Amount) -> Amount:
        """Carrying the output of the host's attention up."""
        return self.upload_s(rows * shape.num_heads * shape.value_dim * self.processing.activation_bytes, True)
