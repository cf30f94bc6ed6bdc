"""FlexGen's own memory model: the bytes of each memory at the peak of each phase, and its capacity rule.

Source and symbols: see flexgen_model. Homes are what lies in a memory throughout, working sets what the layer at work adds. Every term is
affine in the shares.
"""

from __future__ import annotations

from lmoffload_solver.policies.flexgen_constants import FlexgenConstants
from lmoffload_solver.policies.flexgen_model import Case, Shares
from lmoffload_solver.value import Tier


def gpu_home_prefill_bytes(shares: Shares, case: Case) -> float:
    """wi·l·wg + 2·s·h1·bls·hg + 4·(s + n)·h1·bls·l·cg."""
    return _gpu_home(shares, case, case.prompt)


def gpu_home_decode_bytes(shares: Shares, case: Case) -> float:
    """wi·l·wg + 2·h1·bls·hg + 4·(s + n)·h1·bls·l·cg."""
    return _gpu_home(shares, case, 1)


def gpu_working_prefill_bytes(shares: Shares, case: Case) -> float:
    """2·wi·(1 − wg) + 2·s·h1·gbs·(1 − hg) + gbs·(8·s·h1 + (2·s·h1 + 2·nh·s²) + 2·s·h1 + 4·s·h1 + 2·s·h2 + 2·s·h1):
    the layer at work and the next, and the outputs of QKV, scores, values, projection and the two halves of the MLP, all at once."""
    s, h1, h2, nh = case.prompt, case.dims.hidden, case.dims.ffn, case.dims.heads
    outputs = case.micro_batch * (8 * s * h1 + (2 * s * h1 + 2 * nh * s**2) + 2 * s * h1 + 4 * s * h1 + 2 * s * h2 + 2 * s * h1)
    return 2 * case.weight_bytes * (1 - shares.wg) + 2 * s * h1 * case.micro_batch * (1 - shares.hg) + outputs


def gpu_working_decode_bytes(shares: Shares, case: Case) -> float:
    """2·wi·(1 − wg) + 2·h1·gbs·(1 − hg) + 4·gbs·(s + n)·h1·cg + gbs·(8·h1 + 4·h1 + 2·h2 + 2·h1)
    + gbs·cg·((2·h1 + 2·(s + n)·h1 + 2·nh·(s + n)) + (2·(s + n)·h1 + 2·h1))."""
    h1, h2, nh, tokens, gbs = case.dims.hidden, case.dims.ffn, case.dims.heads, case.prompt + case.generated, case.micro_batch
    moved = 2 * case.weight_bytes * (1 - shares.wg) + 2 * h1 * gbs * (1 - shares.hg)
    attention = (2 * h1 + 2 * tokens * h1 + 2 * nh * tokens) + (2 * tokens * h1 + 2 * h1)
    return moved + gbs * (8 * h1 + 4 * h1 + 2 * h2 + 2 * h1) + gbs * shares.cg * (4 * tokens * h1 + attention)


def cpu_home_prefill_bytes(shares: Shares, case: Case) -> float:
    """wi·l·wc + 2·s·h1·bls·hc + 4·s·h1·bls·l·cc."""
    layers = case.weight_bytes * shares.wc + case.cache_bytes(case.prompt) * shares.cc
    return case.dims.layers * layers + case.hidden_bytes(case.prompt) * shares.hc


def cpu_home_decode_bytes(shares: Shares, case: Case) -> float:
    """wi·l·wc + 2·h1·bls·hc + 4·(s + n)·h1·bls·l·cc."""
    layers = case.weight_bytes * shares.wc + case.cache_bytes(case.prompt + case.generated) * shares.cc
    return case.dims.layers * layers + case.hidden_bytes(1) * shares.hc


def cpu_working_prefill_bytes(shares: Shares, case: Case) -> float:
    """wi·(1 − wg) + 2·s·h1·gbs·(1 − hg)."""
    return case.weight_bytes * (1 - shares.wg) + 2 * case.prompt * case.dims.hidden * case.micro_batch * (1 - shares.hg)


def cpu_working_decode_bytes(shares: Shares, case: Case) -> float:
    """wi·wn + 4·h1·gbs·hn + 8·(s + n)·h1·gbs·cn + 2·nh·(s + n)·gbs + 2·h1·gbs."""
    h1, tokens, gbs = case.dims.hidden, case.prompt + case.generated, case.micro_batch
    staged = case.weight_bytes * shares.wn + 4 * h1 * gbs * shares.hn + 8 * tokens * h1 * gbs * shares.cn
    return staged + 2 * case.dims.heads * tokens * gbs + 2 * h1 * gbs


def disk_bytes(shares: Shares, case: Case) -> float:
    """wi·l·wn + 2·s·h1·bls·hn + 4·(s + n)·h1·bls·l·cn."""
    layers = case.weight_bytes * shares.wn + case.cache_bytes(case.prompt + case.generated) * shares.cn
    return case.dims.layers * layers + case.hidden_bytes(case.prompt) * shares.hn


def peak_bytes(shares: Shares, case: Case) -> dict[tuple[Tier, str], float]:
    """The peak of each memory in each phase, home and working set; disk has one for both."""
    return {
        ("device", "prefill"): gpu_home_prefill_bytes(shares, case) + gpu_working_prefill_bytes(shares, case),
        ("device", "decode"): gpu_home_decode_bytes(shares, case) + gpu_working_decode_bytes(shares, case),
        ("host", "prefill"): cpu_home_prefill_bytes(shares, case) + cpu_working_prefill_bytes(shares, case),
        ("host", "decode"): cpu_home_decode_bytes(shares, case) + cpu_working_decode_bytes(shares, case),
        ("disk", "job"): disk_bytes(shares, case),
    }


def usable_bytes(constants: FlexgenConstants) -> dict[Tier, float]:
    """The capacity rule: capacity_share of each memory."""
    sizes: dict[Tier, float] = {"device": constants.gpu_bytes, "host": constants.cpu_bytes, "disk": constants.disk_bytes}
    return {tier: constants.capacity_share * size for tier, size in sizes.items()}


def fits(shares: Shares, case: Case) -> bool:
    """Whether every peak keeps the capacity rule."""
    usable = usable_bytes(case.constants)
    return all(peak <= usable[tier] for (tier, _), peak in peak_bytes(shares, case).items())


def _gpu_home(shares: Shares, case: Case, hidden_tokens: int) -> float:
    layers = case.weight_bytes * shares.wg + case.cache_bytes(case.prompt + case.generated) * shares.cg
    return case.dims.layers * layers + case.hidden_bytes(hidden_tokens) * shares.hg
