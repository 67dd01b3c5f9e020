"""The calls that errors name: each works, and gives the right numbers."""

import pytest
import torch

from attention import BlockMask, attention, block_sparse_attention
from cute_kernels import Sparse24, gemm, prune_2_4, quantize
from cute_kernels.testing.reference import normal
from sparse_collective import BsrMatrix, bsr_gated_linear, bsr_grouped_linear, bsr_linear, bsr_matmul, random_bsr, sddmm

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def near(found, want, slack=0.02):
    """Relative to the size of all numbers: factors that are applied twice, or not at all, err by more than half."""
    error = (found.double() - want.double()).norm() / want.double().norm()
    assert found.shape == want.shape and error < slack, error.item()


class Case:
    """A refused call, the words of its error, and the calls that these name, with what they must give.

    All take the device. Scales are far from 1, so that a factor that is lost or doubled shows. kernel: only kernels
    refuse it.
    """

    def __init__(self, refused, words, *ways, want, slack=0.05, kernel=False):
        self.refused, self.words, self.ways, self.want, self.slack = refused, words, ways, want, slack
        self.kernel = kernel


def numbers(device):
    """Operands whose scales are about 1 / 50."""
    torch.manual_seed(0)
    a, b = 9 * normal(64, 128, device=device), 9 * normal(128, 64, device=device)
    return a, b, quantize(a, per="row"), quantize(b, per="tensor")


def sparse(device):
    W = random_bsr((128, 128), (64, 64), density=0.7, generator=torch.Generator().manual_seed(0)).to(device)
    torch.manual_seed(2)
    return W.with_values(9 * normal(*W.values.shape, device=device))


def experts(device):
    groups = torch.tensor([1, 0], dtype=torch.int32, device=device)
    return torch.full((128, 128), 3.0, dtype=BF16, device=device), BsrMatrix.stack([sparse(device)] * 2), groups


def qkv(device, D=64, dtype=BF16):
    torch.manual_seed(1)
    return tuple(normal(1, 2, 100, D, dtype=dtype, device=device) for _ in range(3))


def dense_attention(q, k, v, scale=None):
    return torch.softmax(q.double() @ k.double().mT * (scale or q.shape[-1] ** -0.5), -1) @ v.double()


def x_of(d):
    return numbers(d)[0]


def float8_kv(d, per="head"):
    q, k, v = qkv(d)
    return q, quantize(4 * k, per=per), quantize(4 * v, per=per), dense_attention(q, 4 * k, 4 * v)


def whole_mask(d):
    return BlockMask.from_blocks(torch.ones(1, 1, dtype=torch.bool, device=d), lengths=(100, 100))


def padded(t):
    return torch.nn.functional.pad(t, (0, 64 - t.shape[-1]))


def complex_product(a, b):
    re = gemm(a.real.to(BF16), b.real.to(BF16)).float() - gemm(a.imag.to(BF16), b.imag.to(BF16)).float()
    return re


CASES = {
    "gemm of BF16 and FP8": Case(
        lambda d: gemm(numbers(d)[0], numbers(d)[3][0]),
        r"dequantize b with \(b.float\(\) \* scale\).to\(torch.bfloat16\), or quantize a with cute_kernels.qu",
        lambda d: gemm(numbers(d)[0], (numbers(d)[3][0].float() * numbers(d)[3][1]).to(BF16)),
        lambda d: gemm(*(q[0] for q in (quantize(x_of(d)), numbers(d)[3])), scale_a=quantize(x_of(d))[1],
                       scale_b=numbers(d)[3][1]),
        want=lambda d: numbers(d)[0].double() @ numbers(d)[1].double(),
    ),
    "gemm of two FP8 dtypes": Case(
        lambda d: gemm(numbers(d)[2][0], quantize(numbers(d)[1], dtype=torch.float8_e5m2)[0]),
        r"dequantize both with \(a.float\(\) \* scale\).to\(torch.bfloat16\) and \(b.float\(\) \* scale\).to",
        lambda d: gemm(*((q.float() * s).to(BF16) for q, s in (numbers(d)[2], numbers(d)[3]))),
        want=lambda d: numbers(d)[0].double() @ numbers(d)[1].double(),
    ),
    "FP8 W and BF16 x": Case(
        lambda d: bsr_linear(x_of(d), sparse(d).quantize()),
        r"dequantize W with W.to\(torch.bfloat16\), or quantize x with cute_kernels.quantize\(x\)",
        lambda d: bsr_linear(x_of(d), sparse(d).quantize().to(BF16)),
        lambda d: bsr_linear(quantize(x_of(d))[0], sparse(d).quantize(), scale_x=quantize(x_of(d))[1]),
        want=lambda d: x_of(d).double() @ sparse(d).to_dense().double().mT,
    ),
    "FP8 W and BF16 b": Case(
        lambda d: bsr_matmul(sparse(d).quantize(), numbers(d)[1]),
        r"dequantize W with W.to\(torch.bfloat16\)",
        lambda d: bsr_matmul(sparse(d).quantize().to(BF16), numbers(d)[1]),
        want=lambda d: sparse(d).to_dense().double() @ numbers(d)[1].double(),
    ),
    "BF16 W and FP8 x": Case(
        lambda d: bsr_linear(quantize(x_of(d))[0], sparse(d)),
        r"dequantize x with \(x.float\(\) \* scale\).to\(torch.bfloat16\), or quantize W with W.quantize\(\)",
        lambda d: bsr_linear((quantize(x_of(d))[0].float() * quantize(x_of(d))[1]).to(BF16), sparse(d)),
        lambda d: bsr_linear(quantize(x_of(d))[0], sparse(d).quantize(), scale_x=quantize(x_of(d))[1]),
        want=lambda d: x_of(d).double() @ sparse(d).to_dense().double().mT,
    ),
    "FP8 experts and BF16 x": Case(
        lambda d: bsr_grouped_linear(experts(d)[0], experts(d)[1].quantize(), expert_ids=experts(d)[2]),
        r"W.to\(torch.bfloat16\)",
        lambda d: bsr_grouped_linear(experts(d)[0], experts(d)[1].quantize().to(BF16), expert_ids=experts(d)[2]),
        want=lambda d: torch.full((128, 128), 3.0).double().to(d) @ sparse(d).to_dense().double().mT,
    ),
    "FP8 Bsr24 and BF16 x": Case(
        lambda d: bsr_linear(x_of(d), sparse(d).prune_2_4().quantize()),
        r"dequantize W with W.to\(torch.bfloat16\)",
        lambda d: bsr_linear(x_of(d), sparse(d).prune_2_4().quantize().to(BF16)),
        want=lambda d: x_of(d).double() @ sparse(d).prune_2_4().to_dense().double().mT,
    ),
    "sddmm of FP8": Case(
        lambda d: sddmm(quantize(numbers(d)[1])[0], numbers(d)[2][0], sparse(d)),
        r"dequantize it with \(a.float\(\) \* scale\).to\(torch.bfloat16\)",
        lambda d: sddmm((quantize(numbers(d)[1])[0].float() * quantize(numbers(d)[1])[1]).to(BF16), x_of(d), sparse(d)),
        want=lambda d: sddmm(numbers(d)[1].float().to(BF16), x_of(d), sparse(d)),
    ),
    "FP32 on a GPU": Case(
        lambda d: gemm(x_of(d).float(), numbers(d)[1].float()),
        'pass precision="tf32"',
        lambda d: gemm(x_of(d).float(), numbers(d)[1].float(), precision="tf32"),
        lambda d: gemm(x_of(d).float(), numbers(d)[1].float(), precision="3xtf32"),
        lambda d: gemm(x_of(d).float().to(BF16), numbers(d)[1]),
        want=lambda d: x_of(d).double() @ numbers(d)[1].double(), kernel=True,
    ),
    "complex operands": Case(
        lambda d: gemm(torch.complex(*[x_of(d).float()] * 2), torch.complex(*[numbers(d)[1].float()] * 2)),
        "multiply real and imaginary parts separately, cast with .to",
        lambda d: complex_product(torch.complex(x_of(d).float(), -x_of(d).float()),
                                  torch.complex(*[numbers(d)[1].float()] * 2)),
        want=lambda d: 2 * x_of(d).double() @ numbers(d)[1].double(),
    ),
    "use_fast_accum with block scales": Case(
        lambda d: bsr_linear(quantize(x_of(d))[0], sparse(d).quantize(), use_fast_accum=True),
        r'use W.float\(\).quantize\(per="tensor"\)',
        lambda d: bsr_linear(quantize(x_of(d))[0], sparse(d).quantize().float().quantize(per="tensor"),
                             scale_x=quantize(x_of(d))[1], use_fast_accum=True),
        want=lambda d: x_of(d).double() @ sparse(d).to_dense().double().mT,
    ),
    "from one FP8 dtype to another": Case(
        lambda d: sparse(d).quantize().to(torch.float8_e5m2),
        r"go by .float\(\).quantize\(torch.float8_e5m2\)",
        lambda d: sparse(d).quantize().float().quantize(torch.float8_e5m2).to_dense(),
        want=lambda d: sparse(d).to_dense(), slack=0.1,
    ),
    "FP8 to torch": Case(
        lambda d: sparse(d).quantize().to_torch(),
        r"convert W.float\(\), which is values \* scales",
        lambda d: sparse(d).quantize().float().to_torch().to_dense(),
        want=lambda d: sparse(d).to_dense(),
    ),
    "a transposed pattern": Case(
        lambda d: sddmm(numbers(d)[1], x_of(d), sparse(d).t()),
        r"pass its base, pattern.t\(\), and swap a.t\(\) and b.t\(\)",
        lambda d: sparse(d).with_values(sddmm(x_of(d).t(), numbers(d)[1].t(), sparse(d).t().t())).to_dense(),
        want=lambda d: (numbers(d)[1].double() @ x_of(d).double()).mT
        * sparse(d).with_values(torch.ones_like(sparse(d).values)).to_dense(),
    ),
    "b of 2:4 sparsity": Case(
        lambda d: gemm(numbers(d)[0], Sparse24.from_dense(prune_2_4(numbers(d)[1]))),
        r"multiply the transposes, gemm\(W, a.mT\).mT",
        lambda d: gemm(Sparse24.from_dense(prune_2_4(numbers(d)[1].mT.contiguous())), x_of(d).mT).mT,
        want=lambda d: x_of(d).double() @ prune_2_4(numbers(d)[1].mT.contiguous()).mT.double(),
    ),
    "fp16 sums of 2:4 sparsity": Case(
        lambda d: gemm(Sparse24.from_dense(prune_2_4(x_of(d))), numbers(d)[1], accumulation_dtype=torch.float16),
        r"call gemm\(a.to_dense\(\), b\)",
        lambda d: gemm(Sparse24.from_dense(prune_2_4(x_of(d).half())).to_dense() / 64, numbers(d)[1].half(),
                       accumulation_dtype=torch.float16),
        want=lambda d: prune_2_4(x_of(d)).double() @ numbers(d)[1].double() / 64,
    ),
    "an FP8 output with a residual": Case(
        lambda d: gemm(x_of(d), numbers(d)[1], residual=normal(64, 64, device=d).to(E4M3), out_dtype=E4M3),
        "add it to an output in torch.bfloat16",
        lambda d: gemm(x_of(d), numbers(d)[1], residual=torch.ones(64, 64, device=d, dtype=BF16)),
        want=lambda d: x_of(d).double() @ numbers(d)[1].double() + 1,
    ),
    "one dimension": Case(
        lambda d: gemm(x_of(d)[0], numbers(d)[1]), "use unsqueeze",
        lambda d: gemm(x_of(d)[0].unsqueeze(0), numbers(d)[1])[0],
        want=lambda d: x_of(d)[0].double() @ numbers(d)[1].double(),
    ),
    "two sparse matrices": Case(
        lambda d: sparse(d) @ sparse(d), r"W @ W2.to_dense\(\), or multiply one after the other, as in W @ \(W2 @ b\)",
        lambda d: (sparse(d) @ sparse(d).to_dense()) @ numbers(d)[1],
        lambda d: sparse(d) @ (sparse(d) @ numbers(d)[1]),
        want=lambda d: sparse(d).to_dense().double() @ sparse(d).to_dense().double() @ numbers(d)[1].double(),
    ),
    "a softcap and a score_mod": Case(
        lambda d: attention(*qkv(d), softcap=0.5, score_mod=lambda s, b, h, i, j: s),
        r"write c \* torch.tanh\(score / c\) in the score_mod",
        lambda d: attention(*qkv(d), score_mod=lambda score, b, h, i, j: 0.5 * torch.tanh(score / 0.5)),
        want=lambda d: attention(*(t.float().cpu() for t in qkv(d)), softcap=0.5).to(d),
    ),
    "a head dimension without a kernel": Case(
        lambda d: attention(*qkv(d, 40)),
        r"pad q and k with zeros .*pass scale=40\*\*-0.5.*drop the padded columns",
        lambda d: attention(*map(padded, qkv(d, 40)), scale=40**-0.5)[..., :40],
        want=lambda d: dense_attention(*qkv(d, 40)), kernel=True,
    ),
    "FP8 k and v with a block mask": Case(
        lambda d: block_sparse_attention(float8_kv(d)[0], float8_kv(d)[1][0], float8_kv(d)[2][0], whole_mask(d),
                                         k_descale=float8_kv(d)[1][1], v_descale=float8_kv(d)[2][1]),
        r"dequantize k and v, as \(k.float\(\) \* scale\).to\(q.dtype\) with a scale that broadcasts over k",
        lambda d: block_sparse_attention(
            float8_kv(d)[0], *((t.float() * s).to(BF16) for t, s in float8_kv(d, "tensor")[1:3]), whole_mask(d)
        ),
        want=lambda d: float8_kv(d)[3], slack=0.1,
    ),
    "scales of 16-bit k with a gradient": Case(
        lambda d: attention(qkv(d)[0].requires_grad_(), *qkv(d)[1:], k_descale=torch.full((1,), 2.0, device=d)),
        r"multiply by them first, as \(k \* k_descale\).to\(k.dtype\)",
        lambda d: attention(qkv(d)[0], (qkv(d)[1] * torch.full((1,), 2.0, device=d)).to(BF16), qkv(d)[2]),
        want=lambda d: dense_attention(qkv(d)[0], 2 * qkv(d)[1], qkv(d)[2]),
    ),
    "a last dimension with a stride": Case(
        lambda d: attention(qkv(d)[0].mT.contiguous().mT, *qkv(d)[1:]), r"is not contiguous; call .contiguous\(\)",
        lambda d: attention(qkv(d)[0].mT.contiguous().mT.contiguous(), *qkv(d)[1:]),
        want=lambda d: dense_attention(*qkv(d)),
    ),
    "alpha as a tensor": Case(
        lambda d: gemm(x_of(d), numbers(d)[1], alpha=torch.tensor(0.5)), r"use float\(\) or .item\(\)",
        lambda d: gemm(x_of(d), numbers(d)[1], alpha=float(torch.tensor(0.5))),
        want=lambda d: 0.5 * x_of(d).double() @ numbers(d)[1].double(),
    ),
    "a captured tensor in an epilogue": Case(
        lambda d: gemm(x_of(d), numbers(d)[1], epilogue=lambda z: z * torch.full((1,), 0.5).to(d)),
        "capture a number, such as float|a captured tensor",
        lambda d: gemm(x_of(d), numbers(d)[1], epilogue=half_of(float(torch.full((1,), 0.5)))),
        want=lambda d: 0.5 * x_of(d).double() @ numbers(d)[1].double(),
    ),
    "an epilogue of a comparison": Case(
        lambda d: gemm(x_of(d), numbers(d)[1], epilogue=lambda z: z > 0),
        r"use .float\(\), or torch.where\(condition, x, y\) with a number for y",
        lambda d: gemm(x_of(d), numbers(d)[1], epilogue=lambda z: (z > 0).float()),
        lambda d: gemm(x_of(d), numbers(d)[1], epilogue=lambda z: torch.where(z > 0, 1.0, 0.0)),
        want=lambda d: (gemm(x_of(d), numbers(d)[1]) > 0).float(),
    ),
    "a Bsr24 transposed": Case(
        lambda d: x_of(d) @ sparse(d).prune_2_4(), r"W.to_bsr\(\)",
        lambda d: x_of(d) @ sparse(d).prune_2_4().to_bsr(),
        want=lambda d: x_of(d).double() @ sparse(d).prune_2_4().to_dense().double(),
    ),
    "a gate of a batch": Case(
        lambda d: bsr_gated_linear(x_of(d), BsrMatrix.stack([sparse(d)] * 2)), "use bsr_linear, and multiply by torch",
        lambda d: bsr_linear(x_of(d), BsrMatrix.stack([sparse(d)] * 2)),
        want=lambda d: (x_of(d).double() @ sparse(d).to_dense().double().mT).expand(2, 64, 128),
    ),
}  # fmt: skip


def half_of(number):
    return lambda z: z * number


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_advice(name, device):
    case = CASES[name]
    if device == "cuda" or not case.kernel:
        with pytest.raises((TypeError, ValueError, RuntimeError), match=case.words):
            case.refused(device)
    for way in case.ways:
        near(way(device), case.want(device), case.slack)


def test_transposed_scales():
    """Scales of blocks that belong to the other operand: the transposed call that the error names."""
    a, b = 9 * normal(128, 256), 9 * normal(256, 384)
    (qa, sa), (qb, sb) = quantize(b.mT.contiguous(), per="1x128"), quantize(a.mT.contiguous(), per="128x128")
    first, second = qb.mT, qa.mT  # a with scales of 128x128, b with scales of 128x1
    with pytest.raises(ValueError, match=r"gemm\(b.mT, a.mT, scale_a=scale_b.mT, scale_b=scale_a.mT\).mT"):
        gemm(first, second, scale_a=sb.mT, scale_b=sa.mT)
    found = gemm(second.mT, first.mT, scale_a=sa.mT.mT, scale_b=sb.mT.mT).mT
    near(found, a.double() @ b.double(), 0.06)


def test_no_error_multiplies_a_cast_sparse_matrix_again():
    """W.to applies the scales: the old advice to multiply by them again gave numbers that were 50 times too small."""
    W = sparse("cpu").quantize()
    near(W.to(BF16).to_dense(), sparse("cpu").to_dense(), 0.05)
    with pytest.raises(TypeError) as error:
        bsr_linear(x_of("cpu"), W)
    assert "times" not in str(error.value)
