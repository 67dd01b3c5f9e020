"""Query heads that share a KV head as rows of its scores: row i is of token i // packed.

The block-sparse kernels read one head's rows, so Q, O and their gradients are copied to this order; the kernel with
gathered KV tiles reads and writes heads where they are.
"""

from typing import Any

from torch import Tensor

from ..arguments import AttentionArgs
from .blocks import SelectedBlocks, mask_of


def packed_of(block_mask: Any) -> int:
    """Query heads that become rows of one head's scores; 1 for other masks."""
    return block_mask.packed if isinstance(block_mask, SelectedBlocks) else 1


def as_rows(t: Tensor, packed: int) -> Tensor:
    """(B, Hkv, S * packed, ..) of (B, Hkv * packed, S, ..)."""
    return t.unflatten(1, (-1, packed)).transpose(2, 3).flatten(2, 3)


def planned_rows(t: Tensor, packed: int) -> Tensor:
    """as_rows for a plan that launches nothing: where that copies, memory like the copy's that is not written."""
    rows = t.unflatten(1, (-1, packed)).transpose(2, 3)
    shape = *rows.shape[:2], t.shape[2] * packed, t.shape[3]
    try:
        return rows.view(shape)
    except RuntimeError:
        return t.new_empty(shape)


def as_heads(t: Tensor, packed: int) -> Tensor:
    """The inverse of as_rows."""
    return t.unflatten(2, (-1, packed)).transpose(2, 3).flatten(1, 2)


def in_rows(args: AttentionArgs, kernel: bool = True) -> AttentionArgs:
    """The call of block_sparse_attention with packed rows, whose mask are selected blocks. kernel: see mask_of; if it
    is False, the call's q is not to be read."""
    mask: Any = args.block_mask
    q = (as_rows if kernel else planned_rows)(args.q, mask.packed)
    lengths = args.q.shape[2] * mask.packed, args.k.shape[2]
    return args._replace(q=q, out=None, block_mask=mask_of(mask, q.shape[1], lengths, kernel))
