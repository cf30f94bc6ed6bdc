"""What every peer is asked to do, and what it answers."""

from __future__ import annotations

from pydantic import Field

from lmoffload_solver.value import Value


class Work(Value):
    """Prompts as token ids; every one is continued greedily by `gen_len` tokens, whatever they are."""

    prompts: tuple[tuple[int, ...], ...] = Field(min_length=1)
    gen_len: int = Field(gt=0)
    repeats: int = Field(default=1, gt=0)
    """How often it is done by one process, to tell a warm run from the first."""

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def decode_tokens(self) -> int:
        """Tokens but each row's first, which the prefill gives."""
        return len(self.prompts) * (self.gen_len - 1)


class Times(Value):
    """One time through the work."""

    prefill_s: float
    decode_s: float
    """Of the `gen_len - 1` steps after the prefill."""


class PeerResult(Value):
    """What a peer did."""

    token_ids: tuple[tuple[int, ...], ...]
    """Of the last time."""
    times: tuple[Times, ...]
    """Of each time."""
    load_s: float
    peak_rss_bytes: int
    about: str
    """Versions and what it runs on, as the peer tells it."""
