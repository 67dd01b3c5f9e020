"""Prune a sentence model's feed-forward layers to blocks, and train it until its embeddings recover.

The dense model is the teacher: the loss is what the sentence embeddings lack to a cosine of 1, and the relative squared
error of the states after each layer. Cosines are reported of texts from documents that were not trained on.
"""

import copy
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparse_collective.nn import InputNorms, SparsityConfig, sparsify_

from . import minilm, text
from .runs import CLIP, SEED, learning_rate, precision

DENSITIES = (0.5, 0.25, 0.125)
BLOCKSIZE = (32, 32)
STEPS = 250
TOKENS = 1024  # of a step, with padding
RATE = 1e-3
BETAS = (0.9, 0.98)
CALIBRATION = 8  # batches whose inputs weigh the blocks
HELD_OUT = 500  # sentences
EVALUATIONS = 5
LOW = 0.05  # the quantile that is shown beside the mean


@dataclass
class Recovery:
    """One density: mean cosines of held-out sentences with the dense model's, and of the worst twentieth at best."""

    density: float
    parameters: int  # stored in the layers that were pruned
    dense_parameters: int
    steps: list[int] = field(default_factory=list)
    cosine: list[float] = field(default_factory=list)  # at each of `steps`; the first is before any training
    low_cosine: list[float] = field(default_factory=list)  # the quantile LOW
    tokens: int = 0  # trained on, without padding
    seconds: float = 0.0  # of training, without evaluations


def texts() -> tuple[list[str], list[str]]:
    """(sentences to train on, others that are evenly drawn from held-out documents)."""
    train, held_out = map(text.sentences, text.split())
    known = set(train)
    held_out = [sentence for sentence in held_out if sentence not in known]
    return train, held_out[:: max(1, len(held_out) // HELD_OUT)][:HELD_OUT]


def pruned(teacher: minilm.MiniLM, density: float, inputs: Sequence[Tensor]) -> tuple[minilm.MiniLM, Recovery]:
    """A copy whose feed-forward layers keep blocks by the size of weights and of what they are multiplied with."""
    student = copy.deepcopy(teacher).requires_grad_(True)
    with InputNorms(student) as norms, torch.no_grad(), precision(inputs[0].device):
        for tokens in inputs:
            student(tokens)
    config = SparsityConfig(BLOCKSIZE, {"*.up": density, "*.down": density}, norms)
    changes = sparsify_(student, config).changed
    dense, stored = (sum(getattr(change, name) for change in changes) for name in ("before", "after"))
    return student, Recovery(density, stored, dense)


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


def recover(
    teacher: minilm.MiniLM,
    density: float,
    train: Sequence[Tensor],
    held_out: Sequence[Tensor],
    steps: int,
    tell: Callable[[int, float], None],
) -> tuple[minilm.MiniLM, Recovery]:
    """Prune and train; tables of words and places stay as they are.

    Args:
        train, held_out: (B, S) tokens of some texts each, on the teacher's device.
        tell: called with the number of steps and the last mean cosine, after each step.
    """
    order = random.Random(SEED)
    student, found = pruned(teacher, density, order.sample(train, min(CALIBRATION, len(train))))
    expected = embedded(teacher, held_out)
    for table in (student.words, student.places, student.kinds):
        table.requires_grad_(False)
    parameters = [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=BETAS, weight_decay=0.0)
    queue: list[Tensor] = []

    def note(step: int) -> None:
        cosines = (embedded(student, held_out) * expected).sum(-1)
        found.steps.append(step)
        found.cosine.append(cosines.mean().item())
        found.low_cosine.append(cosines.quantile(LOW).item())

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
    return student, found
