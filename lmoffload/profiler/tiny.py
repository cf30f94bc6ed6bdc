"""A tiny model run by the real engine: what its fixed costs and the process's base are measured on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from lmoffload_solver.accelerator import EmulatedDevice
from lmoffload_solver.counting import kv_bytes
from lmoffload_solver.formats import stored_bytes
from lmoffload_solver.plan import (
    AttentionPlace,
    HiddenPlan,
    KernelsPlan,
    KVFormat,
    KVPlan,
    Named,
    Plan,
    Predicted,
    TensorPlan,
    WeightsPlan,
)
from lmoffload_solver.workload import Limits, Workload

if TYPE_CHECKING:
    from lmoffload.checkpoint import Checkpoint
    from lmoffload.executor import Request

NUM_LAYERS = 4
LINEARS_PER_LAYER = 7
PROMPT_TOKENS = 8
LINK = EmulatedDevice(memory_bytes=2**28, bytes_per_s=4e9)
"""Of the emulated device: a layer's weights pass while it computes."""


class StepTime(NamedTuple):
    """Medians over decode steps of one micro-batch."""

    layer_s: float
    """One decoder layer."""
    rest_s: float
    """Everything outside the layers."""


def write_tiny_checkpoint(directory: Path, hidden: int = 64, intermediate: int = 64, num_heads: int = 4, num_kv_heads: int = 2) -> Path:
    """Save a random Llama of 4 layers and 128 tokens, fp32. As it is, its products take next to no time."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_file(LlamaForCausalLM(config).state_dict(), directory / "model.safetensors", {"format": "pt"})
    config.save_pretrained(directory)
    return directory


def decode_times(
    checkpoint: Checkpoint, *, rows: int, steps: int, threads: int, kernel: str, stream: Literal["layer", "matrix"] = "layer"
) -> StepTime:
    """Generate `steps` tokens for `rows` prompts in one micro-batch, everything resident. With `stream` "matrix" no layer's work is
    recorded."""
    import numpy as np

    from lmoffload.executor import Engine

    plan = _resident_plan(checkpoint, rows, PROMPT_TOKENS + steps, threads, kernel).model_copy(update={"stream": stream})
    with Engine(checkpoint, plan, keep_spans=True) as engine:
        engine.generate(_requests(rows, steps))
        spans = [span for span in engine.meter.spans if span.task.kind == "compute"]
    layers: dict[int, float] = {}
    begins: dict[int, float] = {}
    for span in spans:
        begins.setdefault(span.task.step, span.begin_s)
        if 1 <= span.task.unit <= NUM_LAYERS:
            layers[span.task.step] = layers.get(span.task.step, 0.0) + span.end_s - span.begin_s
    # A step lasts until the next one begins; the first ones warm up, the last one has no next.
    measured = [step for step in sorted(begins) if step >= 2 and step + 1 in begins]
    layer_s = float(np.median([layers[step] for step in measured])) / NUM_LAYERS
    step_s = float(np.median([begins[step + 1] - begins[step] for step in measured]))
    return StepTime(layer_s, max(0.0, step_s - NUM_LAYERS * layer_s))


def device_layer_s(checkpoint: Checkpoint, *, rows: int, steps: int, threads: int, kernel: str) -> float:
    """Median seconds of a layer of an emulated device, to which weights, keys and values come over a link: two micro-batches of `rows`
    prompts. The first layer, in which the step begins, is left out."""
    import numpy as np

    from lmoffload.executor import Engine

    plan = _streaming_plan(_resident_plan(checkpoint, rows, PROMPT_TOKENS + steps, threads, kernel))
    with Engine(checkpoint, plan, keep_spans=True) as engine:
        engine.generate(_requests(2 * rows, steps))
        spans = [span for span in engine.meter.spans if span.task.kind == "compute"]
    return float(np.median([span.end_s - span.begin_s for span in spans if span.task.step >= 2 and 1 <= span.task.unit < NUM_LAYERS]))


def _requests(count: int, steps: int) -> list[Request]:
    from lmoffload.executor import Request

    return [Request(str(i), tuple((i + j) % 128 for j in range(PROMPT_TOKENS)), steps) for i in range(count)]


def _streaming_plan(plan: Plan) -> Plan:
    """The same in two micro-batches, computed on an emulated device, its weights, keys and values on the host."""
    homes = tuple((layer, batch, "host") for layer in range(NUM_LAYERS) for batch in range(2))
    return plan.model_copy(
        update={
            "limits": Limits(emulated_device=LINK),
            "workload": Workload.of_lengths([PROMPT_TOKENS] * 2 * plan.micro_batch, plan.workload.gen_len),
            "num_micro_batches": 2,
            "attention": AttentionPlace(prefill="device", decode="device", host_share=0),
            "kv": plan.kv.model_copy(update={"homes": homes, "bytes": {"host": 2 * plan.kv.bytes["host"]}}),
            "hidden": HiddenPlan(tier="device"),
            "threads": {**plan.threads, "staging": 1, "host_attention": 1},
        }
    )


def _resident_plan(checkpoint: Checkpoint, rows: int, tokens: int, threads: int, kernel: str) -> Plan:
    """Everything in memory, nothing predicted."""
    shape = checkpoint.shape
    zero = Predicted(
        prefill_s=0, decode_s=0, total_s=0, tokens_per_s=0, decode_tokens_per_s=0, step_s=0, resources={}, peak_bytes={}, base_bytes=0
    )
    return Plan(
        model=Named(name=shape.name, digest=checkpoint.fingerprint),
        machine=Named(name="being measured", digest=""),
        workload=Workload.of_lengths([PROMPT_TOKENS] * rows, tokens - PROMPT_TOKENS),
        quality="exact",
        status="time_limit",
        bound_tokens_per_s=0,
        gap=1,
        micro_batch=rows,
        num_micro_batches=1,
        attention=AttentionPlace(prefill="host", decode="host", host_share=1),
        weights=WeightsPlan(
            format={},
            bytes={"host": sum(stored_bytes(t.shape, t.format) for t in shape.tensors), "disk": 0},
            tensors={t.name: TensorPlan(format=t.format, tier="host") for t in shape.tensors},
        ),
        kv=KVPlan(format=KVFormat(key="fp32", value="fp32"), bytes={"host": rows * kv_bytes(shape, tokens)}, homes=()),
        hidden=HiddenPlan(tier="host"),
        kernels=KernelsPlan(prefill=kernel, decode=kernel),
        threads={"compute": threads, "disk_io": 1},
        prefetch_depth=1,
        predicted=zero,
        binding="host_compute",
        solve_s=0,
        programs_solved=0,
    )
