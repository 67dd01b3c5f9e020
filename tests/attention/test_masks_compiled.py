"""Masks and score functions that are made anew in each step, under torch.compile: few graphs, no leaks."""

import functools
import gc
import types
import weakref
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask as create_flex_mask

from attention import BlockMask, attention, block_sparse_attention, create_block_mask, patterns
from attention.masks import function_text
from cute_kernels.traced import memo, numbers

from .mask_parts import N, operands
from .test_masks_saved import assert_right, gradients_of_truth

BACKENDS = [("cpu", "eager"), ("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)]
every_backend = pytest.mark.parametrize(("device", "backend"), BACKENDS)
STEPS = 12


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counted(fn, backend):
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(fn, fullgraph=True, backend=graphs), graphs


def of_tensor(step, device):
    ids = torch.arange(N, dtype=torch.int32, device=device) // (50 + 10 * step)
    return lambda b, h, q, kv: ids[q] == ids[kv]


def of_number(step, device):
    return lambda b, h, q, kv: (kv <= q) | (kv < 10 * step)


def of_two(step, device):
    """A function that calls another, which captures."""
    inner, reach = of_tensor(step, device), 20 * step + 20
    return lambda b, h, q, kv: inner(b, h, q, kv) & ((q - kv).abs() <= reach)


def of_partial(step, device):
    return functools.partial(mask_of_partial, torch.arange(N, device=device) // (50 + step), 20 + step)


def mask_of_partial(ids, reach, b, h, q, kv):
    return (ids[q] == ids[kv]) & ((q - kv).abs() <= reach)


@dataclass(frozen=True, eq=False)
class Prefix:
    size: int
    ids: Tensor

    def __call__(self, b, h, q, kv):
        return (kv < self.size) | (self.ids[q] == self.ids[kv])


def of_dataclass(step, device):
    return Prefix(step * 7, torch.arange(N, device=device) // (50 + step))


class Config:
    def __init__(self, reach):
        self.reach, self.file = reach, open  # of which the mask reads one


def of_object(step, device):
    config = Config(30 + step)
    return lambda b, h, q, kv: (q - kv).abs() <= config.reach


MASKS = {f.__name__: f for f in (of_tensor, of_number, of_two, of_partial, of_dataclass, of_object)}


def flex(mask_mod, device):
    return create_flex_mask(mask_mod, None, None, N, N, device=device)


def ours(mask_mod, device):
    return create_block_mask(mask_mod, None, None, N, N, device=device)


@pytest.mark.parametrize("make", [ours, flex])
@pytest.mark.parametrize("name", MASKS)
@every_backend
def test_made_anew_in_each_step(device, backend, name, make):
    run, graphs = counted(lambda *args: block_sparse_attention(*args) * 1, backend)
    made = []
    for step in range(STEPS):
        mask_mod = MASKS[name](step, device)
        mask = make(mask_mod, device)
        call = [t.requires_grad_() for t in operands(device)]
        out = run(*call, mask)
        torch.testing.assert_close(out, block_sparse_attention(*call, mask), atol=0, rtol=0)
        if step in (0, STEPS - 1):
            dout = torch.randn_like(out)
            out.backward(dout)
            dense = (BlockMask.from_flex(mask) if make is flex else mask).to_dense()
            assert_right(call, gradients_of_truth(call, dense, dout))
        if name != "of_partial":
            made.append(weakref.ref(mask_mod))
        del mask_mod, mask, out
    assert graphs.frame_count <= 2, "a second one where numbers change"
    gc.collect()
    assert not any(ref() is not None for ref in made[:-1])


def scores_of(step, device):
    temperature, slopes = 0.5 + step * 0.25, torch.full((4,), 0.01 * step, device=device)
    return lambda score, b, h, q, kv: score * temperature + slopes[h] * (kv - q)


@every_backend
def test_score_mods(device, backend):
    """Floats become inputs of the graph."""
    run, graphs = counted(lambda q, k, v, mod: attention(q, k, v, score_mod=mod) * 1, backend)
    for step in range(STEPS):
        call, mod = operands(device), scores_of(step, device)
        torch.testing.assert_close(run(*call, mod), attention(*call, score_mod=mod), atol=0, rtol=0)
    assert graphs.frame_count <= 2


IDS = torch.arange(N) // 50
REACH = 100


def near(b, h, q, kv):
    return (q - kv).abs() <= REACH


def by_globals(b, h, q, kv):
    return (IDS[q] == IDS[kv]) | near(b, h, q, kv)


def score_by_globals(score, b, h, q, kv):
    return score * SCALES[0] + OF_HEADS[h]


SCALES = (0.5, 2)
OF_HEADS = torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_globals_are_inputs_of_the_graph(monkeypatch, backend, inside):
    """The mask of the forward pass counts in backward: a tensor is saved, and so is a number."""

    def attend(q, k, v, mask):
        if inside:
            mask = BlockMask(*mask.lists(), lengths=(N, N), mask_mod=lambda *at: by_globals(*at), check=False)
        return block_sparse_attention(q, k, v, mask) * 1

    monkeypatch.setattr(f"{__name__}.IDS", IDS.clone())
    run, graphs = counted(attend, backend)
    for reach in (100, 30, 60):
        monkeypatch.setattr(f"{__name__}.REACH", reach)
        mask = create_block_mask(by_globals, None, None, N, N)
        call = [t.requires_grad_() for t in operands()]
        out = run(*call, mask)
        dense = mask.to_dense()
        monkeypatch.setattr(f"{__name__}.REACH", 7)
        out.sum().backward()
        assert_right(call, gradients_of_truth(call, dense, torch.ones_like(out)))
    assert graphs.frame_count <= 2, "a second one where the number changes"
    out = run(*call, mask)
    IDS.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_globals_of_a_score_mod_get_gradients(monkeypatch, backend):
    monkeypatch.setattr(f"{__name__}.OF_HEADS", OF_HEADS.clone().requires_grad_())
    run, _ = counted(lambda q, k, v: attention(q, k, v, score_mod=score_by_globals) * 1, backend)
    call = operands()
    results = []
    for f in (run, lambda q, k, v: attention(q, k, v, score_mod=score_by_globals)):
        OF_HEADS.grad = None
        out = f(*call)
        (out * torch.linspace(-1, 1, N)[:, None]).sum().backward()
        results.append((out.detach(), OF_HEADS.grad))
    for ours_, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours_, eager)


def test_patterns_of_other_numbers_share_a_graph():
    run, graphs = counted(lambda *args: block_sparse_attention(*args, causal=True) * 1, "aot_eager")
    for left in range(20, 20 + STEPS):
        call, mask = operands(), patterns.sliding_window((N, N), (left, 0))
        torch.testing.assert_close(run(*call, mask), block_sparse_attention(*call, mask, causal=True), atol=0, rtol=0)
    assert graphs.frame_count <= 2


def test_a_computed_table_beside_a_causal_mask():
    """The tensor that a mask computes is no tensor of a global, also where the mask is a part of another."""
    table = torch.arange(N)
    mask = ours(lambda b, h, q, kv: (table + 5)[q] >= kv, "cpu").with_causal()
    run, _ = counted(lambda *args: block_sparse_attention(*args) * 1, "aot_eager")
    call = operands()
    torch.testing.assert_close(run(*call, mask), block_sparse_attention(*call, mask), atol=0, rtol=0)


def test_the_same_kernel_as_eager_calls(monkeypatch):
    """With a causal mask beside it, a mask is traced to the same Program as without torch.compile."""
    monkeypatch.setattr(memo, "_OF_STATE", {})
    monkeypatch.setattr(numbers, "_SEEN", {})
    monkeypatch.setattr(numbers, "_CHOSEN", {})
    monkeypatch.setattr(function_text, "_TRACES", OrderedDict())
    from attention.block_sparse import with_causal
    from attention.masks.element_mask import trace_mask
    from attention.masks.mask_text import read_mask, written_mask

    mask = ours(of_two(3, "cpu"), "cpu")
    eager = trace_mask(with_causal(mask).mask_mod, torch.device("cpu"))
    mod = read_mask(*written_mask(mask.mask_mod), torch.device("cpu"))
    compiled = trace_mask(with_causal(mask.with_mask_mod(mod)).mask_mod, torch.device("cpu"))
    assert compiled.program == eager.program
    assert all(a is b for a, b in zip(compiled.tensors, eager.tensors, strict=True))


@dataclass(frozen=True)
class Near:
    ids: Tensor

    def __call__(self, b, h, q, kv):
        return (self.ids[q] == self.ids[kv]) | ((q - kv).abs() <= REACH)


def test_what_a_dataclass_reads_beside_its_fields(monkeypatch):
    """Backward uses the forward pass's global number, and the tensor that a method captures is saved."""
    captured = IDS.clone()

    @dataclass(frozen=True)
    class Captures:
        offset: int

        def __call__(self, b, h, q, kv):
            return captured[q] == captured[kv - self.offset]

    run, _ = counted(lambda *args: block_sparse_attention(*args) * 1, "aot_eager")
    call, mask = [t.requires_grad_() for t in operands()], create_block_mask(Near(IDS), None, None, N, N)
    out, dense = run(*call, mask), mask.to_dense()
    monkeypatch.setattr(f"{__name__}.REACH", 7)
    out.sum().backward()
    assert_right(call, gradients_of_truth(call, dense, torch.ones_like(out)))
    out = run(*call, create_block_mask(Captures(0), None, None, N, N))
    captured.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


SETTINGS = types.SimpleNamespace(reach=100, ids=IDS)
MODULE = types.ModuleType("settings")
vars(MODULE).update(vars(SETTINGS))


def by_object(b, h, q, kv):
    return (SETTINGS.ids[q] == SETTINGS.ids[kv]) | ((q - kv).abs() <= SETTINGS.reach)


def by_module(b, h, q, kv):
    return (MODULE.ids[q] == MODULE.ids[kv]) | ((q - kv).abs() <= MODULE.reach)


@pytest.mark.parametrize(("mask_mod", "owner"), [(by_object, SETTINGS), (by_module, MODULE)])
def test_attributes_of_globals_are_inputs_of_the_graph(monkeypatch, mask_mod, owner):
    monkeypatch.setattr(owner, "ids", IDS.clone())
    run, _ = counted(lambda *args: block_sparse_attention(*args) * 1, "aot_eager")
    for reach in (100, 30):
        monkeypatch.setattr(owner, "reach", reach)
        call, mask = [t.requires_grad_() for t in operands()], create_block_mask(mask_mod, None, None, N, N)
        out, dense = run(*call, mask), mask.to_dense()
        monkeypatch.setattr(owner, "reach", 7)
        out.sum().backward()
        assert_right(call, gradients_of_truth(call, dense, torch.ones_like(out)))
    out = run(*call, mask)
    owner.ids.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def shifted(sign):
    """Two classes of one name."""
    if sign > 0:

        @dataclass(frozen=True)
        class Shift:
            by: int

            def __call__(self, score, b, h, q, kv):
                return score + self.by * q * kv

    else:

        @dataclass(frozen=True)
        class Shift:
            by: int

            def __call__(self, score, b, h, q, kv):
                return score - self.by * q * kv

    return Shift(2)


def test_classes_of_one_name():
    """The graph of one is called again after the graph of another was compiled."""
    call, mods = operands("cpu"), (shifted(1), shifted(-1))
    run = torch.compile(lambda q, k, v, mod: attention(q, k, v, score_mod=mod) * 1, fullgraph=True, backend="eager")
    for mod in (*mods, *mods):
        torch.testing.assert_close(run(*call, mod), attention(*call, score_mod=mod), atol=0, rtol=0)


def test_other_globals_are_not_kept_alive(monkeypatch):
    call, tensor = operands("cpu"), torch.zeros(4)
    monkeypatch.setitem(globals(), "UNRELATED", tensor)
    torch.compile(lambda q, k, v: attention(q, k, v, score_mod=score_by_globals) * 1, backend="eager")(*call)
    monkeypatch.undo()
    alive = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is None
