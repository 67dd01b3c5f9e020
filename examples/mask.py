"""A mask of your own for attention: a function of a query's and a key's position, computed in the kernel.

Algorithm. Several documents lie one after another in a sequence. A token sees what came before it in its own document,
and the first 64 tokens of the sequence, which all share:

    seen(q, kv) = kv <= q and (document[q] == document[kv] or kv < 64)

`create_block_mask` calls the function once for all positions and sorts 128 x 128 blocks of scores into three
kinds: none is seen, and the block is neither loaded nor multiplied; all are seen, and it needs no mask; or some are,
and then the kernel computes the function for each score. Torch traces it; what it captures may be numbers, which become
constants of the kernel, and tensors, which the kernel reads at each call.

    python -m examples.mask
"""

import torch

from attention import BlockMask, attention, block_sparse_attention, create_block_mask

from .show import DEVICE, compare, inspect_call, measure, normal, refused

SHARED = 64  # tokens that all others see

# Code


def mask_of(document: torch.Tensor) -> BlockMask:
    """The mask of tokens of which each is in the document of this number; document is (S,) and ascends."""

    def seen(b, h, q, kv):
        return (kv <= q) & ((document[q] == document[kv]) | (kv < SHARED))

    return create_block_mask(seen, None, None, len(document), len(document), device=document.device)


def operands(length: int, device: str = DEVICE):
    """q, k, v (B, H, S, D), and a mask of documents of 300 tokens."""
    q, k, v = (normal(2, 4, length, 64, seed=seed, device=device) for seed in range(3))
    return q, k, v, mask_of(torch.arange(length, device=device) // 300)


# Test


def check(length: int = 700) -> None:
    """Against torch's attention in fp64 with the whole mask in memory, (S, S)."""
    q, k, v, mask = operands(length)
    position = torch.arange(length, device=q.device)
    zero = torch.zeros((), dtype=torch.long, device=q.device)
    whole = mask.mask_mod(zero, zero, position[:, None], position)
    attend = torch.nn.functional.scaled_dot_product_attention
    exact = attend(q.double(), k.double(), v.double(), attn_mask=whole)
    compare(block_sparse_attention(q, k, v, mask), exact, attend(q, k, v, attn_mask=whole))


def inspect(length: int = 2048) -> None:
    """The kernel of this mask, and the causal one, whose mask needs no function."""
    q, k, v, mask = operands(length, "cpu")
    inspect_call(block_sparse_attention, q, k, v, mask)
    inspect_call(attention, q, k, v, causal=True)


def errors() -> None:
    """A mask of other lengths, a function that returns no bool, and one that cannot be traced."""
    q, k, v, mask = operands(256)
    other = mask_of(torch.zeros(128, dtype=torch.long, device=DEVICE))
    refused(lambda: block_sparse_attention(q, k, v, other))
    refused(lambda: create_block_mask(lambda b, h, q, kv: q - kv, None, None, 256, 256))
    refused(lambda: create_block_mask(lambda b, h, q, kv: kv <= q if q.max() > 0 else kv == q, None, None, 256, 256))


# Measurement


def times(length: int = 8192) -> None:
    """Documents of 300 tokens leave few blocks: beside causal attention, which computes half of them."""
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
