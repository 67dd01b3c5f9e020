"""FP32 operands on tensor cores, which multiply TF32: FP32's exponent and 10 of its 23 mantissa bits.

"tf32" rounds both operands to TF32. "3xtf32" splits each operand into big = tf32(x) and small = tf32(x - big), and adds
small * big, big * small and big * big. big + small differs from x by at most 2^-23, and the omitted small * small is at
most 2^-22 of the result. The three GEMMs run as one with a K three times as long:

    A'  [small, big, big]        B'  [big, small, big]        along K; inside each block for a block-sparse A

so kernels need no support for it, and small terms are accumulated first. Tensor cores truncate their accumulators,
which over a long K errs by far more than the split; accumulation is therefore promoted to FP32, as for FP8.
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
        raise ValueError(f"{op}: precision={value!r} requires torch.float32 operands, got {dtype} (leave it out)")


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Round FP32 to the nearest TF32 number, ties to even, stored as FP32. Infinities and NaN stay as they are."""
    bits = x.contiguous().view(torch.int32)
    nearest = (bits + (DROPPED >> 1) + ((bits >> 13) & 1)) & ~DROPPED
    return torch.where(x.isfinite(), nearest.view(torch.float32), x)


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split FP32 numbers into (big, small), both TF32, and finite where x is."""
    big = rounded(x)
    if x.numel():  # the largest numbers round to infinity; those lose their last bits instead
        cut = (x.contiguous().view(torch.int32) & ~DROPPED).view(torch.float32)
        big = torch.where(big.isinf(), cut, big)
    return big, rounded(torch.where(x.isfinite(), x - big, 0.0))


def side_by_side(x: torch.Tensor, of_b: bool, group: int | None = None) -> torch.Tensor:
    """(..., rows, 3 K), contiguous, from (..., rows, K): the three parts of each `group` columns, by default of all K.

    K is padded with zeros to a multiple of 16 bytes.
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
