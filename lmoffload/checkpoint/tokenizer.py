"""Tokenizer and transformers configuration of a checkpoint. transformers is imported inside the functions: planning does without it."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

from lmoffload.checkpoint.checkpoint import Checkpoint
from lmoffload_solver.errors import StatedError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """The tokenizer beside the weights; for a GGUF file, the one that its metadata describe. No network call is made.

    Raises:
        StatedError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = checkpoint.path
    transformers_config(checkpoint)  # the tokenizer's loader reads it too, and its fault would be told as the tokenizer's
    try:
        if checkpoint.is_gguf:
            # What AutoTokenizer ends with too, after it has read the file with gguf.GGUFReader for the model type (4.6 s against 0.4).
            tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True
            )
        else:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # Whatever a damaged tokenizer file makes transformers raise is told as one sentence.
        raise StatedError(f"The tokenizer of {path} cannot be loaded: {_first_line(error)}") from error
    return tokenizer


def transformers_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The configuration object that the model is built from.

    Raises:
        StatedError: transformers refuses the configuration.
    """
    from transformers import CONFIG_MAPPING

    try:
        config: PreTrainedConfig = CONFIG_MAPPING[checkpoint.shape.model_type].from_dict(deepcopy(dict(checkpoint.config)))
    except Exception as error:
        raise StatedError(f"The configuration of {checkpoint.path} is refused by transformers: {_first_line(error)}") from error
    return config


def _first_line(error: Exception) -> str:
    """The message in one line of bounded length; a first line that only announces the next ones is not all of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{' '.join(lines if lines[0].endswith(':') else lines[:1]):.300}"
