"""Launch the kernel of union tiles."""

from typing import NamedTuple

from torch import Tensor

from cute_kernels.runtime.device import device_arch
from cute_kernels.runtime.families import function_for, unsupported

from . import family  # noqa: F401 (importing it registers the family)
from .config import SIDE, facts_for, tokens_of

MOST_CTAS = 2**31 - 1


class UnionTiles(NamedTuple):
    """The union tiles of lists (B, Sq, G, top); see config.py for tiles and steps.

    blocks: (B, G, tiles, capacity) int32, the ascending union of the lists of each tile's tokens. The last block is
        repeated up to the end of the last step; later entries are undefined.
    counts: (B, G, tiles) int32, the number of blocks in the union.
    bits: (B, G, tiles, words, tokens) int32: bit i of word w and token t is set if block w * per_word + i of the union
        is in the list of the tile's token t. per_word is min(SIDE // block_size, 32), so a word is a step, except that
        steps of blocks of one key have four. Words past the last step are undefined.
    """

    blocks: Tensor
    counts: Tensor
    bits: Tensor


def union_tiles(indices: Tensor, block_size: int, kv_blocks: int, packed: int) -> UnionTiles:
    """The union tiles of lists (B, Sq, G, top) int32 on a GPU, of kv_blocks blocks per sequence.

    packed: rows of a token, 1 to SIDE.

    Entries that are no block are ignored, and a block that is listed twice counts once. Does not synchronize.

    Raises:
        ValueError: the sequences have too many blocks or tiles for the kernel.
    """
    batch, length, groups, top = indices.shape
    tiles, tokens = -(-length * packed // SIDE), tokens_of(packed)
    every = batch * groups * tiles
    facts = facts_for(device_arch(indices.get_device())[0].target, block_size, kv_blocks, top)
    reason = unsupported(facts)
    if every > MOST_CTAS:
        reason = f"{every} query tiles are too many; at most {MOST_CTAS} are supported"
    if reason:
        raise ValueError(f"selected_attention: {reason}")
    steps = -(-min(kv_blocks, tokens * top) // facts.per_step)
    shapes: tuple = ((steps * facts.per_step,), (), (steps * facts.words, tokens))
    blocks, counts, bits = (indices.new_empty(batch, groups, tiles, *shape) for shape in shapes)
    if steps == 0:
        counts.zero_()
    elif every > 0:
        lists = indices if indices.stride(3) == 1 else indices.contiguous()
        tables = blocks.view(every, -1), counts.view(-1), bits.view(every, -1)
        function_for(facts)(lists, *tables, kv_blocks, packed, tokens)
    return UnionTiles(blocks, counts, bits)
