"""What the tests of BsrMatrix share: the parts of a matrix, comparison, and a record of the operations that ran."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_collective.bsr import BsrMatrix
from tests.cases import PATTERNS, mask_to_indices

BLOCKSIZES = [(16, 16), (32, 64), (128, 64), (64, 256), (48, 112), (512, 112)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
INDEX_DTYPES = [torch.int32, torch.int64]
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
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
