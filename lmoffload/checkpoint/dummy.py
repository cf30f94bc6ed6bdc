"""Dummies: checkpoints of a given shape with random weights, for measuring without a download."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from math import log2, prod, sqrt
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from lmoffload.checkpoint.dummy_tokenizer import BOS_ID, EOS_ID, PAD_ID, write_tokenizer
from lmoffload.checkpoint.families import FAMILIES
from lmoffload.checkpoint.huggingface import INDEX_FILE, SINGLE_FILE
from lmoffload.checkpoint.names import NAMED_FORMAT, named_config
from lmoffload.checkpoint.shape import model_shape, stored_parts
from lmoffload_solver.counting import tensor_bytes, weights_bytes
from lmoffload_solver.errors import StatedError, UsageError
from lmoffload_solver.model import ModelShape, TensorShape

SHARD_BYTES = 2_000_000_000
CHUNK_BYTES = 8 * 2**20
"""Weights that are in memory at once."""

SIGNAL = 2.0
"""A matrix [N, K] has entries of standard deviation SIGNAL / sqrt(K), about: each layer answers twice as loud as it is asked, so that
outputs of different prompts differ clearly and stay finite."""

BF16_ONE = 0x3F80
RANDOM_BITS = 0x81FF
"""Sign, the exponent's two lowest bits and the mantissa of a bf16 number."""
RANDOM_DEVIATION = 7.042
"""Standard deviation of numbers of random sign, exponent 0 to 3 and mantissa: sqrt(7/3 · (1 + 4 + 16 + 64) / 4)."""
BF16_BIAS = 127


def make_dummy(shape_name: str, directory: str | Path, layers: int | None = None, seed: int = 0) -> Path:
    """Write a checkpoint of a named shape with random bf16 weights: safetensors (in shards of 2 GB), config.json, generation_config.json
    and a tokenizer that reads and writes any text. Memory used does not depend on the model. config.json is written last, so that an
    interrupted dummy is not taken for a model.

    Args:
        layers: number of decoder layers, where it shall differ from the shape's.

    Returns:
        The directory.

    Raises:
        UsageError: the shape is not known, or `layers` is not positive.
        StatedError: the directory holds something already, cannot be written, or lies on a disk that is too full.
    """
    config = dict(named_config(shape_name))
    if layers is not None:
        if layers < 1:
            raise UsageError(f"A model has at least 1 layer, not {layers}.")
        config["num_hidden_layers"] = layers
    shape = model_shape(shape_name, config, lambda *_: NAMED_FORMAT, f"shape {shape_name}")
    folder = Path(directory)
    try:
        _prepare(folder, weights_bytes(shape))
        _write_weights(folder, shape, stored_parts(config, f"shape {shape_name}"), np.random.Generator(np.random.SFC64(seed)))
        write_tokenizer(folder, shape.vocab_size)
        ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
        _write_json(folder / "generation_config.json", ids)
        architectures = [FAMILIES[shape.model_type].causal_class]
        _write_json(folder / "config.json", {"architectures": architectures, "dtype": "bfloat16", **config, **ids})
    except OSError as error:
        raise StatedError(f"The dummy cannot be written to {folder}: {error.strerror or error}.") from error
    return folder


def _prepare(folder: Path, num_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise StatedError(f"The folder {folder} is not empty: give a new one.")
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise StatedError(f"The disk of {folder} has {free / 1e9:.1f} GB free, and the dummy takes {num_bytes / 1e9:.1f} GB.")


def _write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _write_weights(folder: Path, shape: ModelShape, parts: Mapping[str, Sequence[str]], random: np.random.Generator) -> None:
    shards = list(_shards([stored for tensor in shape.tensors for stored in _as_stored(tensor, parts.get(tensor.name, ()))]))
    if len(shards) == 1:
        _write_shard(folder / SINGLE_FILE, shape, shards[0], random)
        return
    weight_map: dict[str, str] = {}
    for i, tensors in enumerate(shards, 1):
        file_name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / file_name, shape, tensors, random)
        weight_map |= {tensor.name: file_name for tensor in tensors}
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": weights_bytes(shape)}, "weight_map": weight_map})


def _as_stored(tensor: TensorShape, parts: Sequence[str]) -> list[TensorShape]:
    """A parameter as checkpoints keep it: experts one by one."""
    if not parts:
        return [tensor]
    rows = prod(tensor.shape[:-1]) // len(parts)
    return [tensor.model_copy(update={"name": name, "shape": (rows, tensor.shape[-1])}) for name in parts]


def _shards(tensors: Sequence[TensorShape]) -> Iterator[list[TensorShape]]:
    """Tensors in order, as many to a shard as fit (one that does not fit has a shard of its own)."""
    shard: list[TensorShape] = []
    num_bytes = 0
    for tensor in tensors:
        if shard and num_bytes + tensor_bytes(tensor) > SHARD_BYTES:
            yield shard
            shard, num_bytes = [], 0
        shard.append(tensor)
        num_bytes += tensor_bytes(tensor)
    yield shard


def _write_shard(path: Path, shape: ModelShape, tensors: Sequence[TensorShape], random: np.random.Generator) -> None:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor_bytes(tensor)
        entries[tensor.name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            _write_tensor(file, shape, tensor, random)


def _write_tensor(file: BinaryIO, shape: ModelShape, tensor: TensorShape, random: np.random.Generator) -> None:
    count = prod(tensor.shape)
    if tensor.tensor_class == "norm" and tensor.name.endswith(".weight"):
        # Gemma multiplies by 1 + weight.
        value = 0 if shape.model_type.startswith("gemma") else BF16_ONE
        file.write(np.full(count, value, np.uint16).tobytes())
        return
    deviation = SIGNAL / sqrt(tensor.shape[-1])
    for start in range(0, count, CHUNK_BYTES // 2):
        file.write(random_bf16(random, min(CHUNK_BYTES // 2, count - start), deviation).data)


def random_bf16(random: np.random.Generator, count: int, deviation: float) -> npt.NDArray[np.uint16]:
    """uint16 [count]: bf16 numbers of mean 0 and about the given standard deviation (the nearest power of two times a constant).

    Sign, mantissa and the two lowest bits of the exponent are random bits, which is several times faster than normal numbers.
    """
    exponent = BF16_BIAS + round(log2(deviation / RANDOM_DEVIATION))
    bits = random.integers(0, 2**64, -(-count // 4), np.uint64)
    bits &= np.uint64(RANDOM_BITS * 0x0001_0001_0001_0001)
    bits += np.uint64((exponent << 7) * 0x0001_0001_0001_0001)
    return bits.view(np.uint16)[:count]
