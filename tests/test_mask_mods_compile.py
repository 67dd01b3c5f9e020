"""The element masks of mask_mods.py are traced in a kernel as they run on torch tensors."""

import dataclasses

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from attention.masks.mask_mods import And, Band, Dilated, GlobalTokens, Or, RowRange, SameDocument

THREADS = 128
NONE = torch.zeros(1, dtype=torch.int32)
MODS = {
    "all": Band(None, None, 5),
    "causal": Band(None, 0, 5),
    "left": Band(3, None, 5),
    "window": Band(3, 4, 5),
    "sinks": And(Or(Band(3, 4, 5), GlobalTokens(4, 0, 5)), Band(None, 0, 5)),
    "globals": GlobalTokens(4, 4, 5),
    "dilated": Dilated(3, 5),
    "documents": SameDocument(NONE, NONE, False),
    "documents of items": SameDocument(NONE, NONE, True),
    "ranges": RowRange(NONE, NONE),
}


def with_tensors(mod, first, second):
    """The mask with a kernel's tensors in the place of torch's."""
    fields = [f.name for f in dataclasses.fields(mod) if isinstance(getattr(mod, f.name), torch.Tensor)]
    return dataclasses.replace(mod, **dict(zip(fields, (first, second), strict=False)))


@pytest.mark.sm_90
@pytest.mark.parametrize("name", MODS)
def test_compiles(name):
    mod = MODS[name]

    @cute.kernel
    def kernel(first: cute.Tensor, second: cute.Tensor, out: cute.Tensor):
        q, _, _ = cute.arch.thread_idx()
        kv, h, b = cute.arch.block_idx()
        seen = with_tensors(mod, first, second)(b, h, q, kv)
        out[q, kv] = Int32(1) if seen else Int32(0)

    @cute.jit
    def launch(first: cute.Tensor, second: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        kernel(first, second, out).launch(grid=[4, 1, 1], block=[THREADS, 1, 1], stream=stream)

    shape = (2, THREADS) if name == "documents of items" else (THREADS,)
    tensors = [
        make_fake_compact_tensor(Int32, s, stride_order=tuple(range(len(s)))) for s in (shape, shape, (THREADS, 4))
    ]
    cute.compile(launch, *tensors, make_fake_stream(), options="--gpu-arch sm_90a")
