"""Write a checkpoint as a GGUF file that llama.cpp loads: the same weights for a peer.

Names and the order of rows are those that `checkpoint.gguf_file` reads. There is no tokenizer: prompts are token ids.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from lmoffload.checkpoint.gguf_file import (
    ARCHITECTURES,
    COMMON_FIELDS,
    LAYER_NAMES,
    LLAMA3,
    OUTER_NAMES,
    ROPE_FACTORS,
    Architecture,
    llama3_factors,
    rotary_row_order,
)
from lmoffload.checkpoint.source import read_bytes
from lmoffload_solver.errors import StatedError
from lmoffload_solver.model import TensorShape

if TYPE_CHECKING:
    from lmoffload.checkpoint import Checkpoint

Kind = Literal["f32", "bf16", "q8_0", "q4_0"]
"""How matrices are stored; vectors are fp32."""

CHUNK_ELEMENTS = 1 << 22
"""Weights that are widened together."""

WRITTEN = ("llama", "qwen2", "qwen3")
"""Of `ARCHITECTURES`."""


def write_gguf(checkpoint: Checkpoint, path: Path, kind: Kind) -> None:
    """Write `checkpoint` to `path`, whole or not at all; memory is one stored tensor and its copy.

    Raises:
        StatedError: its architecture is not written as GGUF, or a file cannot be read or written.
    """
    name = _architecture(checkpoint)
    try:
        descriptor, part = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.absolute().parent)
        os.fchmod(descriptor, 0o644)
        os.close(descriptor)
        try:
            _write(checkpoint, name, Path(part), kind)
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise
    except OSError as error:
        raise StatedError(f"The GGUF file {path} cannot be written: {error.strerror or error}.") from error


def _architecture(checkpoint: Checkpoint) -> str:
    """GGUF's name of the checkpoint's architecture."""
    model_type = checkpoint.config["model_type"]
    written = {ARCHITECTURES[name].model_type: name for name in WRITTEN}
    if model_type not in written:
        raise StatedError(f"Models of the type {model_type} are not written as GGUF; those that are: {', '.join(written)}.")
    if any(layer.window is not None for layer in checkpoint.shape.layers):
        raise StatedError("Models with sliding windows are not written as GGUF.")
    return written[model_type]


def _write(checkpoint: Checkpoint, name: str, path: Path, kind: Kind) -> None:
    import gguf

    from lmoffload.checkpoint import transformers_config

    writer = gguf.GGUFWriter(path, name)
    config = transformers_config(checkpoint)
    _add_metadata(writer, config, checkpoint, name)
    tensors = [(_gguf_name(tensor.name), tensor, _kind_of(tensor, kind)) for tensor in checkpoint.shape.tensors]
    factors = _rope_factors(config, checkpoint.shape.layers[0].key_dim)
    for tensor_name, tensor, tensor_kind in tensors:
        stored = gguf.GGMLQuantizationType[tensor_kind]
        size = prod(gguf.quants.quant_shape_to_byte_shape(tensor.shape, stored))
        writer.add_tensor_info(tensor_name, tensor.shape, np.dtype(np.float32), size, raw_dtype=stored)
    if factors is not None:
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor, tensor_kind in tensors:
        pieces = [gguf.quants.quantize(rows, gguf.GGMLQuantizationType[tensor_kind]) for rows in _rows(checkpoint, tensor, name)]
        writer.write_tensor_data(np.concatenate(pieces).reshape(-1 if len(tensor.shape) == 1 else (tensor.shape[0], -1)))
    if factors is not None:
        writer.write_tensor_data(factors)
    writer.close()


def _kind_of(tensor: TensorShape, kind: Kind) -> str:
    """GGUF's name of a tensor's type; rows that are no whole blocks stay bf16."""
    if len(tensor.shape) == 1:
        return "F32"
    return "BF16" if tensor.shape[-1] % 32 else kind.upper()


def _add_metadata(writer: Any, config: Any, checkpoint: Checkpoint, name: str) -> None:
    shape, layer = checkpoint.shape, checkpoint.shape.layers[0]
    fields = {field: getattr(config, of, None) for field, of in COMMON_FIELDS.items()} | {
        "vocab_size": shape.vocab_size,
        "attention.head_count_kv": layer.num_kv_heads,
        "attention.key_length": layer.key_dim,
        "attention.value_length": layer.value_dim,
        "rope.dimension_count": layer.key_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    for field, value in fields.items():
        if value is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{name}.{field}", value)
    writer.add_tokenizer_model("no_vocab")


def _rope_factors(config: Any, head_dim: int) -> npt.NDArray[np.float32] | None:
    """What llama.cpp divides the rotary frequencies by, or None.

    Raises:
        StatedError: positions are scaled in another way than Llama 3's.
    """
    rotary: Mapping[str, Any] = config.rope_parameters
    if rotary["rope_type"] == "default":
        return None
    if rotary["rope_type"] != "llama3" or any(rotary[field] != value for field, value in LLAMA3.items()):
        raise StatedError(f"Rotary positions of the type {rotary['rope_type']} are not written as GGUF.")
    return llama3_factors(head_dim, rotary["rope_theta"], rotary["factor"]).astype(np.float32)


def _gguf_name(parameter: str) -> str:
    """The inverse of `gguf_file.parameter_name`."""
    stem, _, part = parameter.rpartition(".")
    outer = {of: name for name, of in OUTER_NAMES.items()}
    if stem in outer:
        return f"{outer[stem]}.{part}"
    _, _, layer, module = stem.split(".", 3)
    return f"blk.{layer}.{ {of: name for name, of in LAYER_NAMES.items()}[module]}.{part}"


def _rows(checkpoint: Checkpoint, tensor: TensorShape, architecture: str) -> Iterator[npt.NDArray[np.float32]]:
    """A tensor in fp32, some rows at a time, in the order that llama.cpp wants."""
    import torch

    from lmoffload.kernels.matrix import Matrix, reference_widen

    source = checkpoint.source(tensor.name)
    n, k = (*tensor.shape, 1)[:2]
    row_bytes, together = source.num_bytes // n, max(1, CHUNK_ELEMENTS // k)
    order = _stored_order(checkpoint, tensor, ARCHITECTURES[architecture])
    if source.row_order is not None:
        order = source.row_order if order is None else source.row_order[order]
    whole = None if order is None else read_bytes(source, tensor.name, 0, source.num_bytes).reshape(n, row_bytes)
    for first in range(0, n, together):
        end = min(n, first + together)
        if whole is None or order is None:
            stored = read_bytes(source, tensor.name, first * row_bytes, (end - first) * row_bytes)
        else:
            stored = whole[order[first:end]].reshape(-1)
        yield reference_widen(Matrix(torch.from_numpy(stored), source.format, end - first, k)).numpy()


def _stored_order(checkpoint: Checkpoint, tensor: TensorShape, architecture: Architecture) -> npt.NDArray[np.int64] | None:
    """int64 [rows]: which of the parameter's rows llama.cpp keeps at each place; None where it keeps them in order."""
    if not architecture.permuted or tensor.layer is None:
        return None
    layer = checkpoint.shape.layers[tensor.layer]
    heads = {"q_proj": layer.num_heads, "k_proj": layer.num_kv_heads}.get(tensor.name.split(".")[-2])
    return None if heads is None else np.argsort(rotary_row_order(tensor.shape[0], heads))
