"""Whether a plan that was read, edited or made elsewhere holds on a model. A plan is a value that people may edit; what an edit asks for is
either done or refused, never ignored."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from lmoffload_solver import counting
from lmoffload_solver.errors import StatedError
from lmoffload_solver.memory import spilled_of
from lmoffload_solver.model import ModelShape
from lmoffload_solver.plan import Plan, kept_model, on_device
from lmoffload_solver.value import TaskClass, Tier
from lmoffload_solver.variants import KV_FORMATS_OF, WEIGHT_FORMATS


def check_plan(model: ModelShape, plan: Plan) -> None:
    """Refuse a plan that leaves something out, contradicts itself, or asks for what is not done.

    Raises:
        StatedError: the first thing that does not hold.
    """
    kept = kept_model(model, plan)
    if on_device(plan) and plan.limits.emulated_device is None:
        return  # nothing runs it
    rules = (
        _formats(model, plan), _tensors(kept, plan), _bytes(kept, plan), _places(plan, model.num_layers),
        _cache(model, plan), _refill(plan), _threads(plan),
    )  # fmt: skip
    for problem in chain.from_iterable(rules):  # those after the first need not make sense any more
        raise StatedError(f"The plan does not hold on the model {model.name!r}: {problem}; make a new plan.")


def _formats(model: ModelShape, plan: Plan) -> Iterator[str]:
    """Every tensor as stored, or in a format that it can be quantized to."""
    for tensor in model.tensors:
        kept = plan.weights.tensors.get(tensor.name)
        if kept is not None and kept.format != tensor.format and not tensor.can_become(kept.format):
            yield f"it keeps {tensor.name} as {kept.format:.20}, which is stored as {tensor.format} and cannot become that"
        if kept is not None and kept.format != tensor.format and all(kept.format not in width for width in WEIGHT_FORMATS[plan.quality]):
            yield f"it keeps {tensor.name} as {kept.format:.20}, and its quality is {plan.quality}"


def _tensors(model: ModelShape, plan: Plan) -> Iterator[str]:
    """Every tensor of the model and no other, on the host or on the disk."""
    planned = plan.weights.tensors
    for name in planned:
        if name not in model.by_name:
            yield f"it has a tensor {name!r:.120} that the model has not"
    for tensor in model.tensors:
        if tensor.name not in planned:
            yield f"it leaves out the tensor {tensor.name}"
            return
        kept = planned[tensor.name]
        if kept.tier not in _tiers(plan):
            yield f"it keeps {tensor.name} on the {kept.tier}, and weights are kept on {' or '.join(_tiers(plan))}"
        if kept.tier == "disk" and not (tensor.is_matrix or tensor.is_table):
            yield f"it keeps {tensor.name} on the disk, and vectors are always in memory"
    classes = {tensor.tensor_class for tensor in model.tensors}
    for tensor_class, kept_format in plan.weights.format.items():
        if tensor_class not in classes or kept_format != counting.main_format(model, tensor_class):
            yield f"it gives the class {tensor_class} the format {kept_format:.20}, which most of its tensors have not"


def _bytes(model: ModelShape, plan: Plan) -> Iterator[str]:
    """The bytes of each tier are those of its tensors."""
    for tier in _tiers(plan):
        planned = plan.weights.bytes.get(tier, 0)
        counted = sum(counting.tensor_bytes(tensor) for tensor in model.tensors if plan.weights.tensors[tensor.name].tier == tier)
        if planned != counted:
            yield f"its tensors on the {tier} take {counted} bytes where the plan has {planned}"


def _places(plan: Plan, num_layers: int) -> Iterator[str]:
    """Computing is done where the compute tier is; a device leaves decode's attention to some keys and values to the host."""
    if on_device(plan):
        yield from _device_places(plan, num_layers)
        return
    places = {"prefill's attention": plan.attention.prefill, "decode's attention": plan.attention.decode, "hidden states": plan.hidden.tier}
    for what, tier in places.items():
        if tier != "host":
            yield f"it has {what} on the {tier}, and that is done on the host alone"
    if plan.attention.host_share != 1:
        yield f"it gives the host {plan.attention.host_share:.0%} of attention, and that is done on the host alone"


def _cache(model: ModelShape, plan: Plan) -> Iterator[str]:
    """Keys and values stay on the host, in a format that the plan's quality class allows."""
    allowed = KV_FORMATS_OF[plan.quality]
    for what, kept in (("keys", plan.kv.format.key), ("values", plan.kv.format.value)):
        if kept not in allowed:
            yield f"it keeps {what} as {kept:.20}, and in the quality class {plan.quality} they are kept as {' or '.join(allowed)}"
    for layer, batch, tier in plan.kv.homes:
        if tier not in _tiers(plan):
            yield f"it has keys and values on the {tier}, and they are kept on {' or '.join(_tiers(plan))}"
        if tier == "disk" and plan.stream == "matrix":
            yield "it has keys and values on the disk and cuts layers at their matrices, and both at once is not done"
        if not (0 <= layer < model.num_layers and 0 <= batch < plan.num_micro_batches):
            yield f"it has keys and values of layer {layer} and micro-batch {batch}, and there is no such pair"
    if len({(layer, batch) for layer, batch, _ in plan.kv.homes}) < len(plan.kv.homes):
        yield "it gives the keys and values of some layer and micro-batch two homes"
    on_disk = sum(spilled.num_bytes for spilled in spilled_of(model, plan).values())
    if plan.kv.bytes.get("disk", 0) != on_disk:
        yield f"its keys and values on the disk take {on_disk} bytes where the plan has {plan.kv.bytes.get('disk', 0)}"


def _tiers(plan: Plan) -> tuple[Tier, ...]:
    return ("device", "host", "disk") if on_device(plan) else ("host", "disk")


def _device_places(plan: Plan, num_layers: int) -> Iterator[str]:
    device = plan.limits.emulated_device
    count = 1 if device is None else device.count
    if len(plan.layers_per_device) != (count if count > 1 else 0):
        yield f"it splits layers among {len(plan.layers_per_device)} devices, and there are {count}"
    elif count > 1 and sum(plan.layers_per_device) != num_layers:
        yield f"it gives devices {sum(plan.layers_per_device)} layers of {num_layers}"
    if plan.waves > min(count, plan.num_micro_batches):
        yield f"it has {plan.waves} waves for {count} devices and {plan.num_micro_batches} micro-batches"
    if plan.hidden.tier == "disk":
        yield "it has hidden states on the disk, and they are kept on device or host"
    homes = {(layer, batch): tier for layer, batch, tier in plan.kv.homes}
    for unit in plan.attention.host:
        if homes.get(unit, "device") == "device":
            yield f"it has the host attend to layer {unit[0]} and micro-batch {unit[1]}, whose keys and values are on the device"


def _refill(plan: Plan) -> Iterator[str]:
    if plan.refill is not None and on_device(plan):
        yield "it lets prompts in while others decode, and with a device that is not done"
    if plan.refill is not None and plan.refill > plan.micro_batch:
        yield f"it lets prompts in when {plan.refill} places of a micro-batch are free, and one has {plan.micro_batch}"


def _threads(plan: Plan) -> Iterator[str]:
    attending: tuple[TaskClass, ...] = ("host_attention",) if on_device(plan) and plan.attention.host else ()
    needed: tuple[TaskClass, ...] = ("compute", "disk_io", *attending)
    if plan.attention.streams > plan.threads.get("host_attention", 1):
        yield f"it has {plan.attention.streams} streams of attention with {plan.threads.get('host_attention', 1)} threads together"
    for task in needed:
        if task not in plan.threads:
            yield f"it leaves out the threads of {task}"
