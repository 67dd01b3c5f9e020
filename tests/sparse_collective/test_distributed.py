"""Sharded layers in 2 and 4 processes with gloo, against one process."""

import gc
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sparse_collective.distributed import load_patterns, register_optimizer_hooks
from sparse_collective.nn import BsrGroupedLinear, BsrLinear

from ..ranks import Ranks
from . import checkpoint_checks, distributed_checks, expert_checks, fsdp_checks, peer_checks, refused_checks

MODULES = (distributed_checks, refused_checks, fsdp_checks, expert_checks, checkpoint_checks, peer_checks)
CHECKS = [f"{module.__name__}:{check.__name__}" for module in MODULES for check in module.CHECKS]
STRATEGIES = "column_then_row", "fully_sharded_training", "pattern_changes", "mixture_of_experts"  # run in each commit


def parameter(check):
    name = check.rpartition(":")[2]
    return pytest.param(check, id=name, marks=[pytest.mark.core] * (name in STRATEGIES))


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request):
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("check", map(parameter, CHECKS))
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


def model_of(density, seed):
    torch.manual_seed(seed)
    more = {"density": density, "blocksize": (32, 32)}
    experts = [BsrGroupedLinear(3, 64, 96, one_pattern=one, **more) for one in (True, False)]
    return torch.nn.Sequential(BsrLinear(128, 256, **more), *experts)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_patterns_of_a_checkpoint(tmp_path):
    """A model in one process takes them, also on the meta device, and with wrappers that add to names."""
    source, x = model_of(0.3, 1), torch.randn(5, 128)
    dcp.save({"model": source.state_dict()}, checkpoint_id=tmp_path)
    parameters = dict((model := model_of(0.6, 2)).named_parameters())
    wrapped = torch.nn.Sequential(torch.compile(checkpoint_wrapper(model_of(0.6, 2)[0])), *model_of(0.6, 2)[1:])
    with torch.device("meta"):
        empty = model_of(0.6, 2)
    for target in (model, wrapped, empty):
        load_patterns(target, tmp_path, prefix="model.")
        if target is empty:
            for layer in empty.to_empty(device="cpu"):
                layer.reset_parameters()
        for key, t in target.state_dict().items():
            expected = source.state_dict()[key.replace("_orig_mod.", "")]
            assert t.shape == expected.shape and ("indices" not in key or torch.equal(t, expected))
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    model.load_state_dict(state["model"])
    assert torch.equal(model[0](x), source[0](x))

    with pytest.raises(ValueError, match="has no '0.crow_indices'; it has .*: pass prefix='model.'"):
        load_patterns(model, tmp_path)
    with pytest.raises(ValueError, match="has no 'model.3.crow_indices'; pass the model's own"):
        load_patterns(torch.nn.Sequential(*model, model_of(0.5, 1)[0]), tmp_path, prefix="model.")
    other = torch.nn.Sequential(BsrLinear(128, 128, blocksize=(32, 32), density=0.5))
    with pytest.raises(ValueError, match="load_patterns: 0: .*another number of block rows"):
        load_patterns(other, tmp_path, prefix="model.")


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
