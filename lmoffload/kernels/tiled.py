"""How the quantized formats lie in memory: tiles of 16 rows, interleaved so that the lanes of a vector are rows.

A tile holds 16 rows (the last one what is left, h rows), group by group along K. A group is

* the h rows' scales, fp16; for int4 then their minima, fp16;
* int8: for every 4 columns, h times the 4 signed codes of a row: a row's weight is scale * code;
* int4: for every 8 columns, h times 4 bytes of a row, whose low halves are columns 0..3 and high halves 4..7: scale * code + minimum.

So one load brings the same columns of 16 rows, a dot instruction of 4 bytes meets them with 4 broadcast activations, and no lanes are ever
summed across. A tile of h rows takes h times the bytes of a row: sizes are those of `lmoffload_solver.formats`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lmoffload_solver.formats import QUANTIZED

TILE_ROWS = 16


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantized matrix taken apart.

    Attributes:
        codes: int8 [n, k] for int8, else uint8 [n, k] from 0 to 15.
        scales: fp16 [n, groups].
        minima: fp16 [n, groups]; None for int8.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None


def is_tiled(format_name: str) -> bool:
    """Whether a format lies in tiles."""
    return format_name in QUANTIZED


def pack(parts: Codes, format_name: str) -> torch.Tensor:
    """The stored bytes, uint8 [n * row_bytes]."""
    n = parts.codes.shape[0]
    full = n // TILE_ROWS * TILE_ROWS
    pieces = [_pack_rows(parts, first, end, height, format_name) for first, end, height in _runs(n, full) if end > first]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def unpack(data: torch.Tensor, format_name: str, n: int, k: int) -> Codes:
    """The inverse of `pack`; data: uint8 [n * row_bytes] at any address."""
    fmt = QUANTIZED[format_name]
    row_bytes, full = k // fmt.block_elements * fmt.block_bytes, n // TILE_ROWS * TILE_ROWS
    pieces = [
        _unpack_rows(data[first * row_bytes : end * row_bytes].clone(), height, k, format_name)
        for first, end, height in _runs(n, full)
        if end > first
    ]
    minima = [piece.minima for piece in pieces if piece.minima is not None]
    return Codes(
        torch.cat([piece.codes for piece in pieces]), torch.cat([piece.scales for piece in pieces]), torch.cat(minima) if minima else None
    )


def taken(data: torch.Tensor, format_name: str, k: int, rows: torch.Tensor) -> Codes:
    """Some rows of whole tiles. data: uint8 [tiles * 16 * row_bytes], 4-byte aligned; rows: int64 [R], of all that the tiles hold."""
    fmt, tile, row = QUANTIZED[format_name], rows // TILE_ROWS, rows % TILE_ROWS
    size, groups, num_heads = fmt.block_elements, k // fmt.block_elements, 1 if format_name == "int8" else 2
    words = data.view(torch.int32).view(-1, groups, TILE_ROWS * fmt.block_bytes // 4)
    first = num_heads * TILE_ROWS // 2
    heads = words[..., :first][tile].view(torch.float16).view(len(rows), groups, num_heads, TILE_ROWS)
    scales, *minima = (heads[torch.arange(len(rows)), :, i, row] for i in range(num_heads))
    lanes = words[..., first:].view(len(words), groups, -1, TILE_ROWS)[tile, :, :, row].view(torch.uint8).view(len(rows), groups, -1, 4)
    if format_name == "int8":
        return Codes(lanes.view(torch.int8).view(len(rows), k), scales, None)
    halves = torch.stack((lanes & 15, lanes >> 4), dim=3)
    assert halves.shape[1:] == (groups, size // 8, 2, 4), "8 columns to 4 bytes"
    return Codes(halves.view(len(rows), k), scales, minima[0])


def padded_tail(data: torch.Tensor, format_name: str, n: int, k: int) -> torch.Tensor:
    """The last tile, of fewer than 16 rows, as one of 16 whose further rows are zeros."""
    fmt, height = QUANTIZED[format_name], n % TILE_ROWS
    groups = k // fmt.block_elements
    tail = data[(n - height) * groups * fmt.block_bytes :].view(groups, -1)
    scale_bytes = 2 if format_name == "int8" else 4
    whole = tail.new_zeros(groups, TILE_ROWS * fmt.block_bytes)
    for source, target, unit in (
        (tail[:, : scale_bytes * height], whole[:, : scale_bytes * TILE_ROWS], 2),
        (tail[:, scale_bytes * height :], whole[:, scale_bytes * TILE_ROWS :], 4),
    ):
        target.view(groups, -1, TILE_ROWS, unit)[:, :, :height] = source.reshape(groups, -1, height, unit)
    return whole.view(-1)


def _runs(n: int, full: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """(first row, end, rows of a tile) of the whole tiles and of the last one."""
    return (0, full, TILE_ROWS), (full, n, n - full)


def _pack_rows(parts: Codes, first: int, end: int, height: int, format_name: str) -> torch.Tensor:
    tiles, k = (end - first) // height, parts.codes.shape[1]
    groups = k // QUANTIZED[format_name].block_elements
    lanes = parts.codes[first:end].view(torch.int32)  # 4 columns of a row stay together
    if format_name != "int8":
        lanes = lanes[:, 0::2] | lanes[:, 1::2] << 4
    lanes = lanes.view(tiles, height, -1).transpose(1, 2).reshape(-1).view(torch.uint8)
    heads = [parts.scales] if parts.minima is None else [parts.scales, parts.minima]
    words = [
        head[first:end].view(tiles, height, groups).permute(0, 2, 1).reshape(-1).view(torch.uint8).view(tiles, groups, -1) for head in heads
    ]
    return torch.cat([*words, lanes.view(tiles, groups, -1)], dim=2).view(-1)


def _unpack_rows(data: torch.Tensor, height: int, k: int, format_name: str) -> Codes:
    fmt = QUANTIZED[format_name]
    size, groups = fmt.block_elements, k // fmt.block_elements
    blocks = data.view(-1, groups, height * fmt.block_bytes)
    tiles = blocks.shape[0]
    num_heads = 1 if format_name == "int8" else 2
    heads = [
        blocks[..., 2 * height * i : 2 * height * (i + 1)].reshape(-1).view(torch.float16).view(tiles, groups, height).permute(0, 2, 1)
        for i in range(num_heads)
    ]
    heads = [head.reshape(tiles * height, groups) for head in heads]
    lanes = blocks[..., 2 * height * num_heads :]
    if format_name == "int8":
        codes = lanes.reshape(tiles, groups, size // 4, height, 4).permute(0, 3, 1, 2, 4).contiguous().view(torch.int8)
    else:
        packed = lanes.reshape(tiles, groups, size // 8, 1, height, 4)
        codes = torch.cat((packed & 15, packed >> 4), dim=3).permute(0, 4, 1, 2, 3, 5).contiguous()
    return Codes(codes.view(tiles * height, k), heads[0], heads[1] if num_heads > 1 else None)
