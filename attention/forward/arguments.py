"""Fake arguments that the forward kernels are compiled with."""

from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.tile.element import element_of

from .config import FlashFacts, Float8Facts, ValuesFacts


def tensor_args(facts: FlashFacts) -> tuple:
    """Fakes of Q, K, V, O and LSE."""
    import cutlass.cute as cute

    rank = 3 if facts.packed else 4

    def heads(width: int, dtype: str = facts.dtype):
        align = element_of(dtype).vector
        return fake_tensor(dtype, rank, rank - 1, align, (*(cute.sym_int32() for _ in range(rank - 1)), width))

    cache = getattr(facts, "cache", None) or facts.dtype
    tensors: tuple = heads(facts.head_dim), heads(facts.head_dim, cache), heads(facts.head_dim_v, cache)
    if isinstance(facts, Float8Facts):
        size = facts.head_dim_v * facts.config.tile_n
        values = transposed_values(facts.dtype, size) if facts.fast else heads(facts.head_dim_v, facts.loaded_v)
        tensors = *tensors[:2], values
    tensors += (heads(facts.head_dim_v, facts.stored_dtype),)
    return *tensors, fake_tensor("float32", rank - 1, rank - 2, 1) if facts.lse else None


def transposed_values(dtype: str, size: int):
    """Fake of V (B, Hkv, tiles, elements of a tile)."""
    import cutlass.cute as cute

    return fake_tensor(dtype, 4, 3, element_of(dtype).vector, (*(cute.sym_int32() for _ in range(3)), size))


def values_args(facts: ValuesFacts) -> tuple:
    """Fakes of all arguments of TransposeValues or ConvertValues."""
    import cutlass.cute as cute

    def heads(dtype: str, rank: int):
        shape = *(cute.sym_int32() for _ in range(rank - 1)), facts.head_dim
        return fake_tensor(dtype, rank, rank - 1, element_of(dtype).vector, shape)

    dtype, cu_seqlens = "float8_e4m3fn", fake_tensor("int32", 1, 0, 1) if facts.packed else None
    to = transposed_values(dtype, facts.head_dim * facts.tile) if facts.tile else heads("float16", 4)
    return heads(dtype, 3 if facts.packed else 4), to, cu_seqlens, fake_stream()


def scalar_args(facts: FlashFacts) -> tuple:
    """Fakes of scale_log2, softcap and the window bounds; the bounds are None with a block mask."""
    from cutlass import Float32, Int32

    bounds = (None, None) if facts.blocks else (Int32(0), Int32(0))
    return Float32(1.0), Float32(0.0), *bounds


def offsets_args(facts) -> tuple:
    """Fake of (q_offset, k_offset); None for facts without offsets."""
    from cutlass import Int32

    return ((Int32(0), Int32(0)) if facts.offsets else None,)


def sinks_args(facts) -> tuple:
    """Fake of the sinks, with any stride; None without sinks."""
    return (fake_tensor(facts.sinks, 1, None, 1) if facts.sinks else None,)


def function_args(function) -> tuple:
    """Fakes of the inputs of a mask_mod or score_mod: tensors, then numbers. Empty if `function` is None."""
    from cutlass import Float32, Int32, Int64

    if function is None:
        return ()
    tensors = (fake_tensor(dtype, rank, last, 1) for dtype, rank, last in function.tensors)
    scalars = {"float32": Float32(0.0), "int32": Int32(0), "int64": Int64(0)}
    return *tensors, *(scalars[argument.dtype] for argument in function.program.arguments)


def score_args(score) -> tuple | None:
    """Fakes of the inputs of a score_mod; None if it has none."""
    return function_args(score) or None


def forward_args(facts: FlashFacts) -> tuple:
    """Fakes of all arguments of FlashForwardSm90 or FlashForwardSm80."""
    from cutlass import Int32

    cu_seqlens, blocks = (None, None), None
    if facts.packed:
        cu_seqlens = tuple(fake_tensor("int32", 1, 0, 1) for _ in range(2))
    if facts.blocks is not None:
        index, table = (fake_tensor("int32", n, n - 1, 1) for n in (4, 2))
        blocks = (index, Int32(1), table, *function_args(facts.blocks.mask))
    if facts.gathers:
        tables = (fake_tensor("int32", n, n - 1, 1) for n in (4, 3, 4))
        blocks = (*tables, Int32(1), Int32(1))
    common = *tensor_args(facts), *sinks_args(facts), *cu_seqlens, blocks, score_args(facts.score)
    if isinstance(facts, Float8Facts):
        descales = facts.q_descale, facts.k_descale, facts.v_descale
        common += tuple(fake_tensor("float32", 2 + facts.tokens, None, 1) if scale else None for scale in descales)
    if facts.path == "sm_80":
        return *common, *scalar_args(facts), *offsets_args(facts), fake_stream()
    counter = fake_tensor("int32", 1, 0, 1) if facts.config.dynamic else None
    return *common, counter, *scalar_args(facts), *offsets_args(facts), Int32(1), fake_stream()
