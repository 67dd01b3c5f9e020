"""Force the configuration of GEMM kernels, for tests and measurements of those that heuristics do not select."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from ..matmul import heuristics
from ..matmul.config import GemmConfig
from ..runtime.call_plan import PlanCache


@contextlib.contextmanager
def forced_config(config: GemmConfig) -> Iterator[None]:
    """Inside the block, dense and BSR GEMMs have this configuration, or raise if it is not legal for them.

    Each call inside the block is planned anew, so host overhead is large: time CUDA graphs.
    """
    listed, checked = heuristics.candidates_for, PlanCache.checked

    def forced(*args) -> list:
        return [(family, config) for family in dict.fromkeys(f for f, _ in listed(*args) if f.config is type(config))]

    def planned(self, *args, **terms):
        self.plans.clear()
        self.recent.clear()
        try:
            return checked(self, *args, **terms)
        finally:
            self.plans.clear()
            self.recent.clear()

    with (
        mock.patch.object(heuristics, "candidates_for", forced),
        mock.patch.object(PlanCache, "known", lambda *_: None),
        mock.patch.object(PlanCache, "checked", planned),
    ):
        yield
