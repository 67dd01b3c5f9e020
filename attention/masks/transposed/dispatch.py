"""Launch the kernels that transpose the lists of a block mask."""

from torch import Tensor

from cute_kernels.runtime import families
from cute_kernels.runtime.device import device_arch

from . import family  # noqa: F401 (importing it registers the family)
from .config import MOST_COLUMNS, WORD, TransposeFacts

MOST_CTAS = 2**31 - 1


def supports(indices: Tensor, cols: int) -> bool:
    """True if the kernels transpose lists of columns (B, H, Mq, width) in range(cols)."""
    return 0 < cols <= MOST_COLUMNS and 0 < indices.shape[:3].numel() <= MOST_CTAS


def transposed_lists(counts: Tensor, indices: Tensor, cols: int, part: int | None = None) -> tuple[Tensor, Tensor]:
    """The counts (B, H, cols) and ascending rows (B, H, cols, Mq), both int32, of lists (B, H, Mq) and (B, H, Mq,
    width) on a GPU, in any order. Numbers that are no column are ignored. Rows past the counts are undefined. Does not
    synchronize.

    part: lists of `part` rows each, the last ones of fewer, which count from their first row: counts (B, H * parts,
    cols) and rows (B, H * parts, cols, part).
    """
    batch, heads, rows, _ = indices.shape
    arch = device_arch(indices.get_device())[0].target
    part = part or rows
    parts, words = -(-rows // part), -(-cols // WORD)
    bits = indices.new_empty(batch, heads, parts * part, words)
    bits[:, :, rows:].zero_()
    families.function_for(TransposeFacts(arch, True))(counts, indices, bits, cols)
    found = indices.new_empty(batch, heads * parts, cols), indices.new_empty(batch, heads * parts, cols, part)
    families.function_for(TransposeFacts(arch, False))(bits.view(batch, heads * parts, part, words), *found)
    return found
