"""Checkpoints: Hugging Face folders and GGUF files, read in place; shapes by name; dummies."""

from lmoffload.checkpoint.checkpoint import Checkpoint, open_checkpoint
from lmoffload.checkpoint.dummy import make_dummy
from lmoffload.checkpoint.importance import Importance, importance_path, needs_importance, read_importance, rounding_of, write_importance
from lmoffload.checkpoint.inspection import Inspection, inspect
from lmoffload.checkpoint.names import named_config, named_configs, named_shape
from lmoffload.checkpoint.quantized import with_formats
from lmoffload.checkpoint.source import TensorSource
from lmoffload.checkpoint.store import StoreProgress, open_store, prepare_store, remove_store, store_bytes
from lmoffload.checkpoint.tokenizer import load_tokenizer, transformers_config

__all__ = [
    "Checkpoint",
    "Importance",
    "Inspection",
    "StoreProgress",
    "TensorSource",
    "importance_path",
    "inspect",
    "load_tokenizer",
    "make_dummy",
    "named_config",
    "named_configs",
    "named_shape",
    "needs_importance",
    "open_checkpoint",
    "open_store",
    "prepare_store",
    "read_importance",
    "remove_store",
    "rounding_of",
    "store_bytes",
    "transformers_config",
    "with_formats",
    "write_importance",
]
