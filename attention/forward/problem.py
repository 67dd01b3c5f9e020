"""Problems of the forward kernels: dense or packed sequences, with a window or a block mask, on both paths."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from ..seqlen import DenseSeqlens, PackedSeqlens
from .block_source import with_blocks
from .config import FlashFacts
from .gather.source import with_unions
from .kv_tiles import WindowSource
from .scheduler import PackedScheduler, QueryScheduler


@dataclass(frozen=True)
class Problem:
    """Tensors with a batch mode, the tile scheduler, the sequence lengths, and the source of KV tiles."""

    mQ: cute.Tensor  # (B, H, Sq, D)
    mK: cute.Tensor  # (B, Hkv, Sk, D)
    mV: cute.Tensor  # (B, Hkv, Sk, Dv)
    mO: cute.Tensor  # (B, H, Sq, Dv)
    mLSE: cute.Tensor | None  # (B, H, Sq)
    scheduler: Any  # scheduler.QueryScheduler or PackedScheduler
    seqlens: Any  # seqlen.DenseSeqlens or PackedSeqlens
    source: Any  # kv_tiles.WindowSource, block_source.BlockSource or gather.source.UnionSource


def problem_of(
    facts: FlashFacts,
    tensors: tuple,  # Q, K, V, O, LSE or None: see the kernels' __call__
    cu_seqlens: tuple,  # (cu_q, cu_k), (B + 1,) each; of packed sequences, else None
    blocks: tuple | None,  # block_sparse.blocks_of, or selected.gather.tables; None without a block mask
    left: Int32 | None,  # bounds of the window; None with a block mask
    right: Int32 | None,
    offsets: tuple | None,  # (q_offset, k_offset) with FlashFacts.offsets
) -> Problem:
    mQ, mK, *_ = tensors
    if facts.packed:
        (rows, heads, _), (cols, heads_kv, _) = mQ.shape, mK.shape
        seqlens = PackedSeqlens(*cu_seqlens, rows, cols)
        scheduler = PackedScheduler.at_most(seqlens, facts.config.tile_m, heads, heads // heads_kv)
        *tensors, mLSE = tensors
        tensors = [one_item(t, (1, 0, 2)) for t in tensors]
        tensors.append(None if mLSE is None else one_item(mLSE, (0, 1)))
    else:
        seqlens = DenseSeqlens(mQ.shape[2], mK.shape[2], *(offsets or ()))
        scheduler = QueryScheduler.of(facts, mQ.shape, mK.shape)
    if facts.gathers:
        scheduler, source = with_unions(facts, mQ, mK, blocks)
    elif facts.blocks is not None:
        scheduler, source = with_blocks(facts, scheduler, blocks)
    else:
        source = WindowSource(facts.window, facts.config.tile_m, facts.config.tile_n, left, right)
    return Problem(*tensors, scheduler, seqlens, source)


def one_item(tensor: cute.Tensor, modes: tuple) -> cute.Tensor:
    """The tensor with its modes permuted and a batch mode of extent 1 in front."""
    shape, stride = (tuple(v[i] for i in modes) for v in (tensor.shape, tensor.stride))
    return cute.make_tensor(tensor.iterator, cute.make_layout((1, *shape), stride=(0, *stride)))
