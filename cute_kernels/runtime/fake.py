"""Tensors to compile from, made of facts: element types, ranks, contiguous modes and alignments, never of extents."""

from ..config import GemmFacts
from ..dtypes import cutlass_dtype


def fake_tensor(dtype: str, rank: int, contiguous: int | None, align: int, shape: tuple | None = None):
    """A tensor of unknown extents and strides.

    `contiguous` is the mode of stride 1 (None: no mode is known to be), `align` what all other strides, and the
    base pointer, are multiples of, in elements; the compiled function checks both when it is called.
    """
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    element = cutlass_dtype(dtype)
    stride = tuple(1 if i == contiguous else cute.sym_int64(divisibility=align) for i in range(rank))
    shape = shape or tuple(cute.sym_int32() for _ in range(rank))
    return make_fake_tensor(element, shape, stride=stride, assumed_align=align * element.width // 8)


def matrix(facts: GemmFacts, operand: int):
    """The fake of a (0), b (1) or d (2): a torch matrix or batch."""
    dtype = facts.out_dtype if operand == 2 else facts.dtype
    return fake_tensor(dtype, facts.ranks[operand], contiguous_mode(facts, operand), facts.aligns[operand])


def contiguous_mode(facts: GemmFacts, operand: int, major: str | None = None) -> int | None:
    """Which mode of the torch tensor has stride 1, given its major as the kernel names it."""
    major, rank = major or facts.majors[operand], facts.ranks[operand]
    # The major that names the last mode of the torch tensor: a is (M, K), b (K, N) and d (M, N), or with
    # `transposed` b is (N, K) and d (N, M).
    last = ("k", "k" if facts.transposed else "n", "m" if facts.transposed else "n")[operand]
    return None if major == "any" else rank - 1 if major == last else rank - 2


def epilogue_args(facts: GemmFacts) -> tuple:
    """Fakes of (bias, residual, alpha, beta); a term that the epilogue lacks is None."""
    from cutlass import Float32

    spec = facts.epilogue
    bias = None
    if spec.bias:
        bias = fake_tensor(spec.bias_dtype, 2, 1, 1) if spec.bias_items else fake_tensor(spec.bias_dtype, 1, 0, 1)
    residual = None
    if spec.residual:
        residual = fake_tensor(facts.out_dtype, facts.ranks[2], contiguous_mode(facts, 2, spec.residual), 1)
    return bias, residual, Float32(1.0), Float32(1.0)


def launch_args() -> tuple:
    """Fakes of (group, max_ctas, stream); the stream is the one torch has current at the call."""
    from cutlass import Int32
    from cutlass.cute.runtime import make_fake_stream

    return Int32(1), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True)


def dense_args(facts: GemmFacts) -> tuple:
    """Fakes of all arguments of dense.DenseGemm."""
    operands = (matrix(facts, i) for i in range(3))
    return *operands, *epilogue_args(facts), *launch_args()


def sparse_args(facts: GemmFacts) -> tuple:
    """Fakes of all arguments of sparse_collective's SparseCollective, PairedCollective or SweepCollective."""
    import cutlass.cute as cute

    block = facts.block
    rank = 2 if block.batch == "patterns" else 1
    crow, col = fake_tensor(block.index_dtype, rank, rank - 1, 1), fake_tensor(block.index_dtype, 1, 0, 1)
    outer = [cute.sym_int32() for _ in range(2 if block.batch == "values" else 1)]
    values = fake_tensor(facts.dtype, len(outer) + 2, len(outer) + 1, 8, (*outer, block.bm, block.bk))
    if facts.config.sweep:
        counts, order = (fake_tensor("int32", 1, 0, 1) for _ in range(2))
        tables = counts, fake_tensor("int32", 2, 1, 1), fake_tensor("int32", 3, 2, 4), order
        return crow, *tables, values, matrix(facts, 1), matrix(facts, 2), *epilogue_args(facts), *launch_args()
    order = fake_tensor("int32", 2, 1, 2) if facts.ordered else None
    if facts.config.pairs:
        tables = (fake_tensor("int32", 2, 1, 1) for _ in range(2))
        return crow, *tables, order, values, matrix(facts, 1), matrix(facts, 2), *epilogue_args(facts), *launch_args()
    groups = fake_tensor("int32", 1, 0, 1) if block.run else None
    tensors = crow, col, order, groups, values, matrix(facts, 1), matrix(facts, 2)
    return *tensors, *epilogue_args(facts), *launch_args()
