"""select_blocks as a registered op, for torch.compile: one graph serves all lengths."""

import torch
from torch import Tensor

from cute_kernels.runtime.library import define

from .top_blocks import lists_of


def _fake(q_index, k_index, top, *others) -> Tensor:
    *_, groups = others
    return q_index.new_empty(q_index.shape[0], q_index.shape[2], groups, top, dtype=torch.int32)


define(
    "attention::select_blocks",
    "(Tensor q_index, Tensor k_index, SymInt top, SymInt block_size, bool causal, SymInt local, SymInt initial, "
    "str pool, str? activation, SymInt groups) -> Tensor",
    lists_of, _fake,
)  # fmt: skip


def select_blocks(q_index: Tensor, k_index: Tensor, *terms) -> Tensor:
    """top_blocks.lists_of in a torch.compile trace."""
    return torch.ops.attention.select_blocks(q_index, k_index, *terms)
