"""Fake arguments that the GEMM functions are compiled with."""

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


def term_args(facts: GemmFacts, **fakes) -> tuple:
    """Fakes of what a compiled function has after its operands, see EpilogueArgs.of. fakes: in place of the usual."""
    from cutlass import Float32, Int32

    spec = facts.epilogue
    fakes = {
        "residual": lambda: fake_tensor(facts.out_dtype, facts.ranks[2], contiguous_mode(facts, 2, spec.residual), 1),
        "bias": lambda: fake_tensor(str(spec.bias_dtype), 1 + spec.bias_items, int(spec.bias_items), 1),
        "scale_m": lambda: scale(spec.scale_m),
        "scale_n": lambda: scale(spec.scale_n),
        "scale_out": lambda: fake_tensor("float32", 1, 0, 1),
        "amax": lambda: fake_tensor("float32", 1, 0, 1),
        "z": lambda: matrix(facts, 2),
    } | fakes
    tensors = (fakes[name]() for name in facts.epilogue_tensors)
    return *tensors, Float32(1.0), Float32(1.0), *facts.counts(Int32(1), Int32(1)), fake_stream()


def scale(kind: str | None):
    """Fake of an operand's scales, (1 or L, 1 or its extent) FP32; block scales are (L, M, K / 128) and
    (L, N / 128, K / 128), with any strides."""
    return fake_tensor("float32", 3, None, 1) if kind in ("1x128", "128x128") else fake_tensor("float32", 2, 1, 1)


def dense_args(facts: GemmFacts) -> tuple:
    """Fakes of all arguments of dense.DenseGemm."""
    return *(matrix(facts, i) for i in range(3)), *term_args(facts)
