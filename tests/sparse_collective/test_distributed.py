"""Sharded layers in 2 and 4 processes with gloo, against one process."""

import gc
import weakref

import pytest
import torch

from sparse_collective.distributed import register_optimizer_hooks

from ..ranks import Ranks
from . import checkpoint_checks, distributed_checks, expert_checks, fsdp_checks, peer_checks, refused_checks

MODULES = (distributed_checks, refused_checks, fsdp_checks, expert_checks, checkpoint_checks, peer_checks)
CHECKS = [f"{module.__name__}:{check.__name__}" for module in MODULES for check in module.CHECKS]


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request):
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("check", CHECKS, ids=[check.rpartition(":")[2] for check in CHECKS])
def test_against_one_process(ranks, check):
    ranks.run(check)


@pytest.mark.parametrize(
    "module", [fsdp_checks, expert_checks, checkpoint_checks], ids=["fully_shard", "experts", "tensor_parallel"]
)
def test_checkpoints_from_1_to_2_to_4_and_back(tmp_path, module):
    for number, world in enumerate((1, 2, 4, 1)):
        ranks = Ranks(world)
        ranks.run(f"{module.__name__}:checkpoint_of_another_world", str(tmp_path), number)
        ranks.close()


@pytest.mark.parametrize(
    ("module", "check"),
    [
        (refused_checks, "error_in_one_rank"),
        (refused_checks, "death_of_one_rank"),
        (expert_checks, "error_in_one_rank"),
    ],
    ids=["tensor parallel, error", "tensor parallel, death", "experts, error"],
)
def test_a_rank_that_fails_ends_the_others(module, check):
    """Within the process group's timeout, with the reason."""
    Ranks(2, collective_seconds=4).fail(f"{module.__name__}:{check}")


def test_hooks_do_not_keep_an_optimizer():
    """Its memory, and the model's, is freed with the last reference to it."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    register_optimizer_hooks(model, optimizer)
    with pytest.raises(ValueError, match="has the hooks already"):
        register_optimizer_hooks(model, optimizer)
    references = weakref.ref(optimizer), weakref.ref(model.weight)
    gc.disable()
    try:
        del model, optimizer
        assert not any(reference() is not None for reference in references)
    finally:
        gc.enable()
