"""ModelShape from a configuration: which tensors a model has, before any file is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lmoffload.checkpoint.families import Family, Template
from lmoffload.checkpoint.geometry import ConfigReader, Geometry, family_of, geometry_of
from lmoffload_solver.model import ModelShape, TensorShape


def is_tied(family: Family, config: Mapping[str, Any], what: str) -> bool:
    """Whether the configuration says that the output head is the embedding table."""
    return ConfigReader(family, config, what).flag("tie_word_embeddings")


def model_shape(
    name: str, config: Mapping[str, Any], format_of: Callable[[str, tuple[int, ...]], str], what: str, *, tied: bool | None = None
) -> ModelShape:
    """The shape of a model.

    Args:
        format_of: stored format of a tensor, asked with its transformers name and shape.
        what: names the configuration in error sentences.
        tied: whether head and embedding are one tensor; None: as the configuration says.

    Raises:
        StatedError: the model type does not run, or a field of the configuration is not valid.
    """
    family = family_of(config, what)
    if tied is None:
        tied = is_tied(family, config, what)
    geometry = geometry_of(family, config, what, tied=tied)
    tensors = []
    for template, layer in _templates(family, geometry):
        tensor_name = template.name.format(layer=layer)
        shape = tuple(geometry.sizes[size] for size in template.dims)
        tensors.append(
            TensorShape(
                name=tensor_name,
                shape=shape,
                format=format_of(tensor_name, shape),
                tensor_class=template.tensor_class,
                layer=layer,
                is_matrix=template.is_matrix,
                is_table=template.is_table,
                num_runs=len(template.parts) * geometry.sizes["experts"] if template.parts else 1,
            )
        )
    return ModelShape(
        name=name,
        model_type=family.model_type,
        hidden_size=geometry.sizes["hidden"],
        intermediate_size=geometry.sizes["intermediate"],
        vocab_size=geometry.sizes["vocab"],
        max_positions=geometry.max_positions,
        rotary_follows_length=_rotary_follows_length(config),
        experts_per_token=geometry.experts_per_token,
        expert_size=geometry.sizes.get("expert", 0),
        layers=geometry.layers,
        tensors=tuple(tensors),
        tied_head=tied,
    )


def _rotary_follows_length(config: Mapping[str, Any]) -> bool:
    """Whether rotary frequencies follow the length of the sequence; Phi-3 has called it "su" and "yarn"."""
    by_length = {"dynamic", "longrope", "su", *(("yarn",) if config.get("model_type") == "phi3" else ())}
    scalings = [config.get(name) for name in ("rope_parameters", "rope_scaling")]
    kinds = [one.get("rope_type", one.get("type")) for one in scalings if isinstance(one, Mapping)]
    return any(isinstance(kind, str) and kind in by_length for kind in kinds)


def _templates(family: Family, geometry: Geometry) -> list[tuple[Template, int | None]]:
    """Every parameter of the model with its layer, in the order of computation."""
    places: list[tuple[tuple[Template, ...], int | None]] = [
        (family.before, None),
        *((family.layer, layer) for layer in range(len(geometry.layers))),
        (family.after, None),
    ]
    return [
        (template, layer)
        for templates, layer in places
        for template in templates
        if geometry.flags_of(layer).issuperset(template.when)
    ]


def stored_parts(config: Mapping[str, Any], what: str) -> dict[str, tuple[str, ...]]:
    """Of every parameter that checkpoints keep in several tensors, those tensors' names, in the order of its rows.

    Raises:
        StatedError: as `model_shape`.
    """
    family = family_of(config, what)
    geometry = geometry_of(family, config, what, tied=False)
    return {
        template.name.format(layer=layer): tuple(
            part.format(layer=layer, expert=expert) for expert in range(geometry.sizes["experts"]) for part in template.parts
        )
        for template, layer in _templates(family, geometry)
        if template.parts
    }
