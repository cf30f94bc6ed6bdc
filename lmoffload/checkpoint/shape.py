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
            )
        )
    return ModelShape(
        name=name,
        model_type=family.model_type,
        hidden_size=geometry.sizes["hidden"],
        intermediate_size=geometry.sizes["intermediate"],
        vocab_size=geometry.sizes["vocab"],
        max_positions=geometry.max_positions,
        layers=geometry.layers,
        tensors=tuple(tensors),
        tied_head=tied,
    )


def _templates(family: Family, geometry: Geometry) -> list[tuple[Template, int | None]]:
    """Every parameter of the model with its layer, in the order of computation."""

    def wanted(templates: tuple[Template, ...]) -> list[Template]:
        return [template for template in templates if geometry.flags.issuperset(template.when)]

    in_layer = wanted(family.layer)
    return [
        *((template, None) for template in wanted(family.before)),
        *((template, layer) for layer in range(len(geometry.layers)) for template in in_layer),
        *((template, None) for template in wanted(family.after)),
    ]
