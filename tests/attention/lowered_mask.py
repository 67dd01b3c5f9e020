"""Element masks as kernels compute them, lowered operation by operation, but compiled for the CPU.

A function of CuTe DSL without a kernel runs on the host: what the compiler makes of a mask is tested without a GPU. The
loops below are those of attention/forward/mask.py, over the columns of a tile, and of attention/backward/mask.py, over
its rows, with the same indices and the same values shared in a tile.
"""

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32, const_expr, range_constexpr
from cutlass.base_dsl.common import DSLUserCodeError
from cutlass.cute.runtime import from_dlpack

from attention.masks.element_mask import KV_INPUT, Q_INPUT, element_mask
from cute_kernels.traced.indices import InTile, Shared
from cute_kernels.traced.lower import lower

SIDE = 64  # of a tile; a thread has 4 pairs of every 8 indices


@cute.jit
def fill(out: cute.Tensor, tensors: tuple | None, mask: cutlass.Constexpr, by_rows: cutlass.Constexpr[bool]):
    """out[b, h, q, kv] = mask(b, h, q, kv), as bytes: a tile's columns share values, or its rows."""
    batch, heads, rows, columns = out.shape
    along, across = (rows, columns) if const_expr(by_rows) else (columns, rows)
    for b in cutlass.range(batch, unroll=1):
        for h in cutlass.range(heads, unroll=1):
            for other in cutlass.range(across, unroll=1):
                for part in cutlass.range(cute.ceil_div(along, SIDE) * 4, unroll=1):
                    first, lane = part // 4 * SIDE, part % 4
                    thread(out, tensors, mask, by_rows, b, h, other, first, lane * 2, along)


@cute.jit
def thread(
    out: cute.Tensor,
    tensors: tuple | None,
    mask: cutlass.Constexpr,
    by_rows: cutlass.Constexpr[bool],
    b: Int32,
    h: Int32,
    other: Int32,
    first: Int32,
    low: Int32,
    end: Int32,
):
    """The elements of one thread in a tile that begins at `first`."""
    changing = const_expr(Q_INPUT if by_rows else KV_INPUT)
    shared = Shared(changing)
    for i in range_constexpr(SIDE // 4):
        index = InTile(first, SIDE, low, const_expr(i // 2 * 8 + i % 2))
        at = cutlass.min(index.index, end - 1)
        place = at if const_expr(mask.indexes(changing)) else index
        pair = (place, other) if const_expr(by_rows) else (other, place)
        seen = lower(mask.program, [b, h, *pair], tensors, shared)
        if index.index < end:
            q, kv = (at, other) if const_expr(by_rows) else (other, at)
            out[b, h, q, kv] = cutlass.Uint8(seen)


def lowered(mask_mod, batch: int, heads: int, rows: int, columns: int, by_rows: bool) -> torch.Tensor:
    """mask_mod of all elements, (batch, heads, rows, columns) bool."""
    mask, reads = element_mask(mask_mod, torch.device("cpu"))
    tensors = tuple(from_dlpack(t) if isinstance(t, torch.Tensor) else t for t in reads)
    out = torch.full((batch, heads, rows, columns), 2, dtype=torch.uint8)
    try:
        fill(from_dlpack(out), tensors or None, mask, by_rows)
    except DSLUserCodeError as error:
        if "__truncsfbf2" not in str(error):
            raise
        pytest.skip("this CPU has no conversion to BF16, nor has the runtime library")
    assert out.max() < 2
    return out.bool()
