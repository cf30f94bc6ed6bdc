"""Processing by measured curves: a device that runs the host's kernels on some of its cores, and the host's attention on others.

All is priced as on a machine without a device (`costs.MachineCosts`), each with its own number of threads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from lmoffload_solver import counting
from lmoffload_solver.costs import ANY_FORMAT_KERNEL, DiskCosts, LayerKind, MachineCosts
from lmoffload_solver.lengths import Amount
from lmoffload_solver.machine import Disk, MachineProfile
from lmoffload_solver.model import LayerShape, ModelShape
from lmoffload_solver.processing import Attended, Formats, Matrices
from lmoffload_solver.schedule import PAGE_BYTES


class CurvesProcessing:
    """Prices with numbers of threads.

    Raises:
        StatedError: the profile lacks a curve.
    """

    activation_bytes = counting.ACTIVATION_BYTES
    keeps_ends = True

    def __init__(self, machine: MachineProfile, disk: Disk, compute_threads: int, attention_threads: int) -> None:
        self.device = MachineCosts(machine, DiskCosts(disk, 1), compute_threads)
        self.host = MachineCosts(machine, DiskCosts(disk, 1), attention_threads)
        self.task_s = machine.overheads.handover_s or 0.0
        self._kind = cache(_kind)

    # Products

    def layer_s(self, model: ModelShape, layer: int, tensors: Matrices, tokens: Amount, share: int, more_s: Amount) -> Amount:
        assert share == 1, "layers are computed whole"
        rows = np.asarray(tokens, dtype=np.float64)
        kind, overheads = self._kind(model, (), layer), self.device.machine.overheads
        by_python = np.where(rows > kind.few_tokens, overheads.python_layer_s, 0.0)  # is in a layer's seconds already
        more_s = more_s + np.maximum(overheads.device_layer_s - by_python, 0.0)
        return self.device.layer_seconds(kind, ANY_FORMAT_KERNEL, rows) + self.task_s + more_s

    def head_s(self, model: ModelShape, rows: Amount) -> Amount:
        return self._head_s(model.head.format, ANY_FORMAT_KERNEL, model, rows) + self.task_s

    def _head_s(self, format_name: str, products: str, model: ModelShape, rows: Amount) -> Amount:
        return self.device.linear.seconds(products, format_name, *counting.matrix_size(model.head), np.asarray(rows, dtype=np.float64))

    def product_gain_s(self, model: ModelShape, layer: int | None, tokens: Amount, formats: Formats, products: str) -> Amount:
        chosen = tuple(formats.items())
        if not chosen and products == ANY_FORMAT_KERNEL:
            return 0.0
        if layer is None:
            kept_s = self._head_s(formats.get(model.head.tensor_class, model.head.format), products, model, tokens)
            return kept_s - self._head_s(model.head.format, ANY_FORMAT_KERNEL, model, tokens)
        rows = np.asarray(tokens, dtype=np.float64)
        kept_s = sum(self.device.linear_seconds(self._kind(model, chosen, layer), products, rows))
        return kept_s - sum(self.device.linear_seconds(self._kind(model, (), layer), ANY_FORMAT_KERNEL, rows))

    def widening_s(self, tensors: Matrices, formats: Formats) -> float:
        return 0.0

    def in_products(self, products: str) -> bool:
        return True

    # Attention

    def prefill_attention_s(self, shape: LayerShape, of: Attended, kv_format: str) -> Amount:
        def seconds(lengths: Amount) -> Amount:
            return self.device.prefill_attention_seconds(shape, [int(n) for n in lengths], kv_format)

        return of.rows * of.lengths.mean(("prefill", self, shape, kv_format), seconds, *of.run)

    def decode_attention_s(self, shape: LayerShape, of: Attended, step: int, kv_format: str) -> Amount:
        return self._decode_s(self.device, shape, of, step, kv_format)

    def host_attention_s(self, shape: LayerShape, of: Attended, step: int, kv_format: str) -> Amount:
        return self._decode_s(self.host, shape, of, step, kv_format) + self.task_s

    def _decode_s(self, costs: MachineCosts, shape: LayerShape, of: Attended, step: int, kv_format: str) -> Amount:
        def seconds(lengths: Amount) -> Amount:
            return costs.decode_attention_seconds(shape, [int(n) + step for n in lengths], kv_format)

        return of.rows * of.lengths.mean((step, costs, shape, kv_format), seconds, *of.run)

    def quantize_s(self, elements: Amount, kv_format: str) -> Amount:
        """Whoever attends quantizes as part of it."""
        return 0.0

    # Keys and values

    def kv_room_bytes(self, shape: LayerShape, tokens: int, kv_format: str) -> float:
        return float(counting.layer_kv_bytes(shape, tokens, kv_format, kv_format))

    def loaded_kv_bytes(self, shape: LayerShape, of: Attended, step: int, kv_format: str) -> Amount:
        """All there is room for: it is one copy."""
        return self._room(shape, of, kv_format)

    def stored_kv_bytes(self, shape: LayerShape, of: Attended, step: int, kv_format: str) -> Amount:
        return self._room(shape, of, kv_format) if step == 0 else of.rows * counting.kv_bytes_per_token(shape, kv_format, kv_format)

    def written_kv(self, shape: LayerShape, of: Attended, step: int, kv_format: str) -> tuple[Amount, Amount]:
        """A decode step writes the pages that it changes, one by one."""
        if step == 0:
            return self._room(shape, of, kv_format), 0.0
        pages = of.rows * shape.num_kv_heads * counting.changed_pages(shape, kv_format)
        return pages * PAGE_BYTES, pages

    def _room(self, shape: LayerShape, of: Attended, kv_format: str) -> Amount:
        def room(lengths: Amount) -> Amount:
            return np.array([self.kv_room_bytes(shape, int(n) + of.gen_len, kv_format) for n in lengths])

        return of.rows * of.lengths.mean(("room", shape, kv_format), room, *of.run)


def _kind(model: ModelShape, formats: tuple[tuple[str, str], ...], layer: int) -> LayerKind:
    """A layer whose matrices are kept in other formats."""
    kind, chosen = LayerKind.of(model, layer), dict(formats)
    matrices = zip(kind.products, counting.layer_matrices(model, layer), strict=True)
    return replace(kind, products=tuple(replace(one, format=chosen.get(t.tensor_class, one.format)) for one, t in matrices))
