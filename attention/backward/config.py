"""What the kernels of attention's backward are compiled from."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from cute_kernels.arch import ArchSpec, arch_named
from cute_kernels.tile.element import BYTES, Element, element_of

from ..forward.config import BlockKind, WindowKind
from ..score_mod import Read, ScoreMod
from .warps import Warps, warps_of

FP32 = BYTES["float32"]
ALIGN = 1024  # of operands in shared memory, bytes
PREPARE_WARPS = 4  # of a CTA of the kernel before
QUEUE_BYTES = 80  # of forward/tile_queue: barriers and fields of its slots


@dataclass(frozen=True)
class BackwardConfig:
    """Tile and schedule of one kernel.

    A CTA computes dK and dV of `tile_n` rows of K and V, and visits Q and dO `tile_m` rows at a time; those have rings
    of `stages` stages each. sm_90: each of `groups` consumer warpgroups has 64 of the rows of K, or with `query_tiles`
    all of them, and a part of the columns of dK and dV (shared_columns_sm90). sm_80: `groups` warps share products as
    warps.py says, and dO has one stage where P' stays in their registers.
    """

    tile_m: int
    tile_n: int
    stages: int
    groups: int
    ctas: int = 1  # sm_90: CTAs that share an SM
    ahead: bool = False  # sm_90: scores are computed ahead, of the next 64 query rows, or of the next step
    sums: int = 1  # sm_90: buffers of dQ's sums on their way to memory: 1, or as many as stages
    stages_q: int = 0  # sm_90: of Q's ring; 0: as many as dO's
    query_tiles: int = 0  # sm_90, where warpgroups share columns: of a step, 1 or one a warpgroup
    dq_parts: int = 1  # the same: in how many parts, one after the other, a warpgroup's sums of dQ go to memory
    one_do: bool = False  # the same: dO's ring has one stage
    direct: bool = False  # the same: dQ's sums are added to memory from registers, not through shared memory
    one_ds: bool = False  # sm_90, where scores are computed ahead by units: dS has one buffer

    def __str__(self) -> str:
        text = f"{self.tile_m}x{self.tile_n} stages {self.stages} groups {self.groups}"
        text += f" sums {self.sums}" * (self.sums > 1) + " ahead" * self.ahead
        text += f" stages of Q {self.stages_q}" * (self.stages_q > 0) + " one dS" * self.one_ds
        text += " direct" * self.direct
        return f"{text} of columns, {self.query_tiles} query tiles" if self.query_tiles else text

    @property
    def ring_q(self) -> int:
        """sm_90: stages of Q's ring."""
        return self.stages_q or self.stages

    @property
    def by_units(self) -> bool:
        """sm_90: whether scores are computed ahead by units of 64 query rows (ahead_sm90)."""
        return self.ahead and not self.query_tiles

    @property
    def storing_warps(self) -> int:
        """sm_90: those that add dQ's sums to memory."""
        return 0 if self.query_tiles else self.groups

    @property
    def dq_groups(self) -> int:
        """Those of `groups` that share a query tile's dQ."""
        return self.groups // max(self.query_tiles, 1)

    @property
    def step_rows(self) -> int:
        """Query rows of a step."""
        return self.tile_m * max(self.query_tiles, 1)


@dataclass(frozen=True)
class BackwardFacts:
    """Everything that selects one compiled kernel of dK, dV and of dQ's sums."""

    family: ClassVar[str] = "flash backward"
    arch: str  # the compiler's target
    path: str
    config: BackwardConfig | None  # None until one is picked
    dtype: str = "bfloat16"
    head_dim: int = 128  # of q and k
    head_dim_v: int = 128  # of v and of the output
    window: WindowKind = WindowKind()
    softcap: bool = False
    packed: bool = False  # sequences one after another, of lengths that the GPU reads
    blocks: BlockKind | None = None  # of block-sparse attention, which has no window
    deterministic: bool = False  # whether the sums of dQ are added up in the order of K's tiles (turns.py)
    score: ScoreMod | None = None  # what becomes of the scores; then there is no softcap
    score_sums: tuple[int, ...] = ()  # the tensors that it captures, by number, whose gradients are computed
    offsets: bool = False  # True if q_offset and k_offset are arguments; see FlashFacts
    grad_dtype: str | None = None  # of dQ, dK and dV; None: the operands'

    def key(self) -> str:
        """A text that is the same in every process."""
        return repr(self)

    @cached_property
    def spec(self) -> ArchSpec:
        return arch_named(self.arch)

    @cached_property
    def element(self) -> Element:
        """Of Q, K, V, O and their gradients."""
        return element_of(self.dtype)

    @property
    def masks_first(self) -> bool:
        """sm_90: whether dP's product is issued after the mask, which needs registers, and not with that of S."""
        masked = self.window.left or self.window.right or self.blocks is not None
        return masked and max(self.head_dim, self.head_dim_v) == 128

    @property
    def late_dp(self) -> bool:
        """sm_90: whether it is issued when P is known: a cap or a score_mod needs still more."""
        return (self.softcap or self.score is not None) and max(self.head_dim, self.head_dim_v) == 128

    @cached_property
    def score_reads(self) -> list[Read]:
        """What the score_mod reads of these tensors."""
        return self.score.reads(self.score_sums)

    @cached_property
    def keeps_scores(self) -> bool:
        """Whether dS is computed of the scores, and P once more, and not of P times d score_mod / d score: where what
        captured tensors get needs the scores, or P alone."""
        return bool(self.score_reads) and not (self.score.adds and not any(r.needs_score for r in self.score_reads))

    @property
    def in_turn(self) -> bool:
        """sm_90: whether products are issued one after the other. A warpgroup that has all columns of dQ has no
        registers for more; the CTA beside it then has the tensor cores."""
        return self.config.groups == 1

    @property
    def in_registers(self) -> tuple[bool, bool]:
        """sm_90: whether K, and V, are operands in registers. With two units of rows there is room for K alone; with a
        cap for none."""
        cfg, units = self.config, self.config.by_units and not self.softcap
        return units and self.head_dim <= 64, units and self.head_dim_v <= 64 and cfg.tile_m == 64

    @property
    def ds_buffers(self) -> int:
        """sm_90: buffers of dS; one warpgroup alone has read it before it writes to it again."""
        return 1 if self.in_turn or self.config.one_ds else 2

    @property
    def v_apart(self) -> bool:
        """sm_90: whether V is waited for after K, and given back before it. Rows that are zeroed need both at once."""
        return self.config.by_units and not self.packed

    @property
    def warps(self) -> Warps:
        """sm_80: how warps share the products."""
        return warps_of(self.config, self.head_dim, self.head_dim_v)

    @property
    def stages_do(self) -> int:
        """Of dO's ring."""
        one = self.config.one_do if self.path == "sm_90" else self.warps.in_registers
        return 1 if one else self.config.stages

    @property
    def smem_bytes(self) -> int:
        """Shared memory: of K, V, the rings of Q, dO and rows, and dS.

        sm_90: also dQ and barriers, which come first, with what aligns the others. sm_80: P', where it does not stay in
        registers.
        """
        cfg, hopper = self.config, self.path == "sm_90"
        if cfg.query_tiles:
            return self.smem_of_shared_columns
        scores = cfg.tile_m * cfg.tile_n
        elements = cfg.tile_n * (self.head_dim + self.head_dim_v)
        elements += cfg.tile_m * (cfg.ring_q * self.head_dim + self.stages_do * self.head_dim_v)
        elements += scores * (self.ds_buffers if hopper else 2 - self.warps.in_registers)
        if not hopper:
            return elements * self.element.width + cfg.tile_m * 2 * cfg.ring_q * FP32
        sums = cfg.tile_m * self.head_dim * cfg.sums
        barriers = 16 * (2 + cfg.ring_q + self.stages_do) + QUEUE_BYTES
        first = -(-barriers // 128) * 128 + (cfg.tile_m * 2 * cfg.ring_q + sums) * FP32
        return elements * self.element.width + -(-first // ALIGN) * ALIGN

    @property
    def smem_of_shared_columns(self) -> int:
        """Shared memory where warpgroups share columns: of K, V, the rings of Q, dO and rows, P, dS, parts of dQ.

        Barriers and rows come first, and fill multiples of 1024 bytes.
        """
        cfg, rows = self.config, self.config.step_rows
        elements = cfg.tile_n * (self.head_dim + self.head_dim_v) + 2 * cfg.tile_n * rows
        elements += rows * (cfg.stages * self.head_dim + self.stages_do * self.head_dim_v)
        sums = 0 if cfg.direct else rows * self.head_dim // cfg.dq_parts
        first = 16 * (2 + cfg.stages + self.stages_do) + QUEUE_BYTES + 2 * cfg.stages * rows * FP32
        return elements * self.element.width + sums * FP32 + -(-first // ALIGN) * ALIGN


def overlaps(arch: str) -> bool:
    """Whether a launch may begin before the one that it depends on has ended (programmatic dependent launch)."""
    return arch_named(arch).path == "sm_90"


@dataclass(frozen=True)
class PrepareFacts:
    """Traits of the kernel before: LSE and delta of each row, and zeros for dq_accum and the semaphores of turns.py."""

    family: ClassVar[str] = "backward prepare"
    arch: str
    dtype: str
    tile_m: int  # BackwardConfig's
    head_dim: int
    head_dim_v: int
    lse_gradient: bool  # whether there is a gradient of LSE, too
    packed: bool
    sinks: str | None = None  # dtype of the sinks, of which a gradient is wanted; None: of none
    parts: int = 0  # semaphores of a query tile; 0 unless deterministic

    def key(self) -> str:
        return repr(self)


@dataclass(frozen=True)
class ConvertFacts:
    """Of the kernel after: dQ from its sums."""

    family: ClassVar[str] = "backward dQ"
    arch: str
    path: str
    dtype: str
    config: BackwardConfig
    head_dim: int
    packed: bool
    grad_dtype: str | None = None  # of dQ; None: the operands'

    def key(self) -> str:
        return repr(self)
