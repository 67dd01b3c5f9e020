"""Facts of the decode kernel for selected blocks, the configuration of each, and the number of splits."""

from dataclasses import dataclass, replace
from typing import ClassVar

from ...decode.family import SM_SMEM
from ...decode.heuristics import OVERHEAD, best_splits, forced_splits, split_time
from ...forward.config import ACC_PAD, DecodeFacts, FlashConfig

ROWS, WARPS, WARP = 16, 4, 32  # packed rows of a CTA, of one mma.sync; warps, each with its own tiles; its lanes
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
    192: ((16, 4, 2), (16, 8, 1), (16, 3, 2)),
    256: ((16, 3, 2), (16, 6, 1), (16, 2, 2)),
}
CLUSTERS = range(2, 9)  # of splits on sm_90; more than 8 CTAs are not portable
# Clusters of each size that an H200 holds at once, with a CTA on each of its 132 SMs (asked of the driver).
RESIDENT = {2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}
SMS = 132
# In units of steps, of OVERHEAD; a model. A step of lone CTAs takes about 0.5 µs.
EXCHANGE, COMBINE = 1.0, 5.0  # within a cluster, and by the combine kernel


@dataclass(frozen=True)
class SelectedDecodeFacts(DecodeFacts):
    """Facts of a decode kernel with a list of KV blocks for each query token."""

    family: ClassVar[str] = "selected decode"
    block_size: int = 64
    cluster: int = 1  # CTAs that share a list and combine their results; with `split`, a second kernel combines them

    @property
    def box(self) -> int:
        """Keys of a tile that are adjacent in memory."""
        return min(self.block_size, self.page_size or self.block_size, self.config.tile_n)

    @property
    def boxes(self) -> int:
        return self.config.tile_n // self.box

    @property
    def tiles_at_once(self) -> int:
        """Tiles of a warp whose places its lanes look up at once."""
        return WARP // self.boxes

    @property
    def columns(self) -> int:
        """Keys that the warps of a CTA compute per step."""
        return self.config.tile_n * self.config.groups

    @property
    def warp_bytes(self) -> int:
        """Bytes of a warp's ring, or of its accumulators, which replace it."""
        ring = self.config.stages * self.config.tile_n * (self.head_dim + self.head_dim_v) * (1 if self.cache else 2)
        return max(ring, ROWS * (self.head_dim_v + ACC_PAD) * 4)

    @property
    def share(self) -> int:
        """Rows that each CTA of a cluster combines and stores; the last ones may have fewer."""
        return -(-ROWS // self.cluster)

    @property
    def exchange_bytes(self) -> int:
        """Bytes of shared memory for these rows' O, maxima and sums of all CTAs of the cluster, and an mbarrier."""
        return 0 if self.cluster == 1 else self.cluster * self.share * (self.head_dim_v + 2) * 4 + 8

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory: row maxima and sums, Q, all warps' rings, and the exchange within a cluster."""
        return self.softmax_bytes + self.q_bytes + self.config.groups * self.warp_bytes + self.exchange_bytes

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
        if found.smem_bytes <= (min(facts.spec.smem, SM_SMEM // ctas - 1024) if on_sm_90 else facts.spec.smem):
            break
    return found


def resident_clusters(facts: SelectedDecodeFacts, sms: int) -> int:
    """Number of clusters that run at once."""
    return max(RESIDENT[facts.cluster] * facts.config.ctas * sms // SMS, 1)


def with_splits(facts: SelectedDecodeFacts, items: int, keys: int, sms: int) -> tuple[SelectedDecodeFacts, int]:
    """(facts with their configuration, number of splits) with the least estimated time for `items` lists of `keys`
    keys.

    On sm_90 up to 8 splits are the CTAs of a cluster.
    """
    whole, forced = pick(facts), forced_splits()
    tiles, ctas = -(-keys // whole.columns), sms * whole.config.ctas
    if facts.spec.name != "sm_90":
        count = forced or best_splits(items, tiles, ctas)
        return replace(whole, split=count > 1), count
    options = []
    for cluster in (c for c in CLUSTERS if forced in (None, c)):
        shared = pick(replace(facts, cluster=cluster))
        waves = -(-items // resident_clusters(shared, sms))
        steps = -(-tiles // cluster) * shared.config.ctas / whole.config.ctas  # shorter with fewer CTAs per SM
        options.append((waves * (steps + OVERHEAD + EXCHANGE), shared, cluster))
    if forced is None or not options:
        count = forced or best_splits(items, tiles, ctas, COMBINE)
        options.append((split_time(count, items, tiles, ctas, COMBINE), replace(whole, split=count > 1), count))
    return min(options, key=lambda option: option[0])[1:]  # the first of equals
