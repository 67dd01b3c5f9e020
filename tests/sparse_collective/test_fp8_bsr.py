"""FP8 BsrMatrix, and its GEMM beyond the conformance cases: scales, conversions, copies, plans, errors."""

import copy
import pickle

import pytest
import torch

from cute_kernels import explain, gemm, quantize
from cute_kernels.arch import ARCHS
from cute_kernels.matmul.config import EpilogueSpec
from cute_kernels.testing.reference import poisoned
from sparse_collective import BsrMatrix, bsr_linear, bsr_matmul, random_bsr, sddmm
from sparse_collective.bsr_gemm import catalogue
from sparse_collective.bsr_gemm.family import BSR
from sparse_collective.nn import BsrLinear

from ..compiled import inspect_compiled
from ..gemm_calls import check, dense_matrix
from ..gemm_errors import numbers
from ..kernel_selection import one_of_each

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
PER = pytest.mark.parametrize("per", [None, "tensor", "block"])
OPS = pytest.mark.parametrize("op", [bsr_matmul, bsr_linear])
ON_ARCHS = pytest.mark.parametrize("arch", [pytest.param(n, marks=getattr(pytest.mark, n)) for n in ("sm_89", "sm_90")])


def scales_of(per: str | None, W: BsrMatrix) -> torch.Tensor | None:
    """Scales of W's values, from 1/4 to 5/4."""
    shape = {None: None, "tensor": (1,), "block": W.values.shape[:-2]}[per]
    return None if shape is None else torch.rand(shape, device=W.device) + 0.25


def sparse(shape=(256, 320), block=(64, 64), *, per="block", dtype=E4M3, device="cpu", density=0.5) -> BsrMatrix:
    """With an empty block row, if there are several."""
    W = random_bsr(shape, block, density=density, device=device)
    mask = torch.zeros(W.n_block_rows, W.n_block_cols, dtype=torch.bool, device=device)
    mask[W.row_of_block().long(), W.col_indices.long()] = True
    mask[1:2] = False
    W = BsrMatrix.from_dense(torch.ones(shape, device=device), block, mask=mask)
    return W.with_values(numbers(*W.values.shape, dtype=dtype, device=device), scales_of(per, W))


def batches(per="block") -> list[BsrMatrix]:
    """One of either form, three items of (128, 192)."""
    one = sparse((128, 192), (32, 64), per=None)
    shared = BsrMatrix(one.crow_indices, one.col_indices, numbers(3, *one.values.shape), (3, *one.shape))
    shared = shared.with_values(shared.values, scales_of(per, shared))
    own = BsrMatrix.stack([sparse((128, 192), (32, 64), per=None, density=d) for d in (0.5, 0.0, 1.0)])
    return [shared, own.with_values(own.values, scales_of(per, own))]


def operand(op, W: BsrMatrix, n: int, kind: str, *, batch=(), layout="k"):
    """(x or b, its scale): scales of tokens or columns ("each"), of all ("tensor"), or none; b contiguous along K."""
    x = numbers(*batch, n, W.shape[-1], dtype=W.dtype, device=W.device)
    each = torch.rand(*batch, n, 1, device=W.device) + 0.25
    scale = {"each": each, "tensor": each.flatten()[:1], "none": None}[kind]
    if op is bsr_linear:
        return x, scale
    return x.mT if layout == "k" else x.mT.contiguous(), scale.mT if kind == "each" else scale


def run(op, W, b, scale, **terms):
    return op(b, W, scale_x=scale, **terms) if op is bsr_linear else op(W, b, scale_b=scale, **terms)


def checked(op, W, b, scale=None, **terms):
    """gemm_calls.check of a call; returns the plan."""
    return check(op, b, W, scale_x=scale, **terms) if op is bsr_linear else check(op, W, b, scale_b=scale, **terms)


# -- the matrix -----------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("per", ["tensor", "block"])
def test_quantize(dtype, per):
    W = random_bsr((128, 192), (32, 64), density=0.5)
    W = W.with_values(W.values * torch.randn(W.nnz, 1, 1).exp().to(BF16))
    Q = W.quantize(dtype, per)
    assert Q.dtype == dtype and Q.pattern is W.pattern and Q.scaled_per == per and Q.scales.dtype == FP32
    assert Q.scales.shape == ((1,) if per == "tensor" else (W.nnz,))
    largest = Q.values.float().abs().amax((1, 2))
    assert (largest == torch.finfo(dtype).max).sum() >= (1 if per == "tensor" else W.nnz)
    error = (Q.to_dense() - W.to_dense().float()).norm() / W.to_dense().float().norm()
    assert error < torch.finfo(dtype).eps / 2 and f"scales per {per}" in repr(Q)
    assert torch.equal(W.t().quantize(dtype, per).to_dense(), Q.t().to_dense())
    for batch in batches(None):
        assert batch.to(BF16).quantize(dtype, per).scales.shape == (
            (1,) if per == "tensor" else batch.values.shape[:-2]
        )


def test_quantize_without_blocks():
    W = random_bsr((64, 64), (32, 32), density=0.0)
    assert W.quantize().scales.shape == (0,) and W.quantize(per="tensor").scales.shape == (1,)
    assert (bsr_linear(numbers(8, 64), W.quantize()) == 0).all()


@DTYPES
@PER
def test_copies_and_views_keep_scales(dtype, per, tmp_path):
    W = sparse(per=per, dtype=dtype)
    exact, dense = dense_matrix(W, FP64), dense_matrix(W, FP32)
    torch.save(W, tmp_path / "W.pt")
    for copied in (
        pickle.loads(pickle.dumps(W)), torch.load(tmp_path / "W.pt", weights_only=True), copy.copy(W), copy.deepcopy(W),
        W.clone(), W.detach(), W.to("cpu", copy=True), W.to(dtype), W.t().t(), W.t().transpose(), W.transpose().T,
        pickle.loads(pickle.dumps(W.t())).t(), BsrMatrix.stack([W, W]).unbind()[1],
    ):  # fmt: skip
        assert copied.dtype == dtype and (per is None or copied.scales is not None)
        assert torch.equal(dense_matrix(copied, FP64), exact) and copied.t().shape == W.shape[::-1]
        assert torch.equal(copied.to_dense().float(), dense)
    assert torch.equal(dense_matrix(W.t(), FP64), exact.t()) and torch.equal(W.t().to_dense().float(), dense.t())
    assert torch.equal(W.float().to_dense(), dense) and W.float().scales is None
    assert W.to(BF16).dtype == BF16 and torch.equal(W.to(BF16).to_dense(), dense.to(BF16))


def test_scales_of_items():
    for per in (None, "tensor", "block"):
        for batch in batches(per):
            items = batch.unbind()
            assert torch.equal(torch.stack([dense_matrix(item, FP64) for item in items]), dense_matrix(batch, FP64))
            assert torch.equal(batch.float().to_dense(), dense_matrix(batch, FP32))
            assert torch.equal(dense_matrix(batch.t(), FP64), dense_matrix(batch, FP64).mT)
    mixed = [sparse(per=per) for per in (None, "tensor", "block")]
    assert torch.equal(dense_matrix(BsrMatrix.stack(mixed), FP64), torch.stack([dense_matrix(m, FP64) for m in mixed]))


def test_dense_and_torch_conversions():
    W = sparse(per=None)
    assert W.to_dense().dtype == E4M3
    for again in (
        BsrMatrix.from_dense(W.to_dense(), W.blocksize),
        BsrMatrix.from_dense(W.to_dense().t().contiguous().t(), W.blocksize, density=W.density),
        BsrMatrix.from_torch(W.to_torch()),
    ):
        assert torch.equal(dense_matrix(again, FP64), dense_matrix(W, FP64)) and torch.equal(
            again.col_indices, W.col_indices
        )
    negative_zeros = torch.zeros(64, 64).to(E4M3).view(torch.uint8).fill_(0x80).view(E4M3)
    assert BsrMatrix.from_dense(negative_zeros, (32, 32)).nnz == 0
    with pytest.raises(ValueError, match="sparse_bsr tensor has no scales; convert W.float"):
        sparse().to_torch()


def parts(**changed) -> dict:
    W = sparse()
    found = {"crow_indices": W.crow_indices, "col_indices": W.col_indices, "values": W.values, "shape": W.shape}
    return found | {"scales": torch.ones(W.nnz)} | changed


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"scales": 2.0}, TypeError, "scales must be a strided tensor, got float"),
        ({"scales": torch.ones(1, dtype=FP64)}, TypeError, "scales are torch.float64; they must be torch.float32"),
        ({"scales": torch.ones(1, device="meta")}, ValueError, "scales are on meta, values on cpu"),
        ({"scales": torch.ones(3)}, ValueError, r"scales have shape \(3,\); they must be one element, or \(\d+,\)"),
        ({"scales": torch.ones(40)[::2]}, ValueError, "scales must be contiguous"),
    ],
)
def test_scales_that_a_matrix_does_not_take(changed, error, words):
    with pytest.raises(error, match=words):
        BsrMatrix(**parts(**changed))


def test_what_a_matrix_refuses():
    wide_values = parts(values=torch.ones(parts()["values"].shape))
    with pytest.raises(TypeError, match="scales of torch.float32 values; .*float8_e5m2 have them"):
        BsrMatrix(**wide_values)
    with pytest.raises(TypeError, match="with scales to torch.float8_e5m2: go by .float"):
        sparse().to(E5M2)
    assert sparse(per=None).to(E5M2).dtype == E5M2
    with pytest.raises(ValueError, match="per is 'row'; known are 'block' and 'tensor'"):
        random_bsr((64, 64), (32, 32), density=1.0).quantize(per="row")
    with pytest.raises(TypeError, match="x is torch.float8_e4m3fn"):
        sparse().quantize()
    with pytest.raises(TypeError, match="values cannot be torch.float8_e4m3fn"):
        random_bsr((64, 64), (32, 32), density=1.0, dtype=E4M3)
    with pytest.raises(TypeError, match="values cannot be torch.float8_e4m3fn"):
        BsrLinear.from_bsr(sparse())


# -- the ops, wherever tensors are ----------------------------------------------------------------------------------


@OPS
def test_batches(place, op):
    for batch in batches():
        batch = batch.to(torch.device(place))
        for lead in ((3,), ()):
            for kind in ("none", "tensor", "each"):
                checked(op, batch, *operand(op, batch, 72, kind, batch=lead))
    W = sparse(device=place)
    checked(op, W, *operand(op, W, 24, "each", batch=(2, 3)))


def test_short_forms_of_scales(place):
    W = sparse(device=place)
    x, scale = operand(bsr_linear, W, 24, "each")
    expected = bsr_linear(x, W, scale_x=scale)
    many = scale.expand(24, 3).contiguous()
    assert torch.equal(bsr_linear(x, W, scale_x=scale[:, 0]), expected)
    assert torch.equal(bsr_linear(x, W, scale_x=many[:, 1:2]), expected)
    assert torch.equal(bsr_linear(x.view(2, 12, -1), W, scale_x=scale.view(2, 12, 1)).flatten(0, 1), expected)
    assert torch.equal(bsr_linear(x[0], W, scale_x=scale[0]), bsr_linear(x[:1], W, scale_x=scale[:1])[0])
    assert torch.equal(bsr_matmul(W, x.t(), scale_b=scale[:, 0]), bsr_matmul(W, x.t(), scale_b=scale.t()))
    assert torch.equal(W @ x.t(), bsr_matmul(W, x.t())) and torch.equal(x @ W.T, bsr_linear(x, W))


def test_empty_products(place):
    for shape, n in (((64, 128), 0), ((64, 0), 16), ((0, 64), 16)):
        W = BsrMatrix.from_dense(torch.zeros(shape, device=place), (32, 32)).quantize()
        x = numbers(n, shape[1], device=place)
        out = bsr_linear(x, W, bias=torch.ones(shape[0], device=place), scale_x=torch.ones(n, 1, device=place))
        assert out.shape == (n, shape[0]) and out.dtype == BF16 and (out == 1).all()


def test_operands_that_are_not_contiguous_along_k_are_copied(device):
    W = sparse(device=device)
    for layout, copies in (("k", 0), ("n", 1)):
        b, scale = operand(bsr_matmul, W, 72, "each", layout=layout)
        checked(bsr_matmul, W, b, scale)
        assert sum("b is copied" in note for note in explain(bsr_matmul, W, b).notes) == copies
    x = numbers(40, W.shape[1] + 1, device=device)[:, 1:]
    checked(bsr_linear, W, x, None)
    assert any("x is copied" in note and "contiguous along K" in note for note in explain(bsr_linear, x, W).notes)
    checked(bsr_linear, W, numbers(W.shape[1], 24).t())


# -- plans and refusals ---------------------------------------------------------------------------------------------


@ON_ARCHS
def test_explain_says_where_scales_are(arch):
    W, x = sparse(), numbers(40, 320)
    plan = explain(bsr_linear, x, W, arch=arch)
    assert (
        "times the scale of their block" in str(plan)
        and plan.facts.block.scaled
        and plan.facts.path == ARCHS[arch].float8
    )
    assert f"every {64 if arch == 'sm_90' else 32} elements of K" in str(plan)
    plan = explain(bsr_linear, x, sparse(per="tensor"), use_fast_accum=True, arch=arch)
    assert "about 14 bits" in str(plan) and plan.facts.epilogue.scale_m == "tensor" and not plan.facts.block.scaled


@pytest.mark.parametrize("block", [(16, 32), (32, 32), (48, 96), (128, 64), (64, 128), (512, 224), (128, 256)], ids=str)
@ON_ARCHS
def test_blocks_that_have_kernels(arch, block):
    W = sparse((block[0] * 2, block[1] * 3), block)
    for n, family in ((1, "skinny"), (64, "bsr"), (4096, "bsr")):
        assert explain(bsr_linear, numbers(n, W.shape[1]), W, arch=arch).facts.family == family
        if n > 1:
            V = sparse((block[0] * 2, block[1] * 3), block, per="tensor")
            assert explain(bsr_linear, numbers(n, W.shape[1]), V, use_fast_accum=True, arch=arch).facts


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda W, x: explain(bsr_linear, x[:, :256], W.t(), arch="sm_90"), "transposed view.*W.transpose"),
        (lambda W, x: explain(bsr_linear, x, W, use_fast_accum=True, arch="sm_90"), "promoted to fp32"),
        (lambda W, x: bsr_linear(x, W, use_fast_accum=True), "promoted to fp32"),
        (lambda W, x: bsr_linear(x, W, scale_x=torch.ones(320)), r"scale_x has shape \(320,\).*each row of x"),
        (lambda W, x: bsr_matmul(W, x.t(), scale_b=torch.ones(40, 1)), r"scale_b has shape.*\(40,\) or \(1, 40\)"),
        (lambda W, x: bsr_linear(x, W, scale_x=torch.ones(1, device="meta")), "scale_x is on meta"),
    ],
)
def test_calls_that_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(sparse(), numbers(40, 320))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda W, x: bsr_linear(x.float().to(BF16), W), "x is torch.bfloat16 but W is torch.float8_e4m3fn"),
        (lambda W, x: bsr_linear(x.float().to(E5M2), W), "x is torch.float8_e5m2 but W is"),
        (lambda W, x: bsr_linear(x, W, scale_x=2.0), "scale_x must be a torch.Tensor, got float"),
        (lambda W, x: bsr_linear(x, W, scale_x=torch.ones(1, dtype=FP16)), "scales are torch.float32"),
        (lambda W, x: bsr_linear(x, W, use_fast_accum=1), "use_fast_accum must be a bool"),
        (lambda W, x: bsr_linear(x.float(), W.float(), scale_x=torch.ones(1)), "scale_x of torch.float32 operands"),
        (lambda W, x: bsr_linear(x, W, out=torch.empty(40, 256, dtype=torch.int8)), "output of torch.int8"),
        (lambda W, x: sddmm(numbers(256, 64), numbers(64, 320), W), "a is torch.float8_e4m3fn"),
    ],
)
def test_types_that_are_refused(call, words):
    with pytest.raises(TypeError, match=words):
        call(sparse(), numbers(40, 320))


@OPS
@pytest.mark.parametrize("name", ["values", "scales", "operand", "scale", "bias"])
def test_no_gradient_is_dropped_in_silence(place, op, name):
    W = sparse(device=place)
    b, scale = operand(op, W, 40, "each")
    bias = torch.ones(256 if op is bsr_linear else 40, device=place)
    leaf = {"values": W.stored, "scales": W.stored_scales, "operand": b, "scale": scale, "bias": bias}[name]
    leaf.requires_grad_()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not compute gradients"):
            run(op, W, b, scale, bias=bias)
        with torch.no_grad():
            assert not run(op, W, b, scale, bias=bias).requires_grad


def test_vmap():
    W, x = sparse(), numbers(2, 40, 320)
    found = torch.func.vmap(lambda x: bsr_linear(x, W))(x)
    assert torch.equal(found, torch.stack([bsr_linear(item, W) for item in x]))


# -- kernels --------------------------------------------------------------------------------------------------------

KERNELS = [(name, facts) for name in ("sm_89", "sm_90") for facts in catalogue.float8_kernels(BSR, name, False)]
SCALED = [(n, f) for n, f in KERNELS if f.block.scaled and f.epilogue == EpilogueSpec(scale_n="column")]
EACH = one_of_each(
    SCALED, lambda f: (f.arch, f.overlaps_store, f.takes_turns, f.block.bk % 128), lambda kernel: kernel[1]
)


@pytest.mark.slow
@pytest.mark.parametrize("facts", [pytest.param(f, id=str(f.config), marks=getattr(pytest.mark, n)) for n, f in EACH])
def test_scales_of_columns_alone_are_multiplied(facts, outcome_of):
    """Block scales are part of the additions. test_kernels_compile checks everything else."""
    outcome = outcome_of(inspect_compiled, facts)
    assert not outcome.error and outcome.value.problems == ()
    codes, cfg = outcome.value.resources.opcodes, facts.config
    sums = cfg.tile_m * cfg.tile_n // (cfg.warps_m * cfg.warps_n * (128 if facts.path == "sm_90" else 32))
    first = 2 * sums if facts.overlaps_store else 0  # of the first K-tile, where others follow and where none does
    assert codes.get("FADD", 0) < sums and codes["FMUL"] <= sums + first


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_full_matrix_is_the_dense_product():
    """The same operands and K-tiles in the same order: the same sums."""
    a, (b, scale) = numbers(512, 1024, device="cuda"), quantize(torch.randn(768, 1024, device="cuda"), per="row")
    W = BsrMatrix.from_dense(a, (128, 128), mask=torch.ones(4, 8, dtype=torch.bool, device="cuda"))
    one = W.with_values(W.values, torch.ones(W.nnz, device="cuda"))
    expected = gemm(a, b.t(), scale_b=scale.t(), out_dtype=FP32)
    for matrix in (W, one):
        out = bsr_matmul(matrix, b.t(), scale_b=scale.t(), out=poisoned(512, 768, dtype=FP32, device="cuda"))
        assert torch.equal(out, expected)
