"""Checkpoints: Hugging Face folders and GGUF files, read in place; shapes by name; dummies."""

from lmoffload.checkpoint.checkpoint import Checkpoint, open_checkpoint
from lmoffload.checkpoint.dummy import make_dummy
from lmoffload.checkpoint.inspection import Inspection, inspect
from lmoffload.checkpoint.names import named_config, named_configs, named_shape
from lmoffload.checkpoint.source import TensorSource
from lmoffload.checkpoint.tokenizer import load_tokenizer, transformers_config

__all__ = [
    "Checkpoint",
    "Inspection",
    "TensorSource",
    "inspect",
    "load_tokenizer",
    "make_dummy",
    "named_config",
    "named_configs",
    "named_shape",
    "open_checkpoint",
    "transformers_config",
]
