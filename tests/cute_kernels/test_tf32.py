"""TF32 and 3xTF32 beyond the conformance cases: rounding and parts, strides, errors, gradients, machine code."""

import contextlib
import itertools

import pytest
import torch

import cute_kernels
from cute_kernels import Sparse24, explain, gemm
from cute_kernels.arch import ARCHS
from cute_kernels.matmul import catalogue
from cute_kernels.matmul.config import BlockFacts
from cute_kernels.matmul.family import DENSE
from cute_kernels.matmul.precision import PRECISIONS, rounded, side_by_side, split
from cute_kernels.runtime.families import family_named
from cute_kernels.runtime.inspect import disassemble
from cute_kernels.testing.reference import ACTIVATIONS
from cute_kernels.tf32 import dispatch as tf32
from sparse_collective import BsrMatrix, bsr_gated_linear, bsr_grouped_linear, bsr_linear, bsr_matmul, random_bsr
from sparse_collective.bsr_gemm import catalogue as bsr_catalogue
from sparse_collective.bsr_gemm.family import BSR

from ..compiled import cubin
from ..emulator.ops import GpuTensor, needs_compiler, on_emulator
from ..gemm_calls import check
from ..sparse_collective.bsr_parts import products_refuse

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
BOTH = pytest.mark.parametrize("precision", PRECISIONS)


def numbers(*shape: int, device="cpu") -> torch.Tensor:
    return torch.randn(*shape, device=device)


# -- numbers --------------------------------------------------------------------------------------------------------


def test_rounding_is_to_the_nearest_of_11_bits():
    x = torch.cat([numbers(10_000) * 2.0 ** torch.randint(-40, 40, (10_000,)), torch.tensor([0.0, -0.0, 1.0, -2.0])])
    found = rounded(x)
    assert ((found.view(torch.int32) & 0x1FFF) == 0).all()
    assert ((found.double() - x.double()).abs() <= 2.0**-11 * x.double().abs()).all()
    assert torch.equal(rounded(found), found)
    ties = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-11])
    assert torch.equal(rounded(ties), torch.tensor([1.0, 1 + 2.0**-9, -1.0]))  # to even
    special = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert torch.equal(rounded(special)[:2], special[:2]) and rounded(special)[2].isnan()
    assert torch.equal(rounded(x.view(4, -1).t()), found.view(4, -1).t()) and rounded(torch.empty(0, 3)).shape == (0, 3)


def test_two_parts_hold_a_number_but_for_its_last_bit():
    top = torch.finfo(FP32).max
    x = torch.cat([numbers(10_000) * 2.0 ** torch.randint(-40, 40, (10_000,)), torch.tensor([top, -top, 0.0])])
    big, small = split(x)
    assert big.isfinite().all() and small.isfinite().all()
    assert torch.equal(rounded(small), small)
    assert ((big.double() + small.double() - x.double()).abs() <= 2.0**-23 * x.double().abs()).all()
    assert big[-1] == small[-1] == 0
    big, small = split(torch.tensor([torch.inf, torch.nan]))
    assert big[0] == torch.inf and big[1].isnan() and torch.equal(small, torch.zeros(2))


def test_parts_lie_side_by_side():
    x = numbers(2, 3, 32)
    big, small = split(x)
    assert torch.equal(side_by_side(x, False), torch.cat([small, big, big], -1))
    assert torch.equal(side_by_side(x, True), torch.cat([big, small, big], -1))
    parts = [torch.cat([s, b, b], -1) for s, b in zip(small.split(16, -1), big.split(16, -1), strict=True)]
    assert torch.equal(side_by_side(x, False, 16), torch.cat(parts, -1))
    padded = side_by_side(x[..., :30], False).view(2, 3, 3, 32)
    assert torch.equal(padded[..., :30], side_by_side(x, False).view(2, 3, 3, 32)[..., :30])
    assert (padded[..., 30:] == 0).all()


@needs_compiler
@pytest.mark.parametrize("place", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(70, 136), (3, 20, 64), (2, 5, 48), (1, 4)], ids=str)
def test_kernels_make_the_parts_that_torch_makes(place, shape):
    """Bit for bit, of operands contiguous along K and along their rows; also of what is not finite."""
    x = numbers(*shape) * 2.0 ** torch.randint(-40, 40, shape)
    x.view(-1)[:4] = torch.tensor([torch.inf, -torch.finfo(FP32).max, torch.nan, 1e-42])
    with on_emulator("sm_90", sms=2) if place == "emulated" else contextlib.nullcontext():
        for y in (x, x.mT.contiguous().mT):
            y = y.as_subclass(GpuTensor) if place == "emulated" else y.to("cuda")
            for of_b, group in itertools.product((False, True), (None, 4, 16)):
                if group is None or shape[-1] % group == 0:
                    found = tf32.side_by_side(y, of_b, group).cpu()
                    assert torch.equal(found.view(torch.int32), side_by_side(x, of_b, group).view(torch.int32))
            copied = tf32.along_k(y)
            assert copied is None or torch.equal(copied.cpu().view(torch.int32), x.view(torch.int32))
            assert (copied is None) == (y.stride(-1) == 1)


def test_tensors_that_no_kernel_copies():
    """Tensors on a CPU, or with a K that is no multiple of 16 bytes; and all that is planned for another GPU."""
    x = numbers(8, 16)
    for y in (x.t(), x.t().as_subclass(GpuTensor)[:, :7], numbers(2, 3, 8, 16).transpose(0, 1).mT):
        assert tf32.along_k(y) is None
        assert torch.equal(tf32.side_by_side(y, True), side_by_side(y, True))


# -- the op, wherever tensors are -----------------------------------------------------------------------------------


@BOTH
def test_batches_and_strides(place, precision):
    for a, b in (
        ((3, 40, 64), (64, 72)),
        ((3, 40, 64), (3, 64, 72)),
        ((40, 64), (3, 64, 72)),
        ((2, 1, 9, 20), (4, 20, 8)),
    ):
        check(gemm, numbers(*a, device=place), numbers(*b, device=place), precision=precision)
    check(gemm, numbers(64, 40, device=place).t(), numbers(72, 64, device=place).t(), precision=precision)
    check(gemm, numbers(40, 130, device=place)[:, 1::2], numbers(65, 73, device=place)[:, 1:], precision=precision)
    check(gemm, numbers(3, 64, 40, device=place).mT, numbers(3, 72, 66, device=place).mT[:, 2:], precision=precision)


@BOTH
@pytest.mark.parametrize("form", [None, "values", "patterns"])
@pytest.mark.parametrize("block", [(32, 32), (128, 128), (16, 48)], ids=str)
def test_matrices_without_columns(place, precision, form, block):
    """K = 0: the kernel sums over nothing, and its argument for the values has one block of the right extents."""
    W = BsrMatrix.from_dense(torch.zeros(2 * block[0], 0, device=place), block)
    W = W if form is None else BsrMatrix.stack([W, W])
    if form == "values":
        crow, col = (t[0].contiguous() if t.dim() > 1 else t for t in (W.crow_indices, W.col_indices))
        W = BsrMatrix(crow, col, W.values.new_empty(2, 0, *block), W.shape)
    rows, bias = W.shape[-2], numbers(W.shape[-2], device=place)
    batch = () if form is None else (2,)
    for tokens in (5, 24, 200):
        x = numbers(*batch, tokens, 0, device=place)
        y = bsr_linear(x, W, bias=bias, activation="relu", precision=precision)
        assert torch.equal(y, bias.relu().expand(*batch, tokens, rows))
        y = bsr_matmul(W, x.mT, bias=bias[:, None], precision=precision)
        assert torch.equal(y, bias[:, None].expand(*batch, rows, tokens))


def test_what_is_not_finite(place):
    """As in fp32; but of 3xtf32 an infinity meets the small part of the other operand, and may give NaN."""
    a, b = numbers(16, 32, device=place), numbers(32, 16, device=place)
    a[1, 3], a[2, 5] = torch.nan, torch.finfo(FP32).max
    for precision in PRECISIONS:
        y = gemm(a, b * 0 + 2.0**-10, precision=precision)
        assert y[1].isnan().all() and not y[0].isnan().any() and not y[3:].isnan().any()
        top = torch.finfo(FP32).max * 2.0**-10
        assert precision == "tf32" or ((y[2] - top).abs() <= 2.0**-22 * top).all()
    a[1, 3] = torch.inf
    assert (gemm(a, b.abs() + 1, precision="tf32")[1] == torch.inf).all()
    assert not gemm(a, b.abs() + 1, precision="3xtf32")[1].isfinite().any()


# -- plans ----------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("arch", ARCHS)
def test_plans(arch, precision):
    a, b = (torch.empty(2048, 2048, dtype=FP32, device="meta") for _ in range(2))
    plan = explain(gemm, a, b.t(), arch=arch, precision=precision)
    assert plan.facts.dtype == plan.facts.out_dtype == "float32" and plan.facts.path == ARCHS[arch].path
    how = "when they are copied" if precision == "3xtf32" else "by TMA" if arch == "sm_90" else "in registers"
    assert f"precision: operands rounded to TF32 {how}" in str(plan)
    every = 32 if arch == "sm_90" else 8
    assert (f"accumulation: promoted to FP32 every {every} elements of K" in str(plan)) == (precision == "3xtf32")
    copies = [note for note in plan.notes if "copied" in note]
    assert len(copies) == (2 if precision == "3xtf32" else 0)
    turned = [note for note in explain(gemm, a, b, arch=arch, precision=precision).notes if "copied" in note]
    assert len(turned) == (2 if precision == "3xtf32" else 1)
    assert turned[-1].startswith("b is copied: ") and "along K" in turned[-1]
    W = random_bsr((256, 256), (128, 128), density=0.5, dtype=FP32)
    for tokens in (4, 2048):  # of few, too: other families multiply 16 bits
        plan = explain(bsr_linear, numbers(tokens, 256), W, arch=arch, precision=precision)
        assert plan.facts.family == "bsr" and plan.facts.block.bk == (384 if precision == "3xtf32" else 128)
        assert len([note for note in plan.notes if "copied" in note]) == (2 if precision == "3xtf32" else 0)


def test_what_no_kernel_is_built_from():
    spec = ARCHS["sm_90"]
    skinny, block = family_named("skinny"), BlockFacts(128, 128, "int32")
    facts = catalogue.dense(spec, "sm_90", skinny.candidates("sm_90", block, spec)[0], **catalogue.TF32, block=block)
    assert "dense and BSR kernels support float32" in skinny.unsupported(facts)
    config = DENSE.candidates("sm_90", None, spec)[0]
    for majors in (("m", "k", "n"), ("k", "n", "n")):
        facts = catalogue.dense(spec, "sm_90", config, **catalogue.TF32 | {"majors": majors})
        assert "tensor cores transpose only 16-bit elements" in DENSE.unsupported(facts)


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value", "error", "words"),
    [
        (BF16, "tf32", ValueError, "precision='tf32' requires torch.float32 operands, got torch.bfloat16 .leave"),
        (FP64, "3xtf32", ValueError, "precision='3xtf32' requires torch.float32 operands, got torch.float64"),
        (torch.float8_e4m3fn, "tf32", ValueError, "requires torch.float32 operands, got torch.float8_e4m3fn"),
        (FP32, "high", ValueError, "precision='high'; it must be 'tf32' or '3xtf32'"),
        (FP32, True, TypeError, "precision must be 'tf32' or '3xtf32' or None, got bool"),
        (FP32, ["tf32"], TypeError, "precision must be 'tf32' or '3xtf32' or None, got list"),
    ],
)
def test_refusals(dtype, value, error, words):
    products_refuse(dtype, error, words, precision=value)


def test_float32_without_a_precision_is_refused_by_kernels():
    """And torch's own setting does not give one."""
    a, W = numbers(64, 64), random_bsr((64, 64), (32, 32), density=1.0, dtype=FP32)
    words = 'torch.float32.*pass precision="tf32" or precision="3xtf32", cast with .to.., or use torch.matmul'
    before = torch.get_float32_matmul_precision()
    for setting in ("highest", "high"):
        torch.set_float32_matmul_precision(setting)
        try:
            for op, args in ((gemm, (a, a)), (bsr_matmul, (W, a)), (bsr_linear, (a, W))):
                with pytest.raises(TypeError, match=words):
                    explain(op, *args, arch="sm_90")
        finally:
            torch.set_float32_matmul_precision(before)


def test_what_has_no_precision():
    x, W = numbers(128, 64), random_bsr((128, 64), (64, 64), density=1.0, dtype=FP32)
    groups = torch.zeros(2, dtype=torch.int32)
    stacked = BsrMatrix.stack([W, W])
    for op, matrix, routing in ((bsr_gated_linear, W, {}), (bsr_grouped_linear, stacked, {"expert_ids": groups})):
        with pytest.raises(TypeError, match="torch.float32; the kernels support .*cast with .to"):
            explain(op, x, matrix, **routing, arch="sm_90")
    with pytest.raises(ValueError, match=r"transposed view of blocks of float32.*W.transpose\(\)"):
        explain(bsr_matmul, W.t(), x, arch="sm_90", precision="tf32")
    sparse = Sparse24.from_dense(cute_kernels.prune_2_4(numbers(64, 64).to(BF16)))
    with pytest.raises(ValueError, match="precision is for float32 operands"):
        gemm(sparse, numbers(64, 32).to(BF16), precision="tf32")
    V = random_bsr((64, 64), (64, 64), density=1.0).prune_2_4()
    with pytest.raises(ValueError, match="which a Bsr24 cannot have"):
        bsr_linear(numbers(8, 64).to(BF16), V, precision="tf32")


# -- gradients ------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_gradients_of_gemm(place, precision, activation):
    a, b, bias = numbers(48, 64, device=place), numbers(64, 80, device=place), numbers(80, device=place)
    dy, found = numbers(48, 80, device=place), []
    dy[(a @ b + bias).abs() < 0.1] = 0.0  # rounding to TF32 changes where ReLU is zero
    for dtype in (FP32, FP64):
        x, y, z = (t.detach().to(dtype).requires_grad_() for t in (a, b, bias))
        if dtype == FP32:
            result = gemm(x, y, bias=z, activation=activation, precision=precision)
        else:
            result = ACTIVATIONS[activation](x @ y + z)
        result.backward(dy.to(dtype))
        found.append((x.grad, y.grad, z.grad))
    for ours, exact in zip(*found, strict=True):
        error = torch.linalg.norm(ours.double() - exact) / torch.linalg.norm(exact)
        assert ours.dtype == FP32 and error < (2e-3 if precision == "tf32" else 2e-6)


def test_block_sparse_products_refuse_gradients(place):
    W, x = random_bsr((64, 64), (32, 32), density=1.0, dtype=FP32).to(place), numbers(8, 64, device=place)
    with pytest.raises(RuntimeError, match="does not compute gradients.*no_grad"):
        bsr_linear(x.requires_grad_(), W, precision="tf32")
    with pytest.raises(RuntimeError, match="does not compute gradients"):
        torch.func.grad(lambda x: bsr_linear(x, W, precision="tf32").sum())(x.detach())
    with torch.no_grad():
        assert bsr_linear(x, W, precision="tf32").shape == (8, 64)


# -- kernels --------------------------------------------------------------------------------------------------------

KERNELS = [
    (name, facts)
    for name in ARCHS
    for made, family in ((catalogue, DENSE), (bsr_catalogue, BSR))
    for facts in made.tf32_kernels(family, name, False)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "instruction"), [("sm_86", "HMMA.1688.F32.TF32 "), ("sm_90", "HGMMA.64x192x8.F32.TF32 ")]
)
def test_machine_code(arch, instruction):
    """The products are those of TF32; on the path of mma.sync each operand is rounded, unless it is infinite or NaN."""
    facts = next(facts for name, facts in KERNELS if name == arch)
    sass = disassemble(cubin(facts))
    products = [line for line in sass.splitlines() if "MMA." in line]
    assert products and all(instruction in line for line in products)
    assert (sass.count("FSETP.GEU.AND") >= 48) == (arch != "sm_90")


def without_ties(x: torch.Tensor) -> torch.Tensor:
    """x, less what is between two TF32 numbers: TMA rounds that to the even one, mma.sync's path away from zero."""
    return torch.where((x.view(torch.int32) & 0x1FFF) == 0x1000, 1.0, x)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
def test_operands_are_rounded_to_nearest_on_the_emulator(arch):
    with on_emulator(arch, sms=2):
        operands_are_rounded_to_nearest("cpu")


def operands_are_rounded_to_nearest(device: str) -> None:
    """By the identity a product is its operand, as it was rounded."""
    x = without_ties(numbers(64, 64, device=device))
    one = torch.eye(64, device=device)
    assert torch.equal(gemm(x, one, precision="tf32"), rounded(x))
    assert torch.equal(gemm(one, x, precision="tf32"), rounded(x))
    for y in (gemm(x, one, precision="3xtf32"), gemm(one, x, precision="3xtf32")):
        assert ((y.double() - x.double()).abs() <= 2.0**-22 * x.double().abs()).all()


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["sm_80", "sm_90"])
def test_operands_are_rounded_to_nearest(path):
    """NVIDIA's documents do not say that TMA rounds so."""
    if path == "sm_90" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("TMA is sm_90's")
    with cute_kernels.path(path):
        operands_are_rounded_to_nearest("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("K", [1024, 8192])
def test_three_products_are_nearly_as_exact_as_fp32(K):
    """By norm. Of positive numbers, whose sums tensor cores cut off, and of both signs."""
    for make in (torch.rand, torch.randn):
        a, b = make(512, K, device="cuda"), make(K, 512, device="cuda")
        exact = a.double() @ b.double()
        fast, three = (torch.linalg.norm(gemm(a, b, precision=p).double() - exact) for p in PRECISIONS)
        assert three < 2.0**-20 * torch.linalg.norm(exact) and three < fast / 4
