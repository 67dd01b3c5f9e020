"""Training steps of a transformer beside the same one of dense layers, and of a layer whose pattern changes.

Useful are the stored blocks of the feed-forward layers alone, whose products all candidates of a row are taken to do,
so that a ratio is that of times.
"""

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from cute_kernels.testing.reference import truth
from sparse_collective.nn import BsrLinear, change_pattern_

from . import peers, timing
from .cases import CUBE, DTYPE
from .cases_experts import routed_experts
from .cases_layers import sampled_rows, swiglu
from .peers import Call
from .rows import Candidate, Case, Problem

EIGHTH = 1 / 8
DENSE_STEP = "dense step, compiled"
FEED_FORWARD = "its feed-forward alone"
ALLOWED = "what Amdahl's law allows"
KEPT = "the same step, pattern kept"
DROPPED = 0.3  # of the blocks: what RigL begins with
LR = 1e-5  # weights hardly move in as many steps as are timed


def training_call(
    parameters: Iterator[Tensor], backward: Callable[[Tensor], object], x: Tensor, after: Callable | None = None,
    graph: bool = False,
) -> Call:  # fmt: skip
    """A step: backward(leaf) of a leaf that is x, AdamW of the parameters, and after(optimizer). Returns x's gradient.

    Gradients of the parameters are None before it. graph: on a GPU the step is replayed as a CUDA graph.
    """
    graph = graph and x.is_cuda
    optimizer = torch.optim.AdamW(parameters, lr=LR, fused=True, capturable=graph)

    def call() -> Tensor:
        leaf = x.detach().requires_grad_()
        optimizer.zero_grad()
        backward(leaf)
        optimizer.step()
        if after is not None:
            after(optimizer)
        return leaf.grad

    return Call(captured(call, optimizer) if graph else call)


def captured(step: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    """A step as a CUDA graph; each replay returns the same tensor."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a capture asks for that; kernels are compiled, and AdamW's state is made
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad()  # so that gradients lie in the graph's memory
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()

    def replay(step: Callable = step) -> Tensor:  # which keeps the tensors that are not in the graph's memory
        graph.replay()
        return found

    return replay


# -- a transformer ---------------------------------------------------------------------------------------------


class FeedForward(nn.Module):
    """down(up(x)), the activation between them dense or fused into `up`."""

    def __init__(self, up: nn.Module, down: nn.Module, activation: Callable | None) -> None:
        super().__init__()
        self.up, self.down, self.activation = up, down, activation

    @classmethod
    def dense(cls, dim: int, hidden: int, **more) -> "FeedForward":
        return cls(nn.Linear(dim, hidden, **more), nn.Linear(hidden, dim, **more), nnf.gelu)

    @classmethod
    def sparse(cls, dim: int, hidden: int, block: tuple[int, int], **more) -> "FeedForward":
        """more: density, device, dtype."""
        up = BsrLinear(dim, hidden, True, block, activation="gelu", **more)
        return cls(up, BsrLinear(hidden, dim, True, block, **more), None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.down(x if self.activation is None else self.activation(x))


class Block(nn.Module):
    """x + attention(norm(x)), and of that y + feed_forward(norm(y)); attention is causal."""

    def __init__(self, dim: int, heads: int, feed_forward: nn.Module, **more) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim, **more), nn.LayerNorm(dim, **more)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, **more), nn.Linear(dim, dim, **more)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))  # (B, S, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, S, D) each
        y = nnf.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.feed_forward(self.norm_2(x))


class Stack(nn.Module):
    """Blocks one after the other, each compiled by itself: those of one kind share a graph."""

    def __init__(self, blocks: list[nn.Module], backend: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.compiled = [torch.compile(block, fullgraph=True, backend=backend) for block in blocks]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.compiled:
            x = block(x)
        return x


def transformer(
    asked: float | None = None, *, layers: int = 12, dim: int = 2048, heads: int = 16, hidden: int = 8192,
    shape: tuple[int, int] = (4, 2048), density: float = EIGHTH, block: tuple[int, int] = (128, 128),
    device: str = "cuda", backend: str = "inductor", measure: Callable = timing.interleaved,
) -> Case:  # fmt: skip
    """Forward, backward and AdamW of a stack of transformer blocks in bf16 whose feed-forward layers are sparse.

    What Amdahl's law allows is T - F + density * F with T the dense step's time and F that of its feed-forward layers
    alone, forward, backward and AdamW, measured in turns with it: the row is held against this time, made of theirs
    round by round. F has the activation, too, which sparse weights do not make cheaper.

    Args:
        layers, dim, heads, hidden, shape: of the stack; shape is (batch, tokens of a sequence).
    """
    tokens, blocks = shape[0] * shape[1], hidden * dim // (block[0] * block[1])
    density = round(density * blocks) / blocks
    problem = Problem("training step", hidden, tokens, dim, block, density, products=6 * layers)
    more = {"device": device, "dtype": DTYPE}

    @functools.cache
    def shared() -> tuple[Tensor, Tensor]:
        """(x, gradient of the stack's output)"""
        return tuple(torch.randn(*shape, dim, **more) for _ in range(2))

    def step(feed_forward: Callable[[], nn.Module]) -> tuple[Call, nn.Module]:
        x, dy = shared()
        stack = Stack([Block(dim, heads, feed_forward(), **more) for _ in range(layers)], backend)
        return training_call(stack.parameters(), lambda leaf: stack(leaf).backward(dy), x), stack

    def ours():
        call, stack = step(lambda: FeedForward.sparse(dim, hidden, block, density=density, **more))
        call()
        check_feed_forward(stack.blocks[-1].feed_forward, shared()[0].flatten(0, -2))
        return call, None

    @functools.cache
    def dense() -> Call:
        return step(lambda: FeedForward.dense(dim, hidden, **more))[0]

    @functools.cache
    def alone() -> Call:
        """Each layer has the same x: behind one another their outputs would fade, and the card run faster."""
        x, dy = shared()
        found = nn.ModuleList(FeedForward.dense(dim, hidden, **more) for _ in range(layers))
        compiled = [torch.compile(each, fullgraph=True, backend=backend) for each in found]

        def backward(leaf: Tensor) -> None:
            for each in compiled:
                leaf.grad = None
                each(leaf).backward(dy)

        return training_call(found.parameters(), backward, x)

    def allowed() -> Call:
        """Fails where one of those fails that its time is made of; is not run itself."""
        alone()
        return Call(dense().run, note=f"{DENSE_STEP}, less {1 - density:.4g} of {FEED_FORWARD}")

    def timer(calls: dict, **options) -> dict[str, list[float]]:
        options["rounds"] = max(3, options["rounds"] // 3)  # of some 150 ms each
        times = measure({name: call for name, call in calls.items() if name != ALLOWED}, **options)
        if ALLOWED in calls:
            pairs = zip(times[DENSE_STEP], times[FEED_FORWARD], strict=True)
            times[ALLOWED] = [whole - (1 - density) * part for whole, part in pairs]
        return times

    makes = ((DENSE_STEP, dense), (FEED_FORWARD, alone), (ALLOWED, allowed))
    others = [Candidate(name, problem.flops, make) for name, make in makes]
    name = f"training step of {layers} transformer blocks, {block[0]}x{block[1]}, {density:g}, compiled"
    return Case("training", name, problem, ours, others, ALLOWED, asked, timer=timer)


@torch.no_grad()
def check_feed_forward(layer: FeedForward, x: Tensor) -> None:
    """Some rows of its output for x (tokens, dim), against fp32."""
    rows = sampled_rows(len(x), x.device)
    up, down = (part.weight.to_dense().t() for part in (layer.up, layer.down))
    inner = truth(x[rows], up, layer.up.bias, "gelu", dtype=torch.float32)
    peers.compare(layer(x)[rows], truth(inner, down, layer.down.bias, dtype=torch.float32))


# -- patterns that change --------------------------------------------------------------------------------------


def changing(
    asked: float | None = None, *, size: int = CUBE, tokens: int = CUBE, density: float = EIGHTH,
    block: tuple[int, int] = (128, 128), device: str = "cuda", graph: bool = False,
) -> Case:  # fmt: skip
    """A layer's forward, backward and AdamW, and a change of its pattern by SET, beside the same with a fixed pattern.

    A step with a change computes the tables of its pattern; a graph of it is captured when none is known, so it
    computes them in each replay.

    Args:
        graph: True to replay both steps as CUDA graphs; torch's generator draws other blocks in each replay.
    """
    per_row = round(density * size / block[1])
    problem = Problem("layer", size, tokens, size, block, per_row * block[1] / size, products=3)
    shared = functools.cache(lambda: tuple(torch.randn(tokens, size, device=device, dtype=DTYPE) for _ in range(2)))

    def step(changes: bool) -> tuple[Call, BsrLinear]:
        x, dy = shared()
        layer = BsrLinear(size, size, False, block, density=problem.density, device=device, dtype=DTYPE)

        def after(optimizer) -> None:
            optimizer.zero_grad()  # gradients would be moved, too
            change_pattern_(layer, DROPPED, grow="random", even_rows=True, optimizer=optimizer)

        backward = lambda leaf: layer(leaf).backward(dy)  # noqa: E731
        return training_call(layer.parameters(), backward, x, after if changes else None, graph), layer

    def ours():
        call, layer = step(True)
        call()
        (x, dy), rows = shared(), sampled_rows(tokens, device)
        before = layer.weight.to_dense().detach()
        peers.compare(call()[rows], truth(dy[rows], before, dtype=torch.float32))
        with torch.no_grad():
            dense = layer.weight.to_dense().t()
            peers.compare(layer(x)[rows], truth(x[rows], dense, dtype=torch.float32))
        return call, None

    name = f"layer {block[0]}x{block[1]}, {density:g}, step with a change by SET" + (
        ", in a CUDA graph" if graph else ""
    )
    others = [Candidate(KEPT, problem.flops, lambda: step(False)[0])]
    return Case("training", name, problem, ours, others, KEPT, asked)


def model_cases() -> Iterator[Case]:
    """A step with a change takes at most 1.10 of one without."""
    yield swiglu("bf16", 4096, 14336, 8192, 0.05, 14.0)
    yield routed_experts(4096, 14336, 8192, EIGHTH)
    yield transformer(0.9)
    for graph in (False, True):
        yield changing(1 / 1.10, graph=graph)
