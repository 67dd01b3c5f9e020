"""Block-sparse GEMM for CPU tensors in plain torch, at the cost of the stored blocks.

The blocks of a chunk and their rows of b are gathered, multiplied in one batch, and accumulated in the rows of the
result. The matrix is never densified. Accumulation is in FP32 (float64 for float64).
"""

from typing import Any

import torch
from torch import Tensor

from cute_kernels.dtypes import accumulator
from cute_kernels.reference import outside_autocast

from .bsr import BsrMatrix
from .conversions import bits, of_bits

CHUNK_BYTES = 1 << 20  # of gathered blocks and rows, for each thread: they stay in its L2
MOST_COLUMNS = 512  # of b at a time


@outside_autocast
def product(W: BsrMatrix, b: Tensor) -> Tensor:
    """W @ b, (..., M, N) of the accumulator's dtype, contiguous. b (..., K, N); with a batch (L, K, N) or (K, N)."""
    M, rows, columns = W.shape[-2], W.row_of_block(), W.col_indices
    if W.batch is None:
        batch, N = b.shape[:-2], b.shape[-1]
        b = b.movedim(-2, 0).flatten(1)  # the matrices of a batch side by side
        out = _multiply(W, W.stored, rows, columns, b, M, scales=W.stored_scales)
        return out.unflatten(1, (*batch, N)).movedim(0, -2).contiguous() if batch else out
    items = W.shape[0]
    if W.batch == "values":
        each = b if b.dim() == 3 else b.expand(items, *b.shape)
        scales: Any = W.stored_scales if W.scaled_per == "block" else [W.stored_scales] * items
        given = zip(W.stored, each, scales, strict=True)
        return torch.stack([_multiply(W, v, rows, columns, x, M, scales=s) for v, x, s in given])
    # A pattern for each item: one matrix, whose rows and blocks are those of all items.
    if b.dim() == 3:
        columns = columns + rows // W.n_block_rows * W.n_block_cols
        b = b.flatten(0, 1)
    return _multiply(W, W.stored, rows, columns, b, items * M, scales=W.stored_scales).unflatten(0, (items, M))


@outside_autocast
def grouped_linear(W: BsrMatrix, x: Tensor, expert_ids: Tensor) -> Tensor:
    """(T, M) of the accumulator's dtype: each run of x (T, K) times its item of W, zeros where there is no such item.

    Synchronizes nothing but the CPU's own tensors, and costs what each item's tokens and blocks cost.
    """
    runs = x.unflatten(0, (len(expert_ids), -1))
    out = x.new_zeros(*runs.shape[:-1], W.shape[-2], dtype=accumulator(x.dtype))
    for item in expert_ids.unique().tolist():
        if not 0 <= item < W.shape[0]:
            continue
        taken = expert_ids == item
        scales: Any = W.stored_scales
        if W.batch == "values":
            blocks, part = W.stored[item], slice(None)
            scales = scales[item] if W.scaled_per == "block" else scales
        else:
            blocks, part = W.stored, slice(*W.crow_indices[item, [0, -1]].tolist())
        rows, columns = W.row_of_block()[part] % max(W.n_block_rows, 1), W.col_indices[part]
        tokens = runs[taken].flatten(0, 1).t()  # (K, tokens)
        found = _multiply(W, blocks, rows, columns, tokens, W.shape[-2], part.start or 0, scales)
        out[taken] = found.t().unflatten(0, (-1, runs.shape[1]))
    return out.flatten(0, 1)


def _multiply(
    W, stored: Tensor, rows: Tensor, columns: Tensor, b: Tensor, M: int, first: int = 0, scales: Tensor | None = None
) -> Tensor:
    """(M, N): the blocks from number `first` on, at these block rows and columns, times b (.., N).

    stored: (nnz, bm, bk), those of W or of an item; of a transposed view those of its base. scales: (1,) or (nnz,).
    """
    (bm, bk), N, wide = W.blocksize, b.shape[1], accumulator(b.dtype)
    out = b.new_zeros(M // bm, bm, N, dtype=wide)
    for at in range(0, N, MOST_COLUMNS):
        part = b[:, at : at + MOST_COLUMNS].to(wide).contiguous()
        part = part.unflatten(0, (len(part) // bk, bk))  # (K / bk, bk, n)
        n = part.shape[-1]
        acc = out if n == N else out.new_zeros(M // bm, bm, n)
        block_bytes = out.element_size() * (bm * bk + (bm + bk) * n)
        count = max(1, CHUNK_BYTES * torch.get_num_threads() // block_bytes)
        for begin in range(0, len(columns), count):
            chunk = slice(begin, min(begin + count, len(columns)))  # stored goes on with those of other items
            if W.numbers is None:
                blocks = stored[first:][chunk].to(wide)
            else:
                blocks = of_bits(bits(stored).index_select(0, W.numbers[first:][chunk]), stored.dtype).mT.to(wide)
            if scales is not None:
                each = scales.expand(len(stored))
                each = each[first:][chunk] if W.numbers is None else each.index_select(0, W.numbers[first:][chunk])
                blocks = blocks * each[:, None, None]
            acc.index_add_(0, rows[chunk], blocks @ part.index_select(0, columns[chunk]))
        if acc is not out:
            out[:, :, at : at + n] = acc
    return out.flatten(0, 1)
