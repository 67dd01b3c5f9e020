"""User-defined source of K-tiles: a GEMM over a chessboard of A's tiles.

Algorithm. A consists of tiles of tile_m x tile_k. Row tile m multiplies K-tiles m % 2, m % 2 + 2, m % 2 + 4, ...: every
second one, and the neighboring row tiles multiply the others. Half of A is neither loaded nor multiplied.

A mainloop does not know where its next K-tile comes from: it asks a source (see cute_kernels/k_tiles.py). `at`
alone defines the pattern. Loads, pipeline, tensor-core steps, epilogue and store are the dense kernel's, on both paths.

    python examples/k_tiles.py
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

try:
    from .show import DEVICE, compare, inspect_facts, measure, normal, refused
except ImportError:  # run as a file: python examples/k_tiles.py
    from show import DEVICE, compare, inspect_facts, measure, normal, refused

# Code: a source, its GEMM, and its family


@dataclass(frozen=True)
class ChessboardKTiles(DenseKTiles):
    """K-tiles m % 2, m % 2 + 2, ... of row tile m. `count` is their number; `out` is row tile m of D."""

    def at(self, i) -> KTile:
        k = 2 * i + self.m % 2
        return KTile(a=(self.m, k, self.l), b=(k, 0))


@dataclass(frozen=True)
class ChessboardSource(DenseSource):
    shared_rows = 1  # neighboring row tiles have other K-tiles: a cluster must not multicast B to two of them

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
        return False  # gemm must not select it: it computes a different result

    def candidates(self, path, block, spec, *element) -> list:
        return [ChessboardConfig(**vars(config)) for config in super().candidates(path, block, spec, *element)]

    def unsupported(self, facts) -> str:
        if facts.config.cluster_m > 1 or facts.ranks != (2, 2, 2):
            return "clusters along M (row tiles have different K-tiles of B) and batches are not supported"
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
    """Return a function of a and b that launches the kernel compiled for their shapes."""
    spec, sms = device_arch(a.get_device())
    facts = facts_of(a, b, spec.name)
    function, counts = function_for(facts), facts.counts(1, all_ctas(facts.config, sms))

    def call(a, b):
        d = a.new_empty(a.shape[0], b.shape[1])
        function(a, b, d, 1.0, 1.0, *counts)  # alpha and beta; no bias, residual or second output
        return d

    return call, facts.config


# Test


def masked(a, config):
    """A with zeros in the tiles that the GEMM skips."""
    rows = torch.arange(a.shape[0], device=a.device)[:, None] // config.tile_m
    columns = torch.arange(a.shape[1], device=a.device) // config.tile_k
    return torch.where(rows % 2 == columns % 2, a, 0.0)


def emulated(a, b, config):
    """Compute the GEMM on the CPU by iterating over the source, which is plain Python outside a kernel."""
    k_tiles, out = -(-a.shape[1] // config.tile_k), a.new_zeros(a.shape[0], b.shape[1], dtype=torch.float32)
    source = ChessboardSource(k_tiles, 1)
    for m, rows in enumerate(out.split(config.tile_m)):
        tiles = source.for_tile(m, 0, source.bounds(m, 0, 0))
        for i in range(tiles.count):
            k = tiles.at(i).b[0] * config.tile_k
            tile = slice(m * config.tile_m, (m + 1) * config.tile_m), slice(k, k + config.tile_k)
            rows += a[tile].float() @ b[tile[1]].float()
    return out.to(a.dtype)


def check(M: int = 520, N: int = 264, K: int = 456) -> None:
    """Check extents that are not multiples of a tile, with an odd number of K-tiles for some tile_k."""
    a, b = normal(M, K, seed=1), normal(K, N, seed=2)
    if DEVICE == "cuda":
        call, config = compiled(a, b)
        result = call(a, b)
    else:
        config = facts_of(a, b, "sm_90").config
        result = emulated(a, b, config)
    a_masked = masked(a, config)
    compare(result, a_masked.double() @ b.double(), a_masked @ b)


def inspect() -> None:
    a = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    inspect_facts(lambda arch: facts_of(a, a, arch))


def errors() -> None:
    """Show the errors for a wrong shape, a wrong dtype, and unsupported facts."""
    a, b = normal(64, 64), normal(64, 64)
    refused(lambda: facts_of(a, b[:32], "sm_90"))
    refused(lambda: facts_of(a, b.half(), "sm_90"))
    facts = facts_of(a, b, "sm_90")
    print("refused:", FAMILY.unsupported(replace(facts, config=replace(facts.config, cluster_m=2))))


# Measurement


def times(size: int = 8192) -> None:
    """Time half of the work and all of it."""
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
