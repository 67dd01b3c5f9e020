"""Torch's mechanisms for the fuzz: each calls a random `Subject` through one of them, and compares.

Gradients are compared with torch's in FP64, and may err as torch's in the operands' dtype do. What is documented to
give the numbers of a plain eager call is compared with one. What is documented to raise must raise that error.
"""

import contextlib
import functools
import random
import warnings
from collections.abc import Callable

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from .guard_zones import Wrong
from .mechanism_calls import Subject

WRITTEN = "modified by an inplace operation"
MECHANISMS: dict[str, Callable[[Subject, random.Random, str], None]] = {}


def mechanism(function):
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


# -- autograd --------------------------------------------------------------------------------------------------


def backward_of(run: Callable, s: Subject, draw: random.Random) -> None:
    """Forward and backward() of random inputs and output gradients."""
    dys = output_gradients(s, draw)
    exact, (tensors, leaves) = exact_gradients(s, dys), leaves_of(s, draw)
    torch.autograd.backward(run(*tensors), dys)
    judge(s, tensors, leaves, [t.grad for t in leaves], exact)


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


# -- dispatch modes and subclasses -----------------------------------------------------------------------------


class Nothing(TorchDispatchMode):
    """A mode that changes nothing and counts operators."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@mechanism
def dispatch_mode(s, draw, device):
    """FlopCounterMode and a mode of a user, around forward and backward; selective checkpointing."""
    form = draw.choice(["flops", "mode", "selective"])
    if form == "selective":
        policies = draw.choice(
            [
                (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE),
                (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE),
            ]
        )

        def policy(ctx, op, *args, **kwargs):
            return policies[op.namespace == "aten"]

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        backward_of(lambda *given: checkpoint(s.run, *given, use_reentrant=False, context_fn=contexts), s, draw)
        return
    dys = output_gradients(s, draw)
    exact, (tensors, leaves) = exact_gradients(s, dys), leaves_of(s, draw)
    mode = FlopCounterMode(display=False) if form == "flops" else Nothing()
    with mode:
        found = gradients(s.run, tensors, leaves, dys)
    judge(s, tensors, leaves, found, exact)
    if form == "mode" and not any(op.namespace not in ("aten", "prim") for op in mode.seen):
        raise Wrong("not seen", "the mode has not seen the registered op")


@mechanism
def fx(s, draw, device):
    """make_fx, forward alone or with gradients; the graph runs on other numbers."""
    tensors = [t.detach() for t in s.tensors]
    run = s.run
    if draw.random() < 0.4:
        dys = output_gradients(s, draw)

        def run(*given):
            given = [t.detach().requires_grad_() for t in given]
            found = gradients(s.run, given, given, dys)
            return [t * 0 if g is None else g for g, t in zip(found, given, strict=True)]

    graph = make_fx(run, tracing_mode=draw.choice(["real", "real", "fake", "symbolic"]), _allow_non_fake_inputs=True)(
        *tensors
    )
    others = [t * 0.5 for t in tensors]
    same("result of the graph", graph(*others), run(*others))


class Logged(torch.Tensor):
    """A wrapper subclass that logs which operators it sees."""

    log: list = []
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        more = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **more, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.log.append(function)
        args, kwargs = tree_map_only(Logged, lambda t: t.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Logged, function(*args, **kwargs))


class Plain(torch.Tensor):
    """A subclass without behavior of its own."""


def some_as(convert: Callable, tensors, draw: random.Random) -> list[Tensor]:
    """The tensors, of which one or more are converted."""
    chosen = [draw.random() < 0.5 for _ in tensors]
    chosen[draw.randrange(len(chosen))] = True
    return [convert(t) if c else t for t, c in zip(tensors, chosen, strict=True)]


@mechanism
def subclass(s, draw, device):
    dys = output_gradients(s, draw)
    ys, expected = eager(s, dys)
    if draw.random() < 0.4:
        same("result", s.run(*some_as(lambda t: t.as_subclass(Plain), s.tensors, draw)), ys)
        return
    Logged.log.clear()
    tensors = some_as(lambda t: Logged(t.detach()), [t.detach() for t in s.tensors], draw)
    found = s.run(*[t.requires_grad_() for t in tensors])
    if not any(op.namespace not in ("aten", "prim") for op in Logged.log):
        raise Wrong("not seen", "the subclass has not seen the registered op")
    inner = [getattr(y, "inner", y) for y in found]
    same("result", inner, ys)
    dys = [Logged(dy) if isinstance(y, Logged) else dy for y, dy in zip(found, dys, strict=True)]
    found = torch.autograd.grad(found, tensors, dys, allow_unused=True)
    same("gradient", [getattr(g, "inner", g) for g in found], expected)


@contextlib.contextmanager
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@mechanism
def refused_subclass(s, draw, device):
    """DTensors and nested tensors raise TypeError, also under torch.compile."""
    number = draw.randrange(len(s.tensors))

    def given(convert):
        return [convert(t.detach()) if i == number else t for i, t in enumerate(s.tensors)]

    if draw.random() < 0.5:
        layout = draw.choice([torch.jagged, torch.strided])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nested = given(lambda t: torch.nested.nested_tensor([t, t], layout=layout))
        run = lambda: s.run(*nested)  # noqa: E731
        expect((TypeError, ValueError), ("nested tensor", "values must be"), run, f"a nested {s.names[number]}")
        return
    with process_group():
        mesh = DeviceMesh(device, [0])
        tensors = given(lambda t: DTensor.from_local(t, mesh, [Replicate()], run_check=False))
        expect(TypeError, ("DTensor",), lambda: s.run(*tensors), f"a DTensor {s.names[number]}")


@mechanism
def without_memory(s, draw, device):
    """Shapes, dtypes and devices of meta and fake tensors are those of a call."""
    ys, meta = s.run(*s.tensors), s.on_meta and draw.random() < 0.5

    def check(found, place: str) -> None:
        for y, like in zip(found, ys, strict=True):
            if y.shape != like.shape or y.dtype != like.dtype or y.device.type != place:
                raise Wrong("shape", f"{y.shape} {y.dtype} on {y.device}, not {like.shape} {like.dtype} on {place}")

    if meta:
        tensors = [t.to("meta").requires_grad_(draw.random() < 0.5) for t in s.tensors]
        check(s.run(*tensors, move=lambda t: t.to("meta")), "meta")
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = [mode.from_tensor(t.detach()).requires_grad_(draw.random() < 0.5) for t in s.tensors]
    with mode:
        found = s.run(*tensors)
        check(found, device)
        leaves = [t for t in tensors if t.requires_grad]
        if leaves:
            torch.autograd.grad(found, leaves, [torch.empty_like(y) for y in found], allow_unused=True)


# -- torch.compile and CUDA graphs -----------------------------------------------------------------------------


def compiled(s: Subject, draw: random.Random, device: str) -> Callable:
    torch._dynamo.reset()
    options = {"backend": "aot_eager"}
    if device == "cuda":
        torch._inductor.config.compile_threads = 1  # many processes share the CPUs
        options = draw.choice([{"backend": "aot_eager"}, {}, {"mode": "reduce-overhead"}])
    dynamic = draw.choice([None, None, False, True])
    run = torch.compile(lambda *given: tuple(y * 1 for y in s.run(*given)), fullgraph=True, dynamic=dynamic, **options)

    def call(*given):
        torch.compiler.cudagraph_mark_step_begin()
        return run(*given)

    return call


@mechanism
def compile_autograd(s, draw, device):
    if s.traceable:
        run = compiled(s, draw, device)
        for _ in range(2 if device == "cpu" else 4):
            backward_of(run, s, draw)


@mechanism
def compile_others(s, draw, device):
    """A compiled function under another mechanism, or after an in-place write."""
    if not s.traceable:
        return
    run, form = compiled(s, draw, device), draw.choice(["write", "checkpoint", "no_grad"])
    if form == "write":
        write_between(run, s, draw)
    elif form == "checkpoint":
        backward_of(lambda *given: checkpoint(run, *given, use_reentrant=False), s, draw)
    else:
        with torch.no_grad():
            expected = [y.detach() for y in s.run(*s.tensors)]
            for _ in range(3):
                same("result", run(*s.tensors), expected)


@mechanism
def graph(s, draw, device):
    """Forward and backward in a CUDA graph, replayed with other numbers in the same memory."""
    if device != "cuda":
        return
    dys, (tensors, leaves) = output_gradients(s, draw), leaves_of(s, draw)
    dys = [dy.clone() for dy in dys]

    def step():
        ys = s.run(*tensors)
        return [*ys, *(g for g in torch.autograd.grad(ys, leaves, dys, allow_unused=True) if g is not None)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(), step()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = step()
    for _ in range(3):
        with torch.no_grad():
            for t in (*tensors, *dys):
                if draw.random() < 0.7:
                    t.copy_(-t.flip(0) if t.dim() else -t)
            for _, change, replayed in s.writes:
                if replayed and draw.random() < 0.5:
                    change()
        captured.replay()
        same("replay", [t.detach() for t in found], [t.detach() for t in step()])
