"""The linear program of a plan with a device: for fixed discrete choices, the least job time over the placement fractions.

Symbols: w[c, t] fraction of class c of weights at home in tier t, B_c its bytes; k[p] share of keys and values in place p (home, who
attends); S, G bytes of one buffer of weights on the device and on the host; T_e seconds of sampled step e, which stands for weight_e
steps. U, R, U_p,e, ... are the seconds of `chain_terms`. One function per family of rows; every row is named.

The rows are data: `chain_solver` hands them to HiGHS as arrays, and `as_pulp` writes them as a PuLP model, to be read and as its reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from lmoffload_solver.chain_terms import PLACES, Array, Sizes, StepTerms
from lmoffload_solver.costs import Contention
from lmoffload_solver.device_costs import Pair
from lmoffload_solver.device_memory import KVBuffers
from lmoffload_solver.modelling import load_pulp
from lmoffload_solver.value import Resource, TensorClass, Tier

TIERS: tuple[Tier, ...] = ("device", "host", "disk")

GB = 1e9
"""Bytes are in GB, so that the solver's tolerances suit."""

TIE = 1e-5
"""Share of the device's work that decides between plans that are equally quick: keys and values then lie on the device."""


@dataclass(frozen=True)
class ChainChoices:
    """What is fixed."""

    sizes: Sizes
    steps: StepTerms
    packed_s: Array
    """Seconds that quantized weights add to the device's work, per step."""
    fused_s: Array
    """What of it is within the products, not before them."""
    num_layers: int
    prefetch_depth: int
    slots: int
    """Buffers of weights."""
    num_devices: int
    waves: int
    kv_bytes: float
    """Of the first block."""
    kv_buffers: KVBuffers
    rooms: dict[Tier, float]
    """Bytes for homes and buffers of weights and KV."""
    weights_room: float
    """For homes and buffers of weights on device and host together."""
    upload_bytes_per_s: float
    """Of weights, moved once for every wave, over all links."""
    read_bytes_per_s: float
    """The same; 0: the disk is not used."""
    contention: Contention
    """Of uploads and the host's attention."""
    crowded: Mapping[Pair, Contention]
    """Of other pairs of resources."""
    attends: bool
    """Whether the host may attend."""
    head_at_home: bool | None
    """Whether the output head lies on the device; None: in part, if need be."""
    head_in_pieces: bool
    """Whether a head that is not at home moves in pieces that fit the layers' buffers."""
    disk_kv: bool
    """Whether keys and values may lie on disk."""

    @property
    def early_bytes(self) -> float:
        """What may have been moved while the longer step before computed: a unit more than the buffers hold; by every accelerator, for one
        of its waves."""
        unit = max(self.sizes.in_layers / self.num_layers, self.sizes.classes["head"])
        return self.num_devices / self.waves * (self.prefetch_depth + 2) * unit


@dataclass(frozen=True)
class ChainSolution:
    """The optimum and its duals."""

    total_s: float
    weights: dict[TensorClass, dict[Tier, float]]
    kv: tuple[float, ...]
    """Shares in the order of `PLACES`."""
    duals: dict[str, float]
    """Seconds per unit of each row's right-hand side."""


@dataclass(frozen=True)
class Rows:
    """Rows of one family: lower <= matrix · variables <= upper."""

    names: list[str]
    matrix: Array
    lower: Array
    upper: Array


class ChainProgram:
    """The program of one set of choices. Variables: w by class and tier, k by place, S, G, T by step."""

    def __init__(self, choices: ChainChoices) -> None:
        self.choices = choices
        self.classes = tuple(choices.sizes.classes)
        self.bytes = np.array([choices.sizes.classes[name] for name in self.classes]) / GB
        self.num_steps = len(choices.steps.names)
        self.kv = 3 * len(self.classes)
        self.streamed, self.staged = self.kv + len(PLACES), self.kv + len(PLACES) + 1
        self.seconds = self.staged + 1
        self.num_variables = self.seconds + self.num_steps
        steps = choices.steps
        self.tie = TIE * float(steps.weight @ np.abs(steps.device + choices.packed_s))
        self.cost = np.zeros(self.num_variables)
        self.cost[self.kv + 1 : self.kv + len(PLACES)] = self.tie
        self.cost[self.seconds :] = steps.weight
        self.upper = np.full(self.num_variables, inf)
        self.upper[: self.streamed] = 1.0
        for place, unit in enumerate(PLACES):
            barred = (unit.home == "disk" and not choices.disk_kv) or (unit.attends == "host" and not choices.attends)
            self.upper[self.kv + place] = 0.0 if barred else 1.0
        if not choices.read_bytes_per_s:
            self.upper[2 : self.kv : 3] = 0.0
        if choices.head_at_home is not None:
            head = 3 * self.classes.index("head")
            self.upper[head + 1 : head + 3 if choices.head_at_home else head] = 0.0
            self.upper[head] *= choices.head_at_home

    @property
    def variable_names(self) -> list[str]:
        weights = [f"w.{name}.{tier}" for name in self.classes for tier in TIERS]
        places = [f"k.{unit.home}.{unit.attends}" for unit in PLACES]
        return [*weights, *places, "S", "G", *(f"T.{name}" for name in self.choices.steps.names)]

    def families(self) -> Iterator[Rows]:
        """All rows."""
        yield self.placed()
        yield self.buffers()
        yield self.capacity()
        yield self.device()
        yield self.upload()
        yield self.disk()
        yield self.download()
        yield self.host_attention()
        yield self.path()
        yield from self.crowded()
        if not self.choices.prefetch_depth and not self.choices.attends:
            yield self.serial()

    def placed(self) -> Rows:
        """placed.c: Σ_t w[c, t] = 1; placed.kv: Σ_p k[p] = 1."""
        matrix = np.zeros((len(self.classes) + 1, self.num_variables))
        for number in range(len(self.classes)):
            matrix[number, 3 * number : 3 * number + 3] = 1.0
        matrix[-1, self.kv : self.streamed] = 1.0
        ones = np.ones(len(matrix))
        return Rows([*(f"placed.{name}" for name in self.classes), "placed.kv"], matrix, ones, ones)

    def buffers(self) -> Rows:
        """buffer.device: Σ_c (1 − w[c, device])·B_c / L <= S over the classes of the layers, since the largest layer streams no less than
        the mean, and unless it moves in pieces (1 − w[head, device])·B_head <= S; buffer.host: the same of w[c, disk] and G."""
        matrix = np.zeros((4, self.num_variables))
        buffers: tuple[tuple[tuple[Tier, ...], int], ...] = ((("host", "disk"), self.streamed), (("disk",), self.staged))
        for row, (tiers, variable) in enumerate(buffers):
            matrix[2 * row] = self._bytes(*tiers, but_head=True) / self.choices.num_layers
            matrix[2 * row + 1] = self._bytes(*tiers) - self._bytes(*tiers, but_head=True)
            matrix[2 * row : 2 * row + 2, variable] = -1.0
        names = ["buffer.device", "buffer.device.head", "buffer.host", "buffer.host.head"]
        if self.choices.head_in_pieces:
            names, matrix = names[::2], matrix[::2]
        return Rows(names, matrix, np.full(len(names), -inf), np.zeros(len(names)))

    def capacity(self) -> Rows:
        """capacity.tier: weights and KV at home there and the buffers of weights within the room, and so many of the buffers of KV as of it
        needs them; capacity.weights: homes and buffers of weights on device and host within what the user grants them."""
        choices = self.choices
        matrix = np.zeros((4, self.num_variables))
        for row, tier in enumerate(TIERS):
            matrix[row] = self._bytes(tier)
            for place, unit in enumerate(PLACES):
                buffers = choices.kv_buffers.of(unit).get(tier, 0.0)
                matrix[row, self.kv + place] = (buffers + (choices.kv_bytes if unit.home == tier else 0.0)) / GB
        matrix[0, self.streamed] = matrix[1, self.staged] = choices.slots
        matrix[3] = self._bytes("device", "host")
        matrix[3, [self.streamed, self.staged]] = choices.slots
        upper = np.array([*(choices.rooms[tier] for tier in TIERS), choices.weights_room]) / GB
        return Rows([*(f"capacity.{tier}" for tier in TIERS), "capacity.weights"], matrix, np.full(4, -inf), upper)

    def device(self) -> Rows:
        """device.e: T_e >= device_e + dequantizing + Σ_p k[p]·A_p,e."""
        steps = self.choices.steps
        return self._per_step("device", kv=steps.attend_device, constant=steps.device + self.choices.packed_s)

    def upload(self) -> Rows:
        """upload.e: T_e >= U_e, with U_e = (weights not on the device) / R_up + Σ_p k[p]·U_p,e + hidden − early; and with H_e what the host
        attends, both at once slowing each other by u and h: T_e >= U_e + H_e·h·(1 − 1/u) and (contended.e) T_e >= H_e + U_e·u·(1 − 1/h)."""
        slow, steps, choices = self.choices.contention, self.choices.steps, self.choices
        early = np.where(steps.early, choices.early_bytes / choices.upload_bytes_per_s, 0.0)
        moved = self._bytes("host", "disk") * (GB / choices.upload_bytes_per_s)
        hidden = steps.load_hidden - early
        beside = slow.compute * (1 - 1 / slow.read)
        alone = self._per_step("upload", kv=steps.upload + beside * steps.attend_host, constant=hidden, weights=moved)
        share = slow.read * (1 - 1 / slow.compute)
        both = self._per_step("contended", kv=steps.attend_host + share * steps.upload, constant=share * hidden, weights=share * moved)
        return _joined(alone, both)

    def disk(self) -> Rows:
        """disk_read.e: T_e >= (weights on disk) / R + Σ_p k[p]·R_p,e − early; disk_write.e: T_e >= Σ_p k[p]·W_p,e, but for what may be on
        its way when the step ends."""
        steps, rate = self.choices.steps, self.choices.read_bytes_per_s
        write = self._per_step("disk_write", kv=steps.write, constant=-2 * steps.largest_store)
        if not rate:
            return write
        early = np.where(steps.early, self.choices.early_bytes / rate, 0.0)
        return _joined(self._per_step("disk_read", kv=steps.read, constant=-early, weights=self._bytes("disk") * (GB / rate)), write)

    def download(self) -> Rows:
        """download.e: T_e >= Σ_p k[p]·D_p,e + hidden, but for the two stores that may be on their way when the step ends."""
        steps = self.choices.steps
        return self._per_step("download", kv=steps.store, constant=steps.store_hidden - 2 * steps.largest_store)

    def host_attention(self) -> Rows:
        """host_attention.e: T_e >= Σ_p k[p]·H_p,e."""
        return self._per_step("host_attention", kv=self.choices.steps.attend_host, constant=np.zeros(self.num_steps))

    def path(self) -> Rows:
        """path.e: T_e >= (device_e + Σ_p k[p]·(A_p,e + H_p,e)) / micro-batches: no micro-batch is on the device and on the host at
        once (but weights may be widened meanwhile), and the slowest is no quicker than the mean."""
        steps, one = self.choices.steps, 1 / self.choices.steps.num_batches
        attended = (steps.attend_device + steps.attend_host) * one[:, None]
        return self._per_step("path", kv=attended, constant=(steps.device + self.choices.fused_s) * one)

    def crowded(self) -> Iterator[Rows]:
        """first+second.e and second+first.e of each pair that slow each other by a and b: T_e >= A_e + B_e·b·(1 − 1/a), and the other way
        round."""
        for (first, second), slow in self.choices.crowded.items():
            one, other = self._work_of(first), self._work_of(second)
            if one is None or other is None:
                continue
            for name, this, that, share in (
                (f"{first}+{second}", one, other, slow.compute * (1 - 1 / slow.read)),
                (f"{second}+{first}", other, one, slow.read * (1 - 1 / slow.compute)),
            ):
                kv, constant, weights = (a + share * b for a, b in zip(this, that, strict=True))
                yield self._per_step(name, kv=kv, constant=constant, weights=weights)

    def _work_of(self, resource: Resource) -> tuple[Array, Array, Array] | None:
        """Seconds of a resource in every step: of keys and values by place, always, of weights by class and tier; None: it is not used."""
        steps, choices, nothing = self.choices.steps, self.choices, np.zeros(self.num_variables)
        if resource == "device":
            return steps.attend_device, steps.device + choices.packed_s, nothing
        if resource == "host_attention":
            return steps.attend_host, np.zeros(self.num_steps), nothing
        if resource == "download":
            return steps.store, steps.store_hidden - 2 * steps.largest_store, nothing
        rate = choices.upload_bytes_per_s if resource == "upload" else choices.read_bytes_per_s
        if not rate:
            return None
        early = np.where(steps.early, choices.early_bytes / rate, 0.0)
        if resource == "upload":
            return steps.upload, steps.load_hidden - early, self._bytes("host", "disk") * (GB / rate)
        return steps.read, -early, self._bytes("disk") * (GB / rate)

    def serial(self) -> Rows:
        """serial.e, without prefetch where the device alone attends: a unit's weights go up when the unit before is computed, and are
        waited for: T_e >= device_e + Σ_p k[p]·A_p,e + (weights not on the device) / R_up."""
        steps = self.choices.steps
        moved = self._bytes("host", "disk") * (GB / self.choices.upload_bytes_per_s)
        return self._per_step("serial", kv=steps.attend_device, constant=steps.device + self.choices.packed_s, weights=moved)

    def _bytes(self, *tiers: Tier, but_head: bool = False) -> Array:
        """Coefficients of GB of weights at home in tiers."""
        found = np.zeros(self.num_variables)
        for number, name in enumerate(self.classes):
            for place, tier in enumerate(TIERS):
                if tier in tiers and not (but_head and name == "head"):
                    found[3 * number + place] = self.bytes[number]
        return found

    def _per_step(self, family: str, *, kv: Array, constant: Array, weights: Array | None = None) -> Rows:
        """T_e − Σ_p k[p]·kv_p,e − weights >= constant_e."""
        matrix = np.zeros((self.num_steps, self.num_variables)) if weights is None else np.tile(-weights, (self.num_steps, 1))
        matrix[:, self.kv : self.streamed] = -kv
        matrix[np.arange(self.num_steps), self.seconds + np.arange(self.num_steps)] = 1.0
        names = [f"{family}.{name}" for name in self.choices.steps.names]
        return Rows(names, matrix, constant, np.full(self.num_steps, inf))

    def as_pulp(self) -> tuple[Any, dict[str, Any]]:
        """The same as a PuLP model, and its rows by name."""
        pulp = load_pulp()
        model = pulp.LpProblem("placement", pulp.LpMinimize)
        variables = [
            model.add_variable(name, 0, None if upper == inf else float(upper))
            for name, upper in zip(self.variable_names, self.upper, strict=True)
        ]
        model += pulp.lpSum(float(cost) * variable for cost, variable in zip(self.cost, variables, strict=True))
        named: dict[str, Any] = {}
        for rows in self.families():
            for name, line, lower, upper in zip(rows.names, rows.matrix, rows.lower, rows.upper, strict=True):
                left = pulp.lpSum(float(value) * variable for value, variable in zip(line, variables, strict=True) if value)
                if lower == -inf and upper == inf:
                    continue
                named[name] = left == float(lower) if lower == upper else left >= float(lower) if upper == inf else left <= float(upper)
                model.addConstraint(named[name], name)
        return model, named


def _joined(first: Rows, second: Rows) -> Rows:
    arrays = (np.concatenate([getattr(first, name), getattr(second, name)]) for name in ("matrix", "lower", "upper"))
    return Rows(first.names + second.names, *arrays)
