"""KTileSource: a user-defined source of K-tiles of gemm, as two programs that torch and the kernel both run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .traced.evaluate import evaluate
from .traced.program import INTEGER, Program
from .traced.record import TraceError, trace

if TYPE_CHECKING:
    from .matmul.config import GemmFacts

STEP = 64  # a tile's sides are multiples of it


class KTileSource:
    """The K-tiles that each row tile of a GEMM multiplies, for `gemm(a, b, source=...)`.

    A of shape (M, K) consists of tiles of tile_m x tile_k elements; the last ones of a row or column may be smaller.
    Row tile m of the result is the sum of A[m, k] @ B[k] over the K-tiles k = at(m, 0, k_tiles), at(m, 1, k_tiles),
    ..., at(m, count - 1, k_tiles). Other tiles are neither loaded nor multiplied. The rest of the kernel is that of
    `gemm`: loads, pipeline, tensor-core instructions, epilogue and store.

    `at` and `count` are traced once, when the source is created, and compiled into the kernel, like an epilogue. They
    compute with torch functions and Python operators on integers, and may capture numbers. m, i and k_tiles are
    0-dimensional int32 tensors, so torch.where replaces a branch.

    Args:
        at: (m, i, k_tiles) -> index of the i-th K-tile of row tile m, from 0 to k_tiles - 1. k_tiles is the number of
            K-tiles of A.
        count: (m, k_tiles) -> number of K-tiles of row tile m, from 0 to k_tiles. By default k_tiles.
        tile_m, tile_k: rows and columns of a tile, multiples of 64. They do not depend on the kernel's own tile, which
            divides them. FP8 operands on sm_90 need a tile_k that is a multiple of 128.

    | | supported |
    | --- | --- |
    | operands | matrices and batches, with all dtypes of `gemm`; each matrix of a batch has the same K-tiles |
    | GPUs | the paths sm_80 and sm_90, with split-K and multicast; CPU tensors run a torch reference |
    | arguments of `gemm` | all except block scales (1x128, 128x128), precision="3xtf32" and a Sparse24, which raise |
    | gradients, torch.compile, torch.func | not supported (raise RuntimeError) |

    Raises:
        TypeError: at or count is not a function of integers that returns one, or does something that a kernel cannot,
            such as to read a captured tensor. The message names the line.
        ValueError: tile_m or tile_k is not a positive multiple of 64.

    Example:
        # a chessboard of A's tiles: even row tiles multiply K-tiles 0, 2, 4, ..., odd ones 1, 3, 5, ...
        chessboard = KTileSource(
            at=lambda m, i, k_tiles: 2 * i + m % 2,
            count=lambda m, k_tiles: (k_tiles + 1 - m % 2) // 2,
        )
        chessboard.k_tiles(M=256, K=320)  # [[0, 2, 4], [1, 3]]
        d = gemm(a, b, source=chessboard)
        print(inspect(gemm, a, b, source=chessboard, arch="sm_90").sass)
    """

    __slots__ = ("_hash", "at", "count", "tile_k", "tile_m")

    def __init__(
        self,
        at: Callable[[Tensor, Tensor, Tensor], Tensor],
        count: Callable[[Tensor, Tensor], Tensor] | None = None,
        *,
        tile_m: int = 128,
        tile_k: int = 64,
    ):
        for name, value in (("tile_m", tile_m), ("tile_k", tile_k)):
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0 or value % STEP:
                raise ValueError(f"KTileSource: {name} must be a positive multiple of {STEP}, got {value!r}")
        self.tile_m, self.tile_k = tile_m, tile_k
        self.at = _program("at(m, i, k_tiles)", at, 3)
        self.count = _program("count(m, k_tiles)", count or (lambda m, k_tiles: k_tiles), 2)
        self._hash = hash((tile_m, tile_k, self.at, self.count))

    def __eq__(self, other) -> bool:
        return isinstance(other, KTileSource) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple:
        return _restored, (self.tile_m, self.tile_k, self.at, self.count)

    def __repr__(self) -> str:
        """All that a kernel is compiled from, stable across processes."""
        return f"KTileSource({self.tile_m}x{self.tile_k}, at={self.at}, count={self.count})"

    def k_tiles(self, M: int, K: int) -> list[list[int]]:
        """Return the indices of the K-tiles of each row tile of an (M, K) matrix, in order.

        Raises:
            ValueError: an index or a count is out of range.

        Example:
            source = KTileSource(at=lambda m, i, k_tiles: (m + i) % k_tiles, count=lambda m, k_tiles: 2)
            source.k_tiles(256, 192)  # [[0, 1], [1, 2]]
        """
        tiles = -(-K // self.tile_k)
        rows = torch.arange(-(-M // self.tile_m), dtype=torch.int32, device="cpu")
        known = torch.tensor(tiles, dtype=torch.int32, device="cpu")
        counts = evaluate(self.count, (rows, known)).expand(rows.shape)
        if rows.numel() and (counts.min() < 0 or counts.max() > tiles):
            m = int(((counts < 0) | (counts > tiles)).nonzero()[0])
            raise ValueError(f"KTileSource: count({m}, {tiles}) is {int(counts[m])}; it must be from 0 to {tiles}")
        steps = torch.arange(int(counts.max()) if rows.numel() else 0, dtype=torch.int32, device="cpu")
        at = evaluate(self.at, (rows[:, None], steps, known)).expand(len(rows), len(steps))
        wrong = ((at < 0) | (at >= tiles)) & (steps < counts[:, None])
        if wrong.any():
            m, i = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"KTileSource: at({m}, {i}, {tiles}) is {int(at[m, i])}; K-tiles of K = {K} are 0 to {tiles - 1}"
            )
        return [row[:count] for row, count in zip(at.tolist(), counts.tolist(), strict=True)]

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """The GEMM of its K-tiles, by torch, in the dtype of a (..., M, K) and b (..., K, N)."""
        (M, K), N = a.shape[-2:], b.shape[-1]
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        result = a.new_zeros(*batch, M, N)
        parts = torch.arange(K, device=a.device).split(self.tile_k) if K else ()
        for m, tiles in enumerate(self.k_tiles(M, K)):
            if tiles:
                columns = torch.cat([parts[k] for k in tiles])
                rows = slice(m * self.tile_m, (m + 1) * self.tile_m)
                result[..., rows, :] = a[..., rows, :][..., columns] @ b[..., columns, :]
        return result

    def unsupported(self, facts: GemmFacts) -> str:
        """The reason why a kernel with these facts cannot have this source, or ""."""
        cfg = facts.config
        if self.tile_m % cfg.tile_m or self.tile_k % cfg.tile_k:
            return (
                f"a kernel's tile of {cfg.tile_m}x{cfg.tile_k} does not divide the source's of "
                f"{self.tile_m}x{self.tile_k}; use multiples of {cfg.tile_m} for tile_m and of {cfg.tile_k} for tile_k"
            )
        if self.shared_rows(cfg.tile_m) % cfg.cluster_m:
            return "a cluster along M: row tiles have different K-tiles of B"
        return ""

    def shared_rows(self, tile_m: int) -> int:
        """Source.shared_rows (k_tiles) for a kernel's tiles of tile_m rows: 0, all of them, if none depends on m."""
        return self.tile_m // tile_m if 0 in _read(self.at) | _read(self.count) else 0


def check_source(source, precision, scales: tuple, shape: tuple) -> None:
    """Check a source, its K-tiles of an A of this shape, and arguments that are not supported with one."""
    if source is None:
        return
    if not isinstance(source, KTileSource):
        raise TypeError(f"gemm: source must be a KTileSource, got {type(source).__name__}")
    if precision == "3xtf32":
        raise ValueError('gemm: precision="3xtf32" is not supported with a source; use precision="tf32"')
    if "1x128" in scales or "128x128" in scales:
        raise ValueError("gemm: block scales are not supported with a source; use one scale per tensor, row or column")
    source.k_tiles(*shape)


def _program(what: str, function, arguments: int) -> Program:
    """The program of a function of integers."""
    what = f"KTileSource: {what}"
    if not callable(function):
        raise TypeError(f"{what} must be a function, got {type(function).__name__}")

    def call(*values):
        result = function(*values)
        return values[0] * 0 + result if type(result) is int else result

    try:
        traced = trace(call, what, ("int32",) * arguments, (), torch.device("cpu"))
    except TraceError as error:
        if "captured tensor" not in str(error):
            raise
        traced = None
    if traced is None or traced.tensors or traced.read:
        raise TypeError(
            f"{what} reads a captured tensor, which is not supported; capture numbers, or use a "
            "sparse_collective.BsrMatrix, whose pattern is in tensors"
        )
    if traced.program.dtype not in INTEGER:
        raise TypeError(f"{what} must return an integer, got torch.{traced.program.dtype}; write it with //, % and +")
    return traced.program


def _read(program: Program) -> set[int]:
    """The inputs that a program depends on."""
    first = len(program.inputs)
    used = {program.output} | {i for node in program.nodes for i in node.args if node.op not in ("const", "argument")}
    return {i for i in used if i < first}


def _restored(tile_m: int, tile_k: int, at: Program, count: Program) -> KTileSource:
    source = KTileSource.__new__(KTileSource)
    source.tile_m, source.tile_k, source.at, source.count = tile_m, tile_k, at, count
    source._hash = hash((tile_m, tile_k, at, count))
    return source
