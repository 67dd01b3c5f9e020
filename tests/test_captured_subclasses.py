"""Functions that capture tensor subclasses: score_mods, mask_mods and epilogues."""

import functools

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from attention import attention, block_sparse_attention, create_block_mask
from attention.masks.score_mods import Alibi, RelativeBias
from cute_kernels import gemm
from cute_kernels.testing.reference import normal


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    """The device of torch's reference, and a GPU."""
    return request.param


class Wrapper(torch.Tensor):
    """A wrapper subclass with torch's own __torch_function__."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, function(*args, **kwargs))


class Plain(torch.Tensor):
    """A subclass without behavior of its own: torch's __torch_function__ returns another object than the op did."""


class Calling(torch.Tensor):
    """A subclass with a __torch_function__ of its own."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


CONVERSIONS = [Wrapper, nn.Parameter, *(functools.partial(torch.Tensor.as_subclass, cls=c) for c in (Plain, Calling))]


@pytest.mark.parametrize("convert", CONVERSIONS, ids=["Wrapper", "Parameter", "Plain", "Calling"])
def test_functions_that_capture_subclasses(convert, place):
    """Functions are traced with the numbers that a subclass holds, and gradients reach it."""
    slope, table = normal(2, device=place).float(), normal(2, 9, device=place).float()
    reach = torch.arange(1, 17, device=place)
    q = normal(1, 2, 16, 64, device=place).bfloat16()
    score_mods = {
        "indexed": (slope, lambda t: lambda score, b, h, q, kv: score + t[h] * (kv - q)),
        "function of an element": (slope, lambda t: lambda score, b, h, q, kv: score * torch.exp(t[h].abs())),
        "Alibi": (slope, Alibi),
        "RelativeBias": (table, RelativeBias),
    }
    for name, (tensor, score_mod) in score_mods.items():
        results = []
        for captured in (tensor.clone(), convert(tensor.clone())):
            captured.requires_grad_()
            out = attention(q, q, q, score_mod=score_mod(captured))
            dout = torch.ones_like(q)
            (gradient,) = torch.autograd.grad(out, captured, Wrapper(dout) if isinstance(out, Wrapper) else dout)
            results.append([t.inner if isinstance(t, Wrapper) else t for t in (out, gradient)])
        for found, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(found.as_subclass(torch.Tensor), expected, rtol=1e-2, atol=1e-2, msg=name)
    if convert is nn.Parameter:  # of integers there is none
        return
    for read in (lambda t, q: t[q], lambda t, q: (t * 2)[q]):
        found = []
        for captured in (convert(reach), reach):
            near = lambda b, h, q, kv, t=captured: (q - kv).abs() < read(t, q)  # noqa: B023, E731
            out = block_sparse_attention(q, q, q, create_block_mask(near, None, None, 16, 16, device=place))
            found.append((out.inner if isinstance(out, Wrapper) else out).as_subclass(torch.Tensor))
        torch.testing.assert_close(*found)
    a, scale = normal(16, 16, device=place), torch.tensor(3.0, device="cpu")
    if convert is not Wrapper:
        found = gemm(a, a, epilogue=lambda z: z * scale.as_subclass(Plain))
        torch.testing.assert_close(found, gemm(a, a, epilogue=lambda z: z * 3.0))
