"""The schedule with two pipelines: two consumer groups, each with a producer warp, a ring and work tiles of its own.

    producer 0  | load 0 | load 2 | ...
    producer 1  | load 1 | load 3 | ...
    group 0   |  mma 0      | store 0 |  mma 2      | store 2 | ...
    group 1         |  mma 1      | store 1 |  mma 3      | store 3 | ...

The groups are as independent as two CTAs. For mainloops that wait for their WGMMAs: under promoted accumulation one
group issues WGMMAs while the other adds or stores.
"""

from cutlass import Int32, pipeline

from ...tile.hopper import RingState
from ..contexts import WorkTiles
from .cooperative import Cooperative


class TwoPipelines(Cooperative):
    """Two producer warps and two consumer groups; producer warp i and group i share ring i."""

    def produces(self, warp: Int32):
        return warp < self.cfg.rings

    def ring_state(self, user: pipeline.PipelineUserType, number: Int32) -> RingState:
        stages = self.cfg.stages
        return RingState.begin(stages, number * stages, user is pipeline.PipelineUserType.Producer)

    def work(self, tiles: WorkTiles, number: Int32) -> tuple:
        return tiles.first + number * tiles.step, tiles.step * self.cfg.rings
