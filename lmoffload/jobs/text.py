"""Text to tokens and back, with the model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmoffload.checkpoint import Checkpoint, load_tokenizer
from lmoffload.checkpoint.generation import stop_strings
from lmoffload.errors import StatedError


class Text:
    """The tokenizer of one checkpoint. Loading it imports transformers."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tokenizer: Any = load_tokenizer(checkpoint)
        self._name = checkpoint.shape.name
        self._vocab_size = checkpoint.shape.vocab_size
        self.stop_strings = stop_strings(checkpoint.generation_config)
        """End a completion for which no others are asked for."""

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Tokens of raw text, with the special tokens that the tokenizer adds and exactly one start token where it adds one.

        Raises:
            StatedError: the text has no UTF-8 form, nothing is left to compute, or a token lies outside the model's vocabulary.
        """
        return self._checked(self._tokenizer(_sound(prompt))["input_ids"])

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Tokens of a conversation, ready for the model's turn. The template alone decides about the start token, as in transformers.

        Raises:
            StatedError: the model has no chat template, or its template refuses the messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise StatedError(f"The model {self._name} has no chat template; give it raw text with a prompt instead of messages.")
        try:
            text = self._tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the model's author and may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise StatedError(f"The chat template of {self._name} refuses the messages: {reason}.") from error
        return self._checked(self._tokenizer(_sound(text), add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of generated tokens, special tokens left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def decode_until(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """Text of generated tokens before the first occurrence of any stop string."""
        text = self.decode(token_ids)
        ends = [at for string in stop if (at := text.find(string)) >= 0]
        return text[: min(ends)] if ends else text

    def windows(self, text: str, length: int, most: int) -> tuple[tuple[int, ...], ...]:
        """Consecutive pieces of a text, of `length` tokens each and about `most` together; each begins with the start token where the
        tokenizer puts one.

        Raises:
            StatedError: as `encode` does.
        """
        ids = self.encode(text)
        start = ids[:1] if ids[0] == self._tokenizer.bos_token_id else ()
        ids, step = ids[len(start) :], length - len(start)
        return tuple((*start, *ids[at : min(at + step, most)]) for at in range(0, min(len(ids), most), step) if len(ids) - at > 1)

    @property
    def end_token_id(self) -> int | None:
        """The tokenizer's end token."""
        end: int | None = self._tokenizer.eos_token_id
        return end

    def _checked(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        ids = tuple(token_ids)
        start = self._tokenizer.bos_token_id
        while start is not None and ids[:2] == (start, start):
            ids = ids[1:]
        if not ids:
            raise StatedError("The prompt is empty: it has no tokens.")
        if max(ids) >= self._vocab_size:
            raise StatedError(f"The tokenizer gives token {max(ids)}, but the model {self._name} has only {self._vocab_size}.")
        return ids


def _sound(text: str) -> str:
    """Arguments that are not valid in the terminal's encoding come as lone surrogates, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise StatedError("The prompt is not valid text: it holds bytes or characters that have no UTF-8 form.") from None
    return text
