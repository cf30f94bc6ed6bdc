"""Emit dot products of bytes: 4 codes of a weight row in each lane, met by 4 codes of one activation row.

All ways give the same whole numbers, so a machine's instructions never change a result. Codes of activations are -127..127. Weights are
0..15 (int4), or -127..127 (int8). The traps: `vpdpbusd` wants one side unsigned, so int8 weights go in as code + 128 and sums begin at
-128 times the activations' sum; AVX2's `vpmaddubsw` saturates at 16 bits, so int8 goes in as |w| and x * sign(w) (2 * 127 * 127 fits), and
nibbles may be summed over 32 columns (8 * 2 * 15 * 127 fits) before they are widened.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from lmoffload.kernels.code import I8, I16, I32, Code, Dots, V

CHUNK = 32
"""Columns between two widenings of 16-bit sums."""

SIGNED_SHIFT = 128


@dataclass(frozen=True)
class BytesDot:
    """Sums of products over chunks of 32 columns, `rows` activation rows by `vectors` vectors of weight rows."""

    code: Code
    dots: Dots
    nibbles: bool

    @property
    def shifted(self) -> bool:
        """Whether sums begin at -128 times the sum of the activations' codes."""
        return self.dots == "vnni" and not self.nibbles

    def chunk(self, sums: list[V], weights: list[list[V]], activations: list[list[V]]) -> list[V]:
        """Sums, row by row, after 32 columns.

        weights: [8 steps][vectors] as lanes of 4 codes (<4W x i8>); activations: [8 steps][rows], one whole number of 4 codes each.
        """
        vectors = len(weights[0])
        if self.dots == "maddubs" and self.nibbles:
            return self._by_sixteen_bits(sums, weights, activations)
        for step, xs in zip(weights, activations, strict=True):
            ready = [self._ready(w) for w in step]
            lanes = [self.code.splat(x, self.code.width) for x in xs]
            sums = [self._add(total, ready[n % vectors], lanes[n // vectors]) for n, total in enumerate(sums)]
        return sums

    @property
    def _bytes(self) -> ir.Type:
        return ir.VectorType(I8, 4 * self.code.width)

    @property
    def _words(self) -> ir.Type:
        return ir.VectorType(I16, 2 * self.code.width)

    @property
    def _lanes(self) -> ir.Type:
        return ir.VectorType(I32, self.code.width)

    def _ready(self, weight: V) -> V:
        return self.code.b.xor(weight, self._all_bytes(SIGNED_SHIFT)) if self.shifted else weight

    def _add(self, total: V, weight: V, x: V) -> V:
        code, b = self.code, self.code.b
        if self.dots == "vnni":
            name = f"llvm.x86.avx512.vpdpbusd.{32 * code.width}"
            return code.known(name, self._lanes, total, b.bitcast(weight, self._lanes), x)
        if self.dots == "maddubs":
            signed = code.known("llvm.x86.avx2.psign.b", self._bytes, b.bitcast(x, self._bytes), weight)
            size = code.known(f"llvm.abs.v{4 * code.width}i8", self._bytes, weight, ir.Constant(ir.IntType(1), 0))
            return b.add(total, self._pairs(self._products(size, signed)))
        wide = b.bitcast(weight, self._lanes)
        for place in range(4):
            total = b.add(total, b.mul(self._one(wide, place, signed=not self.nibbles), self._one(x, place, signed=True)))
        return total

    def _one(self, lanes: V, place: int, *, signed: bool) -> V:
        """One of the 4 bytes of each lane, as a whole number."""
        b = self.code.b
        top = b.shl(lanes, self.code.bits(24 - 8 * place, self.code.width))
        return (b.ashr if signed else b.lshr)(top, self.code.bits(24, self.code.width))

    def _by_sixteen_bits(self, sums: list[V], weights: list[list[V]], activations: list[list[V]]) -> list[V]:
        code, vectors = self.code, len(weights[0])
        halves: list[V] = []
        for step, xs in zip(weights, activations, strict=True):
            lanes = [code.b.bitcast(code.splat(x, code.width), self._bytes) for x in xs]
            products = [self._products(step[n % vectors], lanes[n // vectors]) for n in range(len(sums))]
            halves = [code.b.add(half, product) for half, product in zip(halves, products, strict=True)] if halves else products
        return [code.b.add(total, self._pairs(half)) for total, half in zip(sums, halves, strict=True)]

    def _products(self, unsigned: V, signed: V) -> V:
        return self.code.known("llvm.x86.avx2.pmadd.ub.sw", self._words, unsigned, signed)

    def _pairs(self, words: V) -> V:
        ones = ir.Constant(self._words, [1] * (2 * self.code.width))
        return self.code.known("llvm.x86.avx2.pmadd.wd", self._lanes, words, ones)

    def _all_bytes(self, value: int) -> V:
        return ir.Constant(self._bytes, [value] * (4 * self.code.width))
