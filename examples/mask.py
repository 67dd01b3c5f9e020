"""User-defined attention mask: a function of query and key positions, computed in the kernel.

Algorithm. A sequence contains several documents, one after another. A token attends to earlier tokens of its own
document, and to the first 64 tokens of the sequence, which all documents share:

    seen(q, kv) = kv <= q and (document[q] == document[kv] or kv < 64)

`create_block_mask` evaluates the function once for all positions and classifies 128 x 128 blocks of scores. Empty
blocks are neither loaded nor multiplied. Full blocks need no mask. In partial blocks the kernel computes the function
for each score. Torch traces it. Captured numbers become constants of the kernel; captured tensors are read by the
kernel in each call.

    python examples/mask.py
"""

import torch

from attention import BlockMask, attention, block_sparse_attention, create_block_mask

try:
    from .show import DEVICE, compare, inspect_call, measure, normal, refused
except ImportError:  # run as a file: python examples/mask.py
    from show import DEVICE, compare, inspect_call, measure, normal, refused

SHARED = 64  # first tokens, visible to all later ones

# Code


def mask_of(document: torch.Tensor) -> BlockMask:
    """Return the mask for document, (S,): the index of each token's document, ascending."""

    def seen(b, h, q, kv):
        return (kv <= q) & ((document[q] == document[kv]) | (kv < SHARED))

    return create_block_mask(seen, None, None, len(document), len(document), device=document.device)


def operands(length: int, device: str = DEVICE):
    """q, k, v (B, H, S, D), and the mask for documents of 300 tokens."""
    q, k, v = (normal(2, 4, length, 64, seed=seed, device=device) for seed in range(3))
    return q, k, v, mask_of(torch.arange(length, device=device) // 300)


# Test


def check(length: int = 700) -> None:
    """Compare with torch's attention in FP64 with a materialized mask, (S, S)."""
    q, k, v, mask = operands(length)
    position = torch.arange(length, device=q.device)
    zero = torch.zeros((), dtype=torch.long, device=q.device)
    dense_mask = mask.mask_mod(zero, zero, position[:, None], position)
    attend = torch.nn.functional.scaled_dot_product_attention
    exact = attend(q.double(), k.double(), v.double(), attn_mask=dense_mask)
    compare(block_sparse_attention(q, k, v, mask), exact, attend(q, k, v, attn_mask=dense_mask))


def inspect(length: int = 2048) -> None:
    """Inspect the kernel for this mask, and the causal kernel, which needs no function."""
    q, k, v, mask = operands(length, "cpu")
    inspect_call(block_sparse_attention, q, k, v, mask)
    inspect_call(attention, q, k, v, causal=True)


def errors() -> None:
    """Show the errors for a mask of other lengths, a function that returns no bool, and an untraceable function."""
    q, k, v, mask = operands(256)
    other = mask_of(torch.zeros(128, dtype=torch.long, device=DEVICE))
    refused(lambda: block_sparse_attention(q, k, v, other))
    refused(lambda: create_block_mask(lambda b, h, q, kv: q - kv, None, None, 256, 256))
    refused(lambda: create_block_mask(lambda b, h, q, kv: kv <= q if q.max() > 0 else kv == q, None, None, 256, 256))


# Measurement


def times(length: int = 8192) -> None:
    """Time documents of 300 tokens, which leave few blocks, and causal attention, which computes half of all blocks."""
    q, k, v, mask = operands(length if DEVICE == "cuda" else 256)
    measure(
        documents=lambda: block_sparse_attention(q, k, v, mask),
        causal=lambda: attention(q, k, v, causal=True),
    )


if __name__ == "__main__":
    check()
    inspect()
    errors()
    times()
