"""The text of a completion as it grows."""

from __future__ import annotations

from collections.abc import Sequence

from lmoffload.jobs.text import Text

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of a character decode to before the last of them is there."""


class TextStream:
    """Pieces of one completion's text, which together are the whole: no half character, and nothing that may be a stop text's beginning."""

    def __init__(self, text: Text, stop: Sequence[str]) -> None:
        self._text, self._stop = text, stop
        self._told = 0
        self._ended = False

    def more(self, token_ids: Sequence[int]) -> str:
        """What is certain of the text of all tokens so far, and has not been told yet."""
        if self._ended:
            return ""
        text = self._text.decode_until(token_ids, self._stop).rstrip(UNFINISHED)
        held = max((_beginning(text, stop) for stop in self._stop), default=0)
        return self._tell(text[: len(text) - held])

    def end(self, completion: str) -> str:
        """The rest, now that the whole is known."""
        self._ended = True
        return self._tell(completion)

    def _tell(self, text: str) -> str:
        piece, self._told = text[self._told :], max(self._told, len(text))
        return piece


def _beginning(text: str, stop: str) -> int:
    """Characters at the end of a text that `stop` begins with."""
    return next((count for count in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:count])), 0)
