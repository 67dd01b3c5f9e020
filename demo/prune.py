"""Block magnitude pruning: from a dense weight to a block-sparse one."""

from collections.abc import Sequence

from torch import Tensor

from sparse_collective import BsrMatrix


def prune(weight: Tensor, blocksize: Sequence[int], density: float) -> BsrMatrix:
    """Keep the fraction `density` of the blocks of `weight`, those of largest Frobenius norm.

    The norm is compared across the whole matrix, so some block-rows keep more blocks than others and some
    may keep none. Nothing is retrained.

    Args:
        weight: (M, K), M and K multiples of the block's sides.
        blocksize: (bm, bk), multiples of 16.
        density: in [0, 1].
    """
    return BsrMatrix.from_dense(weight, blocksize, density=density)
