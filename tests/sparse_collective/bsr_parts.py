"""Helpers of the tests of BsrMatrix and its GEMM: matrices of a pattern, comparisons, operands, choices."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels import gemm
from cute_kernels.arch import ARCHS
from cute_kernels.matmul.config import BlockFacts, EpilogueSpec
from cute_kernels.matmul.heuristics import choose
from cute_kernels.matmul.problem import Extents, PatternStats, Problem
from cute_kernels.operand import Layout
from cute_kernels.testing.patterns import PATTERNS, mask_to_indices
from cute_kernels.testing.reference import normal, poisoned
from sparse_collective import bsr_linear, bsr_matmul, random_bsr
from sparse_collective.bsr import BsrMatrix
from sparse_collective.bsr_gemm.k_tiles import BsrKTiles
from sparse_collective.gemv.config import LANES_K

BF16 = torch.bfloat16
BLOCKSIZES = [(16, 16), (32, 64), (128, 64), (64, 256), (48, 112), (512, 112)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
INDEX_DTYPES = [torch.int32, torch.int64]
NEEDS_GPU = [pytest.mark.gpu]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
FORMS = ("values", "patterns")  # of a batch
BOTH_OPS = pytest.mark.parametrize("op", [bsr_matmul, bsr_linear], ids=["matmul", "linear"])


def bsr(
    pattern, block, device="cpu", *, grid=(3, 5), dtype=BF16, index_dtype=torch.int32, inside_nan=False
) -> BsrMatrix:
    """A matrix of a pattern of grid[0] x grid[1] blocks, or of a mask; `inside_nan`: NaN lies around its values."""
    mask = pattern if isinstance(pattern, torch.Tensor) else PATTERNS[pattern](*grid)
    crow, col = (t.to(device) for t in mask_to_indices(mask, index_dtype))
    kept = max(1.0, len(col) / len(mask)) * block[1]  # products that an element of a typical row sums
    values = normal(len(col), *block, dtype=dtype, device=device, k=round(kept))
    if inside_nan:
        buffer = poisoned(len(col) + 2, *block, dtype=dtype, device=device)
        buffer[1:-1] = values
        values = buffer[1:-1]
    return BsrMatrix(crow, col, values, (len(mask) * block[0], mask.shape[1] * block[1]))


def batch(
    form, block=(64, 64), device="cpu", *, names=("power_law", "no_blocks", "empty_rows", "all_blocks"), **more
) -> tuple[BsrMatrix, list[BsrMatrix]]:
    """A batch of either form, and its items: those of "values" all have the first one's pattern."""
    items = [bsr(names[l if form == "patterns" else 0], block, device, **more) for l in range(len(names))]
    if form == "patterns":
        return BsrMatrix.stack(items), items
    values = torch.stack([item.values for item in items])
    return BsrMatrix(items[0].crow_indices, items[0].col_indices, values, (len(items), *items[0].shape)), items


def parts(W: BsrMatrix, **changed) -> dict:
    """The constructor's arguments for a matrix, with some of them changed."""
    return {name: getattr(W, name) for name in ("crow_indices", "col_indices", "values", "shape")} | changed


def some(form: str | None = None, pattern="bernoulli", *, items=False, **more):
    """An fp32 matrix, or a batch of four, of which nothing is known yet; with `items`, and what it is made of."""
    more = {"block": (16, 32), "grid": (4, 6), "dtype": torch.float32} | more
    W, made_of = batch(form, **more) if form else (bsr(pattern, **more), None)
    W = BsrMatrix(**parts(W))
    return (W, made_of) if items else W


def assert_same(a: BsrMatrix, b: BsrMatrix):
    assert (a.shape, a.blocksize, a.check) == (b.shape, b.blocksize, b.check)
    for x, y in ((a.crow_indices, b.crow_indices), (a.col_indices, b.col_indices), (a.values, b.values)):
        assert x.dtype == y.dtype and torch.equal(x, y)


def skinny_loads(kernel, row: BsrKTiles) -> list[tuple[int, int]]:
    """(stored block, K-tile of it) of each K-tile that a skinny kernel loads of a row, in its order, with Python's
    numbers; row.count is that of the row's K-tiles, and the row's columns tell its blocks apart."""
    found, cfg = [], kernel.cfg
    for warp in range(cfg.warps):
        for piece in range(warp, -(-row.count // kernel.piece), cfg.warps):
            for t in range(LANES_K):
                for s in range(0, cfg.stages, kernel.span):
                    i = kernel.number(piece, 0 if kernel.uniform else t, s)
                    p, k = divmod(i if kernel.whole else min(i, row.count - 1), row.steps)  # as BsrKTiles.at does
                    assert 0 <= p < row.count // row.steps
                    if kernel.valid(row, i) is not False:
                        k += t if kernel.uniform else 0
                        found += [(row.first + p, k + j * LANES_K) for j in range(kernel.span)]
    return found


def pointers(*tensors):
    return [t.data_ptr() for t in tensors]


class Operations(TorchDispatchMode):
    """The names of the torch operations that ran, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def asked(self) -> bool:
        """True if one of them would wait for a GPU."""
        return bool({"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select"} & set(self.names))


def operands(op, W, n: int, *, k_major: bool = False) -> tuple:
    """The op's arguments: W (M, K) and b (K, n), or n tokens and W."""
    x = normal(n, W.shape[-1], device=W.device)
    b = x.t() if k_major else normal(W.shape[-1], n, device=W.device)
    return (x, W) if op is bsr_linear else (W, b)


def picked(block, extents, density, *, path="sm_90", b_k_major=False, **stats):
    """The facts that the cost model picks of all families for a product on an H200; `block` is None for a dense one."""
    majors, facts = ("k", "k" if b_k_major else "n", "n"), BlockFacts(*block, "int32") if block else None
    ranks = (3 if block else 2, 2, 2)
    layouts = (Layout("row", 8, 8), Layout("col" if b_k_major else "row", 8, 8), Layout("row", 8, 8))
    problem = Problem(
        Extents(*extents), "bfloat16", "bfloat16", layouts, majors, ranks, EpilogueSpec(), facts, False, density,
        PatternStats(**stats),
    )  # fmt: skip
    return choose(problem, ARCHS["sm_90"], 132, path)[0]


def matrix(device="cpu", dtype=torch.bfloat16, shape=(64, 96), block=(16, 32), density=0.6) -> BsrMatrix:
    generator = torch.Generator().manual_seed(1)
    return random_bsr(shape, block, density=density, dtype=dtype, generator=generator).to(device)


def batches(device="cpu", dtype=torch.bfloat16):
    """One of either form, three items of (64, 96)."""
    one = matrix(device, dtype)
    values = torch.stack([normal(*one.values.shape, dtype=dtype, device=device, k=96) for _ in range(3)])
    yield BsrMatrix(one.crow_indices, one.col_indices, values, (3, *one.shape))
    yield BsrMatrix.stack([matrix(device, dtype, density=d) for d in (0.6, 0.0, 1.0)])


def leaf(t):
    return t.detach().clone().requires_grad_()


def products_refuse(dtype: torch.dtype, error: type, words: str, **option) -> None:
    """gemm, bsr_matmul and bsr_linear of operands of this dtype raise alike for an option."""
    a, b = (normal(64, 64, device="cpu").to(dtype) for _ in range(2))
    W = BsrMatrix(*(torch.tensor(t, dtype=torch.int32) for t in ([0, 1], [0])), a[None], (64, 64))
    for op, operands in ((gemm, (a, b)), (bsr_matmul, (W, b)), (bsr_linear, (b, W))):
        with pytest.raises(error, match=words):
            op(*operands, **option)
