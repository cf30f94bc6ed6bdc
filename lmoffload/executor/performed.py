"""What an engine's meter has seen, as the work that a profile can be held against."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

from lmoffload.executor.meter import Attended, Meter
from lmoffload_solver import counting
from lmoffload_solver.costs import PHASES, Phase, num_requests
from lmoffload_solver.model import LayerShape, ModelShape
from lmoffload_solver.performed import Attentions, Others, Performed, Products, Reads
from lmoffload_solver.plan import Plan
from lmoffload_solver.schedule import Unit


def performed(meter: Meter, shape: ModelShape, plan: Plan, units: tuple[Unit, ...]) -> Performed:
    """The work of a run so far.

    Args:
        shape: the model with its tensors in the formats that they are kept in.
    """
    products = tuple(
        Products(
            phase=phase, kernel=kernel, format=format_name, n=n, k=k, rows=seen.amount / seen.count, count=seen.count, seconds=seen.seconds
        )
        for (phase, kernel, format_name, n, k, _), seen in meter.products.items()
    )
    attentions = tuple(_attentions(meter, shape, plan.kv.format.key))
    return Performed(
        threads=plan.threads.get("compute", 1),
        io_threads=plan.threads.get("disk_io", 1),
        overlapped=plan.prefetch_depth > 0,
        row_bytes=counting.row_bytes(shape.embedding),
        reads=tuple(_reads(meter, units)),
        products=products,
        attentions=attentions,
        others=tuple(
            _others(meter, shape, plan, phase)
            for phase in PHASES
            if phase in meter.forwards
        ),
    )


def _reads(meter: Meter, units: tuple[Unit, ...]) -> Iterator[Reads]:
    sizes: dict[tuple[Phase, int, int], tuple[int, float]] = {}
    for (phase, unit), seen in meter.reads.items():
        pieces = [piece.num_bytes for piece in units[unit].streamed]
        count, seconds = sizes.get(key := (phase, sum(pieces), num_requests(pieces)), (0, 0.0))
        sizes[key] = count + seen.count, seconds + seen.seconds
    for (phase, num_bytes, requests), (count, seconds) in sizes.items():
        yield Reads(phase=phase, num_bytes=num_bytes, num_requests=requests, count=count, seconds=seconds)


def _attentions(meter: Meter, shape: ModelShape, kv_format: str) -> Iterator[Attentions]:
    alike: dict[tuple[Phase, LayerShape, int], Attended] = {}
    for (phase, layer, length), seen in meter.attentions.items():
        before = alike.get(key := (phase, shape.layers[layer], length), Attended())
        alike[key] = before.with_more(seen)
    for (phase, at, _), seen in alike.items():
        if phase == "prefill":  # its FLOPs grow with the square of the length
            length = round(sqrt(seen.squares / seen.sequences))
            amount, read = seen.sequences * counting.prefill_attention_flops(at, length), "fp32"
        else:
            length = counting.kv_tokens(at, round(seen.tokens / seen.sequences))
            amount, read = float(seen.sequences * counting.decode_attention_bytes(at, length, kv_format)), kv_format
        yield Attentions(phase=phase, format=read, length=length, amount=amount, count=seen.calls, seconds=seen.seconds)


def _others(meter: Meter, shape: ModelShape, plan: Plan, phase: Phase) -> Others:
    done = meter.forwards[phase]
    told_s = sum(seen.seconds for key, seen in meter.products.items() if key[0] == phase)
    told_s += sum(seen.seconds for key, seen in meter.attentions.items() if key[0] == phase)
    on_disk = plan.weights.tensors[shape.embedding.name].tier == "disk"
    return Others(
        phase=phase,
        layers=done.number * shape.num_layers,
        elementwise_bytes=sum(counting.elementwise_bytes(shape, layer, done.tokens) for layer in range(shape.num_layers)),
        steps=done.number,
        rows=done.rows,
        lookups=done.tokens if on_disk else 0,
        seconds=max(0.0, meter.compute_s.get(phase, 0.0) - told_s),
    )
