"""What the tests of BsrMatrix and of its products share.

Of matrices: their parts, comparison, and a record of the operations that ran. Of products: matrices of a pattern, one
product against the truth, and what holds for every kernel: where it writes, what it must not read, the same bits.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels import explain
from cute_kernels.arch import ARCHS
from cute_kernels.matmul.choose import choose
from cute_kernels.matmul.config import BlockFacts, EpilogueSpec
from cute_kernels.matmul.problem import Extents, PatternStats, Problem
from cute_kernels.operand import Layout
from sparse_collective import bsr_linear, bsr_matmul
from sparse_collective.bsr import BsrMatrix

from .cases import PATTERNS, mask_to_indices
from .reference import assert_as_good_as_torch, dense_of, exact_and_torch, normal, poisoned

BF16 = torch.bfloat16
BLOCKSIZES = [(16, 16), (32, 64), (128, 64), (64, 256), (48, 112), (512, 112)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
INDEX_DTYPES = [torch.int32, torch.int64]
NEEDS_GPU = [pytest.mark.gpu]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


def parts(rows=4, cols=6, pattern="bernoulli", blocksize=(16, 32), dtype=torch.float32, index_dtype=torch.int32):
    """The constructor's arguments for one pattern, on the CPU; shape (rows * bm, cols * bk)."""
    crow, col = mask_to_indices(PATTERNS[pattern](rows, cols), index_dtype)
    values = torch.randn(len(col), *blocksize, generator=torch.Generator().manual_seed(1)).to(dtype)
    return crow, col, values, (rows * blocksize[0], cols * blocksize[1])


def assert_same(a: BsrMatrix, b: BsrMatrix):
    assert (a.shape, a.blocksize, a.check) == (b.shape, b.blocksize, b.check)
    for x, y in ((a.crow_indices, b.crow_indices), (a.col_indices, b.col_indices), (a.values, b.values)):
        assert x.dtype == y.dtype and torch.equal(x, y)


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


# Products

LINEAR = pytest.mark.parametrize("linear", [False, True], ids=["matmul", "linear"])
SCATTERED = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [1, 0, 0, 0, 1]], dtype=torch.bool)


def bsr(pattern, block, device, *, grid=(3, 5), dtype=BF16, index_dtype=torch.int32, inside_nan=False) -> BsrMatrix:
    """A matrix of one pattern of grid[0] x grid[1] blocks; `inside_nan` puts NaN before and after its values."""
    mask = pattern if isinstance(pattern, torch.Tensor) else PATTERNS[pattern](*grid)
    (rows, cols), (bm, bk) = mask.shape, block
    crow, col = (t.to(device) for t in mask_to_indices(mask, index_dtype))
    kept = max(1.0, len(col) / rows) * bk  # products that an element of a typical row sums
    values = normal(len(col), bm, bk, dtype=dtype, device=device, k=round(kept))
    if inside_nan:
        buffer = poisoned(len(col) + 2, bm, bk, dtype=dtype, device=device)
        buffer[1:-1] = values
        values = buffer[1:-1]
    return BsrMatrix(crow, col, values, (rows * bm, cols * bk))


def dense(W: BsrMatrix) -> torch.Tensor:
    return dense_of(W.crow_indices, W.col_indices, W.values, W.shape)


def check(W, b, *, linear=False, out=None, out_dtype=None, matrix=None, **terms):
    """One product into poisoned memory against the truth; returns its plan. W may be given as `matrix` to the op."""
    dtype = out.dtype if out is not None else out_dtype or W.dtype
    rows = dense(W)
    a, b2 = (b, rows.t()) if linear else (rows, b)
    if linear and b.dim() == 1:
        a = b[None]
    exact, by_torch = exact_and_torch(a, b2, dtype, **terms)
    if linear and b.dim() == 1:
        exact, by_torch = exact[0], by_torch[0]
    if out is None:
        out = poisoned(*exact.shape, dtype=dtype, device=b.device)
    matrix = W if matrix is None else matrix
    op, args = (bsr_linear, (b, matrix)) if linear else (bsr_matmul, (matrix, b))
    plan = explain(op, *args, out=out, **terms)
    assert op(*args, out=out, **terms) is out
    assert_as_good_as_torch(out, exact, by_torch, k=W.shape[1], plan=plan)
    return plan


def picked(block, extents, density, *, path="sm_90", b_k_major=False, **stats):
    """The facts that the cost model picks of all families for a product on an H200."""
    majors, facts = ("k", "k" if b_k_major else "n", "n"), BlockFacts(*block, "int32")
    layouts = (Layout("row", 8, 8), Layout("col" if b_k_major else "row", 8, 8), Layout("row", 8, 8))
    problem = Problem(
        Extents(*extents), "bfloat16", "bfloat16", layouts, majors, (3, 2, 2), EpilogueSpec(), facts, False, density,
        PatternStats(**stats),
    )  # fmt: skip
    return choose(problem, ARCHS["sm_90"], 132, path)[0]


def width(W, n, device, linear=False, dtype=BF16):
    """b (K, n), or x (n, K)."""
    return normal(*((n, W.shape[1]) if linear else (W.shape[1], n)), dtype=dtype, device=device)


def multiply(W, b, linear, **terms):
    """W (M, K) @ b (K, n), or b (n, K) @ W.T."""
    return bsr_linear(b, W, **terms) if linear else bsr_matmul(W, b, **terms)


def check_absent_blocks(W, b, junk, linear):
    """W, of SCATTERED blocks, by b with junk in one block column at a time: its rows are spoilt, all others exact."""
    bm, bk = W.blocksize
    for column in range(SCATTERED.shape[1]):
        spoilt, clean = b.clone(), b.clone()
        for t, value in ((spoilt, junk), (clean, 0.0)):
            t.narrow(1 if linear else 0, column * bk, bk).fill_(value)
        args = (clean, dense(W).t()) if linear else (dense(W), clean)
        exact, by_torch = exact_and_torch(*args, W.dtype)
        out = multiply(W, spoilt, linear, out=poisoned(*exact.shape, device=b.device))
        for row, present in enumerate(SCATTERED[:, column]):
            part = slice(row * bm, (row + 1) * bm)
            mine, right, theirs = ((t.t() if linear else t)[part] for t in (out, exact, by_torch))
            if present:
                assert not mine.isfinite().any()
            else:
                assert_as_good_as_torch(mine, right, theirs, k=W.shape[1])
