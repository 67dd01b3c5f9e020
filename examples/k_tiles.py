"""A source of K-tiles of your own: a product that multiplies every other K-tile, as on a chessboard.

Algorithm. A is cut into tiles of tile_m x tile_k. Row tile m multiplies K-tiles m % 2, m % 2 + 2, m % 2 + 4, ...: one
of every two, and neighbouring row tiles take the other ones. So half of A is neither loaded nor multiplied.

A mainloop does not know where its next K-tile comes from: it asks a source (see cute_kernels/k_tiles.py). All of the
pattern is in `at`. Loads, pipeline, tensor-core steps, epilogue and store are those of the dense kernel, on both paths.

    python -m examples.k_tiles
"""

from dataclasses import dataclass, replace

import torch

from cute_kernels import explain, gemm
from cute_kernels.arch import arch_named
from cute_kernels.k_tiles import DenseKTiles, DenseSource, KTile
from cute_kernels.matmul.catalogue import dense
from cute_kernels.matmul.config import GemmConfig
from cute_kernels.matmul.cost import all_ctas
from cute_kernels.matmul.dense import DenseGemm
from cute_kernels.matmul.family import Dense
from cute_kernels.runtime.device import device_arch
from cute_kernels.runtime.families import function_for, register

from .show import DEVICE, compare, inspect_facts, measure, normal, refused

# Code: a source, the product around it, and its family


@dataclass(frozen=True)
class ChessboardKTiles(DenseKTiles):
    """K-tiles m % 2, m % 2 + 2, ... of row tile m. `count` says how many, and `out` that it writes row tile m of D."""

    def at(self, i) -> KTile:
        k = 2 * i + self.m % 2
        return KTile(a=(self.m, k, self.l), b=(k, 0))


@dataclass(frozen=True)
class ChessboardSource(DenseSource):
    shared_rows = 1  # neighbouring row tiles have other K-tiles: a cluster must not load B once for two of them

    def for_tile(self, m, l, bounds) -> ChessboardKTiles:
        return ChessboardKTiles((self.count + 1 - m % 2) // 2, m, l)


class ChessboardGemm(DenseGemm):
    def source(self, k_tiles, a_batch) -> ChessboardSource:
        return ChessboardSource(k_tiles, a_batch)


class ChessboardConfig(GemmConfig):
    family = "chessboard"


class Chessboard(Dense):
    name, config = "chessboard", ChessboardConfig

    def serves(self, block) -> bool:
        return False  # gemm must not choose it: it computes something else

    def candidates(self, path, block, spec, *element) -> list:
        return [ChessboardConfig(**vars(config)) for config in super().candidates(path, block, spec, *element)]

    def unsupported(self, facts) -> str:
        if facts.config.cluster_m > 1 or facts.ranks != (2, 2, 2):
            return "row tiles of a cluster would share B's K-tiles, but take other ones; and batches are not written"
        return super().unsupported(facts)

    def catalogue(self, arch, quick=False) -> list:
        spec = arch_named(arch)
        facts = [dense(spec, spec.path, config) for config in self.candidates(spec.path, None, spec)]
        return [f for f in facts if not self.unsupported(f)]

    def entry(self, facts) -> ChessboardGemm:
        return ChessboardGemm(facts)


FAMILY = register(Chessboard())

# The call: gemm's own checks and facts, with a configuration of this family


def facts_of(a, b, arch: str):
    plan = explain(gemm, a, b, arch=arch)
    facts = (replace(plan.facts, config=c) for c in FAMILY.candidates(plan.facts.path, None, plan.facts.spec))
    return next(f for f in facts if not FAMILY.unsupported(f))


def compiled(a, b):
    """A function of a and b that launches the kernel; made once, for their shapes."""
    spec, sms = device_arch(a.get_device())
    facts = facts_of(a, b, spec.name)
    function, counts = function_for(facts), facts.counts(1, all_ctas(facts.config, sms))

    def call(a, b):
        d = a.new_empty(a.shape[0], b.shape[1])
        function(a, b, d, None, None, None, 1.0, 1.0, *counts)  # no bias, residual or second output
        return d

    return call, facts.config


# Test


def masked(a, config):
    """A with zeros where the product leaves K-tiles out."""
    rows = torch.arange(a.shape[0], device=a.device)[:, None] // config.tile_m
    columns = torch.arange(a.shape[1], device=a.device) // config.tile_k
    return torch.where(rows % 2 == columns % 2, a, 0.0)


def walked(a, b, config):
    """The product as the source says it, on the CPU: the source is plain Python outside of a kernel, too."""
    k_tiles, out = -(-a.shape[1] // config.tile_k), a.new_zeros(a.shape[0], b.shape[1], dtype=torch.float32)
    source = ChessboardSource(k_tiles, 1)
    for m, rows in enumerate(out.split(config.tile_m)):
        part = source.for_tile(m, 0, source.bounds(m, 0, 0))
        for i in range(part.count):
            k = part.at(i).b[0] * config.tile_k
            tile = slice(m * config.tile_m, (m + 1) * config.tile_m), slice(k, k + config.tile_k)
            rows += a[tile].float() @ b[tile[1]].float()
    return out.to(a.dtype)


def check(M: int = 520, N: int = 264, K: int = 456) -> None:
    """Sides that are no multiples of a tile, and an odd number of K-tiles for some tile_k."""
    a, b = normal(M, K, seed=1), normal(K, N, seed=2)
    if DEVICE == "cuda":
        call, config = compiled(a, b)
        result = call(a, b)
    else:
        config = facts_of(a, b, "sm_90").config
        result = walked(a, b, config)
    half = masked(a, config)
    compare(result, half.double() @ b.double(), half @ b)


def inspect() -> None:
    a = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    inspect_facts(lambda arch: facts_of(a, a, arch))


def errors() -> None:
    """A wrong shape and a wrong dtype, and what a family says that it does not support."""
    a, b = normal(64, 64), normal(64, 64)
    refused(lambda: facts_of(a, b[:32], "sm_90"))
    refused(lambda: facts_of(a, b.half(), "sm_90"))
    facts = facts_of(a, b, "sm_90")
    print("refused:", FAMILY.unsupported(replace(facts, config=replace(facts.config, cluster_m=2))))


# Measurement


def times(size: int = 8192) -> None:
    """Half of the work, beside all of it."""
    if DEVICE == "cpu":
        measure()
        return
    a, b = normal(size, size, seed=1), normal(size, size, seed=2)
    call, _ = compiled(a, b)
    measure(chessboard=lambda: call(a, b), gemm=lambda: gemm(a, b), torch=lambda: a @ b)


if __name__ == "__main__":
    check()
    inspect()
    errors()
    times()
