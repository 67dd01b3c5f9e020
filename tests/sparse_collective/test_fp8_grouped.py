"""Grouped FP8 GEMM beyond the conformance cases: offsets, padding, plans, errors, torch.compile."""

import pytest
import torch

from cute_kernels import explain
from cute_kernels.arch import ARCHS
from cute_kernels.testing.reference import poisoned
from sparse_collective import BsrMatrix, bsr_grouped_linear, bsr_linear

from ..gemm_calls import check
from ..gemm_errors import numbers
from .test_fp8_bsr import scales_of, sparse

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ITEMS = 4
GROUPS = [0, 0, 2, 2, 2, 3]  # of uneven lengths; item 1 has no tokens

ON_ARCHS = pytest.mark.parametrize("arch", [pytest.param(n, marks=getattr(pytest.mark, n)) for n in ("sm_89", "sm_90")])


def experts(
    form="patterns", shape=(128, 320), block=(64, 64), *, per: str | None = "block", dtype=E4M3, device="cpu"
) -> BsrMatrix:  # fmt: skip
    """Four items: of one pattern with an empty block row, or of patterns of their own, one of them without blocks."""
    if form == "values":
        one = sparse(shape, block, per=None, dtype=dtype, device=device)
        values = numbers(ITEMS, *one.values.shape, dtype=dtype, device=device)
        W = BsrMatrix(one.crow_indices, one.col_indices, values, (ITEMS, *shape))
    else:
        more = {"per": None, "dtype": dtype, "device": device}
        W = BsrMatrix.stack([sparse(shape, block, density=d, **more) for d in (0.5, 1.0, 0.0, 0.7)])
    return W.with_values(W.values, scales_of(per, W))


def numbers_of(groups: list[int], device="cpu") -> torch.Tensor:
    return torch.tensor(groups, dtype=torch.int32, device=device)


def tokens(W: BsrMatrix, count: int, kind: str = "each") -> tuple:
    """(x, its scale): of each token, of all, or none. The last ten rows are zeros, with a scale as others have it."""
    x = numbers(count, W.shape[-1], dtype=W.dtype, device=W.device)
    x.view(torch.uint8)[-10:] = 0
    each = torch.rand(count, 1, device=W.device) + 0.25
    return x, {"each": each, "tensor": each.flatten()[:1], "none": None}[kind]


# -- the op, wherever tensors are -----------------------------------------------------------------------------------


def test_operands_of_any_strides_and_scales_of_any_shape(place):
    W, groups = experts(device=place), numbers_of(GROUPS, place)
    x, scale = tokens(W, 64 * 6)
    check(bsr_grouped_linear, x, W, expert_ids=groups, scale_x=scale)
    right = bsr_grouped_linear(x, W, expert_ids=groups, scale_x=scale)
    scattered = torch.stack([x.view(torch.uint8)] * 2, -1)[..., 0].view(x.dtype)
    spread = torch.stack([scale, -scale], -1)[..., 0]
    for other, each in ((x.t().contiguous().t(), scale), (scattered, scale), (x, scale[:, 0]), (x, spread)):
        assert torch.equal(bsr_grouped_linear(other, W, expert_ids=groups, scale_x=each), right)


def test_offsets_are_groups(place):
    W = experts(device=place)
    x, scale = tokens(W, 64 * 6)
    groups = numbers_of(GROUPS, place)
    check(bsr_grouped_linear, x, W, expert_ids=groups, scale_x=scale)
    right = bsr_grouped_linear(x, W, expert_ids=groups, scale_x=scale)
    routing = {"offs": numbers_of([128, 128, 320, 384], place), "group_rows": 64}
    assert torch.equal(bsr_grouped_linear(x, W, scale_x=scale, **routing), right)


def test_padding_is_not_multiplied(place):
    """A run of no item: whatever its tokens hold, it gets the bias of the nearest item."""
    for form in ("values", "patterns"):
        W, groups = experts(form, device=place), numbers_of([1, -1, ITEMS], place)
        (x, scale), bias = tokens(W, 3 * 64), torch.randn(ITEMS, 128, device=place)
        x.view(torch.uint8)[64:] = 0x7F  # NaN
        out = bsr_grouped_linear(
            x, W, expert_ids=groups, bias=bias, scale_x=scale, out=poisoned(192, 128, dtype=FP32, device=place)
        )
        assert torch.equal(out[64:], bias[[0, ITEMS - 1]].repeat_interleave(64, 0)) and out.isfinite().all()


def test_items_without_blocks_and_no_tokens(place):
    empty = sparse(per=None, density=0.0, device=place)
    for per in (None, "tensor", "block"):
        W = BsrMatrix.stack([empty, empty])
        W = W.with_values(W.values, scales_of(per, W))
        x, scale = tokens(W, 128)
        assert (bsr_grouped_linear(x, W, expert_ids=numbers_of([1, 0], place), scale_x=scale) == 0).all()
    W, nothing = experts(device=place), numbers_of([], place)
    x, scale = tokens(W, 0)
    assert bsr_grouped_linear(x, W, expert_ids=nothing, scale_x=scale).shape == (0, 128)


def test_scales_of_items():
    """Matrices with a scale each: stacked, each block has its item's."""
    items = [sparse((128, 320), per="tensor") for _ in range(ITEMS)]
    W, groups = BsrMatrix.stack(items), numbers_of(GROUPS)
    assert W.scales.shape == (W.nnz,)
    x, scale = tokens(W, 64 * 6)
    y = bsr_grouped_linear(x, W, expert_ids=groups, scale_x=scale)
    for run, item in enumerate(GROUPS):
        rows = slice(64 * run, 64 * (run + 1))
        torch.testing.assert_close(y[rows], bsr_linear(x[rows], items[item], scale_x=scale[rows]))


@pytest.mark.parametrize("form", ["values", "patterns"])
def test_views_on_the_cpu(form):
    W, groups = experts(form).t(), numbers_of(GROUPS)
    check(bsr_grouped_linear, tokens(W, 64 * 6)[0], W, expert_ids=groups)


# -- plans and refusals ---------------------------------------------------------------------------------------------


@ON_ARCHS
@pytest.mark.parametrize("block", [(16, 32), (64, 64), (128, 64), (128, 128), (256, 128), (512, 224)], ids=str)
def test_runs_that_have_kernels(arch, block):
    """A tile, and the tiles of a cluster, lie in one run."""
    for run in (64, 128, 192, 256, 512):
        groups = numbers_of([0, 2])
        for per, fast in (("block", False), ("tensor", False), ("tensor", True), (None, True)):
            W = experts(shape=(2 * block[0], 3 * block[1]), block=block, per=per)
            x, scale = tokens(W, 2 * run)
            plan = explain(bsr_grouped_linear, x, W, expert_ids=groups, scale_x=scale, use_fast_accum=fast, arch=arch)
            facts, cfg = plan.facts, plan.facts.config
            assert facts.family == "bsr" and facts.path == ARCHS[arch].float8 and facts.use_fast_accum is fast
            assert run % (cfg.tile_n * cfg.cluster_n) == 0 and facts.block.run == run
            assert f"grouped in runs of {run} rows" in str(plan)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_without_8_bit_products_there_is_the_kernel_of_few_tokens(arch):
    x, scale = tokens(experts(), 64 * 6)
    plan = explain(bsr_grouped_linear, x, experts(), expert_ids=numbers_of(GROUPS), scale_x=scale, arch=arch)
    assert plan.facts.family == "skinny" and any(note.startswith("slow") for note in plan.notes)


def call(W=None, x=None, *, count=64 * 6, **terms):
    W = experts() if W is None else W
    x = tokens(W, count)[0] if x is None else x
    return bsr_grouped_linear(x, W, expert_ids=numbers_of(GROUPS), **terms)


@pytest.mark.parametrize(
    ("refused", "error", "words"),
    [
        (lambda: call(use_fast_accum=True), ValueError, "scale for each block of W.*leave use_fast_accum out"),
        (lambda: call(use_fast_accum=1), TypeError, "use_fast_accum must be a bool"),
        (lambda: call(scale_x=torch.ones(6)), ValueError, r"scale_x has shape \(6,\).*\(384,\) or \(384, 1\)"),
        (lambda: call(scale_x=torch.ones(384, 3)), ValueError, "scale_x has shape"),
        (lambda: call(scale_x=2.0), TypeError, "scale_x must be a torch.Tensor, got float"),
        (lambda: call(scale_x=torch.ones(1, dtype=FP16)), TypeError, "scales are torch.float32"),
        (lambda: call(scale_x=torch.ones(1, device="meta")), ValueError, "scale_x is on meta"),
        (lambda: call(x=numbers(384, 320, dtype=E5M2)), TypeError, "x is torch.float8_e5m2 but W is"),
        (lambda: call(x=torch.ones(384, 320)), TypeError, "x is torch.float32 but W is torch.float8_e4m3fn"),
        (lambda: call(experts(per=None).to(BF16), torch.ones(384, 320, dtype=BF16), scale_x=torch.ones(1)), TypeError,
         "scale_x of torch.bfloat16 operands"),
        (lambda: call(out=torch.empty(384, 128).to(E4M3)), TypeError, "output of torch.float8_e4m3fn"),
        (lambda: call(sparse((128, 320))), ValueError, "W is one matrix"),
        (lambda: call(count=6 * 32), ValueError, "a multiple of 64"),
        (lambda: BsrMatrix(*(lambda W: (W.crow_indices, W.col_indices, W.values, W.shape))(experts()),
                           scales=torch.ones(ITEMS)), ValueError, "one element, or .* one for each stored block"),
    ],
)  # fmt: skip
def test_calls_that_are_refused(refused, error, words):
    with pytest.raises(error, match=words):
        refused()


def test_views_have_no_kernel():
    W = experts().t()
    with pytest.raises(ValueError, match="transposed view.*W.transpose"):
        explain(bsr_grouped_linear, tokens(W, 384)[0], W, expert_ids=numbers_of(GROUPS), arch="sm_90")


@pytest.mark.parametrize("name", ["values", "scales", "x", "scale", "bias"])
def test_no_gradient_is_dropped_in_silence(place, name):
    W, bias = experts(device=place), torch.ones(ITEMS, 128, device=place)
    x, scale = tokens(W, 384)
    {"values": W.stored, "scales": W.stored_scales, "x": x, "scale": scale, "bias": bias}[name].requires_grad_()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not compute gradients"):
            bsr_grouped_linear(x, W, expert_ids=numbers_of(GROUPS, place), bias=bias, scale_x=scale)
        with torch.no_grad():
            assert not bsr_grouped_linear(
                x, W, expert_ids=numbers_of(GROUPS, place), bias=bias, scale_x=scale
            ).requires_grad


def test_vmap():
    W, x, groups = experts(), numbers(2, 384, 320), numbers_of(GROUPS)
    found = torch.func.vmap(lambda x: bsr_grouped_linear(x, W, expert_ids=groups))(x)
    assert torch.equal(found, torch.stack([bsr_grouped_linear(item, W, expert_ids=groups) for item in x]))
