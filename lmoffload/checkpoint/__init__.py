"""Checkpoints: Hugging Face folders and GGUF files, read in place; shapes by name; dummies."""

from lmoffload.checkpoint.checkpoint import Checkpoint, open_checkpoint
from lmoffload.checkpoint.source import TensorSource
from lmoffload.checkpoint.tokenizer import load_tokenizer, transformers_config

__all__ = ["Checkpoint", "TensorSource", "load_tokenizer", "open_checkpoint", "transformers_config"]
