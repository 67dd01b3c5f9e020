"""selected_attention against FP64: the reference, the host side of calls on a GPU, the emulator, and GPUs."""

import contextlib
import itertools
import shutil
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention import selected_attention, torch_op
from attention.backward import dispatch as backward
from attention.backward import ranges
from attention.masks import element_mask
from attention.selected import blocks, reference
from attention.selected.blocks import SelectedBlocks, mask_of
from attention.selected.rows import as_rows, planned_rows
from cute_kernels import explain
from cute_kernels.testing.reference import attention_plainly, normal
from cute_kernels.testing.selected_blocks import mean_similarity, similar_lists

from ..emulator.emulate import COMPILER
from ..emulator.ops import on_emulator
from .parts import FP64, captured, nothing_waits, qkv, rows_first
from .parts import where_fixture as where_fixture
from .selected_parts import as_one_sequence, call_of, check, lists, packed_call, seen_of
from .test_gradients import check as check_gradients
from .test_gradients import machine_fixture as machine_fixture

OP = torch.ops.attention.block_sparse_attention.default

# name -> (arguments of call_of, its options, options of the call)
CALLS = {
    "tokens": ((150, 300, 1, 40), {}, {}),
    "blocks of 4, one list": ((200, 333, 4, 20), {}, {"causal": True}),
    "blocks of 16, G = 1": ((130, 260, 16, 5), {"groups": 1}, {"causal": True}),
    "blocks of 64, per KV head": ((300, 500, 64, 3), {"groups": 2}, {"causal": True}),
    "blocks of 128, per head": ((300, 500, 128, 2), {"groups": 4}, {}),
    "12 heads per KV head": ((90, 300, 4, 20), {"groups": 1, "H": 12, "heads": 1, "B": 1}, {"causal": True}),
    "16 heads per KV head": ((90, 300, 64, 3), {"groups": 2, "H": 32, "heads": 2, "B": 1}, {"causal": True}),
    "one token": ((1, 700, 64, 4), {"groups": 2}, {"causal": True}),
    "more rows than columns": ((300, 100, 4, 9), {"groups": 2}, {"causal": True}),
    "all blocks": ((140, 140, 16, 9), {"groups": 4, "heads": 4}, {"causal": True}),
    "cap, scale": ((140, 200, 16, 5), {"groups": 2, "D": 128, "B": 1}, {"softcap": 3.0, "scale": 0.3}),
    "no columns": ((100, 0, 64, 2), {}, {"causal": True}),
    "no batch": ((100, 100, 64, 2), {"B": 0}, {"causal": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(where, name):
    sizes, options, terms = CALLS[name]
    check(*call_of(*sizes, **options, device=where), **terms)


@pytest.mark.parametrize("block_size", [1, 4, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_packed(where, block_size, causal):
    args, cu = packed_call((60, 0, 140, 9), (77, 13, 140, 0), block_size, 6, device=where)
    check(*args, causal=causal, **cu)


def test_sinks(where):
    sinks = torch.tensor([0.5, 3.0, -2.0, -torch.inf], device=where)
    check(*call_of(200, 300, 4, 12, device=where), causal=True, sinks=sinks)


def test_strided_lists_and_operands(where):
    q, k, v, indices, block_size = call_of(200, 300, 4, 12, groups=2, device=where)
    indices = indices.transpose(1, 2).contiguous().transpose(1, 2)
    check(*map(rows_first, (q, k, v)), indices, block_size, causal=True)


def test_entries_that_are_no_block(where):
    """They are ignored, in packed sequences also those past the end of their own sequence; a block counts once."""
    q, k, v, indices, _ = call_of(200, 300, 64, 3, device=where)
    more = [indices.new_full((2, 200, 1), n) for n in (5, -2, 2**31 - 1, -(2**31))]
    given = torch.cat([indices, *more, indices[..., :2]], -1)
    expected = selected_attention(q, k, v, indices, 64)
    assert torch.equal(selected_attention(q, k, v, given, 64), expected)


def test_reference():
    for causal in (False, True):
        for groups in (None, 1, 2, 4):
            q, k, v, indices, block_size = call_of(90, 130, 16, 4, groups=groups, dtype=FP64)
            out, lse = reference.selected_attention(q, k, v, indices, block_size, causal=causal, softcap=2.0)
            seen = seen_of(indices, block_size, 4, 130, causal)
            expected = attention_plainly(q, k, v, seen, softcap=2.0)
            for mine, true in zip((out, lse), expected, strict=True):
                torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-10)
        args, cu = packed_call((20, 0, 40), (30, 8, 50), 4, 5)
        args = *(t.double() for t in args[:3]), *args[3:]
        out, lse = reference.selected_attention(*args, causal=causal, **cu)
        q, k, v, seen = as_one_sequence(*args, **cu, causal=causal)
        expected = attention_plainly(q, k, v, seen)
        torch.testing.assert_close(out.transpose(0, 1)[None], expected[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(lse[None], expected[1], rtol=1e-10, atol=1e-10)


def test_gradcheck():
    call, terms = call_of(9, 14, 4, 2, groups=2, B=1, D=4, dtype=FP64), {"causal": True, "return_lse": True}
    q, k, v = (t.requires_grad_() for t in call[:3])

    def attend(q, k, v):
        out, lse = selected_attention(q, k, v, *call[3:], **terms)
        return out, lse.masked_fill(lse.isneginf(), 0.0)

    assert torch.autograd.gradcheck(attend, (q, k, v))


GRADIENTS = {
    "blocks of 4": ((200, 300, 4, 20), {"B": 1, "H": 2, "heads": 1}, {"causal": True}),
    "blocks of 128": ((300, 400, 128, 2), {"B": 1, "H": 2, "heads": 2, "groups": 2, "D": 128}, {}),
    "16 heads": ((70, 300, 128, 2), {"B": 2, "H": 32, "heads": 2, "groups": 2, "D": 128}, {"causal": True}),
    "16 heads, blocks of 64": ((70, 333, 64, 3), {"B": 1, "H": 16, "heads": 1, "D": 128}, {}),
    "a list per head": ((330, 600, 128, 2), {"B": 1, "H": 4, "heads": 2, "groups": 4, "D": 128}, {"causal": True}),
    "8 heads, 192": ((70, 333, 64, 3), {"B": 1, "H": 8, "heads": 1, "D": 192}, {"causal": True}),
    "2 heads, 96": ((150, 333, 64, 3), {"B": 1, "H": 4, "heads": 2, "groups": 2, "D": 96}, {"causal": True}),
    "12 heads": ((30, 333, 128, 2), {"B": 1, "H": 12, "heads": 1, "D": 128}, {"causal": True}),
    "in one order": (
        (70, 333, 128, 2),
        {"B": 1, "H": 16, "heads": 1, "D": 128},
        {"causal": True, "deterministic": True},
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(machine, name):
    device, kernels, _ = machine
    compare_gradients(device, kernels, name)


def compare_gradients(device, kernels, name):
    """A call of GRADIENTS against FP64, whose backward pass runs in the context kernels()."""
    sizes, options, terms = GRADIENTS[name]
    q, k, v, indices, block_size = call_of(*sizes, **options, device=device)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out, lse = selected_attention(q, k, v, indices, block_size, return_lse=True, **terms)
    dout, dlse = normal(*out.shape, device=device), normal(*lse.shape, device=device).float()
    dlse = dlse.masked_fill(lse.isneginf(), 0.0)
    with kernels():
        got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    seen = seen_of(indices, block_size, q.shape[1], k.shape[2], terms.get("causal", False))
    check_gradients(got, q, k, v, seen, dout, dlse)


IN_RANGES = "16 heads", "16 heads, blocks of 64", "a list per head", "8 heads, 192"


@pytest.mark.parametrize("name", IN_RANGES)
def test_gradients_in_ranges(machine, monkeypatch, name):
    """Work items of two rows of blocks each."""
    device, kernels, path = machine
    monkeypatch.setattr(ranges, "FEWEST", 2)
    monkeypatch.setattr("attention.backward.gather.dispatch.serves", lambda *_: False)  # one list for 16 heads, on CUDA
    with mock.patch.object(backward, "ranges_of", wraps=backward.ranges_of) as ranges_of:
        compare_gradients(device, kernels, name)
    assert ranges_of.call_count == (path == "sm_90")


@pytest.mark.parametrize("name", ["16 heads", "in one order"])
@pytest.mark.sm_90
def test_gradients_by_saved_lists(name):
    """Backward makes a mask in blocks of 64 rows of the lists that forward by gathered blocks saved."""
    if shutil.which(COMPILER) is None:
        pytest.skip("the emulator needs a C++ compiler")
    with on_emulator("sm_90", sms=4), mock.patch("attention.gradients.mask_of", wraps=mask_of) as made:
        compare_gradients("cpu", contextlib.nullcontext, name)
    assert [call.kwargs["side"] for call in made.call_args_list] == [64]


def test_items_of_ranges():
    """Each nonempty (KV block, range) once: range by range, head by head, the longest first."""
    counts = torch.randint(4, (2, 1, 3, 5), dtype=torch.int32)
    order, listed = ranges.items_of(counts, 3, 2, 4, 2)
    found = order[: listed.item()].tolist()
    lengths = counts.expand(2, 4, 3, 5).unflatten(1, (2, 2)).sum(2).permute(2, 0, 1, 3).flatten()
    assert sorted(found) == lengths.nonzero().flatten().tolist()
    sections = [number // 5 for number in found]
    assert sections == sorted(sections)
    same = [lengths[a] >= lengths[b] for a, b in itertools.pairwise(found) if a // 5 == b // 5]
    assert all(same)


def test_gradients_have_the_strides_of_q(machine):
    """Rows (B, S, H, D), as models have them."""
    device, kernels, _ = machine
    q, k, v, indices, block_size = call_of(70, 200, 128, 2, B=1, H=8, heads=1, D=128, device=device)
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k, v))
    out = selected_attention(q, k, v, indices, block_size, causal=True)
    dout = normal(*out.shape, device=device)
    with kernels():
        got = torch.autograd.grad(out, (q, k, v), dout)
    assert got[0].stride() == q.stride()
    check_gradients(got, q, k, v, seen_of(indices, block_size, 8, 200, True), dout, None)


@pytest.mark.parametrize(
    ("block_size", "packed", "members"),
    [(128, 16, True), (64, 64, True), (128, 1, True), (128, 12, False), (16, 16, False)],
)
def test_masks_by_ballots(block_size, packed, members):
    """The masks that backward evaluates without their program."""
    indices = torch.zeros(1, 64, 2, 3, dtype=torch.int32)
    mask = mask_of(SelectedBlocks(indices, block_size, True, packed), 2, (64 * packed, 256))
    element, _ = element_mask.for_kernel(element_mask.trace_mask(mask.mask_mod, mask.device))
    assert (element.members is not None) == members


def test_gradients_of_packed_sequences(machine):
    device, kernels, _ = machine
    args, cu = packed_call((60, 0, 90), (77, 13, 90), 16, 3, D=64, H=2, heads=1, groups=1, device=device)
    q, k, v = (t.requires_grad_() for t in args[:3])
    out, lse = selected_attention(*args, causal=True, return_lse=True, **cu)
    dout = normal(*out.shape, device=device)
    with kernels():
        got = torch.autograd.grad(out, (q, k, v), dout)
    *operands, seen = as_one_sequence(*args, **cu, causal=True)
    check_gradients([t.transpose(0, 1)[None] for t in got], *operands, seen, dout.transpose(0, 1)[None], None)


@pytest.mark.parametrize("path", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("sm_80", "sm_90")])
def test_emulated_kernels(path):
    if shutil.which(COMPILER) is None:
        pytest.skip("the emulator needs a C++ compiler")
    with on_emulator("sm_90", sms=3, path=path):
        check(*call_of(150, 300, 4, 20, B=1, groups=1), causal=True)


# Lists as in trained models


@pytest.mark.gpu
@pytest.mark.parametrize("similarity", [0.9, 0.0])
@pytest.mark.parametrize(
    ("heads", "D", "block_size", "top", "groups"),
    [((24, 2), 256, 4, 512, 1), ((16, 4), 128, 128, 16, 4), ((16, 4), 128, 64, 16, 4)],
    ids=["QSA", "MSA", "NSA"],
)
def test_models(path, heads, D, block_size, top, groups, similarity):
    """Forward and backward of 4,096 tokens, against the reference in FP32."""
    S, (H, kv_heads) = 4096, heads
    indices = similar_lists(S, S // block_size, top, groups=groups, similarity=similarity, device="cuda")[None]
    q, k, v = (t.requires_grad_() for t in qkv(S, S, D, B=1, H=H, heads=kv_heads, device="cuda"))
    out, lse = selected_attention(q, k, v, indices, block_size, causal=True, return_lse=True)
    dout = normal(*out.shape, device="cuda")
    got = out, lse, *torch.autograd.grad(out, (q, k, v), dout)
    wide = [t.detach().float().requires_grad_() for t in (q, k, v)]
    right, right_lse = reference.selected_attention(*wide, indices, block_size, causal=True)
    expected = right, right_lse, *torch.autograd.grad(right, wide, dout.float())
    for name, mine, true in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
        error = (mine.float() - true).norm() / true.norm()
        assert error < (1e-5 if name == "lse" else 1e-2), f"{name}: relative error {error:.2g}"


def test_similar_lists():
    for similarity in (0.5, 0.9):
        found = similar_lists(300, 256, 32, groups=2, similarity=similarity)
        assert abs(mean_similarity(found) - similarity) < 0.04
        assert (found[100:, :, 0] == 0).all() and (found[299].amax(-1) == 255).all()
    shown = found[found >= 0]
    assert found.shape == (300, 2, 32) and shown.max() == 255
    assert ((found[..., 1:] > found[..., :-1]) | (found[..., 1:] == -1)).all()


def test_similar_lists_in_stretches():
    """Tokens see what they see without stretches, and all but the first of a stretch are as similar to the last one."""
    found = similar_lists(300, 256, 32, similarity=0.9, stretch=128)
    whole = similar_lists(300, 256, 32, similarity=0.9)
    assert torch.equal(found == -1, whole == -1) and torch.equal(found, similar_lists(300, 256, 32, stretch=128))
    assert (found[100:, :, 0] == 0).all() and torch.equal(found.amax(-1)[:, 0], whole.amax(-1)[:, 0])
    assert abs(mean_similarity(found[128:256]) - 0.9) < 0.04
    assert mean_similarity(found[254:257]) < 0.5 and found.shape == (300, 1, 32)  # of tokens 255 and 256


# torch


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("form", ["batch", "packed"])
def test_under_torch_compile(fresh_dynamo, device, backend, form):
    if form == "batch":
        args, terms = call_of(200, 300, 4, 12, groups=2, device=device), {}
    else:
        args, terms = packed_call((60, 140), (77, 140), 4, 6, device=device)
    terms |= {"causal": True, "return_lse": True}
    q, k, v = (t.requires_grad_() for t in args[:3])
    dout = normal(*q.shape, device=device)

    def attend(indices):
        out, lse = selected_attention(q, k, v, indices + 0, args[4], **terms)
        return out * 1, lse

    results = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend=backend)):
        out, lse = function(args[3])
        results.append((out, lse, *torch.autograd.grad(out, (q, k, v), dout)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-2, atol=1e-2)


CU = torch.tensor([0, 40, 100], dtype=torch.int32)
TRACED_ERRORS = {
    "one of two": (3, {"cu_seqlens_k": CU}, "must both be given"),
    "numbers of sequences": (3, {"cu_seqlens_q": CU, "cu_seqlens_k": CU[:2]}, "2 sequences and .* 1"),
    "int64": (3, {"cu_seqlens_q": CU.long(), "cu_seqlens_k": CU}, "it must be torch.int32"),
    "heads": (4, {}, "heads of q .* multiple"),
    "rows": (4, {"indices": lists(1, 99, top=2, blocks=2)}, "indices must have shape"),
}


@pytest.mark.parametrize("traced", ["compiled", "meta"])
@pytest.mark.parametrize("name", TRACED_ERRORS)
def test_errors_in_a_trace(fresh_dynamo, name, traced):
    """Errors that the registered op would not find."""
    rank, changes, text = TRACED_ERRORS[name]
    q, k, v, indices, block_size = call_of(100, 100, 64, 2, B=1, H=4, heads=3 if name == "heads" else 2)
    if rank == 3:
        q, k, v, indices = *(t[0].transpose(0, 1) for t in (q, k, v)), indices[0]
    args = {"q": q, "k": k, "v": v, "indices": indices} | changes
    call = selected_attention
    if traced == "compiled":
        call = torch.compile(call, backend="eager")
    else:
        args = {name: t.to("meta") for name, t in args.items()}
    with pytest.raises((TypeError, ValueError), match=text):
        call(**args, block_size=block_size)


def test_opcheck():
    q, k, v, indices, block_size = call_of(150, 200, 4, 12, groups=2)
    mask = torch_op.crossing(SelectedBlocks(indices, block_size, True))
    torch.library.opcheck(OP, (q, k, v, *mask), {"return_lse": True})
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        selected_attention(q, k, v, indices, block_size)
    assert counter.get_total_flops() == 4 * 64 * 2 * 4 * 150 * 12 * 4


def test_without_memory():
    """On the meta device and under vmap the call becomes the registered op."""
    call = call_of(50, 60, 16, 2, groups=2)
    meta = (t.to("meta") for t in call[:4])
    assert selected_attention(*meta, 16, causal=True).shape == (2, 4, 50, 64)
    stacked = [torch.stack([t, t]) for t in call[:4]]
    found = torch.func.vmap(lambda *t: selected_attention(*t, 16, causal=True))(*stacked)
    assert torch.equal(found[1], selected_attention(*call, causal=True))


def test_autocast():
    call = call_of(50, 60, 16, 2, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert selected_attention(*call).dtype is torch.bfloat16


@pytest.mark.gpu
def test_a_graph_reads_the_lists_at_each_replay(path):
    q, k, v, indices, block_size = call_of(300, 500, 4, 30, groups=2, device="cuda")
    call = lambda: selected_attention(q, k, v, indices, block_size, causal=True)  # noqa: E731
    call()
    with nothing_waits():
        call()
    graph, out = captured(call)
    for _ in range(2):
        indices.copy_(lists(2, 300, 2, top=30, blocks=125, device="cuda"))
        graph.replay()
        assert torch.equal(out, call())


def test_explain():
    call = call_of(200, 300, 64, 3, groups=2)
    text = str(explain(selected_attention, *call, causal=True, arch="sm_90"))
    assert "head_dim 64" in text


class Copies(TorchDispatchMode):
    """The numbers of elements of the floating-point tensors that are copied."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten._to_copy):
            self.sizes += [t.numel() for t in args[:1] if t.is_floating_point()]
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("heads", [1, 2])
def test_explain_copies_nothing(heads):
    """The plan's rows of packed heads have the layout that those of the call have."""
    q, *call = call_of(200, 300, 64, 3, groups=heads, heads=heads)
    for given in (q, rows_first(q)):
        with Copies() as copies:
            explain(selected_attention, given, *call, arch="sm_80")
        assert not copies.sizes
        rows, planned = as_rows(given, 4 // heads), planned_rows(given, 4 // heads)
        assert (rows.shape, rows.stride()) == (planned.shape, planned.stride())


def test_lists_of_a_mask():
    """The union of the lists of 128 rows, per query head, without blocks of scores in the future."""
    indices = torch.full((1, 256, 2, 2), -1, dtype=torch.int32)
    indices[0, 5, 0, 0], indices[0, 200, 1, 1], indices[0, 6, 1, 0] = 1, 4, 4
    mask = mask_of(SelectedBlocks(indices, 64, True), 4, (256, 320))
    assert mask.kv_num_blocks.tolist() == [[[1, 0], [1, 0], [0, 1], [0, 1]]]
    assert mask.kv_indices[0, :2, 0, 0].tolist() == [0, 0] and mask.kv_indices[0, 2:, 1, 0].tolist() == [2, 2]


def test_lists_of_packed_heads():
    """12 heads of a token: rows 120 to 131 are of token 10, so two tiles have its blocks."""
    indices = torch.full((1, 22, 1, 2), -1, dtype=torch.int32)
    indices[0, 9, 0, 0], indices[0, 10, 0, 1], indices[0, 11, 0, 0] = 1, 6, 2
    mask = mask_of(SelectedBlocks(indices, 64, False, 12), 1, (22 * 12, 500))
    assert mask.kv_num_blocks.tolist() == [[[2, 2, 0]]]
    assert mask.kv_indices[0, 0, 0, :2].tolist() == [0, 3] and mask.kv_indices[0, 0, 1, :2].tolist() == [1, 3]


def test_lists_are_read_in_parts(monkeypatch):
    """Parts of a few rows each, as with many tokens."""
    monkeypatch.setattr(blocks, "CHUNK", 20_000)
    check(*call_of(90, 300, 4, 20, H=12, heads=1, B=1, groups=1), causal=True)


def test_the_mask_is_traced_once(monkeypatch):
    """For all lists and lengths, since each call has new tensors. Causal masks of as many rows as keys are another."""
    monkeypatch.setattr(element_mask, "_PROGRAMS", {})
    sizes = (90, 300, 1), (90, 300, 1), (40, 250, 2), (33, 300, 1), (300, 33, 1)
    causal, plain = ([call_of(*n, 4, 20, groups=2, B=B) for *n, B in sizes] for _ in range(2))
    square = [call_of(n, n, 4, 20, groups=2) for n in (90, 40)]
    packed = [packed_call(rows, (77, 13), 4, 6) for rows in ((60, 9), (50, 19), (50, 9))]
    for part in (slice(1), slice(1, None)):
        for call in causal[part] + square[part]:
            check(*call, causal=True)
        for call in plain[part]:
            check(*call)
        for call, cu in packed[part]:
            check(*call, causal=True, **cu)
        assert len(element_mask._PROGRAMS) == 4
        monkeypatch.setattr(element_mask, "trace", lambda *_: pytest.fail("traced again"))


# Errors


def bad(**changes):
    """Arguments of a call, with changes by name."""
    names = ("q", "k", "v", "indices", "block_size")
    return dict(zip(names, call_of(100, 100, 64, 2, groups=2), strict=True)) | changes


ERRORS = {
    "int64": (lambda: bad(indices=lists(2, 100, top=2, blocks=2).long()), TypeError, r"torch.int32.*indices.int\(\)"),
    "rows": (lambda: bad(indices=lists(2, 99, top=2, blocks=2)), ValueError, r"\(B, Sq, top\).*got \(2, 99, 2\)"),
    "lists": (
        lambda: bad(indices=lists(2, 100, 3, top=2, blocks=2)),
        ValueError,
        "3 lists per token.*the 2 heads of k",
    ),
    "not a tensor": (lambda: bad(indices=[1]), TypeError, "indices must be a torch.Tensor, got list"),
    "block size": (lambda: bad(block_size=32), ValueError, "one of 1, 4, 16, 64, 128 tokens, got 32"),
    "a bool": (lambda: bad(block_size=True), ValueError, "block_size must be one of"),
    "device": (lambda: bad(indices=torch.zeros(2, 100, 2, dtype=torch.int32, device="meta")), ValueError, "on meta"),
    "dtype": (lambda: bad(v=qkv(100, 100)[2].float()), TypeError, "v is torch.float32"),
    "causal": (lambda: bad(causal=1), TypeError, "causal must be True or False"),
    "scale": (lambda: bad(scale=0.0), ValueError, "scale is 0.0; it must be above 0"),
    "sinks": (lambda: bad(sinks=torch.zeros(3)), ValueError, "sinks has shape"),
    "return_lse": (lambda: bad(return_lse=1), TypeError, "return_lse must be True or False"),
    "one of two": (lambda: bad(cu_seqlens_q=torch.zeros(2, dtype=torch.int32)), ValueError, "must both be given"),
    "packed rank": (
        lambda: bad(**dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.zeros(2, dtype=torch.int32))),
        ValueError,
        r"must be \(total, heads, head_dim\)",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    make, error, text = ERRORS[name]
    with pytest.raises(error, match=f"selected_attention: .*{text}" if "causal" not in name else text):
        selected_attention(**make())
