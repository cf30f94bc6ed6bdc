"""Texts that come with lmoffload: excerpts of Arthur Conan Doyle's The Adventures of Sherlock Holmes (1892), in the public domain.

From Project Gutenberg's edition (ebook 1661), lines of a paragraph joined, its own notices left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class Sample:
    """A text and what it is called where figures are told of it."""

    name: str
    text: str


def measured_sample() -> Sample:
    """What losses are measured on unless a text is given: 43,000 characters."""
    return _sample("The Adventure of the Copper Beeches, A. C. Doyle, 1892", "copper_beeches.txt")


def calibration_sample() -> Sample:
    """What a model is calibrated with, never what it is measured on: 19,000 characters of another story."""
    return _sample("A Scandal in Bohemia, A. C. Doyle, 1892", "scandal.txt")


def _sample(name: str, file: str) -> Sample:
    return Sample(name, (resources.files("lmoffload.jobs") / "texts" / file).read_text(encoding="utf-8"))
