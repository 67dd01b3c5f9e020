"""Comparisons for the fuzz of torch's mechanisms, and random tensors for it.

Gradients are compared with torch's in FP64, and may err as torch's in the operands' dtype do. What is documented to
give the numbers of a plain eager call is compared with one. What is documented to raise must raise that error.
"""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from ..guard_zones import Wrong
from .mechanism_calls import Subject

WRITTEN = "modified by an inplace operation"
MECHANISMS: dict[str, Callable[[Subject, random.Random, str], None]] = {}


def mechanism(function):
    """Register a function (subject, random numbers, device) that raises Wrong, or what torch or the op raises."""
    MECHANISMS[function.__name__] = function
    return function


# -- comparisons -----------------------------------------------------------------------------------------------


def compare(what: str, found: Tensor | None, expected: Tensor, bound: float, floor: float = 0.0) -> None:
    """Raise Wrong unless the Frobenius error is at most bound * norm + floor; infinities must be in the same places."""
    found = torch.zeros_like(expected) if found is None else found
    if found.shape != expected.shape:
        raise Wrong("shape", f"{what} has shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    found, expected = found.detach().double(), expected.detach().double()
    if not torch.equal(found.isneginf(), expected.isneginf()):
        raise Wrong("result", f"{what} has -inf where it should not, or not where it should")
    finite = ~expected.isneginf()
    found, expected = found[finite], expected[finite]
    error, allowed = (found - expected).norm().item(), bound * expected.norm().item() + floor
    if not error <= allowed:  # NaN is never <=
        raise Wrong("result", f"{what} errs by {error:.3g}, allowed {allowed:.3g}, norm {expected.norm().item():.3g}")


def same(what: str, found, expected) -> None:
    """Raise Wrong unless these are the numbers of a plain call, but for another order of summation."""
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if mine is not None and mine.dtype != theirs.dtype:
            raise Wrong("dtype", f"{what} {i} is {mine.dtype}, expected {theirs.dtype}")
        compare(f"{what} {i}", mine, theirs, 2.0**-6, 2e-3 * max(1, theirs.numel()) ** 0.5)


def expect(types, texts: tuple[str, ...], run: Callable, what: str) -> None:
    """Raise Wrong unless run() raises one of these types with one of these texts."""
    try:
        run()
    except types as error:
        if not any(text in str(error) for text in texts):
            raise
        return
    raise Wrong("no error", f"{what} must raise {types}")


# -- tensors ---------------------------------------------------------------------------------------------------


def leaves_of(s: Subject, draw: random.Random | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """(tensors in the same memory, those of them that require gradients): all, or a random subset."""
    tensors = [t.detach() for t in s.tensors]
    chosen = [t for t in tensors if draw is None or draw.random() < 0.6] or [tensors[0]]
    return tensors, [t.requires_grad_() for t in chosen]


def strided(like: Tensor, draw: random.Random) -> Tensor:
    """Random numbers of this shape and dtype, of random strides, some of them 0."""
    kind, shape = {"dtype": like.dtype, "device": like.device}, like.shape
    form = draw.choice(["contiguous", "scalar", "stride 2", "transposed", "stride 0", "offset"])
    if form == "scalar" or not shape:
        return torch.randn((), **kind).expand(shape)
    if form == "stride 2":
        return torch.randn(*shape, 2, **kind)[..., 0]
    if form == "transposed":
        return torch.randn(*shape[::-1], **kind).permute(*range(len(shape))[::-1])
    if form == "stride 0":
        dim = draw.randrange(len(shape))
        return torch.randn(*shape[:dim], 1, *shape[dim + 1 :], **kind).expand(shape)
    if form == "offset":
        return torch.randn(like.numel() + 1, **kind)[1:].view(shape)
    return torch.randn(shape, **kind)


def output_gradients(s: Subject, draw: random.Random) -> list[Tensor]:
    return [strided(y, draw) for y in s.run(*s.tensors)]


def dots(ys, dys) -> Tensor:
    """A loss whose gradients by ys are dys."""
    return sum((torch.where(y.isneginf(), 0.0, y) * dy).float().sum() for y, dy in zip(ys, dys, strict=True))


def gradients(run: Callable, tensors, leaves, dys, **options) -> list[Tensor | None]:
    return list(torch.autograd.grad(run(*tensors), leaves, dys, allow_unused=True, **options))


def eager(s: Subject, dys) -> tuple[list[Tensor], list[Tensor | None]]:
    """(results, gradients of all tensors) of a plain call."""
    tensors, leaves = leaves_of(s)
    ys = s.run(*tensors)
    found = torch.autograd.grad(ys, leaves, dys, allow_unused=True)
    return [y.detach() for y in ys], [
        torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True)
    ]


def exact_gradients(s: Subject, dys) -> list[tuple[Tensor, float]]:
    """(gradient in FP64, error of torch's own in the operands' dtype) of each tensor."""
    results = []
    for dtype in (torch.float64, s.tensors[0].dtype):
        wide = dtype is torch.float64
        tensors = [(t.detach().double() if wide else t.detach().clone()).requires_grad_() for t in s.tensors]
        ys = s.plain(*tensors)
        found = torch.autograd.grad(
            ys, tensors, [dy.to(y.dtype) for y, dy in zip(ys, dys, strict=True)], allow_unused=True
        )
        results.append([torch.zeros_like(t) if g is None else g for g, t in zip(found, tensors, strict=True)])
    return [(exact, (rough.double() - exact).norm().item()) for exact, rough in zip(*results, strict=True)]


def judge(s: Subject, tensors, leaves, found, exact) -> None:
    """Raise Wrong for gradients that are not those of FP64."""
    numbers = [next(i for i, t in enumerate(tensors) if t is leaf) for leaf in leaves]
    for number, leaf, gradient in zip(numbers, leaves, found, strict=True):
        if gradient is not None and gradient.dtype != leaf.dtype:
            raise Wrong("dtype", f"gradient of {s.names[number]} is {gradient.dtype}, expected {leaf.dtype}")
        truth, their_error = exact[number]
        floor = 2 * their_error + 1e-4 * max(1, truth.numel()) ** 0.5
        compare(f"gradient of {s.names[number]}", gradient, truth, 2.0**-6, floor)


# -- forward and backward -----------------------------------------------------------------------------------------


def backward_of(run: Callable, s: Subject, draw: random.Random, compiled: bool = False) -> None:
    """Forward and backward() of random inputs and output gradients.

    compiled: by inductor, whose own kernels read gradients at multiples of 16 bytes, whatever their address.
    """
    dys = output_gradients(s, draw)
    if compiled:
        dys = [dy if dy.data_ptr() % 16 == 0 else dy.clone() for dy in dys]
    exact, (tensors, leaves) = exact_gradients(s, dys), leaves_of(s, draw)
    torch.autograd.backward(run(*tensors), dys)
    judge(s, tensors, leaves, [t.grad for t in leaves], exact)


def write_between(run: Callable, s: Subject, draw: random.Random) -> None:
    """Forward, an in-place write to something that the call read or returned, backward: right, or torch's error."""
    dys = output_gradients(s, draw)
    exact, (tensors, leaves) = exact_gradients(s, dys), leaves_of(s, draw)
    ys = run(*tensors)
    targets = [lambda t=t: t.mul_(-0.5) for t in tensors] + [write for _, write, _ in s.writes] * 2
    targets += [lambda t=t: t[..., :1].add_(1.0) for t in tensors] + [lambda: ys[0].detach().mul_(2.0)]
    with torch.no_grad():
        draw.choice(targets)()
    try:
        found = torch.autograd.grad(ys, leaves, dys, allow_unused=True)
    except RuntimeError as error:
        if WRITTEN not in str(error):
            raise
        return
    judge(s, tensors, leaves, found, exact)
