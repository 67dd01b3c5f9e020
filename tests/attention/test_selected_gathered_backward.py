"""Gradients of selected_attention by gathered KV tiles: on the emulator and on GPUs, against FP64."""

from unittest import mock

import pytest
import torch

from attention import selected_attention
from attention.backward.gather import dispatch
from attention.selected import reference
from cute_kernels.runtime.device import path as path_forced
from cute_kernels.testing.reference import normal, poisoned_empty
from cute_kernels.testing.selected_blocks import similar_lists

from ..emulator.ops import needs_compiler, on_emulator
from .parts import FP16, nothing_waits, qkv, rows_first
from .selected_parts import call_of
from .test_selected_gathered import MODELS

EMULATED = pytest.param("emulated", marks=[needs_compiler, pytest.mark.sm_90])
WHERE = pytest.mark.parametrize("where", [EMULATED, pytest.param("cuda", marks=pytest.mark.gpu)])
ONE = {"B": 1, "groups": 1, "heads": 1}  # one batch index, one list

# name -> (arguments of call_of, its options, options of the call)
CALLS = {
    "12 rows a token": ((30, 200, 4, 20), ONE | {"H": 12, "D": 256}, {"causal": True}),
    "blocks of 16": ((30, 333, 16, 7), {"groups": 1, "H": 12, "heads": 2, "B": 1, "D": 128}, {"causal": True}),
    "two batches, not causal": ((40, 250, 4, 12), {"groups": 2, "H": 8, "heads": 2, "D": 64}, {}),
    "blocks of 64": ((24, 300, 64, 3), {"groups": 2, "H": 24, "heads": 2, "B": 1, "D": 128}, {"causal": True}),
    "tokens": ((30, 150, 1, 40), ONE | {"H": 4, "D": 64}, {"causal": True}),
    "tokens, D 256": ((40, 300, 1, 40), ONE | {"H": 4, "D": 256}, {"causal": True}),
    "blocks of 64, D 256": ((40, 500, 64, 3), ONE | {"H": 4, "D": 256}, {"causal": True}),
    "FP16, scale": ((40, 300, 4, 12), ONE | {"H": 4, "D": 128, "dtype": FP16}, {"causal": True, "scale": 0.11}),
    "more rows than columns": ((150, 90, 4, 9), ONE | {"H": 2, "D": 64}, {"causal": True}),
}
ON_EMULATOR = ("12 rows a token", "blocks of 16", "two batches, not causal", "blocks of 64", "tokens")


def gradients(call: tuple, dout, dlse, **terms) -> tuple:
    """Gradients of q, k and v, computed by the kernel."""
    q, k, v = (t.detach().requires_grad_() for t in call[:3])
    with poisoned_empty(), mock.patch.object(dispatch, "backward", wraps=dispatch.backward) as backward:
        out, lse = selected_attention(q, k, v, *call[3:], return_lse=True, **terms)
        results = (out,) if dlse is None else (out, lse)
        found = torch.autograd.grad(results, (q, k, v), (dout,) if dlse is None else (dout, dlse))
    assert backward.call_count == 1
    return found


def check(call: tuple, with_lse: bool = False, **terms) -> None:
    """The gradients of one call against FP64."""
    wide = [t.double().requires_grad_() for t in call[:3]]
    out, lse = reference.selected_attention(*wide, *call[3:], **terms)
    dout = normal(*out.shape, dtype=call[0].dtype, device=out.device)
    dlse, results, given = None, (out,), (dout.double(),)
    if with_lse:
        dlse = normal(*lse.shape, dtype=torch.float32, device=out.device).masked_fill(lse.isinf(), 0.0)
        results, given = (out, lse), (dout.double(), dlse.double())
    right = torch.autograd.grad(results, wide, given)
    for name, mine, true in zip("qkv", gradients(call, dout, dlse, **terms), right, strict=True):
        assert not mine.isnan().any(), f"d{name} has NaN"
        error = (mine.double() - true).norm() / true.norm()
        assert error < 8e-3, f"d{name}: relative error {error:.2g}"


def checked(where: str, call: tuple, seed: int = 1, **terms) -> None:
    if where == "cuda":
        with path_forced("sm_90"):
            check(tuple(t.cuda() if isinstance(t, torch.Tensor) else t for t in call), **terms)
        return
    with on_emulator("sm_90", sms=3, seed=seed):
        check(call, **terms)


@pytest.mark.parametrize("name", CALLS)
@WHERE
def test_calls(where, name):
    if where == "emulated" and name not in ON_EMULATOR:
        pytest.skip("only on GPUs")
    sizes, options, terms = CALLS[name]
    checked(where, call_of(*sizes, **options), **terms)


@WHERE
def test_a_gradient_of_lse(where):
    checked(where, call_of(20, 100, 4, 9, **ONE, H=12, D=64), with_lse=True, causal=True)


@WHERE
def test_strides(where):
    q, k, v, indices, size = call_of(20, 150, 16, 5, groups=2, H=8, heads=2, B=2, D=64)
    checked(where, (*map(rows_first, (q, k, v)), indices, size), causal=True)


@WHERE
def test_entries_that_are_no_block(where):
    """They are ignored, a block that is listed twice counts once, and a list may be empty."""
    q, k, v, indices, size = call_of(40, 150, 4, 20, **ONE, H=4, D=64)
    others = indices.new_tensor([75, -2, 2**31 - 1, -(2**31)]).expand(1, 40, 1, 4)
    indices = torch.cat([indices, others, indices[..., :5]], -1)
    indices[:, 5:9] = -1
    checked(where, (q, k, v, indices, size), causal=True)


def called(*call, **terms) -> int:
    """Number of times that the kernel computes the gradients of a call."""
    q, k, v = (t.detach().requires_grad_() for t in call[:3])
    with mock.patch.object(dispatch, "backward", wraps=dispatch.backward) as backward:
        selected_attention(q, k, v, *call[3:], **terms).sum().backward()
    assert all(t.grad is not None and not t.grad.isnan().any() for t in (q, k, v))
    return backward.call_count


OTHERS = {
    "deterministic": {"deterministic": True},
    "softcap": {"softcap": 3.0},
    "sinks that need a gradient": {"sinks": torch.zeros(4, requires_grad=True)},
}


@needs_compiler
@pytest.mark.sm_90
@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels(name):
    """Calls whose gradients other kernels compute."""
    with on_emulator("sm_90", sms=2):
        assert called(*call_of(10, 60, 4, 5, **ONE, H=4, D=64), causal=True, **OTHERS[name]) == 0


@needs_compiler
@pytest.mark.sm_90
def test_constant_sinks():
    with on_emulator("sm_90", sms=2):
        assert called(*call_of(10, 60, 4, 5, **ONE, H=4, D=64), causal=True, sinks=torch.zeros(4)) == 1


@needs_compiler
@pytest.mark.sm_90
def test_lists_of_inference_mode():
    q, k, v, indices, size = call_of(10, 60, 4, 5, **ONE, H=4, D=64)
    with torch.inference_mode():
        indices = indices + 0
    with on_emulator("sm_90", sms=2):
        assert called(q, k, v, indices, size, causal=True) == 1


@needs_compiler
@pytest.mark.sm_90
@pytest.mark.parametrize("size", [4, 128])
@pytest.mark.parametrize("write", ["in place", "of .data"])
def test_lists_that_are_written_to_before_backward(size, write):
    q, k, v, indices, _ = call_of(10, 300, size, 2, **ONE, H=4, D=64)
    indices = indices.view(1, 10, 1, 2)
    q.requires_grad_()
    with on_emulator("sm_90", sms=2):
        out = selected_attention(q, k, v, indices, size, causal=True)
        if write == "in place":
            indices.zero_()
        else:
            indices.data = torch.zeros_like(indices)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@needs_compiler
@pytest.mark.sm_90
def test_deterministic_algorithms_after_forward():
    """torch's setting is read in backward, which then makes the block mask."""
    q, k, v, *lists = call_of(10, 60, 4, 5, **ONE, H=4, D=64)
    operands = [t.detach().requires_grad_() for t in (q, k, v)]
    with on_emulator("sm_90", sms=2), mock.patch.object(dispatch, "backward") as backward:
        out = selected_attention(*operands, *lists, causal=True)
        torch.use_deterministic_algorithms(True)
        try:
            found = torch.autograd.grad(out.sum(), operands)
        finally:
            torch.use_deterministic_algorithms(False)
    assert backward.call_count == 0
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    right, _ = reference.selected_attention(*wide, *lists, causal=True)
    for mine, true in zip(found, torch.autograd.grad(right.sum(), wide), strict=True):
        assert (mine.double() - true).norm() / true.norm() < 8e-3


# On GPUs: lists as in trained models, CUDA graphs and torch.compile


@pytest.mark.gpu
@pytest.mark.parametrize("similarity", [0.9, 0.0])
@pytest.mark.parametrize("name", MODELS)
def test_models(name, similarity):
    """2,048 tokens at the end of 8,192 keys, against FP32, and bitwise identical dQ."""
    S, T, ((H, kv_heads), D, size, top, groups) = 8192, 2048, MODELS[name]
    lists = similar_lists(S, S // size, top, groups=groups, similarity=similarity, device="cuda")[None, -T:]
    call = *qkv(T, S, D, B=1, H=H, heads=kv_heads, device="cuda"), lists.contiguous(), size
    dout = normal(1, H, T, D, device="cuda")
    found, again = (gradients(call, dout, None, causal=True) for _ in range(2))
    assert torch.equal(found[0], again[0])
    wide = [t.float().requires_grad_() for t in call[:3]]
    right = [torch.zeros_like(t) for t in wide]
    for begin in range(0, T, 128):  # 128 rows at a time, for memory
        rows = slice(begin, begin + 128)
        end = S - T + begin + 128
        part = wide[0][:, :, rows], wide[1][:, :, :end], wide[2][:, :, :end]
        out, _ = reference.selected_attention(*part, call[3][:, rows], size, causal=True)
        for total, gradient in zip(right, torch.autograd.grad(out, wide, dout[:, :, rows].float()), strict=True):
            total += gradient
    for i, (mine, true) in enumerate(zip(found, right, strict=True)):
        error = (mine.float() - true).norm() / true.norm()
        assert error < 8e-3, f"d{'qkv'[i]}: relative error {error:.2g}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_nothing_waits(name):
    """Forward and backward do not synchronize."""
    S, ((H, kv_heads), D, size, _, groups) = 500, MODELS[name]
    call = call_of(S, S, size, 9, groups=groups, H=H, heads=kv_heads, B=1, D=D, device="cuda")
    gradients(call, torch.ones(1, H, S, D, dtype=call[0].dtype, device="cuda"), None, causal=True)
    q, k, v = (t.detach().requires_grad_() for t in call[:3])
    with nothing_waits():
        out = selected_attention(q, k, v, *call[3:], causal=True)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_compiled(name):
    S, ((H, kv_heads), D, size, _, groups) = 500, MODELS[name]
    q, k, v, *lists = call_of(S, S, size, 9, groups=groups, H=H, heads=kv_heads, B=1, D=D, device="cuda")
    operands = [t.requires_grad_() for t in (q, k, v)]
    attend = lambda q, k, v: selected_attention(q, k, v, *lists, causal=True).float().square().sum()  # noqa: E731
    right = torch.autograd.grad(attend(*operands), operands)
    torch._dynamo.reset()
    with mock.patch.object(dispatch, "backward", wraps=dispatch.backward) as backward:
        found = torch.autograd.grad(torch.compile(attend)(*operands), operands)
    assert backward.call_count == 1
    for mine, eager in zip(found, right, strict=True):
        torch.testing.assert_close(mine, eager, rtol=2e-2, atol=2e-2 * eager.abs().max().item())
