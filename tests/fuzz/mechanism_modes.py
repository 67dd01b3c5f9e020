"""Dispatch modes, tensor subclasses, torch.compile and CUDA graphs for the fuzz, as mechanisms.py."""

import contextlib
import functools
import random
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from ..guard_zones import Wrong
from .mechanism_calls import Subject
from .mechanism_checks import (
    backward_of,
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


def compiled(s: Subject, draw: random.Random, device: str, graphs: bool = True) -> Callable:
    """The compiled call, on a GPU by inductor or, with `graphs`, as CUDA graphs."""
    torch._dynamo.reset()
    options = {"backend": "aot_eager"}
    if device == "cuda":
        from torch._inductor import config

        config.compile_threads = 1  # many processes share the CPUs
        options = draw.choice([{"backend": "aot_eager"}, {}, {"mode": "reduce-overhead"} if graphs else {}])
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
            backward_of(run, s, draw, compiled=True)


@mechanism
def compile_others(s, draw, device):
    """A compiled function under another mechanism, or after an in-place write."""
    if not s.traceable:
        return
    form = draw.choice(["write", "checkpoint", "no_grad"])
    run = compiled(s, draw, device, graphs=form != "checkpoint")  # a checkpoint begins a step inside of a step
    if form == "write":
        # Inductor saves views of inputs that share no version counter, of torch.mm too: it notices no write to them.
        torch._dynamo.reset()
        write_between(torch.compile(s.run, backend="aot_eager", fullgraph=True), s, draw)
    elif form == "checkpoint":
        backward_of(lambda *given: checkpoint(run, *given, use_reentrant=False), s, draw, compiled=True)
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
