"""Backward after a mask was written to: the gradient of the forward's mask, or torch's error; no wrong one."""

import contextlib
import gc
import shutil
import weakref

import pytest
import torch
import torch._dynamo
from torch.nn.attention.flex_attention import create_block_mask as create_flex_mask
from torch.utils.checkpoint import checkpoint

import cute_kernels
from attention import BlockMask, block_sparse_attention, create_block_mask, patterns
from attention.masks import cache
from cute_kernels.testing.reference import attention_plainly

from ..emulator.emulate import COMPILER
from ..emulator.ops import on_emulator
from .mask_parts import FIRST, FORMS, SECOND, N, held, operands, write

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
WRITTEN = "modified by an inplace operation"


def ids(device, size=100):
    return torch.arange(N, device=device, dtype=torch.int32) // size


def elements(device):
    return ids(device)[:, None] == ids(device)


def dense(form: str, mask) -> torch.Tensor:
    """The mask's current pattern, bool (B, H, N, N)."""
    if form in ("bool", "bsr", "torch bsr"):
        blocks = mask
        if form != "bool":
            blocks = (mask if form == "torch bsr" else mask.to_torch()).to_dense()
            blocks = blocks.view(3, 128, 3, 128).any(3).any(1)
        return blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[None, None]
    if form == "elements":
        return mask.seen[None, None].clone()
    if isinstance(mask, cache.FlexBlockMask):
        mask = BlockMask.from_flex(mask)
    return mask.to_dense().clone()


def lists_of_ours(device):
    mask = BlockMask.from_blocks(FIRST.to(device))
    other = BlockMask.from_blocks(SECOND.to(device))
    return mask, lambda: [t.copy_(new) for t, new in zip(mask.lists(), other.lists(), strict=True)]


def documents(device):
    rows = ids(device)
    return patterns.documents(rows, causal=True), lambda: rows.copy_(ids(device, 50))


def function(device, flex=False):
    reach = torch.full((4,), 200, device=device, dtype=torch.int32)
    mask_mod = lambda b, h, q, kv: (q - kv).abs() < reach[h]  # noqa: E731
    if flex:
        mask = create_flex_mask(mask_mod, None, 4, N, N, device=device)
    else:
        mask = create_block_mask(mask_mod, None, 4, N, N, device=device)
    return mask, lambda: reach.fill_(20)


def computed(device):
    """A tensor that the function computes something of as a whole."""
    step = torch.ones(N, device=device, dtype=torch.int32)
    mask_mod = lambda b, h, q, kv: kv < step.cumsum(0, dtype=torch.int32)[q]  # noqa: E731
    return create_block_mask(mask_mod, None, None, N, N, device=device), lambda: step.zero_()


def elements_form(device):
    seen = elements(device)
    return cache.ElementTensor(seen), lambda: seen.copy_(ids(device, 50)[:, None] == ids(device, 50))


def plain(form):
    def make(device):
        mask = held(form, device=device)
        return mask, lambda: write(form, mask)

    return make


# name -> device -> (mask, what writes to it in place)
MASKS = {form: plain(form) for form in FORMS} | {
    "lists": lists_of_ours,
    "documents": documents,
    "function": function,
    "flex function": lambda device: function(device, flex=True),
    "computed": computed,
    "elements": elements_form,
}


class Changes:
    """Masks that change without a write to a tensor: a name that a function captures, attributes of flex's mask."""

    @staticmethod
    def number(device):
        reach = 200

        def mask_mod(b, h, q, kv):
            return (q - kv).abs() < reach

        def change():
            nonlocal reach
            reach = 20

        return create_block_mask(mask_mod, None, None, N, N, device=device), change

    @staticmethod
    def tensor(device):
        reach = torch.full((4,), 200, device=device)

        def mask_mod(b, h, q, kv):
            return (q - kv).abs() < reach[h]

        def change():
            nonlocal reach
            reach = torch.full((4,), 20, device=device)

        return create_block_mask(mask_mod, None, 4, N, N, device=device), change

    @staticmethod
    def lists(device):
        mask, other = held("flex", device=device), held("flex", SECOND, device)

        def change():
            mask.full_kv_num_blocks, mask.full_kv_indices = other.full_kv_num_blocks, other.full_kv_indices

        return mask, change

    @staticmethod
    def mask_mod(device):
        mask = function(device, flex=True)[0]
        return mask, lambda: setattr(mask, "mask_mod", lambda b, h, q, kv: (q - kv).abs() < 20)


def gradients_of_truth(call, seen, dout, causal=False):
    call = [t.detach().double().requires_grad_() for t in call]
    if causal:
        seen = seen & torch.ones(N, N, dtype=torch.bool, device=seen.device).tril()
    attention_plainly(*call, seen)[0].backward(dout.double())
    return [t.grad for t in call]


def assert_right(call, want):
    for name, t, exact in zip("qkv", call, want, strict=True):
        error = ((t.grad.double() - exact).norm() / exact.norm()).item()
        assert error < 0.02, f"d{name} errs by {error:.3g}"


def check(make, form, device, run, causal=False, first=None, around=contextlib.nullcontext, raises=None):
    """Forward, write, backward: right, or torch's error; `raises` says which of the two must be."""
    mask, change = make(device)
    if first is not None:
        first(mask)
    call = [t.requires_grad_() for t in operands(device)]
    want_of = dense(form, mask)
    dout = torch.randn(call[0].shape, device=device).to(call[0].dtype)
    want = gradients_of_truth(call, want_of, dout, causal)
    with around():
        out = run(*call, mask, causal)
    change()
    assert causal or not torch.equal(dense(form, mask), want_of), "the test changes nothing"
    raised = False
    try:
        out.backward(dout)
    except RuntimeError as error:
        if WRITTEN not in str(error):
            raise
        raised = True
    if not raised:
        assert_right(call, want)
    assert raises is None or raised == raises
    if raised and not causal and form != "lists":  # a second forward is right
        run(*call, mask, causal).backward(dout)
        assert_right(call, gradients_of_truth(call, dense(form, mask), dout, causal))


def eagerly(*args):
    return block_sparse_attention(*args[:-1], causal=args[-1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_eager(place, name, causal):
    check(MASKS[name], name, place, eagerly, causal)


@pytest.mark.parametrize("name", [name for name in MASKS if name not in ("bsr", "torch bsr")])
def test_after_a_backward(place, name):
    """The form of a mask that backward needs is there already, and kept."""

    def first(mask):
        call = [t.requires_grad_() for t in operands(place)]
        block_sparse_attention(*call, mask).sum().backward()

    check(MASKS[name], name, place, eagerly, first=first)


@pytest.mark.parametrize("name", [name for name in vars(Changes) if not name.startswith("_")])
def test_changes_that_are_no_writes(place, name):
    check(getattr(Changes, name), name, place, eagerly, raises=False)


@pytest.mark.parametrize("name", MASKS)
def test_copies_that_hooks_keep(place, name):
    """Saved tensors that are copied elsewhere, as by offloading: the copies count, and torch raises nothing."""

    def copies():
        return torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)

    check(MASKS[name], name, place, eagerly, around=copies, raises=False)
    check(MASKS[name], name, place, eagerly, causal=True, around=copies, raises=False)


@pytest.mark.parametrize("name", MASKS)
def test_inference_tensors(place, name):
    """Autograd saves none of them, and torch counts no writes to them."""
    with torch.inference_mode():
        mask, change = MASKS[name](place)
    call = [t.requires_grad_() for t in operands(place)]
    dout = torch.ones_like(call[0])
    with torch.inference_mode():
        seen = dense(name, mask)
    want = gradients_of_truth(call, seen.clone(), dout)
    out = eagerly(*call, mask, False)
    with torch.inference_mode():
        change()
    out.backward(dout)
    assert_right(call, want)


@pytest.mark.parametrize("name", MASKS)
def test_unchanged(place, name):
    """Nothing raises where nothing is written; checkpoints, and two backward passes through one graph."""
    mask, _ = MASKS[name](place)
    for run in (eagerly, lambda *args: checkpoint(eagerly, *args, use_reentrant=False)):
        call = [t.requires_grad_() for t in operands(place)]
        dout = torch.ones_like(call[0])
        out = run(*call, mask, True)
        out.backward(dout, retain_graph=True)
        want = gradients_of_truth(call, dense(name, mask), dout, True)
        assert_right(call, want)
        for t in call:
            t.grad = None
        out.backward(dout)
        assert_right(call, want)


def test_data_that_is_replaced(place):
    mask, _ = function(place)
    reach = mask.mask_mod.__closure__[0].cell_contents
    call = [t.requires_grad_() for t in operands(place)]
    out = block_sparse_attention(*call, mask)
    reach.data = torch.full_like(reach, 20)
    with pytest.raises(RuntimeError, match=WRITTEN):
        out.sum().backward()


def test_the_mask_dies_with_the_graph():
    mask, _ = function("cpu")
    lists = weakref.ref(mask.kv_indices)
    out = block_sparse_attention(*(t.requires_grad_() for t in operands()), mask)
    del mask
    assert lists() is not None
    gc.disable()
    try:
        del out
        assert lists() is None, "a cycle of references"
    finally:
        gc.enable()


ON = [("cpu", "eager"), ("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)]


@pytest.mark.parametrize(("device", "backend"), ON)
@pytest.mark.parametrize("name", [name for name in MASKS if name != "torch bsr"])
def test_compiled(device, backend, name):
    torch._dynamo.reset()
    run = torch.compile(lambda *args: eagerly(*args) * 1, fullgraph=True, backend=backend)
    check(MASKS[name], name, device, run)
    check(MASKS[name], name, device, run, causal=True)


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="the emulator needs a C++ compiler")
@pytest.mark.parametrize(("kind", "causal"), [("as it is", False), ("copies", True)])
def test_the_kernel_backward(kind, causal):
    """The tables and the function of the forward's mask, on the emulator."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
    with on_emulator("sm_90", sms=4), cute_kernels.path("sm_90"):
        around = (lambda: hooks) if kind == "copies" else contextlib.nullcontext
        check(function, "function", "cpu", eagerly, causal, around=around, raises=kind != "copies")
