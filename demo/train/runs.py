"""Train the same transformer dense, block-sparse, block-sparse and wider, and with block-sparse attention alone, on the
same batches."""

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .model import Decoder, Shape

SEED = 0
WARMUP = 0.1  # of the steps
BETAS, DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
WARM_UPS = 2
DENSE, SPARSE, WIDE, ATTENTION = "dense", "block-sparse", "block-sparse, wider", "block-sparse attention"


@dataclass(frozen=True)
class Plan:
    """What all runs share. density: of the sparse ones' feed-forward layers."""

    shape: Shape
    density: float
    batch: int
    steps: int
    rate: float
    evaluations: int
    windows: int  # of held-out text, in each evaluation

    def shapes(self) -> dict[str, Shape]:
        """The model of each run. The wider one takes as many useful operations as the dense one; attention that is
        block-sparse sees the last half of the context, and the first sixteenth."""
        sparse = replace(self.shape, density=self.density)
        wide = replace(sparse, hidden=round(self.shape.hidden / self.density))
        near = replace(self.shape, window=self.shape.context // 2, global_bytes=self.shape.context // 16)
        return {DENSE: self.shape, SPARSE: sparse, WIDE: wide, ATTENTION: near}


GPU = Plan(Shape(1024, 4096, 8, 16, 1024, 128), 0.25, batch=16, steps=300, rate=6e-4, evaluations=20, windows=128)
CPU = Plan(Shape(64, 256, 2, 4, 64, 16), 0.25, batch=16, steps=400, rate=3e-3, evaluations=10, windows=256)


@dataclass
class Run:
    """One training: its model's facts, and a point of each curve for each evaluation. Losses in nats a byte."""

    name: str
    hidden: int
    density: float
    parameters: int
    flops_per_token: float
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of steps alone: no compilation, no evaluation
    train_loss: list[float | None] = field(default_factory=list)  # mean since the point before; none at the start
    held_out_loss: list[float] = field(default_factory=list)
    step_ms: float = math.nan  # median
    peak_bytes: int | None = None  # on a GPU


class Clock:
    """Milliseconds between marks: of the device on a GPU, which nothing waits for before `read`; else of the host."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"
        self.marks: list = []

    def mark(self) -> None:
        if self.gpu:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def read(self) -> list[float]:
        """Of each pair of marks since the last read. Synchronises."""
        pairs = list(zip(self.marks[::2], self.marks[1::2], strict=True))
        self.marks = []
        if self.gpu:
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) for begin, end in pairs]
        return [1e3 * (end - begin) for begin, end in pairs]


def windows_at(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """(n, length) uint8: what text (bytes,) holds from each of starts (n,) on."""
    return text[starts[:, None] + torch.arange(length, device=text.device)]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """A linear warmup, then a cosine to a tenth."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def precision(device: torch.device) -> torch.autocast:
    """A context in which a GPU multiplies in bf16; on a CPU all is fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def optimizer_of(model: Decoder, rate: Tensor) -> torch.optim.Optimizer:
    """AdamW at the rate that a tensor () holds, as a CUDA graph can read it; norms and biases do not decay."""
    groups = [[p for p in model.parameters() if (p.dim() > 1) == decays] for decays in (True, False)]
    options = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (DECAY, 0.0), strict=True)]
    return torch.optim.AdamW(options, lr=rate, betas=BETAS, fused=rate.is_cuda, capturable=rate.is_cuda)


def evaluated(model: Decoder, text: Tensor, plan: Plan) -> float:
    """The mean loss of evenly spread windows of the text."""
    length = plan.shape.context + 1
    starts = torch.linspace(0, len(text) - length, plan.windows, dtype=torch.float64).long().to(text.device)
    with torch.no_grad(), precision(text.device):
        losses = [model.loss(windows_at(text, some, length)) for some in starts.split(plan.batch)]
    return torch.stack(losses).mean().item()


class Step:
    """One optimizer step of a model as a function of nothing: it reads what the tensors `starts` and `rate` hold.

    On a GPU it is a CUDA graph, since a model of this size computes faster than Python launches. Its layers are
    compiled by torch, and share one graph of operations.
    """

    def __init__(self, model: Decoder, plan: Plan, text: Tensor) -> None:
        self.model, self.length, self.text = model, plan.shape.context + 1, text
        self.starts = torch.zeros(plan.batch, dtype=torch.int64, device=text.device)
        self.rate = torch.zeros((), device=text.device)
        self.optimizer = optimizer_of(model, self.rate)
        if text.device.type == "cuda":
            torch.compiler.reset()  # graphs of an earlier model count as failures to reuse one
            for layer in model.layers:
                layer.compile(fullgraph=True)
            self.run = self.captured()
        else:
            self.warm_up()
            self.run = self.eager
        for state in self.optimizer.state.values():
            for moment in state.values():
                moment.zero_()

    def warm_up(self) -> None:
        """Compile kernels and make Adam's state, at a rate of 0, which changes no weight."""
        for _ in range(WARM_UPS):
            self.eager()

    def eager(self) -> Tensor:
        """The loss before the step, ()."""
        with precision(self.text.device):
            loss = self.model.loss(windows_at(self.text, self.starts, self.length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def captured(self) -> Callable[[], Tensor]:
        stream = torch.cuda.Stream()  # as a capture asks for
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.warm_up()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.eager()

        def run() -> Tensor:
            graph.replay()
            return loss.clone()

        return run

    def __call__(self, starts: Tensor, rate: float) -> Tensor:
        self.starts.copy_(starts)
        self.rate.fill_(rate)
        return self.run()


def train(name: str, plan: Plan, train_text: Tensor, held_out: Tensor, tell: Callable[[int, float], None]) -> Run:
    """Train one model on the device that the texts are on: a GPU in bf16 under autocast, or a CPU in fp32.

    Args:
        name: DENSE, SPARSE, WIDE or ATTENTION.
        train_text, held_out: (bytes,) uint8.
        tell: called with the number of steps and the last held-out loss, after each step.
    """
    device, shape = train_text.device, plan.shapes()[name]
    gpu = device.type == "cuda"
    torch.manual_seed(SEED)
    model = Decoder(shape).to(device)
    order = torch.Generator().manual_seed(SEED)
    starts = torch.randint(len(train_text) - shape.context, (plan.steps, plan.batch), generator=order).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    run = Run(name, shape.hidden, 1.0 if shape.density is None else shape.density, parameters, model.flops())
    clock, times, losses = Clock(device), [], []

    def note(step: int) -> None:
        times.extend(clock.read())
        run.tokens.append(step * plan.batch * shape.context)
        run.seconds.append(sum(times) / 1e3)
        run.train_loss.append(torch.stack(losses).mean().item() if losses else None)
        run.held_out_loss.append(evaluated(model, held_out, plan))
        losses.clear()

    if gpu:
        gc.collect()  # a compiled model before this one holds itself
        torch.cuda.reset_peak_memory_stats()
    one = Step(model, plan, train_text)
    note(0)
    every = max(1, plan.steps // plan.evaluations)
    for step in range(plan.steps):
        clock.mark()
        losses.append(one(starts[step], learning_rate(step, plan.steps, plan.rate)))
        clock.mark()
        if (step + 1) % every == 0 or step + 1 == plan.steps:
            note(step + 1)
        tell(step + 1, run.held_out_loss[-1])
    run.step_ms = statistics.median(times)
    run.peak_bytes = torch.cuda.max_memory_allocated() if gpu else None
    return run
