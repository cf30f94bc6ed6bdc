"""Processing: seconds of what the device and the host compute in a plan with a device, and the formats and sizes they compute in.

A processor has a roofline given by constants, published or measured (`RooflineProcessing`), or measured curves of its kernels
(`CurvesProcessing`). The planner takes either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

from lmoffload_solver.lengths import Amount, Lengths
from lmoffload_solver.model import LayerShape, ModelShape, TensorShape
from lmoffload_solver.value import TensorClass

Formats: TypeAlias = Mapping[TensorClass, str]
"""Classes whose matrices are kept in another format than the stored one."""

Matrices: TypeAlias = tuple[TensorShape, ...]


class Attended:
    """Sequences [first, end) of a job, longest first, `rows` of them at once: one micro-batch's, or arrays of many micro-batches'."""

    def __init__(self, lengths: Lengths, rows: Amount, first: Amount, end: Amount, gen_len: int) -> None:
        self.lengths, self.rows, self.run, self.gen_len = lengths, rows, (first, end), gen_len


class Processing(Protocol):
    """Prices of one micro-batch, or of arrays of them."""

    activation_bytes: int
    """Of an element of hidden states, queries and outputs."""
    task_s: float
    """What any task of the device takes beside its work."""
    keeps_ends: bool
    """What is embedded goes into the first layer at once, and what the last one computes into the head; a head that is not at home
    moves up in pieces."""

    def layer_s(self, model: ModelShape, layer: int, tensors: Matrices, tokens: Amount, share: int, more_s: Amount) -> Amount:
        """A layer, or the one of its `share` parts that `tensors` are, without attention, weights at hand as stored, and with `more_s`."""

    def head_s(self, model: ModelShape, rows: Amount) -> Amount:
        """The output head over one token of each sequence, its weights at hand as stored."""

    def product_gain_s(self, model: ModelShape, layer: int | None, tokens: Amount, formats: Formats, products: str) -> Amount:
        """What the products of a layer (None: of the head) take longer than `layer_s` and `head_s` count when weights are in these formats
        and the products take them so; negative where they take less."""

    def widening_s(self, tensors: Matrices, formats: Formats) -> float:
        """Widening what is quantized of some matrices before the products, once for all micro-batches."""

    def in_products(self, products: str) -> bool:
        """Whether products take weights as they are kept, so that nothing is widened before them."""

    def prefill_attention_s(self, shape: LayerShape, of: Attended, kv_format: str) -> Amount:
        """The device's attention over prompts."""

    def decode_attention_s(self, shape: LayerShape, of: Attended, step: int, kv_format: str) -> Amount:
        """The device's attention of a decode step, dequantizing included."""

    def host_attention_s(self, shape: LayerShape, of: Attended, step: int, kv_format: str) -> Amount:
        """The host's, nothing carried to it or back."""

    def quantize_s(self, elements: Amount, kv_format: str) -> Amount:
        """Quantizing keys and values on the device as a task of its own."""

    def kv_room_bytes(self, shape: LayerShape, tokens: int, kv_format: str) -> float:
        """Bytes of a sequence's keys and values with room for `tokens`."""

    def loaded_kv_bytes(self, shape: LayerShape, of: Attended, step: int, kv_format: str) -> Amount:
        """Bytes that a decode step moves to where it is attended to."""

    def stored_kv_bytes(self, shape: LayerShape, of: Attended, step: int, kv_format: str) -> Amount:
        """Bytes that a step adds and moves to their home."""

    def written_kv(self, shape: LayerShape, of: Attended, step: int, kv_format: str) -> tuple[Amount, Amount]:
        """(bytes, writes apart) that a step writes to the disk."""
