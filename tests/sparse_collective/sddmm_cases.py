"""SDDMM as cases of the conformance tests and the fuzz: their operands, and their truth."""

import torch
from torch import Tensor

from cute_kernels.testing.reference import truth
from sparse_collective import BsrMatrix

from ..guard_zones import Placement


def blocks_of(dense: Tensor, pattern: BsrMatrix) -> Tensor:
    """The stored blocks of dense (L, M, N), as the values of a pattern of L items; of one matrix L is 1."""
    (bm, bk), counts = pattern.blocksize, pattern.crow_indices.diff().flatten()
    rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    L, M, N = dense.shape
    parts = dense.view(L, M // bm, bm, N // bk, bk).transpose(2, 3)  # (L, rows, columns, bm, bk)
    columns = pattern.col_indices.long()
    return parts[:, rows, columns] if pattern.batch == "values" else parts.flatten(0, 1)[rows, columns]


def product_of(a: Tensor, b: Tensor, pattern: BsrMatrix, groups: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The stored blocks of a (M, K) @ b (K, N), in `dtype`; of a batch each item's, over its own runs of K."""
    if groups is None:
        return blocks_of(truth(a, b, dtype=dtype)[None], pattern)
    dense = torch.zeros(pattern.shape, dtype=dtype, device=a.device)
    if len(groups):
        of_runs = truth(
            a.unflatten(1, (len(groups), -1)).transpose(0, 1), b.unflatten(0, (len(groups), -1)), dtype=dtype
        )
        for item, found in zip(groups.tolist(), of_runs, strict=True):
            if 0 <= item < len(dense):
                dense[item] += found
    return blocks_of(dense, pattern)


def sampled_truth(args: tuple, terms: dict, before: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The exact result, and torch's: in fp32, rounded once. `before`: what is added to."""
    found = []
    for dtype in (torch.float64, torch.float32):
        blocks = product_of(*args, terms.get("expert_ids"), dtype)
        found.append(blocks if before is None else blocks + before.to(dtype))
    return found[0], found[1].to(out_dtype)


def place_of_blocks(align: int) -> Placement:
    """For the result: contiguous, at an address that is a multiple of 16 bytes, or of an element alone."""
    return Placement(before=3 if align == 1 else 0)
