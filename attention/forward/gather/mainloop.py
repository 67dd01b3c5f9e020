"""The mainloop over gathered KV tiles, which cp.async wrote through another proxy than that of WGMMA: a proxy fence
follows each wait for a tile."""

from dataclasses import replace

import cutlass.cute as cute
from cutlass import pipeline

from ..config import GatherFacts
from ..mainloop_sm90 import MainloopSm90
from ..mask_and_softmax import QueryWork
from ..softmax_policy import policy_of
from .mask import members_of
from .operands import GatheredRows, GatheredValues, gathering


class GatherMainloop(MainloopSm90):
    """Steps over the gathered KV tiles of one query tile."""

    def __init__(self, facts: GatherFacts):
        super().__init__(facts, policy_of(facts), GatheredValues)
        cfg, arrivals = facts.config, gathering(facts)
        self.q = GatheredRows(self.dtype, (cfg.tile_m, facts.head_dim), 1, arrivals, False)
        self.k = GatheredRows(self.dtype, (cfg.tile_n, facts.head_dim), cfg.stages, arrivals, False)
        self.v = GatheredValues(self.dtype, facts, arrivals)

    def of_rows(self, work: QueryWork) -> QueryWork:
        return replace(work, members=members_of(work.tiles, work.row))

    def wait(self, pipe: pipeline.PipelineAsync, state):
        pipe.consumer_wait(state)
        cute.arch.fence_view_async_shared()
