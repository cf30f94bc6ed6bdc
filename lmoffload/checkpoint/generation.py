"""The model's generation configuration: settings that are applied are checked, those that are not are told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lmoffload_solver.errors import StatedError

NOT_APPLIED: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,), "num_beam_groups": (1,), "penalty_alpha": (), "dola_layers": (), "constraints": (), "force_words_ids": (),
    "typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "top_h": (), "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,), "bad_words_ids": (), "sequence_bias": (), "suppress_tokens": (), "begin_suppress_tokens": (),
    "forced_bos_token_id": (), "forced_eos_token_id": (), "min_length": (0,), "min_new_tokens": (0,),
    "exponential_decay_length_penalty": (), "guidance_scale": (1,), "watermarking_config": (),
    "diversity_penalty": (0,), "renormalize_logits": (False,),
}  # fmt: skip
"""Fields of transformers' GenerationConfig that change which tokens come out and that this program does not apply, each with the values,
beside null, that change nothing."""


def generation_remarks(config: Mapping[str, Any] | None, what: str) -> tuple[str, ...]:
    """Check what is applied; returns one remark where the model's authors ask for more than is applied.

    Raises:
        StatedError: a setting that would be applied has no meaning.
    """
    if config is None:
        return ()
    _check_end_tokens(config.get("eos_token_id"), what)
    _check_stop_strings(config.get("stop_strings"), what)
    _check_number(config, "repetition_penalty", what, least=0, most=math.inf, whole=False, above=True)
    if config.get("do_sample"):
        _check_number(config, "temperature", what, least=0, most=math.inf, whole=False)
        _check_number(config, "top_p", what, least=0, most=1, whole=False)
        _check_number(config, "min_p", what, least=0, most=1, whole=False)
        _check_number(config, "top_k", what, least=0, most=math.inf, whole=True)
    asked = [name for name, neutral in NOT_APPLIED.items() if config.get(name) is not None and config[name] not in (*neutral, [], {})]
    if not asked:
        return ()
    return (f"the {what} asks for {', '.join(asked)}, which lmoffload does not apply: transformers may give other text",)


def stop_strings(config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Texts that end a completion, as the model's authors have them."""
    stated = (config or {}).get("stop_strings") or ()
    return (stated,) if isinstance(stated, str) else tuple(stated)


def _check_stop_strings(stated: object, what: str) -> None:
    texts = stated if isinstance(stated, list) else [stated]
    if stated is not None and not all(isinstance(text, str) and text for text in texts):
        raise StatedError(f"The {what} is not valid: stop_strings must be a text or a list of texts, not {stated!r:.80}.")


def _check_end_tokens(ids: object, what: str) -> None:
    for token in ids if isinstance(ids, list) else [ids]:
        if token is not None and (not isinstance(token, int) or isinstance(token, bool)):
            raise StatedError(f"The {what} is not valid: eos_token_id must be a token or a list of tokens, not {ids!r:.80}.")


def _check_number(
    config: Mapping[str, Any], name: str, what: str, *, least: float, most: float, whole: bool, above: bool = False
) -> None:
    value = config.get(name)
    if value is None:
        return
    kinds = int if whole else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not math.isfinite(value) or not least <= value <= most:
        good = False
    else:
        good = value > least or not above
    if not good:
        raise StatedError(f"The {what} is not valid: {name} cannot be {value!r:.80}.")
