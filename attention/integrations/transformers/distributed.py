"""Models whose sequence several processes share (context parallelism).

`make_mask` returns a PlannedMask while `context_parallel` is active. Each layer gets it as its attention_mask, so that
activation checkpointing, which calls layers again in backward, finds the plan in another thread and after the `with`
block.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

from attention.distributed import ContextParallelPlan, context_parallel_attention
from attention.distributed.check import awaits_comparison
from attention.distributed.moves import blocks_of

from .kinds import Kind

OP = "context_parallel"
_ACTIVE: list[Plans] = []  # of the process; torch.compile guards its length, and cannot trace a ContextVar


class PlannedMask(FlexBlockMask):
    """The plan of one kind of layers, in the place of their mask."""

    def __init__(self, plan: ContextParallelPlan, batch: int, options: dict[str, Any], causal: bool):
        self.plan, self.batch, self.options, self.causal = plan, batch, options, causal

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch, 1, self.plan.local_length, self.plan.local_length

    def to(self, *_, **__) -> PlannedMask:
        return self

    def __repr__(self) -> str:
        return f"PlannedMask({self.plan!r})"

    __str__ = __repr__

    def check(self, position_ids: Tensor | None) -> None:
        """Warn in the first eager call with a plan if tokens are numbered from 0, as a model does by itself, where the
        plan has other positions; or if tokens of a causal model see later ones. Synchronizes then."""
        if is_compiling() or not awaits_comparison(self.plan):
            return
        if self.causal and sees_later_tokens(self.plan):
            warnings.warn(
                f"{OP}: the model is causal, and the mask of its plan lets tokens see later ones; pass causal=True to "
                "plan_context_parallel, unless that is meant",
                stacklevel=2,
            )
        if position_ids is None:
            return
        count = torch.arange(self.plan.local_length, device=position_ids.device)
        counted = torch.equal(position_ids.flatten()[: len(count)], count)
        if counted and not torch.equal(self.plan.positions.to(count.device), count):
            warnings.warn(
                f"{OP}: the model numbers this rank's tokens from 0, and they have other positions in the sequence; "
                "pass position_ids=plan.positions[None], unless positions start again at the rank's first token",
                stacklevel=2,
            )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None, **options: Any) -> Tensor:
        """(B, H, L, Dv) of a layer's shards."""
        options = self.options | options
        if sinks is None:
            return context_parallel_attention(q, k, v, self.plan, **options)
        # A sink adds exp(sink) to the sum of exponentials exp(lse).
        out, lse = context_parallel_attention(q, k, v, self.plan, return_lse=True, **options)
        part = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])
        return (out * part.unsqueeze(-1)).to(out.dtype)


def sees_later_tokens(plan: ContextParallelPlan) -> bool:
    """True if a token of this process sees later ones: the first token of the first blocks that may. Synchronizes."""
    sides = zip(plan.numbers, plan.mask.blocksize, strict=True)
    rows, columns = (blocks_of(tiles, plan.tile).view(-1, side) for tiles, side in sides)
    partial, full = plan.mask.tables()
    may = (partial & (columns[:, 0] > rows[:, -1:])) | (full & (columns[:, -1] > rows[:, :1]))
    block = int(may.any(-1).flatten(0, 1).any(0).int().argmax())
    first = block * plan.mask.blocksize[0]
    return bool((plan.mask.elements(first, first + 1) & (columns.flatten() > rows[block, 0])).any())


def _same_tokens(a: ContextParallelPlan, b: ContextParallelPlan) -> bool:
    """True if both deal the same tokens to each process."""
    facts = [(plan.length, plan.tile, plan.rank, plan.size, plan.deal) for plan in (a, b)]
    return facts[0] == facts[1] and (
        a.deal != "balanced" or a.tiles is b.tiles or torch.equal(a.tiles, b.tiles.to(a.tiles.device))
    )


class Plans:
    """The plans of context_parallel, one for each sliding window."""

    def __init__(self, plans: Any, options: dict[str, Any]):
        self.options = options
        self.create: Callable | None = None
        self.by_window: dict[int | None, ContextParallelPlan] = {}
        self.causal: dict[int | None, bool] = {}  # of the layers with each plan
        if isinstance(plans, ContextParallelPlan):
            self.add(None, plans)
        elif isinstance(plans, Mapping) and plans:
            for window, plan in plans.items():
                self.add(window, plan)
        elif callable(plans):
            self.create = plans
        else:
            raise TypeError(
                f"{OP}: plans must be a ContextParallelPlan, a dict of them by window, or a function of the window "
                f"that returns one, got {type(plans).__name__}"
            )

    def add(self, window: int | None, plan: ContextParallelPlan) -> None:
        if not isinstance(plan, ContextParallelPlan):
            raise TypeError(f"{OP}: the plan of window {window} must be a ContextParallelPlan, got {plan!r}")
        if self.by_window:
            first = next(iter(self.by_window.values()))
            if not _same_tokens(first, plan):
                raise ValueError(
                    f"{OP}: the plans of all windows must deal the same tokens to each process, got {first!r} and "
                    f"{plan!r}; pass deal= the first plan to plan_context_parallel"
                )
        self.by_window[window] = plan

    def of(self, window: int | None) -> ContextParallelPlan:
        """The plan of layers with a sliding window; None: those that see the whole sequence."""
        if window not in self.by_window and self.create is not None:
            self.add(window, self.create(window))
        plan = self.by_window.get(window)
        full = self.by_window.get(None)
        if plan is None and window is not None and full is not None and window >= full.length:
            plan = full
        if plan is None:
            windows = ", ".join(map(str, self.by_window))
            raise ValueError(
                f"{OP}: the model has layers with sliding_window={window}, and there are plans of the windows "
                f"{windows}; pass a dict such as {{None: plan, {window}: window_plan}}"
            )
        return plan

    def mask(self, batch: int, lengths: tuple[int, int], q_offset, kind: Kind | None, padding) -> PlannedMask:
        """The mask of a kind of layers, which replaces the one that transformers describes."""
        if padding is not None:
            raise ValueError(f"{OP}: attention_mask must be None; padding and packed sequences are part of the plan")
        if kind is None:
            raise ValueError(
                f"{OP}: the model has a mask that is neither causal, bidirectional nor a sliding window, which is not "
                "supported"
            )
        window = kind.left if kind.left is None or kind.right != 0 else kind.left + 1
        plan = self.of(window)
        if self.causal.setdefault(window, kind.right == 0) != (kind.right == 0):
            raise ValueError(
                f"{OP}: the model has causal and bidirectional masks (an encoder, a decoder, cross-attention), and a "
                "plan is one mask; run it on one GPU, or each of several models in its own `with context_parallel`"
            )
        if not isinstance(q_offset, int) or q_offset or lengths != (plan.local_length, plan.local_length):
            raise ValueError(
                f"{OP}: the model must get the {plan.local_length} tokens of this process, plan.shard(input_ids, 1), "
                f"and no tokens of a cache; got {lengths[0]} queries and {lengths[1]} keys"
            )
        return PlannedMask(plan, batch, self.options, kind.right == 0)


@contextlib.contextmanager
def context_parallel(
    plans: ContextParallelPlan | Mapping[int | None, ContextParallelPlan] | Callable,
    *,
    keep_kv: bool = False,
    reduce_dtype: torch.dtype = torch.float32,
):
    """Run models with attn_implementation="cute_kernels" on a sequence that several processes share.

        plan = plan_context_parallel(mesh=mesh, length=ids.shape[1], causal=True)
        with context_parallel(plan):
            logits = model(input_ids=plan.shard(ids, 1), position_ids=plan.positions[None]).logits

    The plan's mask replaces the model's: its causality, packed sequences and windows. Only the model's forward pass
    belongs in the `with` block; backward, also with activation checkpointing, needs none.

    Args:
        plans: the plan of all layers; for models with sliding-window layers a dict with a plan for each
            config.sliding_window, and that of other layers for None; or a function of the window that returns the plan,
            called once for each. All deal tokens alike: plan_context_parallel(..., deal=first_plan).
        keep_kv, reduce_dtype: see context_parallel_attention.

    Raises:
        TypeError, ValueError: plans is none of these, or they deal tokens differently. In a call of the model: it has a
            window without a plan, another kind of mask, causal and bidirectional ones, or position biases (T5); an
            attention_mask or a cache with tokens was passed; or the number of tokens is not that of a shard.
    """
    _ACTIVE.append(Plans(plans, {"keep_kv": keep_kv, "reduce_dtype": reduce_dtype}))
    try:
        yield
    finally:
        _ACTIVE.pop()


def active() -> Plans | None:
    """The plans of the innermost context_parallel."""
    return _ACTIVE[-1] if _ACTIVE else None


def check_none_active() -> None:
    """Raise ValueError if context_parallel is active, for a layer without a PlannedMask."""
    if _ACTIVE:
        raise ValueError(
            f"{OP}: a layer got another mask, or none, than the one that the model creates in its forward pass; "
            "pass attention_mask=None. Models that create no masks are not supported"
        )
