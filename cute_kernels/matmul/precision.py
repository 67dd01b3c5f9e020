"""Products of fp32 operands on tensor cores, which multiply TF32: fp32's exponent, and 10 bits of mantissa of its 23.

"tf32" rounds both operands to it. "3xtf32" makes two such numbers of each, big = tf32(x) and small = tf32(x - big), and
adds small * big, big * small and big * big. Of big + small an operand errs by 2^-23 at most, and the product of both
small parts, 2^-22 of their product, is left out. The three products are one whose K is three times as long:

    A'  [small, big, big]        B'  [big, small, big]        along K; of a block-sparse A, and of B, in each block

so kernels know nothing of it, and small products are added up first. Tensor cores cut sums off, which over a long K
errs by far more than this: so short sums are promoted to fp32, as those of 8-bit floats are.
"""

import torch

from ..tile.element import VECTOR_BYTES

PRECISIONS = ("tf32", "3xtf32")
PARTS = 3  # of an operand, side by side along K
SMALL_OF_A, SMALL_OF_B = 0, 1  # which of them is the small one
DROPPED = 0x1FFF  # bits of fp32 that TF32 has not


def check_precision(op: str, value, dtype: torch.dtype) -> None:
    """TypeError for one that is no str; ValueError for one that is not known, or of operands that have none."""
    if value is None:
        return
    known = " or ".join(map(repr, PRECISIONS))
    if not isinstance(value, str):
        raise TypeError(f"{op}: precision must be {known} or None, got {type(value).__name__}")
    if value not in PRECISIONS:
        raise ValueError(f"{op}: precision={value!r}; it must be {known}, of torch.float32 operands")
    if dtype != torch.float32:
        raise ValueError(f"{op}: precision={value!r} of {dtype} operands; torch.float32 ones have it (leave it out)")


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The nearest TF32 numbers, of two the even one, as fp32 ones; infinities and NaN are left alone."""
    bits = x.contiguous().view(torch.int32)
    nearest = (bits + (DROPPED >> 1) + ((bits >> 13) & 1)) & ~DROPPED
    return torch.where(x.isfinite(), nearest.view(torch.float32), x)


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(big, small) of fp32 numbers, both TF32, and finite where x is."""
    big = rounded(x)
    if x.numel():  # the largest numbers round to infinity; those lose their last bits instead
        cut = (x.contiguous().view(torch.int32) & ~DROPPED).view(torch.float32)
        big = torch.where(big.isinf(), cut, big)
    return big, rounded(torch.where(x.isfinite(), x - big, 0.0))


def side_by_side(x: torch.Tensor, of_b: bool, group: int | None = None) -> torch.Tensor:
    """(..., rows, 3 K), contiguous, of (..., rows, K): the parts of each `group` columns, of all by default.

    A K that is no multiple of 16 bytes is padded with zeros.
    """
    K = x.shape[-1]
    group = group or K
    padded = -(-group // (VECTOR_BYTES // x.element_size())) * (VECTOR_BYTES // x.element_size())
    out = (x.new_zeros if padded > group else x.new_empty)(*x.shape[:-1], K // group, PARTS, padded)
    place = SMALL_OF_B if of_b else SMALL_OF_A
    big, small = split(x.unflatten(-1, (K // group, group)))
    for part in range(PARTS):
        out[..., part, :group] = small if part == place else big
    return out.flatten(-3)
