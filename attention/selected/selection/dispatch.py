"""Launch the kernel of the exact top k of rows of scores."""

from torch import Tensor

from cute_kernels.runtime.device import device_arch
from cute_kernels.runtime.families import function_for, unsupported

from . import family  # noqa: F401 (importing it registers the family)
from .config import TopFacts, facts_for

MOST_ROWS = 2**31 - 1


def facts_of(device: int, blocks: int, top: int) -> TopFacts | None:
    """The kernel for lists of `top` among `blocks` scores; None if no kernel supports them."""
    facts = facts_for(device_arch(device)[0].target, blocks, top)
    return None if facts is None or unsupported(facts) else facts


def top_blocks(
    facts: TopFacts,
    scores: Tensor,
    out: Tensor,
    first: int,
    columns: int,
    block_size: int,
    local: int,
    initial: int,
    causal: bool,
    whole: bool,
) -> None:
    """Write the lists of rows of scores to `out`, on a GPU.

    Args:
        facts: of facts_of, for at least as many scores per row as there are.
        scores: (B, G, rows, blocks) float32, with blocks rounded up to a multiple of four; those that a row does not
            see may be missing or have any value. Blocks are contiguous, strides multiples of four elements, the address
            one of 16 bytes.
        out: (B, rows, G, top) int32, lists contiguous.
        first: position of the first row.
        columns, block_size, local, initial, causal: see select_blocks.
        whole: a block that is not complete at a row's position is no candidate.
    """
    if scores.shape[0] * scores.shape[1] * scores.shape[2] == 0 or out.shape[3] == 0:
        return
    terms = first, columns, block_size, local, initial, int(causal), int(whole)
    function_for(facts)(scores, out, *terms)
