"""Sharded layers in 2 and 4 processes with gloo, against one process."""

import pytest

from ..ranks import Ranks
from . import distributed_checks


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request):
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("check", [check.__name__ for check in distributed_checks.CHECKS])
def test_against_one_process(ranks, check):
    ranks.run(f"{distributed_checks.__name__}:{check}")
