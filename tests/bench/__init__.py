"""Tests of the benchmarks room."""
