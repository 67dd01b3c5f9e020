"""Every pair of dtypes, of every op: it works within bounds, or it raises before any launch with what would work."""

import functools
import itertools

import pytest
import torch

from attention import attention
from cute_kernels import Sparse24, explain, gemm
from cute_kernels.arch import ARCHS
from cute_kernels.testing.reference import assert_as_good_as_torch
from sparse_collective import BsrMatrix, bsr_gated_linear, bsr_grouped_linear, bsr_linear, bsr_matmul, sddmm

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OTHERS = (torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
DTYPES = (*FLOATS, *FLOAT8, *OTHERS, torch.complex64)
# ops with FP8 operands
EXPERT_IDS = torch.tensor([1, 0], dtype=torch.int32)
NARROW = ("gemm", "bsr_matmul", "bsr_linear", "bsr_grouped_linear", "bsr_gated_linear")
OPS = {op.__name__: op for op in (gemm, bsr_matmul, bsr_linear, bsr_grouped_linear, bsr_gated_linear, sddmm, attention)}
ON_ARCHS = pytest.mark.parametrize("arch", ARCHS)


@functools.cache
def numbers(dtype, *shape: int) -> torch.Tensor:
    """Small integers, which every dtype holds; powers of two in one without a sign."""
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype in (torch.uint8, torch.bool, torch.float8_e8m0fnu):
        return torch.randint(1, 3, shape, generator=generator).float().to(dtype)
    return torch.randint(-2, 3, shape, generator=generator).float().to(dtype)


@functools.cache
def matrix(dtype, batch: bool = False) -> BsrMatrix:
    """128x128 with two of four blocks."""
    crow, col = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
    values = numbers(dtype, 2, 64, 64)
    if batch:
        return BsrMatrix(crow, col, torch.stack([values, values]), (2, 128, 128))
    return BsrMatrix(crow, col, values, (128, 128))


def operands(name: str, first, second) -> tuple:
    """For an op: W, a or q of the first dtype, what it is multiplied by of the second."""
    if name == "gemm":
        return numbers(first, 64, 128), numbers(second, 96, 128).t()
    if name == "bsr_matmul":
        return matrix(first), numbers(second, 128, 64)
    if name == "sddmm":
        return numbers(first, 128, 64), numbers(second, 64, 128), matrix(torch.bfloat16)
    if name == "attention":
        return numbers(first, 1, 2, 20, 64), numbers(second, 1, 2, 24, 64), numbers(second, 1, 2, 24, 64)
    if name == "bsr_grouped_linear":
        return numbers(second, 128, 128), matrix(first, True)
    return numbers(second, 64, 128), matrix(first)


def terms_of(name: str) -> dict:
    """Arguments that an op needs besides its operands."""
    return {"expert_ids": EXPERT_IDS} if name == "bsr_grouped_linear" else {}


def works(name: str, first, second, kernel: bool) -> bool:
    """As docs/howto/epilogues.md has it, but for what an architecture lacks."""
    sixteen = FLOATS[:2]
    if name == "attention" and second in FLOAT8:  # k and v
        return first in (sixteen if kernel else FLOATS) or first == second == torch.float8_e4m3fn
    if first in FLOAT8:
        return first == second and name in NARROW
    return first == second and first in (sixteen if kernel else FLOATS)


def wide(name: str, args: tuple, dtype) -> torch.Tensor:
    """A product in torch, of operands made `dtype`."""
    a, b = (t.to_dense().to(dtype) if isinstance(t, BsrMatrix) else t.to(dtype) for t in args[:2])
    if name == "bsr_grouped_linear":
        return torch.einsum("gtk,gmk->gtm", a.unflatten(0, (2, 64)), b[EXPERT_IDS.long()]).flatten(0, 1)
    if name == "bsr_linear":
        return a @ b.mT
    if name == "bsr_gated_linear":
        gate, up = (a @ b.mT).unflatten(-1, (-1, 2, 64)).unbind(-2)
        return (torch.nn.functional.silu(gate) * up).flatten(-2)
    if name == "attention":
        v = args[2].to(dtype)
        return torch.softmax(a @ b.mT / 8.0, -1) @ v
    if name == "sddmm":
        pattern = args[2]
        tiles = (a @ b).unflatten(0, (2, 64)).unflatten(-1, (2, 64))  # (block row, row, block column, column)
        return torch.stack([tiles[0, :, 1], tiles[1, :, 0]]).reshape(pattern.values.shape)
    return a @ b


def assert_says_what_would_work(error: Exception, first, second) -> None:
    """It names one of the dtypes that were given, and one that is multiplied."""
    text = str(error)
    assert any(str(dtype).removeprefix("torch.") in text for dtype in (first, second)), text
    advice = "cast", "dequantize", "use one of", "it is torch.bfloat16 or", "serves it", "give q"
    assert any(words in text for words in advice), text
    rest = text.replace(f"is {first};", "").replace(f"is {second};", "")
    assert any(str(dtype) in rest for dtype in (*FLOATS, *FLOAT8)), text


@pytest.mark.parametrize("name", OPS)
def test_all_pairs_on_the_cpu(name):
    for first, second in itertools.product(DTYPES, DTYPES):
        expected = works(name, first, second, kernel=False)
        try:
            args = operands(name, first, second)
            result = OPS[name](*args, **terms_of(name))
        except TypeError as error:
            assert not expected, (first, second, error)
            assert_says_what_would_work(error, first, second)
            continue
        assert expected, (first, second)
        default = torch.bfloat16 if first in FLOAT8 else first
        assert result.dtype == default, (first, second)
        at_least = torch.promote_types(default, torch.float32)
        exact, by_torch = wide(name, args, torch.float64), wide(name, args, at_least).to(default)
        assert_as_good_as_torch(result, exact, by_torch, k=args[0].shape[-1])


@ON_ARCHS
@pytest.mark.parametrize("name", OPS)
def test_all_pairs_on_a_gpu(name, arch):
    """As they are planned, which is before any launch."""
    for first, second in itertools.product(DTYPES, DTYPES):
        expected = works(name, first, second, kernel=True)
        if name == "gemm" and first in FLOAT8 and not ARCHS[arch].float8:
            expected = False
        if name == "attention" and first in FLOAT8 and arch != "sm_90":
            expected = False
        try:
            plan = explain(OPS[name], *operands(name, first, second), arch=arch, **terms_of(name))
        except (TypeError, ValueError) as error:
            assert not expected, (first, second, error)
            assert_says_what_would_work(error, first, second)
            continue
        assert expected and (plan.facts is not None or plan.unfused), (first, second)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            torch.bfloat16,
            torch.float8_e4m3fn,
            r"dequantize b with \(b.float\(\) \* scale\).to\(torch.bfloat16\), or quantize a with cute_kernels.qu",
        ),
        (torch.float8_e5m2, torch.float16, r"dequantize a with \(a.float\(\) \* scale\).to\(torch.float16\)"),
        (torch.float8_e4m3fn, torch.float8_e5m2, r"dequantize both with \(a.float.* and \(b.float.* or quantize both"),
        (torch.bfloat16, torch.float16, r"b is torch.float16 but a is torch.bfloat16; cast one of them: b.to"),
        (torch.bfloat16, torch.int8, "b is torch.int8; the kernels support torch.bfloat16 and torch.float16"),
        (
            torch.int8,
            torch.int8,
            "a is torch.int8; the kernels support torch.bfloat16 and torch.float16 .cast with .to",
        ),
        (torch.complex64, torch.complex64, "a is torch.complex64.*multiply real and imaginary parts separately"),
        (torch.float32, torch.float32, "a is torch.float32.*cast with .to.., or use torch.matmul"),
        (torch.bfloat16, torch.float32, "b is torch.float32.*cast with .to.., or use torch.matmul"),
    ],
)
def test_what_a_refusal_says(first, second, words):
    with pytest.raises(TypeError, match=words):
        explain(gemm, *operands("gemm", first, second), arch="sm_90")


def test_structured_sparsity():
    W = numbers(torch.float32, 64, 128).clone()
    W.view(64, 32, 4)[..., 2:] = 0
    for first, second in itertools.product(DTYPES, DTYPES):
        try:
            sparse = Sparse24.from_dense(W.to(first))
            plan = explain(gemm, sparse, numbers(second, 128, 96), arch="sm_90")
        except TypeError as error:
            assert first != second or first not in (*FLOATS[:2], *FLOAT8), error
            assert_says_what_would_work(error, first, second)
            continue
        assert plan.facts is not None and first == second and first in (*FLOATS[:2], *FLOAT8)


@pytest.mark.parametrize("second", DTYPES)
def test_k_and_v_of_two_dtypes(second):
    q, k, v = (numbers(dtype, 1, 2, 20, 64) for dtype in (torch.bfloat16, torch.float8_e4m3fn, second))
    for args in ((q, k, v), (q, v, k)):
        if second == k.dtype:
            assert attention(*args).dtype == q.dtype
            continue
        with pytest.raises(TypeError, match=f"{second}"):
            attention(*args)
