"""The registered attention ops: their schemas, torch.compile without graph breaks, masks as users hold them."""

import pytest
import torch
import torch._dynamo.testing
from torch.nn.attention.flex_attention import create_block_mask as create_flex_mask

from attention import BlockMask, attention, block_sparse_attention, create_block_mask, mask_mods, patterns, torch_op
from attention.arguments import BACKWARD_TERMS, AttentionArgs
from attention.masks import mask_text
from cute_kernels.testing.reference import normal, poisoned

from .mask_parts import (  # noqa: F401 (fixtures are used by name)
    FIRST,
    SECOND,
    N,
    by_head,
    conversions_fixture,
    count,
    held,
    operands,
    parts,
    right,
    write,
)
from .parts import BF16, cache, of_one_projection, packed, qkv, rows_first

CUDA = pytest.param("cuda", "inductor", marks=pytest.mark.gpu)
ON = pytest.mark.parametrize(("device", "backend"), [("cpu", "eager"), ("cpu", "aot_eager"), CUDA])
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
OPS = torch.ops.attention
every_form = pytest.mark.parametrize("form", ["flex", "bool", "bsr"])
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(fn, backend):
    return torch.compile(fn, fullgraph=True, backend=backend)


def counted(fn, backend):
    """(fn compiled, what counts its graphs)"""
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return compiled(fn, graphs), graphs


def sparse(backend, **terms):
    """The same of block_sparse_attention."""
    return counted(lambda *args: block_sparse_attention(*args, **terms) * 1, backend)


def same(results, expected) -> bool:
    results, expected = ((t,) if isinstance(t, torch.Tensor) else t for t in (results, expected))
    return len(results) == len(expected) and all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def crossing(mask: BlockMask) -> tuple:
    """A mask as the registered ops take it."""
    lists = list(mask.lists())
    return "lists", lists, list(mask.lengths), list(mask.blocksize), *mask_text.written_mask(mask.mask_mod)


def masks() -> list[BlockMask]:
    """For every kind of mask_mod."""
    ids, lengths = torch.arange(200, dtype=torch.int32) // 70, (200, 200)
    return [
        BlockMask.from_blocks(torch.tensor([[True, False], [True, True]]), lengths=lengths),
        patterns.sliding_window(lengths, (30, 4)),
        patterns.documents(ids, causal=True),
        create_block_mask(lambda b, h, q, kv: (q - kv) % 3 == 0, None, None, *lengths),
        create_block_mask(lambda b, h, q, kv: (q + h) % 3 > b, 2, 4, *lengths).with_causal(),
    ]


# The registered ops


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck_attention(device):
    call = qkv(Dv=128, device=device)
    out = torch.zeros(2, 4, 200, 128, dtype=BF16, device=device)
    for terms in ({}, {"causal": True, "return_lse": True}, {"window_size": [30, -1], "softcap": 5.0, "scale": 0.1}):
        torch.library.opcheck(OPS.attention.default, call, terms)
        torch.library.opcheck(OPS.attention_out.default, (*call, out), terms)
    torch.library.opcheck(OPS.attention.default, [rows_first(t) for t in qkv(device=device)], {})
    q, k, v, *cu = packed([40, 110], [40, 110], device=device).values()
    torch.library.opcheck(OPS.attention.default, (q, k, v), {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]})
    lengths = torch.tensor([150, 7], dtype=torch.int32, device=device)
    torch.library.opcheck(OPS.attention.default, call, {"seqused_k": lengths, "return_lse": True})
    sinks = torch.randn(4, dtype=BF16, device=device, requires_grad=True)
    torch.library.opcheck(OPS.attention.default, call, {"return_lse": True, "sinks": sinks})


def test_opcheck_block_sparse():
    call = qkv()
    for mask in masks()[0::4]:
        args = *call, *crossing(mask)
        torch.library.opcheck(OPS.block_sparse_attention.default, args, {"return_lse": True})
        terms = {"causal": True, "sinks": torch.randn(4, requires_grad=True)}
        torch.library.opcheck(OPS.block_sparse_attention.default, args, terms)
        out = torch.zeros(2, 4, 200, 64, dtype=BF16)
        torch.library.opcheck(OPS.block_sparse_attention_out.default, (*args, out), {"causal": True})
    for form in ("flex", "bool", "bsr"):
        torch.library.opcheck(OPS.block_sparse_attention.default, (*operands(), *torch_op.crossing(held(form))))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("form", ["contiguous", "rows first", "of one projection"])
def test_gradients_have_the_strides_that_a_compiler_is_told(form, device):
    """The strides are those of the operand, or contiguous where it has gaps."""
    q, k, v = qkv(heads=4, device=device)
    if form == "rows first":
        q, k, v = map(rows_first, (q, k, v))
    elif form == "of one projection":
        q, k, v = of_one_projection(q, k, v)
    mask = crossing(masks()[1].to(device))
    terms = AttentionArgs(q, k, v)._asdict()
    terms = *(terms[name] for name in BACKWARD_TERMS), None, None
    for name, lists in (("attention", ()), ("block_sparse_attention", mask)):
        out, lse = getattr(OPS, name)(q, k, v, *lists, return_lse=True)
        backward = getattr(OPS, f"{name}_backward")
        call = torch.randn_like(out), None, q, k, v, out, lse, *lists, *terms
        torch.library.opcheck(backward.default, call, test_utils=("test_schema", "test_faketensor"))
        for gradient, t in zip(backward(*call), (q, k, v)):
            expected = torch.empty(t.shape) if form == "of one projection" else t
            assert gradient.stride() == expected.stride()


def test_ops_can_be_called_by_name():
    """As an exported graph does."""
    call = qkv()
    assert same(
        OPS.attention(*call, causal=True, window_size=[5, -1])[0], attention(*call, causal=True, window_size=(5, None))
    )
    for mask in masks():
        assert same(OPS.block_sparse_attention(*call, *crossing(mask))[0], block_sparse_attention(*call, mask))


def test_a_mask_is_made_again_only_of_other_tensors():
    """Kept with the first list, but made of all four: one that took the address of another is not that one."""
    mask = masks()[2]
    made = torch_op.block_mask_of(*crossing(mask))
    assert torch_op.block_mask_of(*crossing(mask)).kv_indices is made.kv_indices
    assert torch_op.block_mask_of(*crossing(masks()[2])).kv_indices is not made.kv_indices
    form, lists, *sizes = crossing(BlockMask.from_blocks(FIRST))
    for _ in range(20):
        other = [*lists[:3], BlockMask.from_blocks(SECOND).full_kv_indices]
        for given in (other, lists):
            assert torch.equal(torch_op.block_mask_of(form, given, *sizes).full_kv_indices, given[3])
        del other, given


# torch.compile


TERMS = [
    {}, {"causal": True, "return_lse": True}, {"window_size": (-1, 3), "softcap": 3, "scale": 0.5},
    {"window_size": [20, None], "return_lse": True},
]  # fmt: skip


@ON
@pytest.mark.parametrize("terms", TERMS, ids=str)
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

    call, out = qkv(device=device), poisoned(2, 4, 200, 64, device=device)
    results = compiled(layer, backend)(*call, out)
    expected, lse = attention(*call, causal=True, return_lse=True)
    assert same(out, expected) and same(results, (expected + 1, lse) if return_lse else (expected + 1,))


@ON
@pytest.mark.parametrize("return_lse", [False, True])
def test_packed_and_cached(device, backend, return_lse):
    terms = {"causal": True, "return_lse": return_lse}
    for call in (
        packed([40, 0, 97], [40, 0, 97], more=(13, 13), device=device),
        cache([150, 7], 200, rows=3, device=device),
        cache([150, 7], 160, rows=3, page_size=32, device=device),
    ):
        step = compiled(lambda call: attention(**call, **terms), backend)
        assert same(step(call), attention(**call, **terms))


@ON
def test_a_layer(device, backend):
    """Projections around it: heads are views of a (B, S, H D) product."""

    def layer(x, w):
        q, k, v = ((x @ w[i]).view(2, 130, 4, 64).transpose(1, 2) for i in range(3))
        return attention(q, k, v, causal=True).transpose(1, 2).reshape(2, 130, 256) * 1.0

    x, w = normal(2, 130, 256, device=device), normal(3, 256, 256, device=device, k=256)
    torch.testing.assert_close(compiled(layer, backend)(x, w), layer(x, w), atol=2e-2, rtol=2e-2)


@ON
def test_changing_lengths(device, backend):
    """Extents become symbols after the first change: two graphs, not one for each length."""
    step, graphs = counted(lambda q, k, v: attention(q, k, v, causal=True, return_lse=True), backend)
    for Sq, Sk in ((200, 200), (130, 333), (7, 90), (128, 256)):
        call = qkv(Sq, Sk, device=device)
        assert same(step(*call), attention(*call, causal=True, return_lse=True))
    assert graphs.frame_count <= 2


@BACKENDS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("forms", [None, ("flex", "bool", "bsr")])
def test_masks(backend, causal, forms):
    """The mask is an input of the graph; BlockMasks, and what else users hold."""
    terms = {"causal": causal, "return_lse": True}
    step = compiled(lambda *args: block_sparse_attention(*args, **terms), backend)
    into = compiled(lambda *args, out: block_sparse_attention(*args, **terms, out=out)[1] + 0, backend)
    call = operands() if forms else qkv()
    for mask in map(held, forms) if forms else masks():
        expected = block_sparse_attention(*call, mask, **terms)
        out = poisoned(*call[0].shape)
        lse = into(*call, mask, out=out)
        assert same(step(*call, mask), expected) and same((out, lse), expected)


@BACKENDS
def test_new_tensors_in_a_mask_need_no_new_graph(backend):
    (step, graphs), call = sparse(backend), qkv()
    for length in (70, 100, 64):
        mask = patterns.documents(torch.arange(200, dtype=torch.int32) // length, causal=True)
        assert same(step(*call, mask), block_sparse_attention(*call, mask))
    assert graphs.frame_count == 1


@BACKENDS
def test_masks_of_changing_lengths(backend):
    step, graphs = sparse(backend)
    for Sq, Sk in ((200, 200), (330, 350), (300, 444), (222, 411), (290, 490)):
        call, mask = qkv(Sq, Sk), patterns.sliding_window((Sq, Sk), (Sk // 7, 3))
        assert same(step(*call, mask), block_sparse_attention(*call, mask))
    assert graphs.frame_count <= 3


def every(step):
    return lambda b, h, q, kv: (q - kv) % step == 0


@BACKENDS
@pytest.mark.parametrize("wrapped", [False, True])
def test_functions_are_told_apart(backend, wrapped):
    """For equal code and different constants; one of them again is the same graph."""
    (step, graphs), call, functions = sparse(backend), qkv(), [every(2), every(3)]
    for i in (0, 1, 0, 1):
        mask_mod = mask_mods.And(functions[i], mask_mods.Band(None, 50)) if wrapped else functions[i]
        mask = create_block_mask(mask_mod, None, None, 200, 200)
        assert same(step(*call, mask), block_sparse_attention(*call, mask))
    assert graphs.frame_count == 2


@BACKENDS
def test_a_function_that_captures_a_tensor(backend):
    """The tensor's contents when the graph runs count; and a mask that the compiled function captures."""
    (step, _), call, ids = sparse(backend), qkv(), torch.arange(200) // 70
    mask = create_block_mask(lambda b, h, q, kv: ids[q] >= ids[kv], None, None, 200, 200)
    captured = compiled(lambda *args: block_sparse_attention(*args, mask), backend)
    for _ in range(2):
        assert torch.equal(step(*call, mask), block_sparse_attention(*call, mask))
        assert torch.equal(captured(*call), step(*call, mask))
        ids.add_(torch.arange(200) % 2)


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
        ({}, {"window_size": 5}, "window_size must be .left, right."),
        ({}, {"window_size": (-2, 0)}, "left bound must be at least 0, .*, got -2"),
        ({}, {"scale": -1.0}, "must be above 0"),
    ],
)
def test_refused_under_compile(change, terms, text):
    call = dict(zip("qkv", qkv(), strict=True)) | {name: normal(*shape) for name, shape in change.items()}
    with pytest.raises(Exception, match=text):
        compiled(lambda q, k, v: attention(q, k, v, **terms), "eager")(**call)


def mask_of_a_generator():
    """A mask_mod that captures what has no text."""
    ids, numbers = torch.zeros(N, dtype=torch.int32), iter(range(9))
    return create_block_mask(lambda b, h, q, kv: (ids[q] == ids[kv]) | (numbers is None), None, None, N, N)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: [FIRST], "under torch.compile block_mask must be a BlockMask, Flex.* got list"),
        (mask_of_a_generator, "a mask_mod is a function or a dataclass, and captures tensors, .* not a .*_iterator"),
        (lambda: torch.ones(3, 3), "blocks must be a strided bool tensor"),
        (lambda: create_flex_mask(by_head, 2, 4, N, N, device="cpu", BLOCK_SIZE=256), "64 or 128"),
        (lambda: held("torch bsr"), "torch.compile does not support sparse Tensors"),
    ],
)
def test_masks_that_cannot_cross(make, text):
    with pytest.raises(Exception, match=text):
        sparse("eager")[0](*operands(), make())


def test_masks_that_cannot_be_written():
    with pytest.raises(RuntimeError, match="no class x.Y in this process; trace the model here first"):
        mask_text.read_mask('["class x.Y"]', [], [], "cpu")
    with pytest.raises(TypeError, match="which torch.compile does not take, make BsrMatrix.from_torch"):
        torch_op.crossing(held("torch bsr"))


def test_gradients_are_refused_and_not_dropped():
    q, k, v = qkv(1, 64)
    lengths = torch.tensor([64, 5], dtype=torch.int32)
    with pytest.raises(Exception, match="gradients are not supported with seqused_k, page_table"):
        compiled(lambda q, k, v: attention(q, k, v, seqused_k=lengths), "eager")(q.requires_grad_(), k, v)
    assert q.grad is None
