"""Transformers as the model zoo: its forward runs unmodified, over weights that we bring and with our attention.

`build` makes the model without weights, `runtime` is what its swapped parts ask for (weights, kernel, attention, the switch between
micro-batches), `bind` swaps them in. Nothing here knows where a weight comes from.
"""
