"""The tokenizer of dummies: byte-level BPE that reads and writes any text."""

from __future__ import annotations

import json
from pathlib import Path

from lmoffload_solver.errors import StatedError

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
TRAINED_SIZE = 512
"""Vocabulary that text is split into; ids beyond it stand for made-up words, so that every id that a random model gives is text."""

TRAINING_TEXT = (
    "A language model reads a text token by token and answers with the most likely next token. When the weights do not fit into memory, "
    "they are read from disk again and again, layer by layer, while the processor computes. The plan says which weights stay in memory, "
    "how many prompts are computed together, and how far ahead of the computation the disk reads."
)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json with `vocab_size` tokens; ids 0, 1 and 2 are padding, start and end.

    Raises:
        StatedError: the vocabulary is too small for the 256 bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    smallest = len(SPECIAL_TOKENS) + 256
    if vocab_size < smallest:
        raise StatedError(f"A tokenizer needs at least {smallest} tokens, and the shape has {vocab_size}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, TRAINED_SIZE),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    document = json.loads(tokenizer.to_str())
    vocabulary: dict[str, int] = document["model"]["vocab"]
    vocabulary |= {f"Ġw{i}": i for i in range(len(vocabulary), vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    pad, bos, eos = SPECIAL_TOKENS
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad, "bos_token": bos, "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
