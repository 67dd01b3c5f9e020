"""Fake arguments that the backward kernels are compiled with."""

import math

from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.tile.element import element_of

from ..forward.arguments import function_args, offsets_args, score_args, sinks_args
from .config import PREPARE_WARPS as WARPS
from .config import BackwardFacts, CombineFacts, ConvertFacts, PrepareFacts


def heads(facts, width: int, dtype: str | None = None):
    """A fake of Q, K, V, O or their gradients: (B, H, S, width), packed (total, H, width)."""
    import cutlass.cute as cute

    rank = 3 if facts.packed else 4
    dtype, shape = dtype or facts.dtype, (*(cute.sym_int32() for _ in range(rank - 1)), width)
    return fake_tensor(dtype, rank, rank - 1, element_of(dtype).vector, shape)


def cu_seqlens(facts):
    return fake_tensor("int32", 1, 0, 1) if facts.packed else None


def tiles(*extents: int):
    """A fake of an array of query tiles (tiles, *extents), contiguous FP32."""
    import cutlass.cute as cute
    from cutlass import Float32
    from cutlass.cute.runtime import make_fake_tensor

    stride = tuple(math.prod(extents[i:]) for i in range(len(extents) + 1))
    return make_fake_tensor(Float32, (cute.sym_int32(), *extents), stride=stride, assumed_align=16)


def tensor_like(tensor: tuple):
    """A fake of the FP32 gradient of a captured tensor, given as in ElementMask.tensors: (dtype, rank, mode of stride
    1)."""
    _, rank, _ = tensor
    return fake_tensor("float32", rank, rank - 1, 1)


def prepare_args(facts: PrepareFacts) -> tuple:
    """Fakes of all arguments of Prepare."""
    rank = 2 if facts.packed else 3
    lse = fake_tensor("float32", rank, rank - 1, 1)
    lse_gradient = fake_tensor("float32", rank, rank - 1, 1) if facts.lse_gradient else None
    o, do = (heads(facts, facts.head_dim_v) for _ in range(2))
    arrays = tiles(2, facts.tile_m), tiles(facts.tile_m * facts.head_dim)
    sinks = sinks_args(facts)[0], tiles(WARPS) if facts.sinks else None
    turns = fake_tensor("int32", 2, 1, 1) if facts.parts else None
    return o, do, lse, lse_gradient, cu_seqlens(facts), *arrays, turns, *sinks, fake_stream()


def convert_args(facts: ConvertFacts) -> tuple:
    """Fakes of all arguments of Convert."""
    from cutlass import Float32

    dq = tiles(facts.config.tile_m * facts.head_dim)
    return dq, cu_seqlens(facts), heads(facts, facts.head_dim, facts.grad_dtype), Float32(1.0), fake_stream()


def combine_args(facts: CombineFacts) -> tuple:
    """Fakes of all arguments of CombineKv."""
    widths = facts.head_dim, facts.head_dim_v
    return *(heads(facts, width, dtype) for dtype in ("float32", facts.dtype) for width in widths), fake_stream()


def backward_args(facts: BackwardFacts) -> tuple:
    """Fakes of all arguments of FlashBackwardSm90 or FlashBackwardSm80."""
    from cutlass import Float32, Int32

    dim, dim_v = facts.head_dim, facts.head_dim_v
    tensors = [heads(facts, width) for width in (dim, dim, dim_v, dim_v)]
    tensors += [heads(facts, width, "float32" if facts.shared_kv else facts.grad_dtype) for width in (dim, dim_v)]
    arrays = tiles(2, facts.config.tile_m), tiles(facts.config.tile_m * dim)
    blocks = None
    if facts.blocks is not None:
        ranks = 3, 4, 3, 4, 4 if facts.deterministic else 1, *[1] * facts.ranges
        lists = (fake_tensor("int32", n, n - 1, 1) for n in ranks)
        blocks = (*lists, *function_args(facts.blocks.mask))
    score_tensors = () if facts.score is None else facts.score.tensors
    sums = tuple(tensor_like(score_tensors[slot]) for slot in facts.score_sums) or None
    score = score_args(facts.score), sums
    bounds = (None, None) if facts.blocks else (Int32(0), Int32(0))
    scalars = Float32(1.0), Float32(0.0), Float32(1.0), *bounds, *offsets_args(facts)
    turns: tuple = (fake_tensor("int32", 2, 1, 1) if facts.deterministic else None,)
    if facts.path == "sm_90":  # a persistent kernel
        turns = *turns, fake_tensor("int32", 1, 0, 1), Int32(1) if facts.split_heads else None
        scalars = *scalars, Int32(1)
    return *tensors, *arrays, *turns, cu_seqlens(facts), cu_seqlens(facts), blocks, *score, *scalars, fake_stream()
