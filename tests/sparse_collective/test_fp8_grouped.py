"""Grouped products of 8-bit floats: scales of tokens and of blocks, runs of any item, both kinds of sums, kernels."""

import pytest
import torch

from cute_kernels import explain, quantize
from cute_kernels.arch import ARCHS
from cute_kernels.matmul.config import BlockFacts, EpilogueSpec
from cute_kernels.testing.reference import ACTIVATIONS, assert_as_good_as_torch, poisoned
from cute_kernels.tile.element import element_of
from sparse_collective import BsrMatrix, bsr_grouped_linear, bsr_linear
from sparse_collective.bsr_gemm import catalogue
from sparse_collective.bsr_gemm.family import BSR

from ..cute_kernels.test_fp8 import numbers
from ..emulator import emulate
from ..emulator.ops import needs_compiler, on_emulator
from ..fp8_parts import assert_as_tensor_cores, some
from .test_fp8_bsr import scales_of, sparse, wide

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ITEMS = 4
GROUPS = [0, 0, 2, 2, 2, 3]  # of uneven lengths; item 1 has no tokens
OUTSIDE = [-1, 3, 4, 0, 2**31 - 1, -(2**31)]  # padding: nothing is multiplied, the bias is the nearest item's
BLOCKS = [((256, 256), (128, 128)), ((128, 320), (64, 64)), ((256, 192), (128, 64))]

DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
FORMS = pytest.mark.parametrize("form", ["values", "patterns"])
PER = pytest.mark.parametrize("per", [None, "tensor", "block"])
KINDS = pytest.mark.parametrize("kind", ["none", "tensor", "each"])
ON_ARCHS = pytest.mark.parametrize("arch", [pytest.param(n, marks=getattr(pytest.mark, n)) for n in ("sm_89", "sm_90")])
ONE_PLACE = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


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


def factors_of(x, W, groups, scale, dtype=FP64) -> tuple:
    """Dequantised, run by run: x (runs, rows, K) and the transposes of W's items (runs, K, M), zeros where none is."""
    x = x.to(dtype) if scale is None else x.to(dtype) * scale.to(dtype).reshape(-1, 1)
    nearest = groups.clamp(0, W.shape[0] - 1).long()
    W = wide(W, dtype)[nearest] * (groups == nearest).to(dtype)[:, None, None]
    return x.unflatten(0, (len(groups), -1)), W.mT


def exact_of(x, W, groups, scale, *, bias=None, activation=None, epilogue=None, dtype=FP64) -> torch.Tensor:
    left, right = factors_of(x, W, groups, scale, dtype)
    y = left @ right
    if bias is not None:
        of_run = bias if bias.dim() == 1 else bias[groups.clamp(0, W.shape[0] - 1).long()][:, None]
        y = y + of_run.to(dtype)
    return (epilogue or ACTIVATIONS[activation])(y).flatten(0, 1)


def check(x, W, groups, scale, *, fast=False, out=None, **terms) -> torch.Tensor:
    """Against fp64, as torch errs in fp32 but for what tensor cores of a GPU drop. Slopes of terms are at most 1.2."""
    ours = bsr_grouped_linear(x, W, expert_ids=groups, out=out, scale_x=scale, use_fast_accum=fast, **terms)
    assert out is None or ours is out
    exact = exact_of(x, W, groups, scale, **terms)
    if x.is_cuda:
        runs = (len(groups), -1)
        factors = factors_of(x, W, groups, scale)
        assert_as_tensor_cores(ours.unflatten(0, runs), exact.unflatten(0, runs), *factors, fast=fast)
    else:
        by_torch = exact_of(x, W, groups, scale, dtype=FP32, **terms).to(ours.dtype)
        assert_as_good_as_torch(ours, exact, by_torch, k=W.shape[-1])
    return ours


# -- the op, wherever tensors are -----------------------------------------------------------------------------------


@FORMS
@DTYPES
@PER
@KINDS
def test_products(place, form, dtype, per, kind):
    for shape, block in BLOCKS:
        W = experts(form, shape, block, per=per, dtype=dtype, device=place)
        for groups in (GROUPS, OUTSIDE):
            x, scale = tokens(W, 64 * len(groups), kind)
            groups = numbers_of(groups, place)
            check(x, W, groups, scale, out=poisoned(len(x), shape[0], device=place))
            if per != "block":
                check(x, W, groups, scale, fast=True)


@FORMS
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32], ids=str)
def test_terms_and_outputs(place, form, out_dtype):
    W = experts(form, device=place)
    (x, scale), groups = tokens(W, 64 * 6), numbers_of(OUTSIDE, place)
    for bias in (torch.randn(ITEMS, 128, device=place), torch.randn(128, device=place).to(BF16), None):
        for activation in ("silu", "gelu", None):
            out = poisoned(len(x), 128, dtype=out_dtype, device=place)
            check(x, W, groups, scale, bias=bias, activation=activation, out=out)
    terms = {"bias": torch.randn(ITEMS, 128, device=place), "epilogue": lambda v: v * 0.5 + 1.0}
    check(x, W, groups, scale, **terms, out=poisoned(len(x), 128, dtype=FP32, device=place))


def test_operands_of_any_strides_and_scales_of_any_shape(place):
    W, groups = experts(device=place), numbers_of(GROUPS, place)
    x, scale = tokens(W, 64 * 6)
    right = check(x, W, groups, scale)
    scattered = torch.stack([x.view(torch.uint8)] * 2, -1)[..., 0].view(x.dtype)
    spread = torch.stack([scale, -scale], -1)[..., 0]
    for other, each in ((x.t().contiguous().t(), scale), (scattered, scale), (x, scale[:, 0]), (x, spread)):
        assert torch.equal(bsr_grouped_linear(other, W, expert_ids=groups, scale_x=each), right)


def test_offsets_are_groups(place):
    W = experts(device=place)
    x, scale = tokens(W, 64 * 6)
    right = check(x, W, numbers_of(GROUPS, place), scale)
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
    y = check(x, W, groups, scale)
    for run, item in enumerate(GROUPS):
        rows = slice(64 * run, 64 * (run + 1))
        torch.testing.assert_close(y[rows], bsr_linear(x[rows], items[item], scale_x=scale[rows]))


@pytest.mark.parametrize("form", ["values", "patterns"])
def test_views_on_the_cpu(form):
    W, groups = experts(form).t(), numbers_of(GROUPS)
    check(*tokens(W, 64 * 6)[:1], W, groups, None)


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


# -- torch.compile --------------------------------------------------------------------------------------------------


@ONE_PLACE
@FORMS
def test_compiled(where, form):
    torch._dynamo.reset()
    W = experts(form, device=where)
    W.check_indices()
    (x, scale), groups = tokens(W, 384), numbers_of(GROUPS, where)
    bias, ends = torch.randn(ITEMS, 128, device=where), numbers_of([128, 128, 320, 384], where)
    backend = "inductor" if where == "cuda" else "aot_eager"

    def step(x, scale, groups, out=None):
        return bsr_grouped_linear(x, W, expert_ids=groups, bias=bias, activation="silu", out=out, scale_x=scale) * 2.0

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    assert torch.equal(compiled(x, scale, groups), step(x, scale, groups))
    out = poisoned(384, 128, dtype=FP32, device=where)
    assert torch.equal(compiled(x, scale, groups, out=out), step(x, scale, groups, out=torch.empty_like(out)))
    one = W.with_values(W.values, W.scales.flatten()[:1].clone())

    def fast(x, ends):
        return bsr_grouped_linear(x, one, offs=ends, group_rows=64, use_fast_accum=True)

    assert torch.equal(torch.compile(fast, fullgraph=True, backend=backend)(x, ends), fast(x, ends))
    with pytest.raises(Exception, match="does not compute gradients"):
        compiled(x, scale.clone().requires_grad_(), groups)
    torch._dynamo.reset()


@ONE_PLACE
@FORMS
def test_opcheck(where, form):
    """Without test_schema: torch compares tensors there, which it cannot where they are 8-bit floats on a CPU."""
    from sparse_collective import torch_op  # noqa: F401 (registers the ops, as torch.compile does)

    W, groups = experts(form, device=where), numbers_of(GROUPS, where)
    matrix = False, W.crow_indices, W.col_indices, W.values, W.shape[-1], True
    (x, scale), ops = tokens(W, 384), torch.ops.sparse_collective
    out = x.new_zeros(384, 128, dtype=FP16)
    for op, args, terms in (
        (ops.scaled_bsr.default, (*matrix, x, W.scales, scale), {"activation": "gelu", "out_dtype": FP32}),
        (ops.scaled_bsr.default, (*matrix, x, None, None, True), {}),
        (ops.scaled_bsr_out.default, (*matrix, x, out, W.scales), {}),
    ):
        args, terms = ("bsr_grouped_linear", *args), {**terms, "expert_ids": groups}
        torch.library.opcheck(op, args, terms, test_utils=("test_faketensor",))


# -- kernels --------------------------------------------------------------------------------------------------------


def configurations(arch: str) -> list:
    """Each configuration, with a scale for each block, and one for W where it keeps its sums in the tensor cores."""
    spec, element, found = ARCHS[arch], element_of("float8_e4m3fn"), []
    usual = {"dtype": "float8_e4m3fn", "aligns": (16, 16, 8), "batch": "values", "ranks": (4, 2, 2)}
    kinds = (
        {"epilogue": EpilogueSpec(bias="row", bias_dtype="float32", bias_items=True, scale_n="column"), "scaled": True},
        {"epilogue": EpilogueSpec(scale_m="tensor", scale_n="column"), "use_fast_accum": True},
    )
    for block in ((128, 128), (64, 64), (128, 64)):
        for kind in kinds:
            for config in BSR.candidates(spec.path, BlockFacts(*block, "int32", run=512), spec, element):
                run = config.tile_n * config.cluster_n * (2 if config.tile_n < 128 else 1)
                facts = catalogue.linear(spec, spec.path, config, block, **usual, **kind, run=run)
                found += [] if BSR.unsupported(facts) else [facts]
    fast = {True: ", fast", False: ""}
    return [
        pytest.param(f, id=f"{f.block.bm}x{f.block.bk}, {f.config.short}{fast[f.use_fast_accum]}") for f in some(found)
    ]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("facts", [*configurations("sm_90"), *configurations("sm_89")])
def test_configurations_on_the_emulator(facts):
    """Runs of one and of two tiles, of an item twice, of another one, and of none."""
    (bm, bk), scaled = (facts.block.bm, facts.block.bk), facts.block.scaled
    W = experts("values", (3 * bm, 3 * bk), (bm, bk), per="block" if scaled else "tensor")
    groups = numbers_of([2, 2, ITEMS, 0])
    x, scale = tokens(W, len(groups) * facts.block.run)
    d, bias = poisoned(len(x), W.shape[1]), torch.randn(ITEMS, W.shape[1]) if scaled else None
    pattern = W.crow_indices, W.col_indices, None, groups, None
    with emulate.emulator(sms=4):
        emulate.emulated(facts)(
            *pattern, W.values, x, d, W.scales.flatten(), scale.t(), bias, None, None, 1.0, 0.0, *facts.counts(1, 4)
        )  # fmt: skip
    given = x, W, groups, scale
    by_torch = exact_of(*given, bias=bias, dtype=FP32).to(BF16)
    assert_as_good_as_torch(d, exact_of(*given, bias=bias), by_torch, k=W.shape[-1])


@needs_compiler
@pytest.mark.slow
@FORMS
@pytest.mark.parametrize(("arch", "dtype"), [("sm_90", E4M3), ("sm_89", E5M2)], ids=["sm_90", "sm_89"])
def test_calls_on_the_emulator(arch, dtype, form):
    """Every kind of scale, copies, orders of work tiles, padding, runs of several lengths, both kinds of sums."""
    with on_emulator(arch, sms=4):
        for (shape, block), per, kind, rows in (
            (BLOCKS[0], "block", "each", 128),
            (BLOCKS[1], "block", "tensor", 64),
            (BLOCKS[2], "tensor", "each", 256),
            (((96, 192), (32, 96)), None, "none", 64),
        ):
            W = experts(form, shape, block, per=per, dtype=dtype)
            groups, bias = numbers_of([3, 0, 0, -7]), torch.randn(ITEMS, shape[0])
            x, scale = tokens(W, rows * 4, kind)
            check(x, W, groups, scale, bias=bias, activation="gelu")
            check(x.t().contiguous().t(), W, groups, scale, out=poisoned(len(x), shape[0], dtype=FP32))
            if per != "block":
                check(x, W, groups, scale, fast=True, bias=bias[0])


@needs_compiler
@pytest.mark.slow
@FORMS
def test_the_kernel_of_few_tokens_on_the_emulator(form):
    with on_emulator("sm_80", sms=4):
        for per, kind in (("block", "each"), ("tensor", "tensor"), (None, "none")):
            W = experts(form, per=per)
            x, scale = tokens(W, 64 * 4, kind)
            check(x, W, numbers_of([3, 0, 0, -7]), scale, bias=torch.randn(ITEMS, 128), activation="silu")


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@FORMS
@DTYPES
@PER
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (128, 64), (512, 224), (32, 32)], ids=str)
def test_large_products(form, dtype, per, block):
    """Of runs of each length; the same bits each time, and those of a product for each item."""
    W = experts(form, (block[0] * 8, block[1] * 12), block, per=per, dtype=dtype, device="cuda")
    bias = torch.randn(ITEMS, W.shape[1], device="cuda")
    for rows in (64, 128, 256):
        groups = numbers_of([0, 0, 1, 3, 3, 3, 2, -1], "cuda")
        x, scale = tokens(W, rows * len(groups))
        for fast in (False, True) if per != "block" else (False,):
            terms = {"bias": bias, "activation": "gelu"}
            out, again = (poisoned(len(x), W.shape[1], device="cuda") for _ in range(2))
            check(x, W, groups, scale, fast=fast, out=out, **terms)
            bsr_grouped_linear(x, W, expert_ids=groups, out=again, scale_x=scale, use_fast_accum=fast, **terms)
            assert torch.equal(out, again)


@pytest.mark.gpu
def test_routing_and_scales_change_in_a_graph():
    W = experts(shape=(512, 768), block=(128, 128), device="cuda")
    (x, scale), ends = tokens(W, 1024), numbers_of([256, 256, 512, 1024], "cuda")
    routing, out = {"offs": ends, "group_rows": 128}, poisoned(1024, 512, device="cuda")
    bsr_grouped_linear(x, W, out=out, scale_x=scale, **routing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bsr_grouped_linear(x, W, out=out, scale_x=scale, **routing)
    for after in ([0, 384, 384, 768], [1024] * 4):
        wide_x = torch.randn(1024, 768, device="cuda")
        for t, new in zip((x, scale), quantize(wide_x, per="row"), strict=True):
            t.copy_(new)
        ends.copy_(numbers_of(after, "cuda"))
        W.scales.uniform_(0.5, 2.0)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, bsr_grouped_linear(x, W, scale_x=scale, offs=ends.clone(), group_rows=128))
