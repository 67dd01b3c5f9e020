"""A whole training step of layers, forward, loss, backward and AdamW: as a CUDA graph, compiled, and in parts.

Where there is no GPU, what would be replayed runs eagerly: that checks the tests themselves.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from cute_kernels.testing.reference import normal
from sparse_collective import sddmm
from sparse_collective.nn import BsrLinear, change_pattern_

from .nn_parts import near

BLOCK, TOKENS = (64, 64), 96


def model_of(device) -> nn.Sequential:
    """Two layers whose block rows hold four blocks each."""
    more = {"density": 0.5, "device": device, "dtype": torch.bfloat16}
    return nn.Sequential(
        BsrLinear(512, 512, True, BLOCK, activation="gelu", **more), BsrLinear(512, 256, True, BLOCK, **more)
    )


class Training:
    """A model, its AdamW, and inputs at fixed addresses; `step` leaves the loss in `loss`."""

    def __init__(self, model: nn.Module, compiled: bool = False, backend: str = "inductor") -> None:
        self.model = model
        device = next(model.parameters()).device
        self.x, self.target = normal(TOKENS, 512, device=device), torch.randn(TOKENS, 256, device=device)
        self.loss = torch.zeros((), device=device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=device.type == "cuda")
        self.forward = torch.compile(self.loss_of, fullgraph=True, backend=backend) if compiled else self.loss_of

    def loss_of(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(x).float(), target)

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.forward(self.x, self.target)
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def warm_up(self) -> None:
        """Three steps beside the default stream, as a capture asks for: kernels are compiled, Adam's state is made."""
        if not self.x.is_cuda:
            for _ in range(3):
                self.step()
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)

    def captured(self) -> Callable[[], None]:
        """A step as a CUDA graph; capturing it makes no step."""
        if not self.x.is_cuda:
            return self.step
        self.optimizer.zero_grad()  # so that gradients lie in the graph's memory
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def new_data(self, turn: int) -> None:
        generator = torch.Generator().manual_seed(turn)
        self.x.copy_(torch.randn(self.x.shape, generator=generator))
        self.target.copy_(torch.randn(self.target.shape, generator=generator))

    def state(self) -> list[torch.Tensor]:
        """Parameters, Adam's moments and counts, and the loss."""
        moments = [t for p in self.model.parameters() for t in self.optimizer.state[p].values()]
        return [self.loss, *(p.detach() for p in self.model.parameters()), *moments]


def two(device, compiled: bool = False) -> tuple[Training, Training]:
    """Trainings that begin alike."""
    torch._dynamo.reset()
    model, backend = model_of(device), "inductor" if device == "cuda" else "aot_eager"
    pair = Training(model, compiled, backend), Training(copy.deepcopy(model), compiled, backend)
    pair[1].target.copy_(pair[0].target)
    pair[1].x.copy_(pair[0].x)
    return pair


def assert_same(one: Training, other: Training) -> None:
    mine, theirs = one.state(), other.state()
    assert len(mine) == len(theirs) == 1 + 4 + 4 * 3
    for a, b in zip(mine, theirs, strict=True):
        assert a.isfinite().all() and torch.equal(a, b)


def outcome(training: Training, before: list[torch.Tensor], step: Callable[[], None]) -> list[torch.Tensor]:
    """The state that a step leaves when it begins with this one."""
    for t, value in zip(training.state(), before, strict=True):
        t.copy_(value)
    step()
    return [t.clone() for t in training.state()]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_graph_of_a_step(device, compiled):
    """Each replay has the bits of the same step without a graph, and of another replay; data change between steps."""
    training, _ = two(device, compiled)
    training.warm_up()
    replay, losses = training.captured(), []
    for turn in range(4):
        training.new_data(turn % 2)
        before = [t.clone() for t in training.state()]
        expected, *found = (outcome(training, before, step) for step in (training.step, replay, replay))
        assert all(t.isfinite().all() for t in expected) and not torch.equal(expected[1], before[1])
        for again in found:
            assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
        losses.append(expected[0].item())
    assert losses[2] < losses[0] and losses[3] < losses[1], "it learns"


def change(trainings, turn: int, even: bool) -> None:
    """The same change of the patterns of all of them, with Adam's state; no layer keeps its pattern."""
    for number in range(2):
        layers = [training.model[number] for training in trainings]
        scores = torch.rand(layers[0].grid, generator=torch.Generator().manual_seed(10 * turn + number))
        before = layers[0].pattern.keys()
        for training, layer in zip(trainings, layers, strict=True):
            grow = scores.to(layer.values.device)
            change_pattern_(layer, 0.5, grow=grow, even_rows=even, optimizer=training.optimizer)
        assert not torch.equal(before, layers[0].pattern.keys())


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_a_graph_is_captured_again_after_a_change_of_the_pattern(device, even):
    one, other = two(device)
    one.warm_up()
    other.warm_up()
    for turn in range(2):
        change((one, other), turn, even)
        one.step()  # makes what kernels know of the new patterns
        other.step()
        replay = one.captured()
        for _ in range(2):
            replay()
            other.step()
            assert_same(one, other)


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_a_graph_that_makes_its_tables_follows_changes_of_the_pattern(device, even):
    """Tables that do not exist when a graph is captured are made in each replay, of the indices as they are."""
    one, other = two(device)
    change((one, other), 0, even)
    one.warm_up()
    other.warm_up()
    change((one, other), 1, even)
    replay = one.captured()
    for turn in range(3):
        replay()
        other.step()
        assert_same(one, other)
        change((one, other), 2 + turn, even)


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_no_step_waits_for_the_gpu(device, even):
    """Neither one whose pattern has just changed; the change does not either."""
    one, _ = two(device)
    change((one,), 0, even)
    one.warm_up()
    scores = [torch.rand(layer.grid, device=device) for layer in one.model]
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        for layer, grow in zip(one.model, scores, strict=True):
            change_pattern_(layer, 0.5, grow=grow, even_rows=even, optimizer=one.optimizer)
        one.step()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def test_a_compiled_step(device):
    """Losses and gradients beside those of an eager one."""
    eager, compiled = two(device)[0], two(device, True)[1]
    compiled.model.load_state_dict(eager.model.state_dict())
    for turn in range(6):
        for training in (eager, compiled):
            training.new_data(turn % 2)
            training.step()
        assert compiled.loss.item() == pytest.approx(eager.loss.item(), rel=0.02)
        if turn == 0:
            for mine, theirs in zip(compiled.model.parameters(), eager.model.parameters(), strict=True):
                near(mine.grad, theirs.grad.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_parts_of_a_batch_add_up(device, dtype):
    """By autograd, in the values' dtype; and by sddmm into a buffer of either dtype."""
    layer = model_of(device)[1]
    x, dy = normal(4 * TOKENS, 512, device=device), normal(4 * TOKENS, 256, device=device)
    layer(x).backward(dy)
    whole = layer.values.grad
    layer.values.grad, sums = None, torch.zeros(layer.values.shape, dtype=dtype, device=device)
    for part_x, part_dy in zip(x.chunk(4), dy.chunk(4), strict=True):
        layer(part_x).backward(part_dy)
        assert sddmm(part_dy.t(), part_x, layer.weight, out=sums, accumulate=True) is sums
    near(layer.values.grad, whole.double())
    blocks = (dy.double().t() @ x.double()).unflatten(0, (-1, 64)).unflatten(2, (-1, 64)).transpose(1, 2)
    exact = blocks[layer.pattern.rows(), layer.col_indices.long()]
    near(sums, exact, 1 if dtype is torch.bfloat16 else 1e-4)
