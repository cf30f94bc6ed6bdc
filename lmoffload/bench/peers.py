"""The peers by name: which program, which settings by default, and what a sweep tries of each setting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

from lmoffload.bench.peer import PASSIVE, Peer
from lmoffload_solver.comparison import Setting, Settings
from lmoffload_solver.errors import UsageError
from lmoffload_solver.model import ModelShape

CHILDREN = Path(__file__).with_name("children")
OWN, POLICIES = "lmoffload", {"accelerate-policy": "accelerate", "zero-policy": "zero-inference", "flexgen-policy": "flexgen"}
"""This engine; and its rows with another system's plan."""
MIB = 2**20
TORCH_BASE_BYTES = 700 * MIB
"""Left to Python, torch, transformers and activations where a system is told how much memory its weights may take."""
DEEPSPEED_PREPARATION = """
from deepspeed.accelerator import get_accelerator
for name in ("ShareMemCommBuilder", "AsyncIOBuilder"):
    get_accelerator().create_op_builder(name).load()
"""
NO_FOLDER = "It reads folders in Hugging Face layout, and the model is none."


@dataclass(frozen=True, slots=True)
class Contestant:
    """What peers are made of."""

    shape: ModelShape
    path: Path
    is_folder: bool
    """In Hugging Face layout."""
    num_prompts: int
    cores: int
    memory_bytes: int | None
    python: Path

    @property
    def batches(self) -> tuple[Setting, ...]:
        """All prompts at once, half and a quarter of them."""
        return tuple(dict.fromkeys(-(-self.num_prompts // part) for part in (1, 2, 4)))

    @property
    def torch_axes(self) -> dict[str, tuple[Setting, ...]]:
        """What every system on torch may be given: how threads wait, how many, what is computed in, how many prompts at once."""
        return {
            PASSIVE: (False, True),
            "threads": tuple(dict.fromkeys((None, self.cores, 1))),
            "dtype": ("auto", "float32"),
            "batch": self.batches,
        }


def accelerate_peer(of: Contestant) -> Peer:
    """By default as a user would: stored precision, torch's own threads, all prompts at once, room for weights left by the rest."""
    memory = tuple(f"{size // MIB}MiB" for size in _weights_memory(of))
    axes: dict[str, tuple[Setting, ...]] = {**of.torch_axes, "cpu_memory": memory or (None,)}
    default: Settings = {name: values[0] for name, values in axes.items()}
    return Peer(
        "accelerate", CHILDREN / "with_accelerate.py", of.python, of.path, "as stored", "accelerate", default, axes,
        refusal=None if of.is_folder else NO_FOLDER,
    )  # fmt: skip


def zero_peer(of: Contestant) -> Peer:
    """By default as DeepSpeedExamples' script for ZeRO-Inference has it, with parameters on the disk where memory is limited."""
    hidden, largest = of.shape.hidden_size, max(prod(tensor.shape) for tensor in of.shape.tensors)
    fits = of.memory_bytes is None
    axes: dict[str, tuple[Setting, ...]] = {
        **of.torch_axes,
        "dtype": ("bfloat16", "float32"),
        "parameters_on": ("cpu", "nvme") if fits else ("nvme", "cpu"),
        "prefetch_bucket": (2 * hidden * hidden, 8 * hidden * hidden, 0),
        "persistence_threshold": (hidden, 100_000),
        "pin_memory": (False, True),
        "aio_threads": (1, of.cores),
        "buffer_count": (5, 8),
    }
    default: Settings = {name: values[0] for name, values in axes.items()}
    return Peer(
        "zero-inference", CHILDREN / "with_zero_inference.py", of.python, of.path, "as stored", "deepspeed", default,
        {name: tuple(dict.fromkeys(values)) for name, values in axes.items()},
        facts={"largest_elements": largest},
        preparation=DEEPSPEED_PREPARATION,
        environment={"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"},
        refusal=None if of.is_folder else NO_FOLDER,
    )  # fmt: skip


def airllm_peer(of: Contestant) -> Peer:
    """By default as its documentation has it."""
    axes: dict[str, tuple[Setting, ...]] = {**of.torch_axes, "prefetching": (True, False)}
    default: Settings = {name: values[0] for name, values in axes.items()}
    return Peer(
        "airllm", CHILDREN / "with_airllm.py", of.python, of.path, "as stored", "airllm", default, axes,
        refusal=None if of.is_folder else NO_FOLDER,
    )  # fmt: skip


def llama_cpp_peer(of: Contestant, gguf: Path | None, weights: str, comparable: bool, refusal: str | None) -> Peer:
    """By default as llama.cpp's own programs: all cores, memory-mapped, repacked, flash attention."""
    axes: dict[str, tuple[Setting, ...]] = {
        "threads": tuple(dict.fromkeys((of.cores, 1))),
        "repack": (True, False),
        "mmap": (True, False),
        "flash_attention": (True, False),
        "ubatch": (512, 2048),
        "unified": (False, True),
        "batch": of.batches,
    }
    default: Settings = {name: values[0] for name, values in axes.items()}
    return Peer(
        "llama.cpp", CHILDREN / "with_llama_cpp.py", of.python, gguf or of.path, weights, "llama_cpp", default, axes,
        comparable=comparable, refusal=refusal,
    )  # fmt: skip


def own_peer(of: Contestant, name: str, plan: Path | None, weights: str, comparable: bool, refusal: str | None) -> Peer:
    """This engine by a plan."""
    return Peer(
        name, CHILDREN / "with_lmoffload.py", of.python, of.path, weights, facts={"plan": str(plan)}, comparable=comparable, refusal=refusal
    )


ON_TORCH: Mapping[str, Callable[[Contestant], Peer]] = MappingProxyType(
    {"accelerate": accelerate_peer, "zero-inference": zero_peer, "airllm": airllm_peer}
)
NAMES = ("accelerate", "zero-inference", "llama.cpp", "airllm", "flexgen-policy", "accelerate-policy", "zero-policy")


def names_of(text: str) -> tuple[str, ...]:
    """The peers of a list such as "accelerate,llama.cpp".

    Raises:
        UsageError: one is not known.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in NAMES:
            raise UsageError(f"The peer {name!r} is not known; choose from {', '.join(NAMES)}.")
    if not names:
        raise UsageError(f"No peer is named; choose from {', '.join(NAMES)}.")
    return names


def _weights_memory(of: Contestant) -> Iterator[int]:
    """Memory for weights: what the rest leaves, then less and more of it; nothing where memory is not limited."""
    if of.memory_bytes is not None:
        left = max(64 * MIB, of.memory_bytes - TORCH_BASE_BYTES)
        yield from dict.fromkeys((left, max(64 * MIB, left - 200 * MIB), left + 200 * MIB))
