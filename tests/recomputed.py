"""Selective activation checkpointing with a policy that saves what comparisons of ranks run, too."""

import functools

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def recomputed(block, *args):
    """block(*args), of which backward computes all again but concatenations.

    Ranks compare arguments in a first call alone, and concatenate to do so: nothing must be saved of these.
    """
    contexts = functools.partial(create_selective_checkpoint_contexts, _saves_cat)
    return checkpoint(block, *args, use_reentrant=False, context_fn=contexts)


def _saves_cat(ctx, op, *_, **__):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.cat.default else CheckpointPolicy.PREFER_RECOMPUTE
