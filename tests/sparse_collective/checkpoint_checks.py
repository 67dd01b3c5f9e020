"""Checks of state dicts of tensor- and expert-parallel layers, which each rank runs; see tests/ranks.py.

They are one process's, whatever the number of ranks. Weights are FP32 on the CPU and BF16 on a GPU.
"""

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_map_only

from sparse_collective.distributed import (
    BsrColwiseParallel,
    BsrExpertParallel,
    BsrRowwiseParallel,
    full_state_dict,
    load_full_state_dict,
    load_patterns,
    partition_hidden,
    register_optimizer_hooks,
)
from sparse_collective.nn import (
    BsrExperts,
    BsrGroupedLinear,
    BsrLinear,
    BsrMixtureOfExperts,
    Float8Config,
    SwiGLU,
    change_pattern_,
    prune_,
    quantize_,
)

from .distributed_checks import dtype_of, mesh_of, near, normal, raises, whole
from .fsdp_checks import same_folder

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # of optimizers with other parameter groups
PLACES = ("one process", "tensor parallel", "fully_shard", "both", "one process")


def linears(device, density, seed=1):
    torch.manual_seed(seed)
    more = {"density": density, "device": device, "dtype": dtype_of(device)}
    return nn.Sequential(BsrLinear(128, 256, True, (32, 32), **more), BsrLinear(256, 96, True, (32, 32), **more))


def models(device):
    """name -> model of one process"""
    torch.manual_seed(2)
    more = {"device": device, "dtype": dtype_of(device)}
    masks = torch.rand(8, 6, 2) < 0.5, torch.rand(8, 2, 3) < 0.5
    masks[0][5] = False  # an expert without blocks
    found = {
        "linear": linears(device, 0.4),
        "all blocks": linears(device, 1.0),  # ranks hold equally many, row-parallel ones in another order
        "SwiGLU": SwiGLU(128, 512, True, (64, 32), density=0.3, **more),
        "experts": BsrExperts(
            BsrGroupedLinear(8, 64, 192, True, (32, 32), one_pattern=False, mask=masks[0], **more),
            BsrGroupedLinear(8, 96, 64, True, (32, 32), one_pattern=False, mask=masks[1], **more), "gelu", 64,
        ),
    }  # fmt: skip
    for one_pattern in (True, False):
        options = {"one_pattern": one_pattern, "density": 0.4, **more}
        up, down = (BsrGroupedLinear(3, *size, True, (32, 32), **options) for size in ((64, 256), (256, 96)))
        found[f"grouped {one_pattern}"] = nn.Sequential(up, down)
    return found


def parallelized(alone, mesh):
    """A copy over a mesh; hidden features are permuted, by stored blocks."""
    model = copy.deepcopy(alone)
    if isinstance(model, BsrExperts):
        return parallelize_module(model, mesh, BsrExpertParallel())
    first, second = ("gate_up", "down") if isinstance(model, SwiGLU) else ("0", "1")
    partition = partition_hidden(model.get_submodule(first), model.get_submodule(second), mesh.size())
    styles = BsrColwiseParallel(partition=partition), BsrRowwiseParallel(partition=partition)
    return parallelize_module(model, mesh, dict(zip((first, second), styles, strict=True)))


def optimizer_of(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    register_optimizer_hooks(model, optimizer)
    return optimizer


def step(model, optimizer):
    """Gradients that depend on the parameter alone; those behind a rank's entries become numbers, too."""
    for p in model.parameters():
        p.grad = 0.5 * p.detach() + 0.125
    optimizer.step()
    optimizer.zero_grad()


def equal(found, expected):
    """Tensors of nested states; DTensors are compared whole."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), (found.keys(), expected.keys())
        for key in expected:
            equal(found[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        found = whole(found).cpu()
        assert torch.equal(found, whole(expected).cpu()) or found.is_floating_point()
        near(found, whole(expected).cpu(), 1e-2)
    else:
        assert found == expected, (found, expected)


def agrees(model, optimizer, alone, alone_optimizer):
    equal(full_state_dict(model, rank0_only=False), dict(alone.state_dict()))
    states = [get_optimizer_state_dict(*pair)["state"] for pair in ((model, optimizer), (alone, alone_optimizer))]
    equal(*states)


def zeroed(model):
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return model


def checkpoint_of_another_world(device, folder, number):
    """Load the checkpoint `number` of model and optimizer, take a step, and save the next one."""
    for name, alone in models(device).items():
        model = parallelized(alone, mesh_of(device))
        pairs = [(m, optimizer_of(m)) for m in (model, alone)]
        if number:
            for m, optimizer in pairs:
                zeroed(m)
                state = dict(zip(("model", "optimizer"), get_state_dict(m, optimizer), strict=True))
                dcp.load(state, checkpoint_id=f"{folder}/{name} {number - 1}")
                set_state_dict(m, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            agrees(*pairs[0], *pairs[1])
        for pair in pairs:
            step(*pair)
        agrees(*pairs[0], *pairs[1])
        assert sum(p.numel() for p in alone.parameters())
        state = dict(zip(("model", "optimizer"), get_state_dict(*pairs[0]), strict=True))
        dcp.save(state, checkpoint_id=f"{folder}/{name} {number}")


def with_plain_parameters(device, density, seed=4):
    """A model whose norm and router stay plain tensors next to the DTensors of parallelize_module."""
    torch.manual_seed(seed)
    more = {"device": device, "dtype": dtype_of(device)}
    return nn.Sequential(
        nn.LayerNorm(128, **more),
        SwiGLU(128, 512, True, (64, 32), density=density, **more),
        BsrMixtureOfExperts(128, 64, 8, 2, True, (32, 32), density=density, **more),
    )


def placed(model, place, device):
    """The model, changed, and its AdamW with a parameter group of each kind of tensor."""
    world = dist.get_world_size()
    mesh = mesh_of(device, world // 2, 2, names=("dp", "tp")) if place == "both" else mesh_of(device)
    if place in ("tensor parallel", "both"):
        own = mesh["tp"] if place == "both" else mesh
        partition = partition_hidden(model[1].gate_up, model[1].down, own.size())
        plan = {"gate_up": BsrColwiseParallel(partition=partition), "down": BsrRowwiseParallel(partition=partition)}
        parallelize_module(model[1], own, plan)
        parallelize_module(model[2], own, BsrExpertParallel())
    if place in ("fully_shard", "both"):
        for module in (model[1], model[2], model):
            fully_shard(module, mesh=mesh["dp"] if place == "both" else mesh)
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is kind] for kind in (True, False)]
    assert all(kinds) is (place == "tensor parallel")
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds if kind], lr=1e-2)
    register_optimizer_hooks(model, optimizer)
    return model, optimizer


def saved(model, optimizer, path):
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=FLAT), strict=True))
    dcp.save(state, checkpoint_id=path)
    return path


def loaded(model, optimizer, path):
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=FLAT), strict=True))
    dcp.load(state, checkpoint_id=path)
    states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(model, optimizer, **states, options=FLAT)


def states_of_other_groups(device):
    """A parameter group of each kind of tensor, or one group: from one process to ranks and back, with steps."""
    folder, alone = same_folder(), with_plain_parameters(device, 0.4)
    alone, alone_optimizer = placed(alone, "one process", device)
    path, initial = "", copy.deepcopy(alone)
    for number, place in enumerate(PLACES):
        model, optimizer = placed(copy.deepcopy(initial), place, device)
        if path:
            loaded(zeroed(model), optimizer, path)
            agrees(model, optimizer, alone, alone_optimizer)
            assert all(group["lr"] == 1e-2 / number for group in optimizer.param_groups)
        for pair in ((model, optimizer), (alone, alone_optimizer)):
            step(*pair)
            for group in pair[1].param_groups:
                group["lr"] = 1e-2 / (number + 1)
        agrees(model, optimizer, alone, alone_optimizer)
        path = saved(model, optimizer, f"{folder}/{number}")


def states_of_pruned_layers(device):
    """A checkpoint with fewer and more blocks than new layers have, in other places: from each kind of ranks to all."""
    folder, x = same_folder(), normal(8, 128, device=device)
    alone, alone_optimizer = placed(with_plain_parameters(device, 0.6), "one process", device)
    step(alone, alone_optimizer)
    prune_(alone[1].down, 0.2, optimizer=alone_optimizer)
    generator = torch.Generator(device).manual_seed(1)
    change_pattern_(alone[1].gate_up, 0.3, grow="random", optimizer=alone_optimizer, generator=generator)
    step(alone, alone_optimizer)
    path = saved(alone, alone_optimizer, f"{folder}/initial")
    for place in PLACES[1:]:
        model = with_plain_parameters(device, 0.5, seed=dist.get_rank())
        load_patterns(model, path, prefix="model.")
        model, optimizer = placed(model, place, device)
        loaded(model, optimizer, path)
        agrees(model, optimizer, alone, alone_optimizer)
        near(model(x), alone(x))
        path = saved(model, optimizer, f"{folder}/{place}")

    with torch.device("meta"):  # sharded without memory
        model = nn.Sequential(SwiGLU(128, 512, True, (64, 32), density=0.5, dtype=dtype_of(device)))
    dcp.save(nn.Sequential(alone[1]).state_dict(), checkpoint_id=f"{folder}/SwiGLU")
    load_patterns(model, f"{folder}/SwiGLU")
    state = fully_shard(model, mesh=mesh_of(device)).to_empty(device=device).state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/SwiGLU")
    model.load_state_dict(state)
    equal(full_state_dict(model[0], rank0_only=False), dict(alone[1].state_dict()))
    near(model(x), alone[1](x))


def full_states(device):
    """Full states on rank 0, loaded from all ranks' and from rank 0's."""
    for alone in models(device).values():
        model = parallelized(alone, mesh_of(device))
        optimizer, alone_optimizer = optimizer_of(model), optimizer_of(alone)
        for pair in ((model, optimizer), (alone, alone_optimizer)):
            step(*pair)
        states = get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)
        first = dist.get_rank() == 0
        assert first or not any(states)
        if first:
            equal(dict(states[0]), dict(alone.state_dict()))
            equal(states[1]["state"], get_optimizer_state_dict(alone, alone_optimizer)["state"])
        set_model_state_dict(zeroed(model), dict(alone.state_dict()), options=FULL)
        fresh = optimizer_of(model)
        state = states[1] if first else {}
        if torch.__version__ < "2.12":  # what it gathers of uneven shards is not contiguous, and its broadcast fails
            state = tree_map_only(torch.Tensor, torch.Tensor.contiguous, state)
        set_optimizer_state_dict(model, fresh, state, options=FROM_RANK_0)
        agrees(model, fresh, alone, alone_optimizer)
        load_full_state_dict(zeroed(model), alone.state_dict() if first else {})
        agrees(model, fresh, alone, alone_optimizer)


def states_with_fully_shard(device):
    """Tensor or expert parallel over one mesh dimension, FSDP2 over the other; and FSDP2 alone."""
    world = dist.get_world_size()
    mesh, folder = mesh_of(device, world // 2, 2, names=("dp", "tp")), same_folder()
    for name, alone in models(device).items():
        if name == "experts" and world == 4:  # each rank has a part of a rank's experts' blocks
            assert alone.get_submodule("down").nnz % 4
        sharded, path = fully_shard(parallelized(alone, mesh["tp"]), mesh=mesh["dp"]), f"{folder}/{name}"
        pairs = [(m, optimizer_of(m)) for m in (sharded, alone)]
        for pair in pairs:
            step(*pair)
        agrees(*pairs[0], *pairs[1])
        state = dict(zip(("model", "optimizer"), get_state_dict(*pairs[0]), strict=True))
        dcp.save(state, checkpoint_id=path)
        for fresh in (sharded, parallelized(alone, mesh_of(device)), fully_shard(copy.deepcopy(alone))):
            optimizer = optimizer_of(zeroed(fresh))
            state = dict(zip(("model", "optimizer"), get_state_dict(fresh, optimizer), strict=True))
            dcp.load(state, checkpoint_id=path)
            set_state_dict(fresh, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            agrees(fresh, optimizer, *pairs[1])
        state = get_model_state_dict(sharded, options=FULL)
        if dist.get_rank() == 0:
            equal(dict(state), dict(alone.state_dict()))
        load_full_state_dict(zeroed(sharded), alone.state_dict() if dist.get_rank() == 0 else {})
        agrees(*pairs[0], *pairs[1])


def states_of_offloaded_parameters(device):
    """fully_shard keeps parts of parameters on the CPU, beside a tensor-parallel layer's and alone."""
    mesh, first = mesh_of(device, dist.get_world_size() // 2, 2, names=("dp", "tp")), dist.get_rank() == 0
    alone = linears(device, 0.4)
    for model, part in ((parallelized(alone, mesh["tp"]), mesh["dp"]), (copy.deepcopy(alone), mesh_of(device))):
        fully_shard(model, mesh=part, offload_policy=CPUOffloadPolicy(pin_memory=False))
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        equal(full_state_dict(model, rank0_only=False), dict(alone.state_dict()))
        load_full_state_dict(zeroed(model), alone.state_dict() if first else {})
        equal(full_state_dict(model, rank0_only=False), dict(alone.state_dict()))


def states_of_some_ranks(device):
    """Models without rank 0: a pipeline stage, and one on a mesh of the last ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    half = world // 2
    mesh = mesh_of(device, 2, half, names=("pp", "tp"))
    alone = linears(device, 0.4 + rank // half / 2)
    state = full_state_dict(model := parallelized(alone, mesh["tp"]))
    equal(state, dict(alone.state_dict()) if rank % half == 0 else {})
    raises(RuntimeError, "its model has other names or shapes", load_full_state_dict, model, alone.state_dict())
    mesh = DeviceMesh(device.type, list(range(half, world)))
    if rank >= half:
        model = parallelized(alone, mesh)
        assert bool(full_state_dict(model)) is (rank == half)
        raises(ValueError, "rank 0, whose state is loaded, does not", load_full_state_dict, model, alone.state_dict())


def states_of_fp8_layers(device):
    """FP8 layers are whole on each rank; gloo broadcasts no FP8."""
    more = {"density": 0.5, "device": device, "dtype": torch.bfloat16}
    models = [nn.Sequential(BsrLinear(128, 128, blocksize=(64, 64), **more)) for _ in range(2)]
    for model in models:
        quantize_(model, Float8Config())
    load_full_state_dict(models[0], full_state_dict(models[1]))
    for mine, theirs in zip(*(m.state_dict().items() for m in models), strict=True):
        assert mine[0] == theirs[0] and torch.equal(mine[1].view(-1).float(), theirs[1].view(-1).float())


def refused_states(device):
    """States that would be read in a wrong order, or of other layers."""
    mesh, folder = mesh_of(device), same_folder()
    alone = linears(device, 1.0)
    model = parallelized(alone, mesh)
    state = dict(alone.state_dict()) if dist.get_rank() == 0 else {}
    raises(RuntimeError, "load_full_state_dict", set_model_state_dict, model, state, options=FROM_RANK_0)
    raises(RuntimeError, "is the parameter itself", model.load_state_dict, model.state_dict(keep_vars=True))
    first = dist.get_rank() == 0
    state = {**alone.state_dict(), "2.bias": alone[0].bias} if first else {}
    raises(RuntimeError, "keys that the model does not have: ['2.bias']", load_full_state_dict, model, state)
    state = {**alone.state_dict(), "0.bias": alone[1].bias} if first else {}
    raises(RuntimeError, "0.bias has shape (96,), the model's (256,)", load_full_state_dict, model, state)
    raises(RuntimeError, "must pass a state dict, got NoneType", load_full_state_dict, model, None)
    sharded = model.state_dict()
    for state, kind in ((sharded, "DTensor"), ({**alone.state_dict(), "0.values": 1.0}, "float")):
        words = f"0.values must be a torch.Tensor that is not sharded, got {kind}"
        raises(RuntimeError, words, load_full_state_dict, model, state if first else {})

    other, mine = linears(device, 0.5, seed=3), parallelized(linears(device, 0.5), mesh)
    dcp.save(other.state_dict(), checkpoint_id=folder)
    raises(TypeError, "load_patterns: 0 is split over ranks", load_patterns, mine, folder)
    sharded = fully_shard(linears(device, 0.5), mesh=mesh)
    raises(TypeError, "load_patterns: 0 is split over ranks", load_patterns, sharded, folder)
    state = mine.state_dict()
    dcp.load(state, checkpoint_id=folder)
    raises(RuntimeError, "another pattern; load it before parallelize_module", mine.load_state_dict, state)

    mine = parallelized(linears(device, 0.4), mesh)
    optimizer = torch.optim.AdamW(mine.parameters())
    step(mine, optimizer)
    state = optimizer.state_dict()
    register_optimizer_hooks(mine, optimizer)
    raises(ValueError, "parameters were saved in this form", optimizer.load_state_dict, state)
    optimizer.state[mine[0].values]["rows"] = normal(7, device=device)
    raises(TypeError, "use one with elementwise state", optimizer.state_dict)


CHECKS = [
    full_states,
    states_with_fully_shard,
    states_of_other_groups,
    states_of_pruned_layers,
    states_of_offloaded_parameters,
    states_of_some_ranks,
    states_of_fp8_layers,
    refused_states,
]
