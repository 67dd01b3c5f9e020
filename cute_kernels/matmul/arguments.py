"""Fake arguments that the GEMM functions are compiled with."""

from collections.abc import Callable

from ..runtime.fake import fake_stream, fake_tensor
from .config import GemmFacts


def matrix(facts: GemmFacts, operand: int):
    """The fake of a (0), b (1) or d (2): a torch matrix or batch."""
    dtype = facts.out_dtype if operand == 2 else facts.dtype
    return fake_tensor(dtype, facts.ranks[operand], contiguous_mode(facts, operand), facts.aligns[operand])


def contiguous_mode(facts: GemmFacts, operand: int, major: str | None = None) -> int | None:
    """Mode of the torch tensor that has stride 1, given its major mode in the kernel's terms; None if any has."""
    major, rank = major or facts.majors[operand], facts.ranks[operand]
    # The major that names the last mode of the torch tensor: a is (M, K), b (K, N) and d (M, N), or with
    # `transposed` b is (N, K) and d (N, M).
    last = ("k", "k" if facts.transposed else "n", "m" if facts.transposed else "n")[operand]
    return None if major == "any" else rank - 1 if major == last else rank - 2


def epilogue_args(facts: GemmFacts) -> tuple:
    """Fakes of (bias, residual, z, alpha, beta); None for a term that the epilogue does not have."""
    from cutlass import Float32

    spec = facts.epilogue
    bias = None
    if spec.bias and spec.bias_dtype:
        bias = fake_tensor(spec.bias_dtype, 2, 1, 1) if spec.bias_items else fake_tensor(spec.bias_dtype, 1, 0, 1)
    residual = None
    if spec.residual:
        residual = fake_tensor(facts.out_dtype, facts.ranks[2], contiguous_mode(facts, 2, spec.residual), 1)
    z = matrix(facts, 2) if spec.stores_z else None
    return bias, residual, z, Float32(1.0), Float32(1.0)


def scale_args(facts: GemmFacts) -> tuple:
    """Fakes of (scale_a, scale_b), each (1 or L, 1 or its extent) FP32; None for one that the epilogue does not have.

    Block scales are (L, M, K / 128) and (L, N / 128, K / 128), with any strides.
    """
    made: dict[str | None, Callable] = {None: lambda: None}
    made |= dict.fromkeys(("1x128", "128x128"), lambda: fake_tensor("float32", 3, None, 1))
    kinds = facts.epilogue.scale_m, facts.epilogue.scale_n
    return tuple(made.get(kind, lambda: fake_tensor("float32", 2, 1, 1))() for kind in kinds)


def narrow_args(facts: GemmFacts) -> tuple:
    """Fakes of (scale_out, amax) of an FP8 D, each (1,) FP32; None for one that the epilogue does not have."""
    terms = facts.epilogue.scale_out, facts.epilogue.amax
    return tuple(fake_tensor("float32", 1, 0, 1) if there else None for there in terms)


def launch_args(facts: GemmFacts) -> tuple:
    """Fakes of (group, max_ctas, stream), None as in GemmFacts.counts."""
    from cutlass import Int32

    return *facts.counts(Int32(1), Int32(1)), fake_stream()


def dense_args(facts: GemmFacts) -> tuple:
    """Fakes of all arguments of dense.DenseGemm, of dense.ScaledGemm if operands have scales, or of dense.NarrowGemm
    if D is FP8."""
    operands = (matrix(facts, i) for i in range(3))
    scales = scale_args(facts) if facts.epilogue.scales_operands or facts.narrow else ()
    scales += narrow_args(facts) if facts.narrow else ()
    return *operands, *scales, *epilogue_args(facts), *launch_args(facts)
