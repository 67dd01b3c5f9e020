"""User-defined source of K-tiles: a GEMM with a lower triangular matrix, in half of the time.

Algorithm. A is lower triangular, in tiles of 128 rows and 64 columns. Row tile m has no elements beyond column
128 (m + 1), so it needs the first 2 (m + 1) K-tiles only. Half of A is neither loaded nor multiplied.

A mainloop does not know where its next K-tile comes from: it asks a source. A `KTileSource` is a source written as two
functions of tile numbers, which are traced and compiled into the kernel of `gemm`. Loads, pipeline, tensor-core
instructions, epilogue and store are those of the dense kernel, on both paths; CPU tensors run the same functions in
torch.

    python examples/k_tiles.py
"""

import torch

from cute_kernels import KTileSource, explain, gemm

try:
    from .show import DEVICE, compare, inspect_call, measure, normal, refused
except ImportError:  # run as a file: python examples/k_tiles.py
    from show import DEVICE, compare, inspect_call, measure, normal, refused

# Code

LOWER = KTileSource(
    at=lambda m, i, k_tiles: i,
    count=lambda m, k_tiles: torch.minimum(2 * (m + 1), k_tiles),
    tile_m=128,
    tile_k=64,
)

# Test


def check(size: int = 520, columns: int = 264) -> None:
    """Check extents that are not multiples of a tile. The K-tiles of row tile 0 are the first two, and so on."""
    assert LOWER.k_tiles(320, 320) == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    a, b = normal(size, size, seed=1).tril(), normal(size, columns, seed=2)
    compare(gemm(a, b, source=LOWER), a.double() @ b.double(), a @ b)


def inspect(size: int = 4096) -> None:
    a = torch.empty(size, size, dtype=torch.bfloat16, device="meta")
    print(explain(gemm, a, a, source=LOWER, arch="sm_90"))
    inspect_call(gemm, a, a, source=LOWER)


def errors() -> None:
    """A branch, K-tiles out of range, and a captured tensor."""
    a = normal(256, 256)
    refused(lambda: KTileSource(at=lambda m, i, k_tiles: i if m > 0 else 0))
    refused(lambda: gemm(a, a, source=KTileSource(at=lambda m, i, k_tiles: i + 1)))
    table = torch.arange(4)
    refused(lambda: KTileSource(at=lambda m, i, k_tiles: table[i]))


# Measurement


def times(size: int = 8192) -> None:
    """Time half of the work and all of it."""
    if DEVICE == "cpu":
        measure()
        return
    a, b = normal(size, size, seed=1).tril(), normal(size, size, seed=2)
    measure(lower=lambda: gemm(a, b, source=LOWER), gemm=lambda: gemm(a, b), torch=lambda: a @ b)


if __name__ == "__main__":
    check()
    inspect()
    errors()
    times()
