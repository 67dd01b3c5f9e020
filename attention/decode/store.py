"""Decode: store packed rows, which belong to several heads, to the result or to one split; read their sinks."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from ..forward.mask import LOG2E
from ..forward.store_o import store_partial, store_rows


def packed(tensor: cute.Tensor, tile, qhead_per_kvhead: Int32) -> cute.Tensor:
    """(B, H, Sq, ..) as the ((g, Sq), ..) of a packing.DecodeTile's heads."""
    one = tensor[tile.b, None, None, None] if len(tensor.shape) == 4 else tensor[tile.b, None, None]
    (_, rows, *shape), (head, row, *stride) = one.shape, one.stride
    layout = cute.make_layout(((qhead_per_kvhead, rows), *shape), stride=((head, row), *stride))
    return cute.make_tensor(one.iterator + Int64(tile.h_kv * qhead_per_kvhead) * head, layout)


@cute.jit
def read_sinks(mSinks: cute.Tensor | None, tile, qhead_per_kvhead: Int32, row: Int32) -> cute.Tensor | None:
    """Sinks (2,) of a thread's packed rows `row` and `row` + 8, times log2(e); None without sinks (H,)."""
    sinks = None
    if const_expr(mSinks is not None):
        sinks = cute.make_rmem_tensor(2, Float32)
        for r in range_constexpr(2):
            head = tile.h_kv * qhead_per_kvhead + (row + 8 * r) % qhead_per_kvhead
            sinks[r] = mSinks[head].to(Float32) * LOG2E
    return sinks


@cute.jit
def store_tile(
    split: cutlass.Constexpr,  # True for split-KV
    acc_O: cute.Tensor,  # ((2, 2), 1, Dv / 8)
    lse: cute.Tensor,  # (2,)
    mO: cute.Tensor,  # (B, H, Sq, Dv)
    mLSE: cute.Tensor | None,  # (B, H, Sq)
    mPartO: cute.Tensor | None,  # (splits, B, H, Sq, Dv)
    mPartLSE: cute.Tensor | None,  # (splits, B, H, Sq)
    tile,
    qhead_per_kvhead: Int32,
    row: Int32,  # of the thread's first row, packed
    rows: Int32,  # packed
):
    """Store a thread's two rows, `row` and `row` + 8, if they are below `rows`."""
    if const_expr(split):
        store_partial(acc_O, packed(mPartO[tile.split, None, None, None, None], tile, qhead_per_kvhead), row, rows)
        store_lse(mPartLSE[tile.split, None, None, None], lse, tile, qhead_per_kvhead, row, rows)
    else:
        store_rows(acc_O, packed(mO, tile, qhead_per_kvhead), row, rows)
        if const_expr(mLSE is not None):
            store_lse(mLSE, lse, tile, qhead_per_kvhead, row, rows)


@cute.jit
def store_lse(mLSE: cute.Tensor, lse: cute.Tensor, tile, qhead_per_kvhead: Int32, row: Int32, rows: Int32):
    """Store LSE to (B, H, Sq)."""
    places = packed(mLSE, tile, qhead_per_kvhead)
    if cute.arch.lane_idx() % 4 == 0:
        for r in range_constexpr(2):
            if row + 8 * r < rows:
                places[row + 8 * r] = lse[r]
