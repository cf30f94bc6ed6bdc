"""From the tensors that are stored to the tensors that the model needs: missing, surplus, misshapen and tied ones are found here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

from lmoffload.checkpoint.families import Family
from lmoffload.checkpoint.geometry import family_of
from lmoffload.checkpoint.shape import is_tied, model_shape, stored_parts
from lmoffload.checkpoint.source import STORED_FORMATS, TensorSource
from lmoffload_solver.errors import StatedError
from lmoffload_solver.formats import FORMATS
from lmoffload_solver.model import ModelShape, TensorShape

COMPARE_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Assembly:
    """A checked model: its shape, where each of its tensors lies, and what is odd but harmless."""

    shape: ModelShape
    sources: Mapping[str, TensorSource]
    remarks: tuple[str, ...]


def assemble(name: str, config: Mapping[str, Any], stored: Mapping[str, TensorSource], what: str, config_what: str) -> Assembly:
    """Match stored tensors with the parameters of the model.

    Args:
        name: of the model.
        stored: every tensor of the weight files by stored name.
        what: names the checkpoint, `config_what` its configuration, in error sentences.

    Raises:
        StatedError: a tensor is missing, of another shape, of an unsupported type, or consumed by nothing.
    """
    family = family_of(config, config_what)
    named = _parameter_names(family, config, stored, what, config_what)
    remarks: list[str] = []
    tied = is_tied(family, config, config_what)
    if tied:
        tied = _resolve_tied(family, named, remarks)
    shape = model_shape(name, config, lambda tensor, _: named[tensor].format if tensor in named else "fp32", config_what, tied=tied)
    _check_missing(shape, named, what)
    for tensor in shape.tensors:
        _check_tensor(tensor, named[tensor.name], what)
    _check_surplus(family, shape, named, what, remarks)
    return Assembly(shape, {tensor.name: named[tensor.name] for tensor in shape.tensors}, tuple(remarks))


def _parameter_names(
    family: Family, config: Mapping[str, Any], stored: Mapping[str, TensorSource], what: str, config_what: str
) -> dict[str, TensorSource]:
    """Stored names made the parameter names of transformers: older names, base models saved without their prefix, and experts that are
    stored one by one, as transformers' `conversion_mapping.py` has them."""
    shapes = model_shape("", config, lambda *_: "fp32", config_what, tied=False).by_name
    parts = stored_parts(config, config_what)
    wanted = {*shapes, *chain.from_iterable(parts.values())}
    named: dict[str, TensorSource] = {}
    for name, source in stored.items():
        parameter = name
        for old, new in family.renames:
            parameter = re.sub(old, new, parameter)
        if parameter not in wanted and family.prefix + parameter in wanted and family.prefix + parameter not in stored:
            parameter = family.prefix + parameter
        named[name if parameter in named else parameter] = source
    for name, stored_names in parts.items():
        _join(name, shapes[name].shape, stored_names, named, what)
    return named


def _join(name: str, shape: tuple[int, ...], parts: Sequence[str], named: dict[str, TensorSource], what: str) -> None:
    """Replace the parts of a parameter by the parameter, where all of them are there and fit."""
    found = [named[part] for part in parts if part in named]
    part_shape = (prod(shape[:-1]) // len(parts), shape[-1])
    if name in named or not found:
        return
    for part in parts:
        if part not in named:
            raise StatedError(f"The {what} lacks the tensor {part} (incomplete download?).")
        if (named[part].shape, named[part].format) != (part_shape, found[0].format):
            raise StatedError(
                f"The {what} stores {part} as {named[part].format} with shape {list(named[part].shape)}, where its configuration and "
                f"the other experts ask for {found[0].format} with {list(part_shape)}."
            )
    for part in parts:
        del named[part]
    named[name] = TensorSource.joined(found, shape)


def _resolve_tied(family: Family, named: dict[str, TensorSource], remarks: list[str]) -> bool:
    """As transformers does (`PreTrainedModel.tie_weights`): whichever of the two is stored serves as both; a stored head that differs
    from the embedding is not tied. Removes the duplicate from `named`."""
    embedding, head = family.embedding.name, next(t.name for t in family.after if t.tensor_class == "head" and t.is_matrix)
    if head not in named:
        return True
    if embedding not in named:
        named[embedding] = named.pop(head)
        remarks.append(f"{head} is stored in place of the embedding table that it is tied to")
        return True
    if _same_data(named[embedding], named[head]):
        del named[head]
        remarks.append(f"{head} is stored although it is tied to {embedding}; the two are equal and read once")
        return True
    remarks.append(f"{head} should be tied to {embedding} by the configuration, but differs from it and is used as it is")
    return False


def _same_data(a: TensorSource, b: TensorSource) -> bool:
    if (a.format, a.shape, a.num_bytes) != (b.format, b.shape, b.num_bytes):
        return False
    with a.file.open("rb") as file_a, b.file.open("rb") as file_b:
        file_a.seek(a.offset_bytes)
        file_b.seek(b.offset_bytes)
        for start in range(0, a.num_bytes, COMPARE_BYTES):
            num_bytes = min(COMPARE_BYTES, a.num_bytes - start)
            if file_a.read(num_bytes) != file_b.read(num_bytes):
                return False
    return True


def _check_missing(shape: ModelShape, named: Mapping[str, TensorSource], what: str) -> None:
    missing = [tensor.name for tensor in shape.tensors if tensor.name not in named]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise StatedError(f"The {what} lacks the tensor {missing[0]}{more} (incomplete download?).")


def _check_tensor(tensor: TensorShape, source: TensorSource, what: str) -> None:
    if source.format not in STORED_FORMATS:
        raise StatedError(
            f"The {what} stores {tensor.name} as {source.format}, which does not run; those that run are {', '.join(STORED_FORMATS)}."
        )
    if source.shape != tensor.shape:
        raise StatedError(
            f"The {what} stores {tensor.name} with shape {list(source.shape)}, where its configuration asks for {list(tensor.shape)}."
        )
    if not tensor.is_matrix and FORMATS[source.format].block_elements > 1:
        raise StatedError(f"The {what} stores the vector {tensor.name} in blocks ({source.format}), which does not run.")


def _check_surplus(family: Family, shape: ModelShape, named: Mapping[str, TensorSource], what: str, remarks: list[str]) -> None:
    surplus = [name for name in named if name not in shape.by_name]
    harmless = sorted(name for name in surplus if any(re.search(pattern, name) for pattern in family.harmless))
    unused = sorted(set(surplus) - set(harmless))
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise StatedError(
            f"The {what} stores the tensor {unused[0]}{more}, which a {family.model_type} model of this configuration does not use."
        )
    if harmless:
        remarks.append(f"{len(harmless)} stored tensors are recomputed and not read, such as {harmless[0]}")
