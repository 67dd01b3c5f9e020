"""Attention sinks (H,) in kernels: a logit per head, times log2(e) like all logits of the softmax."""

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .mask import LOG2E


def row_sinks(mSinks: cute.Tensor | None, rows: int) -> cute.Tensor | None:
    """Registers (rows,) for the sinks of a thread's rows, all the same register: the rows belong to one head. None
    without sinks."""
    if mSinks is None:
        return None
    return cute.make_tensor(cute.make_rmem_tensor(1, Float32).iterator, cute.make_layout(rows, stride=0))


@cute.jit
def read_sink(mSinks: cute.Tensor | None, head: Int32, sinks: cute.Tensor | None):
    """Fill the registers of row_sinks, unless there are none."""
    if const_expr(mSinks is not None):
        sinks[0] = mSinks[head].to(Float32) * LOG2E
