"""Flash attention on the iterators of `cute_kernels`: dense, block-sparse, selected blocks, packed, and decoding."""

from .masks import mask_mods, patterns, score_mods
from .masks.block_mask import BlockMask, create_block_mask
from .ops import attention, block_sparse_attention
from .sdpa import scaled_dot_product_attention
from .selected.ops import selected_attention
from .selected.select import select_blocks
from .shards import attention_backward, merge

__all__ = [
    "BlockMask",
    "attention",
    "attention_backward",
    "block_sparse_attention",
    "create_block_mask",
    "mask_mods",
    "merge",
    "patterns",
    "scaled_dot_product_attention",
    "score_mods",
    "select_blocks",
    "selected_attention",
]
