"""The registered attention ops: their schemas, torch.compile without graph breaks, masks, and changing shapes."""

import functools

import pytest
import torch
import torch._dynamo.testing

from attention import BlockMask, attention, block_sparse_attention, mask_mods, patterns, torch_op
from attention.masks import mask_text

from .attention_parts import qkv
from .reference import normal, poisoned

BF16 = torch.bfloat16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CPU = [("cpu", "eager"), ("cpu", "aot_eager")]
ON = pytest.mark.parametrize(("device", "backend"), [*CPU, pytest.param("cuda", "inductor", marks=pytest.mark.gpu)])
ON_CPU = pytest.mark.parametrize(("device", "backend"), CPU)
OPS = torch.ops.attention


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(fn, backend, **options):
    return torch.compile(fn, fullgraph=True, backend=backend, **options)


def counted(fn, backend):
    """(fn compiled, what counts its graphs)"""
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(fn, fullgraph=True, backend=graphs), graphs


def same(results, expected) -> bool:
    results, expected = ((t,) if isinstance(t, torch.Tensor) else t for t in (results, expected))
    return len(results) == len(expected) and all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


# The schemas


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_attention(device):
    call = qkv(Dv=128, device=device)
    out = torch.zeros(2, 4, 200, 128, dtype=BF16, device=device)
    for terms in ({}, {"causal": True, "return_lse": True}, {"left": 30, "softcap": 5.0, "scale": 0.1}):
        torch.library.opcheck(OPS.attention.default, call, terms)
        torch.library.opcheck(OPS.attention_out.default, (*call, out), terms)
    rows_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv(device=device)]
    torch.library.opcheck(OPS.attention.default, rows_first, {})
    packed = [normal(150, heads, 64, device=device) for heads in (4, 2, 2)]
    starts = torch.tensor([0, 40, 150], dtype=torch.int32, device=device)
    torch.library.opcheck(OPS.attention.default, packed, {"cu_seqlens_q": starts, "cu_seqlens_k": starts})
    lengths = torch.tensor([150, 7], dtype=torch.int32, device=device)
    torch.library.opcheck(OPS.attention.default, call, {"seqlens_k": lengths, "return_lse": True})


def test_a_mask_is_made_again_only_of_other_tensors():
    mask = masks()[2]
    made = torch_op._block_mask(*crossing(mask))
    assert torch_op._block_mask(*crossing(mask)) is made
    assert torch_op._block_mask(*crossing(masks()[2])) is not made


def crossing(mask: BlockMask) -> tuple:
    """A mask as the registered ops take it."""
    lists = list(mask.lists())
    return lists, list(mask.lengths), list(mask.blocksize), *mask_text.written(mask.mask_mod)


def masks(device="cpu") -> list[BlockMask]:
    """Of every kind of mask_mod."""
    ids = torch.arange(200, dtype=torch.int32, device=device) // 70
    lengths, more = (200, 200), {"device": device}
    return [
        BlockMask.from_blocks(torch.tensor([[True, False], [True, True]], device=device), lengths=lengths),
        patterns.sliding_window(lengths, (30, 4), **more),
        patterns.documents(ids, causal=True),
        BlockMask.from_mask_mod(lambda b, h, q, kv: (q - kv) % 3 == 0, lengths, **more),
        BlockMask.from_mask_mod(lambda b, h, q, kv: (q + h) % 3 > b, lengths, batch=2, heads=4, **more).with_causal(),
    ]


def test_opcheck_block_sparse():
    call = qkv()
    for mask in masks()[0::4]:
        args = *call, *crossing(mask)
        torch.library.opcheck(OPS.block_sparse_attention.default, args, {"return_lse": True})
        out = torch.zeros(2, 4, 200, 64, dtype=BF16)
        torch.library.opcheck(OPS.block_sparse_attention_out.default, (*args, out), {"causal": True})


def test_ops_can_be_called_by_name():
    """As an exported graph does."""
    call = qkv()
    assert same(OPS.attention(*call, True, 5, None)[0], attention(*call, causal=True, window=(5, None)))
    for mask in masks():
        args = *call, *crossing(mask)
        assert same(OPS.block_sparse_attention(*args)[0], block_sparse_attention(*call, mask))


# torch.compile


@ON
@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"causal": True, "return_lse": True},
        {"window": (-1, 3), "softcap": 3, "scale": 0.5},
        {"window": [20, None], "return_lse": True},
    ],
    ids=str,
)
def test_attention(device, backend, terms):
    call = qkv(device=device)
    assert same(compiled(lambda q, k, v: attention(q, k, v, **terms), backend)(*call), attention(*call, **terms))


@ON
@pytest.mark.parametrize("return_lse", [False, True])
def test_attention_into_out(device, backend, return_lse):
    """The mutation is seen outside, and between operations of the graph."""

    def layer(q, k, v, out):
        result = attention(q, k, v, causal=True, return_lse=return_lse, out=out)
        return out + 1, *((result[1],) if return_lse else ())

    call = qkv(device=device)
    out = poisoned(2, 4, 200, 64, device=device)
    results = compiled(layer, backend)(*call, out)
    expected, lse = attention(*call, causal=True, return_lse=True)
    assert same(out, expected) and same(results[0], expected + 1)
    assert not return_lse or same(results[1], lse)


@ON
@pytest.mark.parametrize("return_lse", [False, True])
def test_packed_and_cached(device, backend, return_lse):
    q, k, v = (normal(150, heads, 64, device=device) for heads in (4, 2, 2))
    starts = torch.tensor([0, 40, 40, 137], dtype=torch.int32, device=device)
    terms = {"causal": True, "return_lse": return_lse}

    def packed(q, k, v, starts):
        return attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, **terms)

    assert same(compiled(packed, backend)(q, k, v, starts), packed(q, k, v, starts))
    q, k, v = qkv(3, device=device)
    lengths = torch.tensor([150, 7], dtype=torch.int32, device=device)
    pages = torch.arange(10, dtype=torch.int32, device=device).view(2, 5)

    def cached(q, k, v, lengths):
        return attention(q, k, v, seqlens_k=lengths, **terms)

    def paged(q, k, v, lengths, pages):
        return attention(q, k, v, seqlens_k=lengths, block_table=pages, **terms)

    assert same(compiled(cached, backend)(q, k, v, lengths), cached(q, k, v, lengths))
    k, v = (normal(10, 2, 32, 64, device=device) for _ in range(2))
    assert same(compiled(paged, backend)(q, k, v, lengths, pages), paged(q, k, v, lengths, pages))


@ON
def test_a_layer(device, backend):
    """Projections around it: heads are views of a (B, S, H D) product."""

    def layer(x, w):
        q, k, v = ((x @ w[i]).view(2, 130, 4, 64).transpose(1, 2) for i in range(3))
        return attention(q, k, v, causal=True).transpose(1, 2).reshape(2, 130, 256) * 1.0

    x, w = normal(2, 130, 256, device=device), normal(3, 256, 256, device=device, k=256)
    out = compiled(layer, backend)(x, w)
    torch.testing.assert_close(out, layer(x, w), atol=2e-2, rtol=2e-2)


@ON
def test_changing_lengths(device, backend):
    """Extents become symbols after the first change: two graphs, not one for each length."""
    step, graphs = counted(lambda q, k, v: attention(q, k, v, causal=True, return_lse=True), backend)
    for Sq, Sk in ((200, 200), (130, 333), (7, 90), (128, 256)):
        call = qkv(Sq, Sk, device=device)
        assert same(step(*call), attention(*call, causal=True, return_lse=True))
    assert graphs.frame_count <= 2


@ON_CPU
@pytest.mark.parametrize("causal", [False, True])
def test_masks(device, backend, causal):
    """The mask is an input of the graph."""
    call = qkv(device=device)
    terms = {"causal": causal, "return_lse": True}
    step = compiled(lambda q, k, v, m: block_sparse_attention(q, k, v, m, **terms), backend)
    for mask in masks(device):
        assert same(step(*call, mask), block_sparse_attention(*call, mask, **terms))


@ON_CPU
def test_masks_into_out(device, backend):
    step = compiled(lambda q, k, v, m, out: block_sparse_attention(q, k, v, m, return_lse=True, out=out)[1], backend)
    call, out = qkv(device=device), poisoned(2, 4, 200, 64, device=device)
    for mask in masks(device)[2:4]:
        lse = step(*call, mask, out)
        assert same((out, lse), block_sparse_attention(*call, mask, return_lse=True))


@ON_CPU
def test_new_tensors_in_a_mask_need_no_new_graph(device, backend):
    step, graphs = counted(lambda q, k, v, m: block_sparse_attention(q, k, v, m), backend)
    call = qkv(device=device)
    for length in (70, 100, 64):
        mask = patterns.documents(torch.arange(200, dtype=torch.int32) // length, causal=True)
        assert same(step(*call, mask), block_sparse_attention(*call, mask))
    assert graphs.frame_count == 1


@ON_CPU
def test_masks_of_changing_lengths(device, backend):
    step, graphs = counted(lambda q, k, v, m: block_sparse_attention(q, k, v, m), backend)
    for Sq, Sk in ((200, 200), (330, 350), (300, 444), (222, 411), (290, 490)):
        call, mask = qkv(Sq, Sk, device=device), patterns.sliding_window((Sq, Sk), (Sk // 7, 3))
        assert same(step(*call, mask), block_sparse_attention(*call, mask))
    assert graphs.frame_count <= 3


def every(step):
    return lambda b, h, q, kv: (q - kv) % step == 0


@ON_CPU
@pytest.mark.parametrize("wrapped", [False, True])
def test_functions_are_told_apart(device, backend, wrapped):
    """Of equal code and different constants; one of them again is the same graph."""
    step, graphs = counted(lambda q, k, v, m: block_sparse_attention(q, k, v, m), backend)
    call, functions = qkv(device=device), [every(2), every(3)]
    for i in (0, 1, 0, 1):
        mask_mod = mask_mods.And(functions[i], mask_mods.Band(None, 50)) if wrapped else functions[i]
        mask = BlockMask.from_mask_mod(mask_mod, (200, 200))
        assert same(step(*call, mask), block_sparse_attention(*call, mask))
    assert graphs.frame_count == 2


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, causal=True)

    call = qkv()
    program = torch.export.export(Layer(), call)
    assert same(program.module()(*call), attention(*call, causal=True))
    assert "attention.attention" in str(program.graph)


# What tracing refuses


@pytest.mark.parametrize(
    ("change", "terms", "text"),
    [
        ({"k": (2, 2, 200, 32)}, {}, "q has head_dim 64 and k 32"),
        ({"v": (2, 2, 199, 64)}, {}, "k has 200 rows and v 199"),
        ({"q": (2, 200, 64)}, {}, "must have 4 dimensions"),
        ({}, {"window": 5}, "window must be .left, right."),
        ({}, {"window": (-2, 0)}, "left bound is -2"),
        ({}, {"scale": -1.0}, "must be above 0"),
    ],
)
def test_errors_under_compile(change, terms, text):
    call = dict(zip("qkv", qkv(), strict=True))
    call |= {name: normal(*shape) for name, shape in change.items()}
    with pytest.raises(Exception, match=text):
        compiled(lambda q, k, v: attention(q, k, v, **terms), "eager")(**call)


def same_document(ids, b, h, q, kv):
    return ids[q] == ids[kv]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_function_that_captures_a_tensor(backend):
    """What is in the tensor when the graph runs counts."""
    step = compiled(lambda q, k, v, m: block_sparse_attention(q, k, v, m), backend)
    call, ids = qkv(), torch.arange(200) // 70
    mask = BlockMask.from_mask_mod(lambda b, h, q, kv: ids[q] >= ids[kv], (200, 200))
    for _ in range(2):
        assert torch.equal(step(*call, mask), block_sparse_attention(*call, mask))
        ids.add_(torch.arange(200) % 2)


def test_masks_that_cannot_cross():
    step = compiled(lambda q, k, v, m: block_sparse_attention(q, k, v, m), "eager")
    call, ids = qkv(), torch.zeros(200, dtype=torch.int32)
    with pytest.raises(Exception, match="under torch.compile block_mask must be a BlockMask, Flex.* got list"):
        step(*call, [torch.ones(2, 2, dtype=torch.bool)])
    with pytest.raises(Exception, match="must be a plain function, or a dataclass of ints, tensors and such masks"):
        step(*call, BlockMask.from_mask_mod(functools.partial(same_document, ids), (200, 200)))
    with pytest.raises(RuntimeError, match="no mask_mod class x.Y in this process; trace the model here first"):
        mask_text.read('["x.Y"]', [], [])


def test_gradients_are_refused_and_not_dropped():
    q, k, v = qkv()
    with pytest.raises(Exception, match="gradient|autograd formula"):
        compiled(lambda q, k, v: attention(q, k, v), "eager")(q.requires_grad_(), k, v).sum().backward()
    assert q.grad is None
