"""Peers that misbehave, as programs of their own."""
