"""sddmm as a registered op: torch.compile without graph breaks, opcheck, vmap and dispatch modes."""

import pytest
import torch
import torch._dynamo.testing
from torch.func import vmap
from torch.utils.flop_counter import FlopCounterMode

from cute_kernels.testing.reference import normal
from sparse_collective import BsrMatrix, bsr_linear, sddmm

from .bsr_parts import DEVICES, batch, bsr
from .nn_parts import near

FP32 = torch.float32
ON = pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "eager"), ("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)],
)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pattern(device="cpu", **more) -> BsrMatrix:
    W = bsr("power_law", (32, 64), device, grid=(4, 5), **more)
    W.check_indices()
    return W


def operands(W, K, device):
    """a.t() and b contiguous, as the gradient of a linear layer has them."""
    return normal(K, W.shape[-2], device=device).t(), normal(K, W.shape[-1], device=device)


@ON
def test_compiled(device, backend):
    """One graph for all K, results of any dtype, and out that is written or added to."""
    W = pattern(device)
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    step = torch.compile(lambda a, b: sddmm(a, b, W) * 2.0, fullgraph=True, backend=graphs, dynamic=True)
    wide = torch.compile(lambda a, b: sddmm(a, b, W, out_dtype=FP32), fullgraph=True, backend=backend)
    into = torch.compile(lambda a, b, out: sddmm(a, b, W, out=out), fullgraph=True, backend=backend)
    added = torch.compile(lambda a, b, out: sddmm(a, b, W, out=out, accumulate=True), fullgraph=True, backend=backend)
    for K in (40, 64, 136):
        a, b = operands(W, K, device)
        right = sddmm(a, b, W, out_dtype=FP32)
        near(step(a, b), 2 * right.double())
        assert torch.equal(wide(a, b), right)
        out = torch.ones_like(right)
        into(a, b, out)
        assert torch.equal(out, right)
        added(a, b, out)
        near(out, 2 * right.double())
    assert graphs.frame_count == 1


@ON
def test_compiled_batches(device, backend):
    for form in ("values", "patterns"):
        W, _ = batch(form, (32, 64), device, grid=(4, 5))
        W.check_indices()
        groups = torch.tensor([2, 0, 0, 3], dtype=torch.int32, device=device)
        a, b = operands(W, 256, device)
        step = torch.compile(
            lambda a, b, groups, W=W: sddmm(a, b, W, expert_ids=groups), fullgraph=True, backend=backend
        )
        assert torch.equal(step(a, b, groups), sddmm(a, b, W, expert_ids=groups))


@ON
def test_compiled_step_with_a_gradient_of_its_own(device, backend):
    """A layer's forward pass and the gradient of its values in one graph; unchecked indices are checked in the call."""
    W = bsr("power_law", (32, 64), device, grid=(4, 5))

    def step(x, dy):
        return bsr_linear(x, W), sddmm(dy.t(), x, W)

    x, dy = normal(48, W.shape[1], device=device), normal(48, W.shape[0], device=device)
    for found, right in zip(torch.compile(step, fullgraph=True, backend=backend)(x, dy), step(x, dy), strict=True):
        near(found, right.double())


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    W = pattern(device)
    a, b = operands(W, 40, device)
    parts = W.crow_indices, W.col_indices, W.values, W.shape[1], False
    op, into = torch.ops.sparse_collective.sddmm.default, torch.ops.sparse_collective.sddmm_out.default
    for terms in ({}, {"out_dtype": FP32}):
        torch.library.opcheck(op, (a, b, *parts), terms)
    out = torch.zeros_like(W.values)
    torch.library.opcheck(into, (a, b, *parts, out), {})
    torch.library.opcheck(into, (a, b, *parts, out), {"accumulate": True})


@pytest.mark.parametrize("device", DEVICES)
def test_dispatch_modes_and_vmap(device):
    W = pattern(device)
    a, b = operands(W, 40, device)
    with FlopCounterMode(display=False) as counter:
        sddmm(a, b, W)
    assert counter.get_total_flops() == 2 * W.values.numel() * 40
    both = vmap(lambda b: sddmm(a, b, W))(torch.stack([b, 2 * b]))
    assert torch.equal(both[0], sddmm(a, b, W)) and torch.equal(both[1], sddmm(a, 2 * b, W))


def test_what_is_refused():
    W = pattern()
    a, b = operands(W, 40, "cpu")
    groups = torch.tensor([0], dtype=torch.int32)
    for call, error, message in (
        (lambda a: sddmm(a, b, W, accumulate=True), ValueError, "accumulate=True adds to out; pass out="),
        (lambda a: sddmm(b.t(), a.t(), W.t()), ValueError, "pattern is a transposed view; pass its base"),
        (lambda a: sddmm(a, b, W, expert_ids=groups), ValueError, "expert_ids.*is required for a batch"),
        (lambda a: sddmm(a, b[:, :8], W), ValueError, r"they must be \(128, K\) and \(K, 320\)"),
        (lambda a: sddmm(a.clone().requires_grad_(), b, W), RuntimeError, "sddmm does not compute gradients"),
    ):
        with pytest.raises(error, match=message), FlopCounterMode(display=False):
            call(a)
    with pytest.raises(Exception, match=r"a must be \(128, K\) and b \(K, 320\)"):
        torch.compile(lambda a: sddmm(a, b[:, :8], W), fullgraph=True, backend="eager")(a)
    nested = torch.nested.nested_tensor([b[:3], b[:5]], layout=torch.jagged)
    with pytest.raises(TypeError, match="nested tensor"):
        sddmm(a, nested, W)
