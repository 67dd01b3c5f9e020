"""Sums of an indexer's heads as two 16-bit numbers: facts and launch of the kernel, and the same by torch ops."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as nnf
from torch import Tensor

from cute_kernels.dtypes import NAMES
from cute_kernels.runtime.device import device_arch, plans_kernel
from cute_kernels.runtime.families import function_for

from ...checks import tma_ready

VECTOR = 8  # 16-bit elements of a load
WARP = 32
MOST_COLUMNS = WARP * VECTOR  # a warp has whole rows
THREADS = 256
BATCH = 4  # heads that a thread loads at once
LEAST_EXPONENT, MOST_EXPONENT = 103, 158  # biased, of FP32; those of sums of FP16 numbers are in between
SCALED = 141  # the biased exponent of a row's largest sum after scaling: below 2^15


@dataclass(frozen=True)
class SumFacts:
    """Kernel parameters. lanes: threads of a row, a power of two. batch: heads that a thread loads at once."""

    family: ClassVar[str] = "head sums"
    arch: str
    dtype: str
    lanes: int
    batch: int

    @property
    def scales(self) -> bool:
        """True if rows are scaled, so that no sum exceeds the range of the dtype."""
        return self.dtype == "float16"


def facts_for(arch: str, dtype: str, columns: int, heads: int) -> SumFacts:
    """Select the kernel for rows of at most MOST_COLUMNS."""
    lanes = 1 << (-(-columns // VECTOR) - 1).bit_length()
    return SumFacts(arch, dtype, lanes, 1 if heads % BATCH else BATCH)


def aligned(x: Tensor, head_dim: int) -> Tensor:
    """x (B, H, S, D) with D padded to head_dim by zeros and contiguous, other strides multiples of 16 bytes and, as TMA
    requires, none 0 that an extent above 1 has."""
    if x.shape[3] < head_dim:
        return nnf.pad(x, (0, head_dim - x.shape[3]))
    fits = tma_ready(x) and not any(n % 8 for n in x.stride()[:3])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def split_sums(q: Tensor, groups: int) -> Tensor:
    """Sums of each group's heads (B, groups, 2, S, D), from 16-bit q (B, groups * heads, S, D).

    Heads are added in FP32, one after another, and a sum is the first of two 16-bit numbers plus the second. The second
    is 0 where the first is not finite. Sums of FP16 heads, which may exceed 65,504, are multiplied by a power of two
    for each row of D sums, so that its largest one is in [2^14, 2^15); the order of a row's scores is the same.
    """
    columns = q.shape[3]
    if not plans_kernel(q.device) or not 0 < columns <= MOST_COLUMNS:
        return _split_sums(q.unflatten(1, (groups, -1)))
    q = aligned(q, -(-columns // VECTOR) * VECTOR)
    facts = facts_for(device_arch(q.get_device())[0].target, NAMES[q.dtype], q.shape[3], q.shape[1] // groups)
    out = torch.empty(q.shape[0], groups * 2, *q.shape[2:], dtype=q.dtype, device=q.device)
    function_for(facts)(q, out)
    return out.unflatten(1, (groups, 2))[..., :columns]


def _split_sums(q: Tensor) -> Tensor:
    total = q[:, :, 0].float()
    for head in range(1, q.shape[2]):
        total += q[:, :, head]
    if q.dtype is torch.float16:
        exponent = ((total.view(torch.int32) & 0x7FFFFFFF) >> 23).amax(-1, keepdim=True)
        scale = (127 + SCALED - exponent.clamp(LEAST_EXPONENT, MOST_EXPONENT)) << 23
        total *= scale.view(torch.float32)
    high = total.to(q.dtype)
    rest = total - high.float()
    return torch.stack([high, rest.where(rest.isfinite(), 0.0).to(q.dtype)], 2)
