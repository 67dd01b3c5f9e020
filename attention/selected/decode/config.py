"""Facts of the decode kernel for selected blocks, and the configuration of each."""

from dataclasses import dataclass, replace
from typing import ClassVar

from ...forward.config import ACC_PAD, DecodeFacts, FlashConfig

ROWS, WARPS = 16, 4  # packed rows of a CTA, of one mma.sync; warps, each with its own tiles
# By the larger of the two head dimensions: (tile_n, stages, CTAs per SM on sm_90). The first that fits is selected. A
# warp's ring has 24 KB with two CTAs per SM, and 48 KB with one. A tile has at most 32 rows, since each lane finds the
# place of one of them.
WIDE_16 = {
    64: ((32, 3, 2), (32, 2, 2)),
    96: ((16, 4, 2), (16, 3, 2)),
    128: ((16, 3, 2), (16, 2, 2)),
    192: ((16, 4, 1), (16, 3, 1), (16, 2, 1), (16, 1, 1)),
    256: ((16, 3, 1), (16, 2, 1), (16, 1, 1)),
}
WIDE_8 = {
    64: ((32, 6, 2), (32, 4, 2)),
    96: ((32, 4, 2), (32, 3, 2)),
    128: ((32, 3, 2), (32, 2, 2)),
    192: ((16, 4, 2), (16, 3, 2)),
    256: ((16, 3, 2), (16, 2, 2)),
}


@dataclass(frozen=True)
class SelectedDecodeFacts(DecodeFacts):
    """Facts of a decode kernel with a list of KV blocks for each query token."""

    family: ClassVar[str] = "selected decode"
    block_size: int = 64

    @property
    def box(self) -> int:
        """Keys of a tile that are adjacent in memory."""
        return min(self.block_size, self.page_size or self.block_size, self.config.tile_n)

    @property
    def boxes(self) -> int:
        return self.config.tile_n // self.box

    @property
    def columns(self) -> int:
        """Keys that the warps of a CTA compute per step."""
        return self.config.tile_n * self.config.groups

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory: row maxima and sums, Q, and all warps' rings or their accumulators."""
        cfg = self.config
        rings = cfg.groups * cfg.stages * cfg.tile_n * (self.head_dim + self.head_dim_v) * (1 if self.cache else 2)
        return self.softmax_bytes + self.q_bytes + max(rings, cfg.groups * ROWS * (self.head_dim_v + ACC_PAD) * 4)

    @property
    def q_in_registers(self) -> bool:
        return max(self.head_dim, self.head_dim_v) <= 128


def pick(facts: SelectedDecodeFacts) -> SelectedDecodeFacts:
    """The facts with their configuration, the only one for them."""
    table = WIDE_8 if facts.cache else WIDE_16
    on_sm_90 = facts.spec.name == "sm_90"
    for tile_n, stages, ctas in table[max(facts.head_dim, facts.head_dim_v)]:
        config = FlashConfig(ROWS, tile_n, stages, WARPS, ctas=ctas if on_sm_90 else 1)
        found = replace(facts, path="sm_80", config=config)
        if found.smem_bytes <= facts.spec.smem:
            break
    return found
