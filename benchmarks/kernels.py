"""What the kernels reach on this machine: GFLOP/s and GB/s of stored weights for each kernel and M; weights rotated beyond the cache.

python benchmarks/kernels.py [--threads 2] [--n 5632] [--k 2048] [--memory-mib 1024] [--formats bf16 q8_0 ...] [--one-row]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: see docs/kernels.md

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from lmoffload.executor.kv_cache import LayerCache
from lmoffload.kernels.attention import prefill_attention
from lmoffload.kernels.decode_attention import decode_attention
from lmoffload.kernels.kv_rows import KVRows, Numbers
from lmoffload.kernels.linear import kernels_for, linear
from lmoffload.kernels.matrix import Matrix
from lmoffload.kernels.pool import Pool
from lmoffload.kernels.runs import Rooms
from lmoffload_solver import counting
from lmoffload_solver.formats import FORMATS, KV_FORMATS, QUANTIZED, stored_bytes
from lmoffload_solver.model import LayerShape
from lmoffload_solver.plan import KVFormat

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)

CONTEXTS = ((1, 32, 4, 64, 4096), (16, 32, 4, 64, 1024), (8, 32, 8, 128, 2048), (32, 9, 3, 64, 256), (8, 32, 32, 128, 512))
"""Rows, heads, key heads, head size and keys of decode attention."""

PROMPTS = ((16, 64, None, None), (4, 512, None, None), (1, 2048, None, None), (1, 2048, 512, None), (1, 2048, None, 50.0))
"""Segments, tokens of each, window and softcap of prefill attention."""


def best_seconds(calls: Iterable[Callable[[], object]], least_s: float = 0.25) -> float:
    """The lowest decile of the calls' times: others may use the machine. Calls are repeated in turn for `least_s`."""
    times = times_of(calls, least_s)
    return times[len(times) // 10]


def times_of(calls: Iterable[Callable[[], object]], least_s: float) -> list[float]:
    """Seconds of calls, repeated in turn for `least_s`, the shortest first."""
    calls, times = list(calls), list[float]()
    begin = time.perf_counter()
    while time.perf_counter() - begin < least_s or len(times) < 5:
        call = calls[len(times) % len(calls)]
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)


def linear_table(options: argparse.Namespace, pool: Pool) -> Table:
    table = Table("format", "kernel", *(f"M={rows}" for rows in ROWS), title=f"GFLOP/s (GB/s stored), [{options.n}, {options.k}]")
    for format_name in options.formats:
        matrices = rotated(options, format_name)
        size = matrices[0].data.numel()
        for kernel in kernels_for(format_name):
            cells = []
            for rows in ROWS:
                x = torch.randn(rows, options.k)
                seconds = best_seconds([partial(linear, x, matrix, kernel, pool) for matrix in matrices])
                cells.append(f"{2e-9 * rows * options.n * options.k / seconds:.0f} ({1e-9 * size / seconds:.1f})")
            table.add_row(format_name, kernel, *cells)
    return table


def one_row_table(options: argparse.Namespace, pool: Pool) -> Table:
    """Products of one row as a decode step runs them: recorded, two of one input in a stage, one pair after another."""
    title = f"One row, as recorded: billions of weights/s (GB/s stored), pairs of [{options.n}, {options.k}]"
    table = Table("format", "kernel", "median", "lowest decile of times", title=title)
    x = torch.randn(1, options.k)
    for format_name in options.formats:
        matrices = rotated(options, format_name)
        for kernel in kernels_for(format_name):

            def work(kernel: str = kernel, matrices: Sequence[Matrix] = matrices) -> None:
                for first in range(0, len(matrices) - 1, 2):
                    pool.beside([partial(linear, x, matrix, kernel, pool) for matrix in matrices[first : first + 2]])

            _, runs = pool.together(work, Rooms())
            if runs is None:
                continue  # not a kernel without Python
            seconds = times_of([lambda runs=runs: pool.again(runs)], 1.0)
            rates = [1e-9 * (len(matrices) // 2 * 2) / one for one in (seconds[len(seconds) // 2], seconds[len(seconds) // 10])]
            size = matrices[0].data.numel()
            table.add_row(format_name, kernel, *(f"{rate * options.n * options.k:.1f} ({rate * size:.1f})" for rate in rates))
    return table


def rotated(options: argparse.Namespace, format_name: str) -> list[Matrix]:
    """Matrices that fill the memory asked for."""
    size = stored_bytes((options.n, options.k), format_name)
    count = max(2, (options.memory_mib << 20) // size)
    memory = torch.randint(48, 64, (count * size,), dtype=torch.uint8)  # normal numbers in every format
    return [Matrix(memory[i * size : (i + 1) * size], format_name, options.n, options.k) for i in range(count)]


def attention_table(pool: Pool) -> Table:
    table = Table("attention", "shape", *KV_FORMATS, title="Attention: decode in GB/s of stored keys and values (billions of numbers/s)")
    for rows, heads, kv_heads, dim, length in CONTEXTS:
        cells = [decode_cell(pool, kind, rows, heads, kv_heads, dim, length) for kind in KV_FORMATS]
        table.add_row("decode", f"{rows} rows, {heads}/{kv_heads} heads of {dim}, {length} keys", *cells)
    for count, length, window, softcap in PROMPTS:
        q, k, v = torch.randn(count * length, 32, 64), torch.randn(count * length, 4, 64), torch.randn(count * length, 4, 64)
        segments = [(i * length, (i + 1) * length) for i in range(count)]
        seconds = best_seconds([partial(prefill_attention, q, k, v, segments, scaling=0.125, window=window, softcap=softcap, pool=pool)])
        pairs = sum(min(i + 1, window or length) for i in range(length))
        what = f"{count} x {length} tokens, 32/4 heads of 64" + (f", window {window}" if window else "") + (", softcap" if softcap else "")
        table.add_row("prefill", what, f"{4e-9 * count * 32 * 64 * pairs / seconds:.0f} GFLOP/s")
    return table


def decode_cell(pool: Pool, kind: str, rows: int, heads: int, kv_heads: int, dim: int, length: int) -> str:
    """Layers' caches lie one after another in memory and are read in turn, as in a decode step."""
    layer = LayerShape(num_heads=heads, num_kv_heads=kv_heads, key_dim=dim, value_dim=dim)
    formats = KVFormat(key=kind, value=kind)
    size = rows * counting.decode_attention_bytes(layer, length, kind, kind)
    caches = [LayerCache.allocate(layer, [length] * rows, formats) for _ in range(max(2, (256 << 20) // size))]
    for cache in caches:
        for memory in (cache.keys.data, cache.values.data):
            memory.random_(48, 60)  # normal numbers in every format
    q, every, lengths = torch.randn(rows, heads, dim), np.arange(rows), np.full(rows, length)
    options = {"scaling": dim**-0.5, "pool": pool}
    seconds = best_seconds([partial(decode_attention, q, cache.keys, cache.values, every, lengths, **options) for cache in caches])
    return f"{1e-9 * size / seconds:.1f} ({2e-9 * rows * kv_heads * dim * length / seconds:.1f})"


def store_tokens(parts: Sequence[tuple[KVRows, torch.Tensor]], rows: Numbers, places: Numbers) -> None:
    for kept, new in parts:
        kept.store_tokens(rows, places, new)


def store_table(pool: Pool) -> Table:
    """Storing a prompt, and one token of every row."""
    table = Table("store", *KV_FORMATS, title="Storing keys and values, millions of numbers/s")
    layer = LayerShape(num_heads=32, num_kv_heads=4, key_dim=64, value_dim=64)
    for name, rows, tokens in (("a prompt of 1024", 1, 1024), ("a token of 32 rows", 32, 1)):
        cells = []
        for kind in KV_FORMATS:
            cache = LayerCache.allocate(layer, [1024 + 64] * rows, KVFormat(key=kind, value=kind))
            key, value, places = torch.randn(max(rows, tokens), 4, 64), torch.randn(max(rows, tokens), 4, 64), np.full(rows, 1000)
            if rows == 1:
                store = partial(cache.store_prompt, 0, 0, key, value, pool)
            else:
                parts = (cache.keys, key), (cache.values, value)
                store = partial(store_tokens, parts, np.arange(rows), places)
            cells.append(f"{1e-6 * 2 * key.numel() / best_seconds([store]):.0f}")
        table.add_row(name, *cells)
    return table


def hand_off_us(pool: Pool) -> float:
    """Microseconds of a run of one empty job a thread."""
    jobs = [lambda: None] * pool.threads
    return 1e6 * best_seconds([lambda: pool.run(jobs)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--n", type=int, default=5632)
    parser.add_argument("--k", type=int, default=2048)
    parser.add_argument("--memory-mib", type=int, default=1024)
    parser.add_argument("--formats", nargs="+", default=[*FORMATS, *QUANTIZED], choices=[*FORMATS, *QUANTIZED])
    parser.add_argument("--one-row", action="store_true", help="that table alone")
    options = parser.parse_args()
    console = Console(width=max(160, Console().width) if not sys.stdout.isatty() else None)
    with Pool(options.threads) as pool:
        console.print(f"{options.threads} threads, {torch.backends.cpu.get_cpu_capability()}, hand-off {hand_off_us(pool):.0f} us")
        if not options.one_row:
            console.print(attention_table(pool))
            console.print(store_table(pool))
            console.print(linear_table(options, pool))
        console.print(one_row_table(options, pool))


if __name__ == "__main__":
    main()
