"""The order of work tiles: with divisors it is that of divisions, and each tile comes once."""

import shutil

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32

from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.scheduler import TileScheduler

from ..emulator.emulate import COMPILER, emulate_entry


class Decode:
    """Writes (m, n, l) of each index, by divisions and with divisors, and where the indices end."""

    @cute.jit
    def __call__(self, out: cute.Tensor, tiles_m: Int32, tiles_n: Int32, batch: Int32, group: Int32, s: cuda.CUstream):
        extents = tiles_m, tiles_n, batch, group
        self.kernel(out, TileScheduler(*extents), TileScheduler.with_divisors(*extents)).launch(
            grid=(1, 1, 1), block=(32, 1, 1), stream=s
        )

    @cute.kernel
    def kernel(self, out: cute.Tensor, plain: TileScheduler, divided: TileScheduler):
        if cute.arch.thread_idx()[0] == 0:
            for i in cutlass.range(plain.count, unroll=1):
                out[i, 0], out[i, 1], out[i, 2] = plain.decode(i)
                out[i, 3], out[i, 4], out[i, 5] = divided.decode(i)
            out[plain.count, 0] = divided.count


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="the emulator needs a C++ compiler")
def test_divisors():
    run = emulate_entry(
        "sm_90a", Decode(), (fake_tensor("int32", 2, 1, 1), *(Int32(1) for _ in range(4)), fake_stream())
    )
    for tiles_m, tiles_n, batch, group in [
        (1, 1, 1, 1), (3, 7, 2, 3), (5, 4, 1, 4), (2, 9, 3, 16), (64, 5, 1, 2), (7, 16, 2, 1), (1, 130, 1, 64),
    ]:  # fmt: skip
        count = tiles_m * tiles_n * batch
        out = torch.full((count + 1, 6), -1, dtype=torch.int32)
        run(out, tiles_m, tiles_n, batch, group)
        assert out[count, 0] == count and torch.equal(out[:count, :3], out[:count, 3:])
        every = torch.cartesian_prod(*(torch.arange(n, dtype=torch.int32) for n in (tiles_m, tiles_n, batch)))
        assert torch.equal(out[:count, :3].unique(dim=0), every.view(-1, 3))
