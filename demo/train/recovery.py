"""Prune a sentence model's feed-forward layers to blocks, and train it until its embeddings recover.

It is pruned in stages: each density starts from the trained model of the one before. The dense model is the teacher:
the loss is what the sentence embeddings lack to a cosine of 1, and the relative squared error of the states after each
layer. Cosines are reported of texts from documents that were not trained on.
"""

import copy
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparse_collective.nn import BsrLinear, SparsityConfig, prune_, sparsify_

from . import minilm, text
from .runs import CLIP, SEED, learning_rate, precision

DENSITIES = (0.5, 0.25, 0.125)
BLOCKSIZE = (32, 32)
STEPS = 300  # at each density
TOKENS = 1024  # of a step, with padding
RATE = 1e-3
BETAS = (0.9, 0.98)
HELD_OUT = 500  # sentences
EVALUATIONS = 5
LOW = 0.05  # the quantile that is shown beside the mean


@dataclass
class Recovery:
    """One density: cosines of held-out sentences with the dense model's, as a mean and as the quantile LOW."""

    density: float
    parameters: int  # of the layers that are pruned
    dense_parameters: int
    at_once: float  # mean and quantile of the dense model pruned to this density, not trained
    low_at_once: float
    steps: list[int] = field(default_factory=list)
    cosine: list[float] = field(default_factory=list)  # at each of `steps`, the first before this density's training
    low_cosine: list[float] = field(default_factory=list)
    tokens: int = 0  # trained on at this density, without padding
    seconds: float = 0.0  # of its training, without evaluations


def texts() -> tuple[list[str], list[str]]:
    """(sentences to train on, others that are evenly drawn from held-out documents)."""
    train, held_out = map(text.sentences, text.split())
    known = set(train)
    held_out = [sentence for sentence in held_out if sentence not in known]
    return train, held_out[:: max(1, len(held_out) // HELD_OUT)][:HELD_OUT]


def prune_feed_forward_(model: minilm.MiniLM, density: float) -> None:
    """Keep the largest blocks of the feed-forward layers: of dense ones, or of those that are stored yet."""
    if any(isinstance(module, BsrLinear) for module in model.modules()):
        for layer in model.layers:
            prune_(layer.up, density)
            prune_(layer.down, density)
    else:
        sparsify_(model, SparsityConfig(BLOCKSIZE, {"*.up": density, "*.down": density}))


def feed_forward_parameters(model: minilm.MiniLM) -> int:
    return sum(p.numel() for layer in model.layers for part in (layer.up, layer.down) for p in part.parameters())


def loss_of(student: list[Tensor], teacher: list[Tensor], tokens: Tensor) -> Tensor:
    """() 1 - cosine of the embeddings, and the mean over layers of the states' relative squared error.

    Args:
        student, teacher: (B, S, dim) states after each layer.
        tokens: (B, S), 0 where a text has ended; states there do not count.
    """
    mask = (tokens != 0)[..., None]
    ours, theirs = (minilm.embeddings(states[-1].float(), tokens) for states in (student, teacher))
    errors = [((a - b) * mask).float().square().sum() / (b * mask).float().square().sum()
              for a, b in zip(student, teacher, strict=True)]  # fmt: skip
    return 1 - (ours * theirs).sum(-1).mean() + torch.stack(errors).mean()


def embedded(model: minilm.MiniLM, inputs: Sequence[Tensor]) -> Tensor:
    """(texts, dim) float32 embeddings."""
    with torch.no_grad(), precision(inputs[0].device):
        return torch.cat([minilm.embeddings(model(tokens)[-1].float(), tokens) for tokens in inputs])


def similarity(model: minilm.MiniLM, inputs: Sequence[Tensor], expected: Tensor) -> tuple[float, float]:
    """Mean and quantile LOW of the cosines with expected (texts, dim) embeddings."""
    cosines = (embedded(model, inputs) * expected).sum(-1)
    return cosines.mean().item(), cosines.quantile(LOW).item()


def recover(
    student: minilm.MiniLM,
    teacher: minilm.MiniLM,
    density: float,
    train: Sequence[Tensor],
    held_out: Sequence[Tensor],
    steps: int,
    tell: Callable[[int, float], None],
) -> Recovery:
    """Prune the student (further) and train it, in place; tables of words and places stay as they are.

    Args:
        student: a copy of the teacher, or what this function has made of it at a higher density.
        train, held_out: (B, S) tokens of some texts each, on the teacher's device.
        tell: called with the number of steps and the last mean cosine, after each step.
    """
    order, expected = random.Random(f"{SEED} {density}"), embedded(teacher, held_out)
    at_once = copy.deepcopy(teacher)
    prune_feed_forward_(at_once, density)
    prune_feed_forward_(student, density)
    sizes = (feed_forward_parameters(model) for model in (student, teacher))
    found = Recovery(density, *sizes, *similarity(at_once, held_out, expected))
    student.requires_grad_(True)
    for table in (student.words, student.places, student.kinds):
        table.requires_grad_(False)
    parameters = [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=BETAS, weight_decay=0.0)
    queue: list[Tensor] = []

    def note(step: int) -> None:
        mean, low = similarity(student, held_out, expected)
        found.steps.append(step)
        found.cosine.append(mean)
        found.low_cosine.append(low)

    def train_step(step: int) -> None:
        if not queue:  # an epoch
            queue.extend(order.sample(train, len(train)))
        tokens = queue.pop()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, RATE)
        with precision(tokens.device):
            with torch.no_grad():
                target = teacher(tokens)
            loss = loss_of(student(tokens), target, tokens)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        found.tokens += int((tokens != 0).sum())

    note(0)
    every = max(1, steps // EVALUATIONS)
    for step in range(steps):
        start = time.perf_counter()
        train_step(step)
        found.seconds += time.perf_counter() - start
        if (step + 1) % every == 0 or step + 1 == steps:
            note(step + 1)
        tell(step + 1, found.cosine[-1])
    return found
