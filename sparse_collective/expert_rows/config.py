"""Kernel parameters of expert rows."""

from dataclasses import dataclass
from typing import ClassVar

FAMILY = "expert rows"
VECTOR = 8  # elements that a lane loads at a time: 16 bytes, or two times 16 bytes of FP32
WARPS = 8
THREADS = 32 * WARPS
RESIDENT = 4  # CTAs of a multiprocessor that share the rows of a layout
AHEAD = {"places": 4, "dispatch": 8, "gradient": 4, "combine": 4, "values": 4}  # vectors
MOST_EXPERTS = 2048  # of all ranks: their numbers are in shared memory


@dataclass(frozen=True)
class RowsFacts:
    """The step, and dtypes of the rows that it reads and writes.

    step:
        "places"    the place of each choice's row, from the table of where each rank's rows of each expert begin
        "dispatch"  rows of tokens to the layout of a rank's experts
        "gradient"  the same of gradients of the weighted sums, times the weights of their choices
        "combine"   sums of each token's rows
        "values"    an FP32 value for each row, back to its choice
    weighted: True if "combine" multiplies by weights, and if "gradient" returns those of weights.
    local: True if one rank has all tokens and experts, as tensors instead of addresses.
    """

    family: ClassVar[str] = FAMILY
    arch: str
    step: str
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    weighted: bool = False
    local: bool = False

    @property
    def ahead(self) -> int:
        """Loads of a thread in flight; an FP32 vector is two."""
        wide = "float32" in (self.dtype, self.out_dtype) and self.step in ("dispatch", "gradient")
        return AHEAD[self.step] // (2 if wide else 1)

    @property
    def smem_bytes(self) -> int:
        arrays = {"places": 3, "dispatch": 1, "gradient": 1}
        return arrays.get(self.step, 0) * (MOST_EXPERTS + 4) * 4
