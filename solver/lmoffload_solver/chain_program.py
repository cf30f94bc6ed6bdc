"""The linear program of a plan with a device: for fixed discrete choices, the least job time over the placement fractions.

Symbols: w[c, t] fraction of class c of weights at home in tier t, B_c its bytes; k[p] share of keys and values in place p (home, who
attends); S, G bytes of one buffer of weights on the device and on the host; T_e seconds of sampled step e, which stands for weight_e
steps. U, R, U_p,e, ... are the seconds of `chain_terms`. One function per family of rows; every row is named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmoffload_solver.chain_terms import PLACES, Sizes, StepTerms
from lmoffload_solver.costs import Contention
from lmoffload_solver.program import _silent_stdout
from lmoffload_solver.value import TensorClass, Tier

TIERS: tuple[Tier, ...] = ("device", "host", "disk")


@dataclass(frozen=True)
class ChainChoices:
    """What is fixed."""

    sizes: Sizes
    steps: tuple[StepTerms, ...]
    packed_s: tuple[float, ...]
    """Seconds that quantized weights add to the device's work, per step."""
    num_layers: int
    prefetch_depth: int
    kv_bytes: float
    """Of the first block."""
    rooms: dict[Tier, float]
    """Bytes for homes and buffers of weights and KV."""
    upload_bytes_per_s: float
    read_bytes_per_s: float
    contention: Contention
    disk_kv: bool
    """Whether keys and values may lie on disk."""


@dataclass(frozen=True)
class ChainSolution:
    """The optimum and its duals."""

    total_s: float
    weights: dict[TensorClass, dict[Tier, float]]
    kv: tuple[float, ...]
    """Shares in the order of `PLACES`."""
    duals: dict[str, float]
    """Seconds per unit of each row's right-hand side."""


class ChainProgram:
    """The program of one set of choices, as a PuLP model; bytes in GB, so that the solver's tolerances suit."""

    def __init__(self, choices: ChainChoices) -> None:
        import pulp  # its import takes a tenth of a second

        self.pulp, self.choices = pulp, choices
        self.model = pulp.LpProblem("placement", pulp.LpMinimize)
        self.rows: dict[str, Any] = {}
        new = self.model.add_variable
        self.w = {name: {tier: new(f"w.{name}.{tier}", 0, 1) for tier in TIERS} for name in choices.sizes.classes}
        self.k = [new(f"k.{unit.home}.{unit.attends}", 0, 1 if unit.home != "disk" or choices.disk_kv else 0) for unit in PLACES]
        self.streamed, self.staged = new("S", 0), new("G", 0)
        self.seconds = [new(f"T.{step.name}", 0) for step in choices.steps]
        total = pulp.lpSum(step.weight * seconds for step, seconds in zip(choices.steps, self.seconds, strict=True))
        away = pulp.lpSum(k for k, unit in zip(self.k, PLACES, strict=True) if unit.home != "device")
        self.tie = TIE * sum(step.weight * step.device for step in choices.steps)
        self.model += total + self.tie * away
        self.placed()
        self.buffers()
        self.capacity()
        self.device()
        self.upload()
        self.disk()
        self.download()
        self.host_attention()
        self.path()

    def placed(self) -> None:
        """placed.c: Σ_t w[c, t] = 1; placed.kv: Σ_p k[p] = 1."""
        for name, by_tier in self.w.items():
            self._add(f"placed.{name}", self.pulp.lpSum(by_tier.values()) == 1)
        self._add("placed.kv", self.pulp.lpSum(self.k) == 1)

    def buffers(self) -> None:
        """buffer.device: Σ_c (1 − w[c, device])·B_c / L <= S over the classes of the layers; buffer.host: Σ_c w[c, disk]·B_c / L <= G:
        the largest layer streams no less than the mean."""
        layers = self.choices.num_layers
        self._add("buffer.device", self._layer_bytes("host", "disk") * (1 / layers) <= self.streamed)
        self._add("buffer.host", self._layer_bytes("disk") * (1 / layers) <= self.staged)

    def capacity(self) -> None:
        """capacity.tier: weights and KV at home there and (prefetch depth + 1) buffers of weights within the room."""
        slots = self.choices.prefetch_depth + 1
        extra = {"device": slots * self.streamed, "host": slots * self.staged, "disk": 0.0}
        for tier in TIERS:
            kv = self.pulp.lpSum(k for k, unit in zip(self.k, PLACES, strict=True) if unit.home == tier) * (self.choices.kv_bytes / GB)
            self._add(f"capacity.{tier}", self._bytes(tier) + kv + extra[tier] <= self.choices.rooms[tier] / GB)

    def device(self) -> None:
        """device.e: T_e >= device_e + dequantizing + Σ_p k[p]·A_p,e."""
        for (step, seconds), packed in zip(self._steps(), self.choices.packed_s, strict=True):
            work = step.device + packed
            self._add(f"device.{step.name}", seconds >= work + self._kv(step.attend_device))

    def upload(self) -> None:
        """upload.e: T_e >= U_e, with U_e = (weights not on the device) / R_up + Σ_p k[p]·U_p,e + hidden − early; and with H_e what the host
        attends, both at once slowing each other by u and h: T_e >= U_e + H_e·h·(1 − 1/u) and T_e >= H_e + U_e·u·(1 − 1/h)."""
        slow = self.choices.contention
        for step, seconds in self._steps():
            up, attend = self._upload(step), self._kv(step.attend_host)
            if slow.read == 1 and slow.compute == 1:
                self._add(f"upload.{step.name}", seconds >= up)
                continue
            self._add(f"upload.{step.name}", seconds >= up + attend * (slow.compute * (1 - 1 / slow.read)))
            self._add(f"contended.{step.name}", seconds >= attend + up * (slow.read * (1 - 1 / slow.compute)))

    def disk(self) -> None:
        """disk_read.e: T_e >= (weights on disk) / R + Σ_p k[p]·R_p,e − early; disk_write.e: T_e >= Σ_p k[p]·W_p,e."""
        for step, seconds in self._steps():
            read = self._bytes("disk") * (GB / self.choices.read_bytes_per_s) + self._kv(step.read)
            self._add(f"disk_read.{step.name}", seconds >= read - self._early(step, self.choices.read_bytes_per_s))
            self._add(f"disk_write.{step.name}", seconds >= self._kv(step.write) - 2 * step.largest_store)

    def download(self) -> None:
        """download.e: T_e >= Σ_p k[p]·D_p,e + hidden, but for the two stores that may be on their way when the step ends."""
        for step, seconds in self._steps():
            self._add(f"download.{step.name}", seconds >= self._kv(step.store) + step.store_hidden - 2 * step.largest_store)

    def host_attention(self) -> None:
        """host_attention.e: T_e >= Σ_p k[p]·H_p,e."""
        for step, seconds in self._steps():
            self._add(f"host_attention.{step.name}", seconds >= self._kv(step.attend_host))

    def path(self) -> None:
        """path.e: T_e >= (device_e + Σ_p k[p]·(A_p,e + H_p,e)) / micro-batches: no micro-batch is on the device and on the host at
        once, and the slowest is no quicker than the mean."""
        for (step, seconds), packed in zip(self._steps(), self.choices.packed_s, strict=True):
            one = 1 / step.num_batches
            attended = self._kv(tuple(a + h for a, h in zip(step.attend_device, step.attend_host, strict=True)))
            self._add(f"path.{step.name}", seconds >= (step.device + packed) * one + attended * one)

    def solve(self) -> ChainSolution | None:
        """The optimum; None where the rows contradict each other."""
        with _silent_stdout():
            self.model.solve(self.pulp.HiGHS(msg=False))
        if self.pulp.LpStatus[self.model.status] != "Optimal":
            return None
        weights = {c: {tier: float(v.value()) for tier, v in by_tier.items()} for c, by_tier in self.w.items()}
        duals = {name: float(row.pi) for name, row in self.rows.items()}
        total = max(0.0, float(self.pulp.value(self.model.objective)) - self.tie)
        return ChainSolution(total, weights, tuple(float(k.value()) for k in self.k), duals)

    def scaling_s(self, solution: ChainSolution, resource: str) -> float:
        """Seconds of the job that scale with 1 / rate of the link up ("upload") or of the disk ("disk_read"): Σ_e dual · seconds."""
        slow = self.choices.contention
        sizes, kv = self.choices.sizes.classes, solution.kv
        moved = sum(sizes[c] * (share["host"] + share["disk"]) for c, share in solution.weights.items())
        staged = sum(sizes[c] * share["disk"] for c, share in solution.weights.items())
        total = 0.0
        for step, _ in self._steps():
            if resource == "disk_read":
                rate = self.choices.read_bytes_per_s
                seconds = staged / rate + sum(a * b for a, b in zip(step.read, kv, strict=True)) - self._early(step, rate)
                total += solution.duals[f"disk_read.{step.name}"] * seconds
                continue
            rate = self.choices.upload_bytes_per_s
            seconds = moved / rate + sum(a * b for a, b in zip(step.upload, kv, strict=True)) + step.load_hidden - self._early(step, rate)
            dual = solution.duals[f"upload.{step.name}"]
            dual += solution.duals.get(f"contended.{step.name}", 0.0) * slow.read * (1 - 1 / slow.compute)
            total += dual * seconds
        return max(0.0, total)

    def _steps(self) -> list[tuple[StepTerms, Any]]:
        return list(zip(self.choices.steps, self.seconds, strict=True))

    def _bytes(self, *tiers: Tier) -> Any:
        """GB of weights at home in tiers."""
        sizes = self.choices.sizes.classes
        return self.pulp.lpSum(sizes[c] / GB * by_tier[tier] for c, by_tier in self.w.items() for tier in tiers)

    def _layer_bytes(self, *tiers: Tier) -> Any:
        sizes = self.choices.sizes.classes
        return self.pulp.lpSum(sizes[c] / GB * by_tier[tier] for c, by_tier in self.w.items() if c != "head" for tier in tiers)

    def _kv(self, seconds: tuple[float, ...]) -> Any:
        return self.pulp.lpSum(value * share for value, share in zip(seconds, self.k, strict=True) if value)

    def _upload(self, step: StepTerms) -> Any:
        rate = self.choices.upload_bytes_per_s
        return self._bytes("host", "disk") * (GB / rate) + self._kv(step.upload) + step.load_hidden - self._early(step, rate)

    def _early(self, step: StepTerms, rate: float) -> float:
        """What may have been moved while the longer step before computed."""
        largest = max(self.choices.sizes.in_layers / self.choices.num_layers, self.choices.sizes.classes["head"])
        return (self.choices.prefetch_depth + 2) * largest / rate if step.early else 0.0

    def _add(self, name: str, row: Any) -> None:
        self.rows[name] = row
        self.model.addConstraint(row, name)


GB = 1e9

TIE = 1e-5
"""Share of the device's work that decides between plans that are equally quick: keys and values then lie on the device."""
