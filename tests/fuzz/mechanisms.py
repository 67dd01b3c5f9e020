"""Autograd, autocast and torch.func for the fuzz: each function calls a random `Subject` through one mechanism."""

import torch
import torch.autograd.forward_ad as forward_ad
from torch.utils.checkpoint import checkpoint

from .mechanism_checks import (
    backward_of,
    dots,
    eager,
    exact_gradients,
    expect,
    gradients,
    judge,
    leaves_of,
    mechanism,
    output_gradients,
    same,
    write_between,
)

# -- autograd --------------------------------------------------------------------------------------------------


@mechanism
def autograd(s, draw, device):
    backward_of(s.run, s, draw)


@mechanism
def two_backward_passes(s, draw, device):
    """Through one graph, with other gradients."""
    tensors, leaves = leaves_of(s, draw)
    ys = s.run(*tensors)
    for _ in range(2):
        dys = output_gradients(s, draw)
        found = torch.autograd.grad(ys, leaves, dys, allow_unused=True, retain_graph=True)
        judge(s, tensors, leaves, found, exact_gradients(s, dys))


@mechanism
def one_output(s, draw, device):
    """The gradient of one of the results; the other has none."""
    dys = output_gradients(s, draw)
    number = draw.randrange(len(dys))
    kept = [dy if i == number else torch.zeros_like(dy) for i, dy in enumerate(dys)]
    exact, (tensors, leaves) = exact_gradients(s, kept), leaves_of(s, draw)
    ys = s.run(*tensors)
    judge(s, tensors, leaves, torch.autograd.grad(ys[number], leaves, dys[number], allow_unused=True), exact)


@mechanism
def write(s, draw, device):
    write_between(s.run, s, draw)


@mechanism
def batched_gradients(s, draw, device):
    tensors, leaves = leaves_of(s, draw)
    ys = s.run(*tensors)
    seeds = [torch.stack([torch.randn_like(y) for _ in range(2)]) for y in ys]
    options = {"allow_unused": True, "retain_graph": True}
    found = torch.autograd.grad(ys, leaves, seeds, is_grads_batched=True, **options)
    singles = [torch.autograd.grad(ys, leaves, [seed[i] for seed in seeds], **options) for i in range(2)]
    for i, each in enumerate(singles):
        same(
            "batched gradient",
            [None if g is None else g[i] for g in found],
            [g if g is not None else t * 0 for g, t in zip(each, leaves, strict=True)],
        )


@mechanism
def second_derivative(s, draw, device):
    tensors, leaves = leaves_of(s, draw)
    dys = [dy.requires_grad_(draw.random() < 0.5) for dy in (torch.randn_like(y) for y in s.run(*tensors))]
    first = [g for g in gradients(s.run, tensors, leaves, dys, create_graph=True) if g is not None and g.grad_fn]
    if first:
        run = lambda: sum(g.sum() for g in first).backward()  # noqa: E731
        expect(RuntimeError, ("differentiable once",), run, "a second derivative")


@mechanism
def forward_mode(s, draw, device):
    """Dual tensors, torch.func.jvp and jacfwd."""
    number, texts = draw.randrange(len(s.tensors)), ("has no forward-mode derivative", "captured")

    def of_one(t):
        return s.run(*s.tensors[:number], t, *s.tensors[number + 1 :])[0]

    t = s.tensors[number]
    if draw.random() < 0.5:
        expect(RuntimeError, texts, lambda: torch.func.jvp(of_one, (t,), (torch.ones_like(t),)), "torch.func.jvp")
        return
    with forward_ad.dual_level():
        expect(RuntimeError, texts, lambda: of_one(forward_ad.make_dual(t, torch.ones_like(t))), "a dual tensor")


@mechanism
def saved_tensors_hooks(s, draw, device):
    """Copies as offloading makes them, of the same or of other strides."""
    pack = draw.choice([lambda t: t.clone(), lambda t: t.contiguous().clone(), lambda t: t.to("cpu", copy=True)])
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to(device))

    def run(*given):
        with hooks if draw.random() < 0.8 else torch.autograd.graph.save_on_cpu():
            return s.run(*given)

    backward_of(run, s, draw)


@mechanism
def checkpointed(s, draw, device):
    reentrant = draw.random() < 0.3
    backward_of(lambda *given: checkpoint(s.run, *given, use_reentrant=reentrant), s, draw)


@mechanism
def autocast(s, draw, device):
    """FP32 tensors under autocast: the numbers of a call in 16 bits, gradients in FP32."""
    dtype = s.tensors[0].dtype
    dys = output_gradients(s, draw)
    ys, expected = eager(s, dys)
    floats = [t.detach().float().requires_grad_() for t in s.tensors]
    with torch.autocast(device, dtype):
        found = s.run(*floats)
    same("result under autocast", found, ys)
    found = torch.autograd.grad(found, floats, dys, allow_unused=True)
    same("gradient under autocast", found, [g.float() for g in expected])


@mechanism
def inference(s, draw, device):
    expected = [y.detach() for y in s.run(*s.tensors)]
    mode = draw.choice([torch.inference_mode, torch.no_grad])
    with mode():
        tensors = [t.clone() if draw.random() < 0.5 else t for t in s.tensors]
        same("result", s.run(*tensors), expected)


# -- torch.func ------------------------------------------------------------------------------------------------


@mechanism
def func_grad(s, draw, device):
    dys = output_gradients(s, draw)
    exact, count = exact_gradients(s, dys), draw.randint(1, len(s.tensors))
    chosen = tuple(sorted(draw.sample(range(len(s.tensors)), count)))
    if draw.random() < 0.5:
        found = torch.func.grad(lambda *given: dots(s.run(*given), dys), argnums=chosen)(*s.tensors)
    else:

        def part(*given):
            tensors = list(s.tensors)
            for number, t in zip(chosen, given, strict=True):
                tensors[number] = t
            return s.run(*tensors)

        ys, pull = torch.func.vjp(part, *(s.tensors[i] for i in chosen))
        same("result", ys, [y.detach() for y in s.run(*s.tensors)])
        found = pull(tuple(dys))
    judge(s, s.tensors, [s.tensors[i] for i in chosen], found, exact)


@mechanism
def vmap(s, draw, device):
    """Over a random subset of inputs, or gradients for each item."""
    chosen = [draw.random() < 0.5 for _ in s.tensors]
    chosen[draw.randrange(len(chosen))] = True
    dims = [draw.randrange(max(t.dim(), 1)) if c else None for c, t in zip(chosen, s.tensors, strict=True)]
    dims = tuple(d and (0 if name == "values" else d) for d, name in zip(dims, s.names, strict=True))  # contiguous
    both = [torch.stack([t, t / 2], dim) if dim is not None else t for dim, t in zip(dims, s.tensors, strict=True)]
    run = s.run
    if draw.random() < 0.4:
        dys = output_gradients(s, draw)
        run = torch.func.grad(lambda *given: dots(s.run(*given), dys), argnums=tuple(range(len(s.tensors))))
    found = torch.func.vmap(run, in_dims=dims)(*both)
    for i in range(2):
        items = [t.select(dim, i) if dim is not None else t for dim, t in zip(dims, both, strict=True)]
        same(f"item {i}", [y[i] for y in found], run(*items))


@mechanism
def jacrev(s, draw, device):
    number = draw.randrange(len(s.tensors))

    def few(t):
        return s.run(*s.tensors[:number], t, *s.tensors[number + 1 :])[0].flatten()[:2]

    found = torch.func.jacrev(few)(s.tensors[number])
    leaf = s.tensors[number].detach().requires_grad_()
    for row, y in zip(found, few(leaf), strict=True):
        (expected,) = torch.autograd.grad(y, leaf, retain_graph=True, allow_unused=True)
        same("row of the Jacobian", [row], [leaf * 0 if expected is None else expected])
