"""Selective activation checkpointing with a policy that saves what comparisons of ranks run, too."""

import functools

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def recomputed(block, *args, attention: bool = False):
    """block(*args), of which backward computes all again but concatenations, or with `attention` all but its ops.

    Ranks compare arguments in a first call alone, and concatenate to do so: nothing must be saved of these.
    """
    policy = _saves_attention if attention else _saves_cat
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, *args, use_reentrant=False, context_fn=contexts)


def _saves_cat(ctx, op, *_, **__):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.cat.default else CheckpointPolicy.PREFER_RECOMPUTE


def _saves_attention(ctx, op, *_, **__):
    return CheckpointPolicy.MUST_SAVE if op.namespace == "attention" else CheckpointPolicy.PREFER_RECOMPUTE
