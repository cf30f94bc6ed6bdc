"""What the peers of a comparison are made of: plans for this engine, a GGUF copy for llama.cpp, a Python for each."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmoffload.api.asking import Asked
from lmoffload.api.importance import require_importance
from lmoffload.api.machine import Machine
from lmoffload.api.model import Model
from lmoffload.api.planning import solve_for
from lmoffload.api.telling import Tell
from lmoffload.bench.gguf_copy import Kind, write_gguf
from lmoffload.bench.peer import Peer
from lmoffload.bench.peers import ON_TORCH, OWN, POLICIES, Contestant, llama_cpp_peer, own_peer
from lmoffload.checkpoint import with_formats
from lmoffload.errors import StatedError, UsageError
from lmoffload_solver.counting import main_format
from lmoffload_solver.formats import FORMATS
from lmoffload_solver.value import Quality
from lmoffload_solver.workload import Limits, Workload

KIND_OF: Mapping[Quality, Kind] = {"int8": "q8_0", "int4": "q4_0", "any": "q4_0"}
"""The format of llama.cpp's copy in each class; in class exact it is the stored one."""
REFERENCE = "the reference"
EMULATED = "A device is emulated in this engine alone; its policy rows stand for the others."


@dataclass(frozen=True, slots=True)
class Given:
    """What all peers have in common."""

    model: Model
    machine: Machine
    workload: Workload
    quality: Quality
    limits: Limits
    """The planner's."""
    cores: int
    memory_bytes: int | None
    folder: Path
    """Plans and copies lie here."""
    pythons: Mapping[str, Path]
    """By name of a peer; "" for all that are not named."""
    memories: Mapping[str, int]
    tell: Tell

    def contestant(self, name: str) -> Contestant:
        checkpoint = self.model.require_checkpoint()
        python = self.pythons.get(name) or self.pythons.get("") or Path(sys.executable)
        return Contestant(
            self.model.shape, checkpoint.path, not checkpoint.is_gguf, self.workload.num_prompts, self.cores,
            self.memories.get(name, self.memory_bytes), python,
        )  # fmt: skip

    def peers(self, names: tuple[str, ...]) -> list[Peer]:
        """This engine, then the peers named."""
        return [self._with_memory(peer) for peer in (self.own(OWN), *map(self._peer, names))]

    def reference(self, workload: Workload) -> Peer:
        """This engine without any loss, on other work: what greedy tokens should be."""
        return self.own(REFERENCE, workload=workload, quality="exact")

    def own(self, name: str, *, policy: str = "optimal", workload: Workload | None = None, quality: Quality | None = None) -> Peer:
        """This engine with its own plan or another system's; one that cannot run where no plan exists."""
        of = replace(self.contestant(OWN), python=Path(sys.executable))
        try:
            words: Any = quality or self.quality
            asked = Asked(quality=words, policy=policy)
            planned = solve_for(self.model, self.machine, asked.of(workload or self.workload), self.limits, asked)
            path, plan = self.folder / f"{name.replace(' ', '-')}.plan.json", planned.plan
            path.write_text(plan.model_dump_json(), encoding="utf-8")
            self._store(planned)
        except StatedError as error:  # no plan exists, or the policy has none for such a machine or model
            return own_peer(of, name, None, "as stored", True, str(error))
        formats = sorted({fmt for part, fmt in plan.weights.format.items() if part != "norm"})
        lossless = all(tensor.format == self.model.shape.by_name[given].format for given, tensor in plan.weights.tensors.items())
        return own_peer(of, name, path, ", ".join(formats), lossless, None)

    def _store(self, planned: Any) -> None:
        """Quantize now what the plan wants quantized: peers' files are made before they are measured, too."""
        checkpoint = self.model.require_checkpoint()
        formats = {name: tensor.format for name, tensor in planned.plan.weights.tensors.items()}
        if any(formats[tensor.name] != tensor.format for tensor in checkpoint.shape.tensors):
            from lmoffload.jobs.text import Text

            require_importance(planned, Text(checkpoint), self.tell)
            with_formats(checkpoint, formats)

    def _peer(self, name: str) -> Peer:
        of = self.contestant(name)
        if name in POLICIES:
            return self.own(name, policy=POLICIES[name])
        if name == "llama.cpp":
            peer = self._llama_cpp(of)
        else:
            peer = ON_TORCH[name](of)
        return peer if self.limits.emulated_device is None else _refusing(peer, EMULATED)

    def _llama_cpp(self, of: Contestant) -> Peer:
        checkpoint = self.model.require_checkpoint()
        stored = main_format(checkpoint.shape)
        if checkpoint.is_gguf:
            return llama_cpp_peer(of, checkpoint.path, stored, FORMATS[stored].block_elements == 1, None)
        kind = KIND_OF.get(self.quality) or ("bf16" if stored == "bf16" else "f32")
        path = self.folder / f"{checkpoint.fingerprint}-{kind}.gguf"
        peer = llama_cpp_peer(of, path, kind, self.quality == "exact", None)
        if peer.missing() is not None or path.exists():
            return peer
        self.tell(f"Writing the weights as a GGUF file ({kind}) for llama.cpp")
        try:
            write_gguf(checkpoint, path, kind)
        except StatedError as error:
            return _refusing(peer, str(error))
        return peer

    def _with_memory(self, peer: Peer) -> Peer:
        return replace(peer, memory_bytes=self.memories[peer.name]) if peer.name in self.memories else peer


def _refusing(peer: Peer, sentence: str) -> Peer:
    return replace(peer, refusal=sentence)


def named_values(texts: tuple[str, ...], option: str) -> dict[str, str]:
    """Values by the name before their equals sign; under "" those without one.

    Raises:
        UsageError: a name is given twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name, value = (name, value) if equals else ("", text)
        if name in found:
            raise UsageError(f"--{option} is given twice for {name or 'all peers'}.")
        found[name] = value
    return found
