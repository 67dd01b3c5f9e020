"""scaled_dot_product_attention beside torch's own, on CPU tensors: results, gradients, errors, torch.compile."""

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as torchs

from attention import BlockMask, create_block_mask, scaled_dot_product_attention
from attention.masks import cache
from attention.operands import padded
from cute_kernels import explain
from cute_kernels.runtime import derived
from cute_kernels.runtime.device import assume

TIGHT = {"rtol": 1e-10, "atol": 1e-10}  # in float64


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(q, k, v, dtype=torch.float64):
    """For these shapes."""
    return tuple(normal(shape, seed=i).to(dtype) for i, shape in enumerate((q, k, v)))


def random_mask(*shape, seed=3, share=0.7):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def agree(q, k, v, *args, tolerance=TIGHT, **options):
    """Results and gradients are torch's."""
    found = []
    for op in (scaled_dot_product_attention, torchs):
        inputs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        out = op(*inputs, *args, **options)
        found.append((out, *torch.autograd.grad(out, inputs, normal(out.shape, seed=9).to(out.dtype))))
        with torch.no_grad():
            torch.testing.assert_close(op(q, k, v, *args, **options), out.detach(), **tolerance)
    for ours, other in zip(*found, strict=True):
        torch.testing.assert_close(ours, other, **tolerance)


SHAPES = {
    "2d": ((5, 16), (7, 16), (7, 8)),
    "3d": ((4, 5, 16), (4, 7, 16), (4, 7, 8)),
    "4d": ((2, 4, 5, 16), (2, 4, 7, 16), (2, 4, 7, 8)),
    "5d": ((2, 3, 4, 5, 16), (2, 3, 4, 7, 16), (2, 3, 4, 7, 8)),
    "one batch of k and v": ((2, 4, 5, 16), (1, 4, 7, 16), (1, 4, 7, 16)),
    "one batch of q": ((1, 4, 5, 16), (3, 4, 7, 16), (3, 4, 7, 16)),
    "batches of several dimensions": ((2, 1, 4, 5, 16), (3, 4, 7, 16), (1, 3, 4, 7, 16)),
    "one head of k and v": ((2, 4, 5, 16), (2, 1, 7, 16), (2, 1, 7, 16)),
    "one head of v": ((2, 4, 5, 16), (2, 4, 7, 16), (2, 1, 7, 16)),
    "one head of q": ((2, 1, 5, 16), (2, 4, 7, 16), (2, 4, 7, 16)),
    "no batch of q": ((4, 5, 16), (2, 4, 7, 16), (2, 4, 7, 16)),
    "long q": ((1, 2, 200, 16), (1, 2, 7, 16), (1, 2, 7, 16)),
    "long k": ((1, 2, 7, 16), (1, 2, 200, 16), (1, 2, 200, 16)),
}


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_shapes(shapes, is_causal):
    agree(*qkv(*shapes), is_causal=is_causal)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_dtypes(dtype, bound):
    for options in ({}, {"is_causal": True}, {"attn_mask": random_mask(40, 50)}):
        agree(*qkv(*[(1, 2, n, 16) for n in (40, 50, 50)], dtype), **options, tolerance={"rtol": bound, "atol": bound})


@pytest.mark.parametrize(("rows", "cols"), [(5, 7), (7, 5), (6, 6), (1, 9), (9, 1)])
def test_causal_counts_from_the_first_row(rows, cols):
    agree(*qkv(*[(1, 2, n, 16) for n in (rows, cols, cols)]), is_causal=True, scale=0.3)


MASKS = [(5, 7), (1, 7), (5, 1), (1, 1), (4, 5, 7), (1, 5, 7), (4, 1, 7), (2, 4, 5, 7), (2, 1, 1, 7), (1, 1, 5, 7)]


@pytest.mark.parametrize("shape", [*MASKS, (1, 4, 1, 1), (2, 1, 5, 1)])
def test_masks_broadcast(shape):
    agree(*qkv(*SHAPES["4d"]), attn_mask=random_mask(*shape))


@pytest.mark.parametrize("lengths", [(128, 256), (130, 257), (1, 300), (300, 1)])
@pytest.mark.parametrize("lead", [(), (1, 2), (2, 1)])
def test_masks_of_several_blocks(lengths, lead):
    """With blocks that are empty, full and neither."""
    mask = random_mask(*lead, *lengths)
    mask[..., 128:, :128] = False
    mask[..., :128, 128:256] = True
    agree(*qkv(*[(2, 2, n, 16) for n in (lengths[0], lengths[1], lengths[1])]), attn_mask=mask)


def test_masks_of_other_ranks_and_strides():
    five, three, two = (qkv(*SHAPES[name]) for name in ("5d", "3d", "2d"))
    for shape in ((5, 7), (4, 5, 7), (3, 4, 5, 7), (2, 3, 4, 5, 7), (2, 1, 1, 1, 7), (3, 1, 5, 7)):
        agree(*five, attn_mask=random_mask(*shape))
    agree(*three, attn_mask=random_mask(4, 5, 7))
    agree(*two, attn_mask=random_mask(5, 7))
    four = qkv(*SHAPES["4d"])
    agree(*four, attn_mask=random_mask(7, 5).t())
    agree(*four, attn_mask=random_mask(1, 1, 1, 7).expand(2, 4, 5, 7))
    agree(*four, attn_mask=random_mask(2, 1, 10, 14)[..., ::2, ::2])


def test_operands_of_any_strides():
    q, k, v = qkv((2, 4, 16, 5), (2, 7, 4, 16), (2, 4, 7, 32))
    agree(q.mT, k.transpose(1, 2), v[..., ::2])


@pytest.mark.parametrize("heads", [(4, 2, 2), (4, 1, 1), (6, 2, 3), (4, 4, 2), (4, 2, 1)])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_grouped_heads(heads, lead):
    shapes = [(*lead, n, rows, 16) for n, rows in zip(heads, (5, 7, 7), strict=True)]
    agree(*qkv(*shapes), enable_gqa=True)
    agree(*qkv(*shapes), attn_mask=random_mask(heads[0], 5, 7), enable_gqa=True)


def test_rows_that_see_nothing_are_zero():
    """As torch's are, gradients included."""
    mask = random_mask(5, 7)
    mask[2] = False
    q, k, v = qkv(*SHAPES["4d"])
    agree(q, k, v, attn_mask=mask)
    assert not scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, :, 2].any()


@pytest.mark.parametrize(("rows", "cols"), [(0, 7), (5, 0), (0, 0)])
def test_empty(rows, cols):
    q, k, v = qkv(*[(2, 4, n, 16) for n in (rows, cols, cols)])
    for options in ({}, {"is_causal": True}, {"attn_mask": random_mask(rows, cols)}):
        out = scaled_dot_product_attention(q, k, v, **options)
        assert out.shape == (2, 4, rows, 16) and not out.any()


def test_random_calls():
    """For all arguments together."""
    choose = torch.Generator().manual_seed(5)

    def one_of(*values):
        return values[torch.randint(len(values), (), generator=choose)]

    for trial in range(60):
        h, rows, cols, d, dv = one_of(1, 2, 4), one_of(1, 5, 129), one_of(1, 8, 140), one_of(8, 24), one_of(8, 32)
        kv = one_of(*(n for n in (1, 2, 4) if h % n == 0))
        q, k, v = (normal((2, *s), seed=trial) for s in ((h, rows, d), (kv, cols, d), (kv, cols, dv)))
        mask = one_of(None, random_mask(rows, cols, seed=trial), random_mask(2, one_of(1, h), rows, cols, seed=trial))
        causal = mask is None and one_of(True, False)
        gqa = kv not in (1, h) or one_of(True, False)
        agree(q, k, v, mask, 0.0, causal, scale=one_of(None, 0.2), enable_gqa=gqa)


def test_autocast():
    """Operands of one dtype, that of autocast, and no less exact than that: the reference computes in fp32."""
    q, k, v = (t.requires_grad_() for t in qkv(*SHAPES["4d"], torch.float32))
    exact = torchs(*(t.bfloat16().float() for t in (q, k, v)))
    for mask in (None, random_mask(5, 7)):
        with torch.autocast("cpu", torch.bfloat16):
            out = scaled_dot_product_attention(q, k.bfloat16(), v, mask)
            assert torchs(q, k.bfloat16(), v, mask).dtype == out.dtype == torch.bfloat16
            assert scaled_dot_product_attention(*(t.double() for t in (q, k, v))).dtype == torch.float64
        assert torch.autograd.grad(out.float().sum(), q)[0].dtype == torch.float32
        if mask is None:
            assert torch.equal(out, exact.bfloat16())


def test_inference_mode():
    q, k, v = qkv(*SHAPES["4d"])
    with torch.inference_mode():
        mask = random_mask(5, 7)
        for given in (q, q.clone()):
            torch.testing.assert_close(scaled_dot_product_attention(given, k, v, mask), torchs(q, k, v, mask), **TIGHT)


# ------------------------------------------------------------------ errors


def mask_of(dtype):
    return torch.zeros(5, 7, dtype=dtype)


ERRORS = [
    ({"dropout_p": 0.1}, ValueError, r"do not drop attention probabilities. Pass dropout_p=0.0"),
    ({"dropout_p": "0"}, TypeError, "dropout_p must be a Python number"),
    ({"is_causal": 1}, TypeError, "is_causal must be True or False"),
    ({"enable_gqa": None}, TypeError, "enable_gqa must be True or False"),
    ({"scale": -1.0}, ValueError, "scale is -1.0; it must be above 0"),
    ({"attn_mask": mask_of(torch.complex64)}, TypeError, r"attn_mask is torch.complex64"),
    ({"attn_mask": mask_of(torch.float8_e4m3fn)}, TypeError, r"pass attn_mask.to\(torch.float32\)"),
    ({"attn_mask": mask_of(torch.int32)}, TypeError, r"attn_mask is torch.int32; it must be bool.*attn_mask.bool\(\)"),
    ({"attn_mask": mask_of(torch.float32), "is_causal": True}, ValueError, "exclude each other; add -inf above"),
    ({"attn_mask": mask_of(torch.float32)[:, :6]}, ValueError, r"\(5, 6\), which does not broadcast"),
    ({"attn_mask": [True]}, TypeError, "attn_mask must be a torch.Tensor"),
    ({"attn_mask": random_mask(5, 7), "is_causal": True}, ValueError, "exclude each other"),
    ({"attn_mask": random_mask(7)}, ValueError, "2 dimensions or more"),
    ({"attn_mask": random_mask(5, 6)}, ValueError, r"\(5, 6\), which does not broadcast to \(2, 4, 5, 7\)"),
    ({"attn_mask": random_mask(3, 1, 5, 7)}, ValueError, "does not broadcast"),
    ({"attn_mask": random_mask(1, 2, 4, 5, 7)}, ValueError, "does not broadcast"),
    (
        {"key": torch.ones(2, 2, 7, 16).double()},
        ValueError,
        "4, 2 and 4 heads; they must be equal, or 1. enable_gqa=True",
    ),
    ({"key": torch.ones(2, 3, 7, 16), "enable_gqa": True}, ValueError, "must be a multiple of 3 of key"),
    ({"key": torch.ones(3, 4, 7, 16)}, ValueError, "batches that do not agree"),
    ({"key": torch.ones(2, 4, 7, 12).double()}, ValueError, "head_dim 16 and k 12"),
    ({"key": torch.ones(2, 4, 6, 16).double()}, ValueError, "differ in heads or length"),
    ({"key": torch.ones(2, 4, 7, 16)}, TypeError, "k is torch.float32 but q is torch.float64"),
    ({"key": torch.ones(16)}, ValueError, r"key has shape \(16,\)"),
    ({"query": None}, TypeError, "query must be a torch.Tensor"),
]


@pytest.mark.parametrize(("changed", "error", "message"), ERRORS, ids=[e[2][:30] for e in ERRORS])
def test_errors(changed, error, message):
    names = dict(zip(("query", "key", "value"), qkv((2, 4, 5, 16), (2, 4, 7, 16), (2, 4, 7, 16)), strict=True))
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(**names | changed)


def test_two_dimensions_have_no_heads():
    with pytest.raises(ValueError, match="enable_gqa needs a dimension of heads"):
        scaled_dot_product_attention(*qkv(*SHAPES["2d"]), enable_gqa=True)


# ------------------------------------------------------------------ masks of elements


@pytest.mark.parametrize("blocksize", list(itertools.product((64, 128), (64, 128))))
def test_from_elements(blocksize):
    seen = random_mask(2, 3, 200, 330)
    seen[:, :, :128, :128] = True
    seen[:, :, 128:, 128:256] = False
    mask = BlockMask.from_elements(seen, blocksize)
    assert torch.equal(mask.to_dense(), seen)
    partial, full = mask.tables()
    wholly = create_block_mask(lambda b, h, q, kv: seen[b, h, q, kv], 2, 3, 200, 330, BLOCK_SIZE=blocksize)
    assert torch.equal(full, wholly.tables()[1]) and torch.equal(partial, wholly.tables()[0])
    assert full.any() and not (partial | full).all()


@pytest.mark.parametrize("shape", [(1, 300), (200, 1), (1, 1), (3, 1, 300), (2, 1, 200, 1), (2, 3, 1, 1)])
def test_from_elements_that_broadcast(shape):
    seen = random_mask(*shape, share=0.5)
    mask = BlockMask.from_elements(seen, lengths=(200, 300))
    assert torch.equal(mask.to_dense(2, 3), seen.expand(2, 3, 200, 300))
    strided = BlockMask.from_elements(seen.expand(*shape[:-2], 200, 300))
    assert torch.equal(strided.to_dense(2, 3), seen.expand(2, 3, 200, 300))


def test_from_elements_errors():
    for seen, lengths, error in (
        (torch.ones(2, 2), None, TypeError),
        (random_mask(4), None, ValueError),
        (random_mask(5, 6), (5, 7), ValueError),
    ):
        with pytest.raises(error, match="seen"):
            BlockMask.from_elements(seen, lengths=lengths)


def test_a_mask_is_converted_once(monkeypatch):
    made = []
    monkeypatch.setattr(
        cache.BlockMask, "from_elements", lambda *a, real=BlockMask.from_elements, **k: made.append(1) or real(*a, **k)
    )
    q, k, v = qkv(*[(1, 2, 150, 16)] * 3)
    mask = random_mask(150, 150)
    for _ in range(3):
        out = scaled_dot_product_attention(q, k, v, mask)
    assert len(made) == 1
    mask[:, 40:] = False
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask), torchs(q, k, v, mask), **TIGHT)
    assert len(made) == 2 and not torch.equal(out, scaled_dot_product_attention(q, k, v, mask))
    number = id(mask)
    del mask
    assert number not in derived.of_tensor.found


# ------------------------------------------------------------------ with kernels, and under torch.compile


@pytest.mark.parametrize(
    ("d", "dv", "read"), [(32, 32, 64), (80, 64, 96), (64, 64, 64), (200, 129, 256), (300, 64, 512)]
)
def test_plans_of_a_gpu(d, dv, read):
    """Head dimensions without a kernel are padded; masks take the kernel of block masks."""
    q, k, v = (torch.empty(1, 2, 256, n, dtype=torch.bfloat16, device="meta") for n in (d, d, dv))
    plan = explain(scaled_dot_product_attention, q, k, v, is_causal=True, arch="sm_90")
    assert plan.op == "attention" and plan.facts.head_dim == read and plan.facts.window.right
    mask = random_mask(256, 256)
    q, k, v = (torch.empty_like(t, device="cpu") for t in (q, k, v))
    plan = explain(scaled_dot_product_attention, q, k, v, mask, arch="sm_90")
    assert plan.op == "block_sparse_attention" and plan.facts.blocks.mask is not None


def test_head_dims_of_a_gpu():
    q, k, v = qkv((1, 2, 5, 40), (1, 2, 7, 40), (1, 2, 7, 600))
    assert padded(q, k, v) == (q, k, v)
    with assume("sm_90"):
        wide = padded(q, k, v)
    assert [t.shape[-1] for t in wide] == [64, 64, 600] and wide[2] is v
    torch.testing.assert_close(torchs(*wide, scale=40**-0.5), torchs(q, k, v), **TIGHT)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": random_mask(2, 1, 20, 30)}])
def test_under_compile(options):
    torch._dynamo.reset()
    q, k, v = qkv(*[(2, 2, n, 16) for n in (20, 30, 30)])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q, k, v):
        return scaled_dot_product_attention(q, k, v, **options) * 2

    torch.testing.assert_close(compiled(q, k, v), 2 * torchs(q, k, v, **options), **TIGHT)
    torch._dynamo.reset()
