"""Performed: what a run did, amount by amount, with the seconds each took, so that any profile can be held against it afterwards."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lmoffload_solver.costs import Phase
from lmoffload_solver.value import Value

Part = Literal["read_weights", "compute", "products", "attention", "rest"]
"""read_weights and compute are kinds of task; the other three are what computing consists of."""

Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(gt=0)]


class Reads(Value):
    """Read tasks of one size."""

    phase: Phase
    num_bytes: int = Field(gt=0)
    """Of one task."""
    num_requests: Count
    """Of one task."""
    count: Count
    seconds: Seconds


class Products(Value):
    """Products of activations with matrices [N, K] of one format by one kernel, of about as many rows."""

    phase: Phase
    kernel: str
    format: str
    n: Count
    k: Count
    rows: float = Field(ge=1)
    """Mean over the products."""
    count: Count
    seconds: Seconds


class Attentions(Value):
    """Attention of micro-batches at layers of one shape, over sequences of about one length."""

    phase: Phase
    format: str
    """Of the keys and values that are read."""
    length: float = Field(ge=1)
    """Tokens that a sequence keeps at such a layer, the mean."""
    amount: float = Field(gt=0)
    """FLOPs in the prefill, bytes of keys and values in decode, summed."""
    count: Count
    seconds: Seconds


class Others(Value):
    """What of computing is neither product nor attention, storing keys and values included."""

    phase: Phase
    layers: int = Field(ge=0)
    """Decoder layers computed, each micro-batch's counted."""
    elementwise_bytes: int = Field(ge=0)
    steps: int = Field(ge=0)
    """Forwards of micro-batches."""
    rows: int = Field(ge=0)
    """Sequences in them."""
    lookups: int = Field(ge=0)
    """Rows of an embedding table on disk."""
    seconds: Seconds


class Performed(Value):
    """A run's work."""

    threads: Count
    io_threads: Count
    file_system: str | None = None
    """The mount point of the disk that was read; None: the first that the profile knows."""
    overlapped: bool
    """Weights were read ahead while others were computed with."""
    row_bytes: int = Field(ge=0)
    """Of the embedding table."""
    reads: tuple[Reads, ...] = ()
    products: tuple[Products, ...] = ()
    attentions: tuple[Attentions, ...] = ()
    others: tuple[Others, ...] = ()
