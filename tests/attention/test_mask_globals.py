"""Masks and score functions that read through globals: dicts, classes, objects and helper functions.

Backward has the values of the forward pass, a new value needs no new graph, and tensors are saved.
"""

import types
from collections import ChainMap
from dataclasses import dataclass

import pytest
import torch

from attention import BlockMask, attention, block_sparse_attention, create_block_mask
from attention.masks import function_text
from cute_kernels.traced import global_state

from .mask_parts import N, operands
from .test_masks_compiled import counted, fresh_dynamo  # noqa: F401  (a fixture)
from .test_masks_saved import assert_right, gradients_of_truth


class Config:
    reach = 100

    @staticmethod
    def of_class():
        return Config.reach


class Helper:
    def __init__(self):
        self.reach, self.file = 100, open

    def of_instance(self):
        return self.reach

    def __getitem__(self, key):
        return vars(self)[key]


class Slots:
    __slots__ = ("reach",)

    def __init__(self):
        self.reach = 100


@dataclass(frozen=True)
class ByHelper:
    offset: int

    def reach(self):
        return TABLE["reach"] + self.offset

    def __call__(self, b, h, q, kv):
        return (q - kv).abs() <= self.reach()


def of_default(b, h, q, kv, table={"reach": 100}):  # noqa: B006
    return (q - kv).abs() <= table["reach"]


def of_helper():
    return TABLE["reach"]


TABLE = {"reach": 100, "nested": {"reach": 100}, "list": [1, {"reach": 100}], "name": "table", (1, "x"): 3}
GET = TABLE.get
TENSORS = {"reach": torch.full((4,), 100), "other": torch.zeros(4)}
USER_MODULE = types.ModuleType("user_module")
OBJECT, SLOTS, CAPTURED, CHAIN = Helper(), Slots(), {"reach": 100}, ChainMap({"reach": 100})
USER_MODULE.TABLE = {"reach": 100}
USER_MODULE.Config = type("Config", (), {"reach": 100})


def put(table):
    return lambda n: table.__setitem__("reach", n)


def put_attribute(owner):
    return lambda n: setattr(owner, "reach", n)


def near_by(reach):
    return lambda b, h, q, kv: (q - kv).abs() <= reach()


def of_captured(table):
    return lambda b, h, q, kv: (q - kv).abs() <= table["reach"]


# name -> (mask_mod, what gives it another reach)
THROUGH = {
    "dict": (lambda b, h, q, kv: (q - kv).abs() <= TABLE["reach"], put(TABLE)),
    "get": (lambda b, h, q, kv: (q - kv).abs() <= TABLE.get("reach", 1), put(TABLE)),
    "bound get": (lambda b, h, q, kv: (q - kv).abs() <= GET("reach"), put(TABLE)),
    "nested": (lambda b, h, q, kv: (q - kv).abs() <= TABLE["nested"]["reach"], put(TABLE["nested"])),
    "list": (lambda b, h, q, kv: (q - kv).abs() <= TABLE["list"][1]["reach"], put(TABLE["list"][1])),
    "tensor": (
        lambda b, h, q, kv: (q - kv).abs() <= TENSORS["reach"][h],
        lambda n: TENSORS.update(reach=torch.full((4,), n)),
    ),
    "class": (lambda b, h, q, kv: (q - kv).abs() <= Config.reach, put_attribute(Config)),
    "static": (lambda b, h, q, kv: (q - kv).abs() <= Config.of_class(), put_attribute(Config)),
    "method": (lambda b, h, q, kv: (q - kv).abs() <= OBJECT.of_instance(), put_attribute(OBJECT)),
    "item": (lambda b, h, q, kv: (q - kv).abs() <= OBJECT["reach"], put_attribute(OBJECT)),
    "slots": (lambda b, h, q, kv: (q - kv).abs() <= SLOTS.reach, put_attribute(SLOTS)),
    "library": (lambda b, h, q, kv: (q - kv).abs() <= CHAIN["reach"], put(CHAIN)),
    "module": (lambda b, h, q, kv: (q - kv).abs() <= USER_MODULE.TABLE["reach"], put(USER_MODULE.TABLE)),
    "module class": (lambda b, h, q, kv: (q - kv).abs() <= USER_MODULE.Config.reach, put_attribute(USER_MODULE.Config)),
    "globals": (lambda b, h, q, kv: (q - kv).abs() <= globals()["TABLE"]["reach"], put(TABLE)),
    "dataclass": (ByHelper(0), put(TABLE)),
    "function": (near_by(of_helper), put(TABLE)),
    "captured": (of_captured(CAPTURED), put(CAPTURED)),
    "default": (of_default, put(of_default.__defaults__[0])),
}
FIXED = ("captured", "default")  # which Dynamo makes constants of, as it does elsewhere


@pytest.fixture(name="through", params=THROUGH)
def through_fixture(request):
    mask_mod, change = THROUGH[request.param]
    change(100)
    yield request.param, mask_mod, change
    change(100)


def forward(run, mask_mod, device="cpu"):
    call = [t.requires_grad_() for t in operands(device)]
    mask = create_block_mask(mask_mod, None, 4, N, N, device=device)
    out, dout = run(*call, mask), torch.randn_like(call[0])
    return out, dout, call, gradients_of_truth(call, mask.to_dense(), dout)


def backward(out, dout, call, want):
    out.backward(dout)
    assert_right(call, want)


@pytest.mark.parametrize("backend", ["none", "aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_what_globals_lead_to(through, backend):
    """Forward passes of several values, and then their backward passes at another one. Few graphs."""
    name, mask_mod, change = through
    device = "cuda" if backend == "inductor" else "cpu"
    if device == "cuda" and name == "tensor":
        pytest.skip("the table is on the CPU")
    run = (lambda *args: block_sparse_attention(*args) * 1), None
    if backend != "none":
        run = counted(run[0], backend)
    passes = []
    for reach in (100, 30, 60, 90, 30, 120):
        change(reach)
        passes.append(forward(run[0], mask_mod, device))
    change(7)
    for parts in reversed(passes):
        backward(*parts)
    if backend != "none" and name not in FIXED:
        assert run[1].frame_count <= 2


def test_what_globals_lead_to_under_vjp(through):
    _, mask_mod, change = through
    call, mask = [t.requires_grad_() for t in operands()], create_block_mask(mask_mod, None, 4, N, N)
    dout = torch.randn_like(call[0])
    want = gradients_of_truth(call, mask.to_dense(), dout)
    _, pull = torch.func.vjp(lambda *args: block_sparse_attention(*args, mask), *[t.detach() for t in call])
    change(7)
    for t, grad in zip(call, pull(dout), strict=True):
        t.grad = grad
    assert_right(call, want)


def test_the_guards_of_what_globals_lead_to(through):
    """Many calls, and then one with another value."""
    _, mask_mod, change = through
    run, _ = counted(lambda *args: block_sparse_attention(*args) * 1, "aot_eager")
    everything = torch.ones(3, 3, dtype=torch.bool)
    mask = BlockMask.from_blocks(everything, lengths=(N, N), partial=everything, mask_mod=mask_mod)
    call = operands()
    for reach in (100, 30, 60):
        change(reach)
        for _ in range(6):
            out = run(*call, mask)
        assert torch.equal(out, block_sparse_attention(*call, mask))


def test_tensors_of_a_dict(monkeypatch):
    """They are saved, get gradients, and others of the dict may be written to."""
    run, _ = counted(lambda *args: block_sparse_attention(*args) * 1, "aot_eager")
    out, *parts = forward(run, THROUGH["tensor"][0])
    TENSORS["other"].add_(1)
    out.backward(parts[0], retain_graph=True)
    TENSORS["reach"].fill_(100)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(parts[0])

    monkeypatch.setitem(TENSORS, "slopes", torch.linspace(0, 1, 4).requires_grad_())
    score_mod = lambda score, b, h, q, kv: score + TENSORS["slopes"][h] * (q - kv) / TABLE["reach"]  # noqa: E731
    run, _ = counted(lambda q, k, v: attention(q, k, v, score_mod=score_mod) * 1, "aot_eager")
    call, grads = operands(), []
    for f in (run, lambda q, k, v: attention(q, k, v, score_mod=score_mod)):
        monkeypatch.setitem(TABLE, "reach", 100)
        out = f(*call)
        monkeypatch.setitem(TABLE, "reach", 7)
        grads += torch.autograd.grad((out * torch.linspace(-1, 1, N)[:, None]).sum(), TENSORS["slopes"])
    torch.testing.assert_close(*grads)


def test_a_trace_that_is_no_longer_cached(monkeypatch):
    """Backward traces again while the globals are as they were, and raises when they are not."""
    run, _ = counted(lambda *args: block_sparse_attention(*args) * 1, "aot_eager")
    parts = forward(run, THROUGH["dict"][0])
    function_text._TRACES.clear()
    backward(*parts)
    parts = forward(run, THROUGH["dict"][0])
    function_text._TRACES.clear()
    monkeypatch.setitem(TABLE, "reach", 7)
    with pytest.raises(RuntimeError, match="has changed since"):
        backward(*parts)


def test_captured_tensors_as_a_whole(monkeypatch):
    """Their contents are not in the version: backward traces again, or raises."""

    def of_steps(steps):
        return lambda b, h, q, kv: kv < steps.cumsum(0)[q] + TABLE["reach"]

    run, _ = counted(lambda *args: block_sparse_attention(*args) * 1, "aot_eager")
    passes = [forward(run, of_steps(torch.full((N,), n))) for n in (0, 1)]
    for parts in passes:
        backward(*parts)
    passes = [forward(run, of_steps(torch.full((N,), n))) for n in (0, 1)]
    monkeypatch.setitem(TABLE, "reach", 7)
    with pytest.raises(RuntimeError, match="has changed since"):
        backward(*passes[0])


REACH = 100


def write_global(n):
    global REACH
    REACH = n


@pytest.mark.parametrize(
    ("mask_mod", "write"),
    [
        (THROUGH["dict"][0], lambda n: TABLE.update(reach=n)),
        (THROUGH["class"][0], lambda n: setattr(Config, "reach", n)),
        (THROUGH["method"][0], lambda n: setattr(OBJECT, "reach", n)),
        (lambda b, h, q, kv: (q - kv).abs() <= REACH, write_global),
    ],
)
def test_globals_that_the_compiled_function_writes(mask_mod, write):
    """Dynamo would write them after the graph."""

    def attend(q, k, v, mask, n):
        write(n)
        return block_sparse_attention(q, k, v, mask)

    mask = create_block_mask(mask_mod, None, None, N, N)
    call = operands()
    try:
        out = torch.compile(attend, backend="eager")(*call, mask, 50)
    except Exception as error:
        assert "the compiled function writes to a global" in str(error)
    else:  # torch 2.11 breaks the graph where an attribute of a class is written
        assert torch.equal(out, attend(*call, mask, 50))
    attend(*call, mask, 100)


def test_attributes_that_the_code_does_not_name():
    """They make no new version, and so no new trace."""
    settings = types.SimpleNamespace(reach=100, step=0, file=open, many=list(range(200)))
    state = global_state.GlobalState(({"settings": settings}, compile("settings.reach", "", "eval")))
    before = state.version
    settings.step = 1
    assert state.version == before
    settings.reach = 30
    after = state.version
    settings.reach = 100
    assert after != before == state.version
