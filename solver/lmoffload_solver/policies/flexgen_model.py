"""FlexGen's own cost model, as published: seconds of a layer in prefill and in a decode step, and the throughput that follows.

Source: FlexGen (ICML 2023), section 4.3, as FMInference/FlexLLMGen has it at 004ffef (experimental/cost_model.py). It is kept with its
faults (no device-memory bandwidth, no launches, quantization a mere division by 4, attention over what is off the device always on the
host): it is what FlexGen itself would predict, never what lmoffload predicts.

Symbols of the docstrings: l layers, h1 hidden, h2 feed-forward, nh heads, s prompt, n generated, gbs rows of a micro-batch, bls rows of the
block. Shares of the weights wg, wc, wn, of the KV cache cg, cc, cn and of the hidden states hg, hc, hn lie on the GPU (g), on the CPU (c)
and on the NVMe disk (n). Traffic is ctog (CPU to GPU), gtoc, dtoc (disk to CPU) and ctod; _p is prefill, _g a decode step. Every term is
affine in the shares, which flexgen_program relies on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Field, model_validator

from lmoffload_solver.errors import StatedError
from lmoffload_solver.model import ModelShape
from lmoffload_solver.policies.flexgen_constants import FlexgenConstants
from lmoffload_solver.value import Value


@dataclass(frozen=True)
class Dimensions:
    """What FlexGen's model knows of a model."""

    layers: int
    hidden: int
    ffn: int
    heads: int


def dimensions_of(model: ModelShape) -> Dimensions:
    """The dimensions of an OPT-like model, whose layers hold 4·h1² + 2·h1·h2 weights and a key and a value of h1 for every token.

    Raises:
        StatedError: a layer is of another make, for which FlexGen's model counts wrong.
    """
    hidden, ffn = model.hidden_size, model.intermediate_size
    for layer, tensors in zip(model.layers, model.by_layer, strict=True):
        weights = sum(math.prod(t.shape) for t in tensors if t.is_matrix)
        cached = layer.num_kv_heads * (layer.key_dim + layer.value_dim)
        if weights != 4 * hidden**2 + 2 * hidden * ffn or cached != 2 * hidden or layer.window is not None:
            raise StatedError(
                f"FlexGen's own policy is for models with OPT's layers, and those of {model.name} differ; choose another policy."
            )
    return Dimensions(model.num_layers, hidden, ffn, model.layers[0].num_heads)


class Shares(NamedTuple):
    """Shares in [0, 1]; each triple of a whole placement adds up to 1."""

    wg: float = 0.0
    wc: float = 0.0
    wn: float = 0.0
    cg: float = 0.0
    cc: float = 0.0
    cn: float = 0.0
    hg: float = 0.0
    hc: float = 0.0
    hn: float = 0.0


class PolicyRow(Value):
    """One policy in FlexGen's terms."""

    percent: tuple[float, float, float, float, float, float]
    """Weights on GPU and CPU, cache on GPU and CPU, hidden states on GPU and CPU; what is left of 100 lies on disk."""
    micro_batch: int = Field(gt=0)
    num_micro_batches: int = Field(gt=0)
    weights_4bit: bool = False
    kv_4bit: bool = False
    """FlexGen's model knows no quantized cache and counts 16 bits."""
    cpu_attention: bool = True
    """FlexGen's model has the CPU attend to whatever is off the GPU, whichever is said here."""

    @model_validator(mode="after")
    def _adds_up(self) -> PolicyRow:
        for name, gpu, cpu in zip(("weights", "cache", "hidden"), self.percent[::2], self.percent[1::2], strict=True):
            if gpu < 0 or cpu < 0 or gpu + cpu > 100 + 1e-5:
                raise ValueError(f"the percentages of {name}, {gpu:g} and {cpu:g}, must lie between 0 and 100 and add up to 100 at most")
        return self

    @property
    def shares(self) -> Shares:
        wg, wc, cg, cc, hg, hc = (percent / 100 for percent in self.percent)
        return Shares(wg, wc, max(0.0, 1 - wg - wc), cg, cc, max(0.0, 1 - cg - cc), hg, hc, max(0.0, 1 - hg - hc))


@dataclass(frozen=True)
class Case:
    """What a policy's shares are judged for: the model, the job, the batch and the machine."""

    dims: Dimensions
    prompt: int
    """s, in tokens."""
    generated: int
    """n, in tokens."""
    micro_batch: int
    """gbs, in rows."""
    num_micro_batches: int
    constants: FlexgenConstants
    weights_4bit: bool = False

    @property
    def block(self) -> int:
        """bls, in rows."""
        return self.micro_batch * self.num_micro_batches

    @property
    def weight_bytes(self) -> float:
        """wi = 8·h1² + 4·h1·h2, of one layer; a quarter of it in 4 bits, scales not counted."""
        wi = 8 * self.dims.hidden**2 + 4 * self.dims.hidden * self.dims.ffn
        return wi / 4 if self.weights_4bit else wi

    @property
    def mean_length(self) -> float:
        """s + n/2 tokens, that a decode step attends to in the mean."""
        return self.prompt + self.generated / 2

    def hidden_bytes(self, tokens: float) -> float:
        """2·tokens·h1·bls."""
        return 2 * tokens * self.dims.hidden * self.block

    def cache_bytes(self, tokens: float) -> float:
        """4·tokens·h1·bls, of one layer: a key and a value."""
        return 4 * tokens * self.dims.hidden * self.block


def ctog_prefill_s(shares: Shares, case: Case) -> float:
    """ctog_p = (wi·(wc + wn) + 2·s·h1·bls·(hc + hn)) / ctog."""
    weights = case.weight_bytes * (shares.wc + shares.wn)
    return (weights + case.hidden_bytes(case.prompt) * (shares.hc + shares.hn)) / case.constants.ctog_bytes_per_s


def gtoc_prefill_s(shares: Shares, case: Case) -> float:
    """gtoc_p = 4·(s + 1)·h1·bls·(cc + cn) / gtoc_cache + 2·s·h1·bls·(hc + hn) / gtoc_hidden."""
    cache = case.cache_bytes(case.prompt + 1) * (shares.cc + shares.cn)
    hidden = case.hidden_bytes(case.prompt) * (shares.hc + shares.hn)
    return cache / case.constants.gtoc_cache_bytes_per_s + hidden / case.constants.gtoc_hidden_bytes_per_s


def dtoc_prefill_s(shares: Shares, case: Case) -> float:
    """dtoc_p = (wi·wn + 2·s·h1·bls·hn) / dtoc."""
    return (case.weight_bytes * shares.wn + case.hidden_bytes(case.prompt) * shares.hn) / case.constants.dtoc_bytes_per_s


def ctod_prefill_s(shares: Shares, case: Case) -> float:
    """ctod_p = 4·(s + 1)·h1·bls·cn / ctod_cache + 2·s·h1·bls·hn / ctod_hidden."""
    cache = case.cache_bytes(case.prompt + 1) * shares.cn / case.constants.ctod_cache_prefill_bytes_per_s
    return cache + case.hidden_bytes(case.prompt) * shares.hn / case.constants.ctod_hidden_prefill_bytes_per_s


def compute_prefill_s(case: Case) -> float:
    """comp_p = bls·(8·s·h1² + 4·s·h1·h2) / mm_p + 4·bls·s²·h1 / bmm_p."""
    s, h1, h2 = case.prompt, case.dims.hidden, case.dims.ffn
    products = case.block * (8 * s * h1**2 + 4 * s * h1 * h2) / case.constants.mm_prefill_flops_per_s
    return products + 4 * case.block * s**2 * h1 / case.constants.bmm_prefill_flops_per_s


def ctog_decode_s(shares: Shares, case: Case) -> float:
    """ctog_g = (wi·(wc + wn) + 2·h1·bls·(hc + hn)) / ctog."""
    weights = case.weight_bytes * (shares.wc + shares.wn)
    return (weights + case.hidden_bytes(1) * (shares.hc + shares.hn)) / case.constants.ctog_bytes_per_s


def gtoc_decode_s(shares: Shares, case: Case) -> float:
    """gtoc_g = 2·h1·bls·(hc + hn) / gtoc_hidden."""
    return case.hidden_bytes(1) * (shares.hc + shares.hn) / case.constants.gtoc_hidden_bytes_per_s


def dtoc_decode_s(shares: Shares, case: Case) -> float:
    """dtoc_g = (4·(s + n/2)·h1·bls·cn + 2·h1·bls·hn) / dtoc + wi·wn / (0.95·dtoc)."""
    dtoc, share = case.constants.dtoc_bytes_per_s, case.constants.dtoc_weights_share
    batch = case.cache_bytes(case.mean_length) * shares.cn + case.hidden_bytes(1) * shares.hn
    return batch / dtoc + case.weight_bytes * shares.wn / (share * dtoc)


def ctod_decode_s(shares: Shares, case: Case) -> float:
    """ctod_g = (4·h1·bls·cn + 2·h1·bls·hn) / ctod."""
    return (case.cache_bytes(1) * shares.cn + case.hidden_bytes(1) * shares.hn) / case.constants.ctod_decode_bytes_per_s


def cpu_flops_per_s(micro_batch: int, hidden: int, constants: FlexgenConstants) -> float:
    """cpu·max(0.1, 1 + c1·a·b − c2·a − c3·b) with a = max(0, log2(64 / gbs)) and b = max(0, log2(4096 / h1))."""
    a, b = max(0.0, math.log2(64 / micro_batch)), max(0.0, math.log2(4096 / hidden))
    return constants.cpu_flops_per_s * max(0.1, 1 + constants.c1 * a * b - constants.c2 * a - constants.c3 * b)


def compute_decode_s(shares: Shares, case: Case) -> float:
    """comp_g = bls·(8·h1² + 4·h1·h2) / mm_g + 4·bls·(s + n/2)·h1·(cg / bmm_g + (cc + cn) / cpu_real)."""
    h1, h2 = case.dims.hidden, case.dims.ffn
    products = case.block * (8 * h1**2 + 4 * h1 * h2) / case.constants.mm_decode_flops_per_s
    attention = 4 * case.block * case.mean_length * h1
    on_gpu = attention * shares.cg / case.constants.bmm_decode_flops_per_s
    return products + on_gpu + attention * (shares.cc + shares.cn) / cpu_flops_per_s(case.micro_batch, h1, case.constants)


def prefill_terms_s(shares: Shares, case: Case) -> dict[str, float]:
    """Tpre, seconds of a layer in prefill, is the largest: {load: ctog_p + dtoc_p, store: gtoc_p + ctod_p, compute: comp_p}."""
    return {
        "load": ctog_prefill_s(shares, case) + dtoc_prefill_s(shares, case),
        "store": gtoc_prefill_s(shares, case) + ctod_prefill_s(shares, case),
        "compute": compute_prefill_s(case),
    }


def decode_terms_s(shares: Shares, case: Case) -> dict[str, float]:
    """Tgen, seconds of a layer in a decode step, is ctog_g plus the largest of gtoc_g, dtoc_g, ctod_g and comp_g (compute)."""
    upload = ctog_decode_s(shares, case)
    return {
        "gtoc": upload + gtoc_decode_s(shares, case),
        "dtoc": upload + dtoc_decode_s(shares, case),
        "ctod": upload + ctod_decode_s(shares, case),
        "compute": upload + compute_decode_s(shares, case),
    }


@dataclass(frozen=True)
class Prediction:
    """What FlexGen's own model says of a policy."""

    tokens_per_s: float
    prefill_s: float
    decode_s: float


def predict_shares(shares: Shares, case: Case) -> Prediction:
    """T = l·Tpre + l·(n − 1)·Tgen for a block of bls rows of n tokens: bls·n / T tokens per second."""
    prefill_s = case.dims.layers * max(prefill_terms_s(shares, case).values())
    decode_s = case.dims.layers * (case.generated - 1) * max(decode_terms_s(shares, case).values())
    return Prediction(case.block * case.generated / (prefill_s + decode_s), prefill_s, decode_s)


def case_of(dims: Dimensions, prompt: int, generated: int, row: PolicyRow, constants: FlexgenConstants) -> Case:
    """The case that a policy row makes of a job."""
    return Case(dims, prompt, generated, row.micro_batch, row.num_micro_batches, constants, row.weights_4bit)


def predict(dims: Dimensions, prompt: int, generated: int, row: PolicyRow, constants: FlexgenConstants) -> Prediction:
    """What FlexGen's own model predicts for a policy row; a row that does not fit in memory is predicted like any other."""
    return predict_shares(row.shares, case_of(dims, prompt, generated, row, constants))
