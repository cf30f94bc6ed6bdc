"""What is published of FlexGen (flexgen.json, beside this file), and a toy of its model's size whose terms are small numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lmoffload_solver.policies.flexgen_constants import FlexgenConstants
from lmoffload_solver.policies.flexgen_model import Case, Dimensions, PolicyRow, Shares

PUBLISHED: dict[str, Any] = json.loads(Path(__file__).with_name("flexgen.json").read_text(encoding="utf-8"))

TOY_CONSTANTS = FlexgenConstants(
    ctog_bytes_per_s=2,
    gtoc_cache_bytes_per_s=4,
    gtoc_hidden_bytes_per_s=8,
    dtoc_bytes_per_s=10,
    ctod_cache_prefill_bytes_per_s=16,
    ctod_hidden_prefill_bytes_per_s=3,
    ctod_decode_bytes_per_s=5,
    mm_prefill_flops_per_s=6,
    mm_decode_flops_per_s=7,
    bmm_prefill_flops_per_s=9,
    bmm_decode_flops_per_s=11,
    cpu_flops_per_s=13,
    c1=0,
    c2=0,
    c3=0,
    dtoc_weights_share=0.5,
    capacity_share=0.5,
    gpu_bytes=1500,
    cpu_bytes=900,
    disk_bytes=800,
)
TOY = Case(Dimensions(layers=3, hidden=2, ffn=3, heads=2), 3, 4, 2, 2, TOY_CONSTANTS)
"""wi = 8·4 + 4·6 = 56 bytes; block 4; hidden states 16 bytes a token of each row, cache 32; mean length 5."""
TOY_SHARES = Shares(0.5, 0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 0.25, 0.25)


def dimensions(model: str) -> Dimensions:
    found = PUBLISHED["models"][model]
    return Dimensions(found["layers"], found["hidden"], found["ffn"], found["heads"])


def rows(model: str, prompt: int) -> list[PolicyRow]:
    """The published policies of a model and prompt; the 16-bit one first."""
    found = [row for row in PUBLISHED["policies"]["rows"] if row["model"] == model and row["prompt"] == prompt]
    parsed = [PolicyRow.model_validate({key: value for key, value in row.items() if key not in ("model", "prompt")}) for row in found]
    return sorted(parsed, key=lambda row: row.weights_4bit or row.kv_4bit)
