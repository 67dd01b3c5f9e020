"""Checks of fully_shard and DistributedDataParallel, which each rank runs; see tests/ranks.py."""

import copy
import functools
import inspect
import tempfile
import types

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from sparse_collective.nn import (
    Blocks,
    BsrGroupedLinear,
    BsrLinear,
    BsrMixtureOfExperts,
    DenseGradients,
    GatedBsrLinear,
    SwiGLU,
    change_pattern_,
    densify_,
    prune_,
)

from .distributed_checks import (
    dtype_of,
    facts,
    gradient_with_selective_checkpointing,
    mesh_of,
    near,
    normal,
    raises,
    refuses,
    whole,
)
from .expert_checks import exact_route


class Grouped(nn.Module):
    """A BsrGroupedLinear whose tokens go to experts by their signs."""

    def __init__(self, one_pattern, **more):
        super().__init__()
        self.experts = BsrGroupedLinear(3, 128, 128, True, (32, 32), one_pattern=one_pattern, density=0.4, **more)

    def forward(self, x):
        expert = (x[:, :2] > 0).sum(1)
        order = expert.argsort(stable=True)
        offs = torch.searchsorted(expert[order], torch.arange(3, device=x.device), right=True).int()
        return torch.zeros_like(x).index_copy(0, order, self.experts(x[order], offs))


def models(device):
    """name -> (model of 128 features in and out, submodules to shard before the root)"""
    more = {"device": device, "dtype": dtype_of(device)}
    torch.manual_seed(5)
    two = nn.Sequential(
        BsrLinear(128, 96, True, (32, 32), density=0.42, activation="silu", **more),
        BsrLinear(96, 128, True, (32, 32), density=0.5, **more),
    )
    gated = nn.Sequential(GatedBsrLinear(128, 256, False, (32, 32), density=0.3, **more))
    moe = BsrMixtureOfExperts(128, 128, 3, 2, False, (32, 32), density=0.4, group_rows=64, **more)
    moe.route = types.MethodType(exact_route, moe)
    swiglu = SwiGLU(128, 256, True, (64, 32), density=0.3, **more)
    return {
        "each layer": (two, list(two)),
        "one layer": (copy.deepcopy(two), [1]),
        "root": (copy.deepcopy(two), []),
        "gated": (gated, [0]),
        "SwiGLU": (swiglu, []),
        "gate_up of SwiGLU": (copy.deepcopy(swiglu), ["gate_up"]),
        "experts of one pattern": (Grouped(True, **more), ["experts"]),
        "experts of own patterns": (Grouped(False, **more), ["experts"]),
        "mixture": (moe, ["gate", "down"]),
    }


def sharded(model, parts, mesh=None):
    """A copy of the model under fully_shard."""
    model = copy.deepcopy(model)
    for part in parts:
        fully_shard(model.get_submodule(str(part)) if not isinstance(part, nn.Module) else part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model, alone, optimizers, steps=2, seed=1):
    """Some steps on each rank's part of a batch, beside one process on all of it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = next(alone.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(16, 128, generator=generator).to(device, dtype_of(device))
        for m, part, optimizer in ((model, x.chunk(world)[rank], optimizers[0]), (alone, x, optimizers[1])):
            optimizer.zero_grad()
            m(part).float().square().mean().backward()
            optimizer.step()


def agree(model, alone, slack=1.0):
    """Parameters and buffers are those of one process."""
    theirs = dict(alone.state_dict())
    for name, mine in model.state_dict().items():
        if mine.is_floating_point():
            near(whole(mine), theirs[name], slack)
        else:
            assert torch.equal(whole(mine), theirs[name]), name


def pair_of(name, device, mesh=None, rate=1e-3):
    alone, parts = models(device)[name]
    names = [n for n, m in alone.named_modules() if any(m is part for part in parts)]
    model = sharded(alone, names or parts, mesh)
    # SGD with momentum: its steps are linear in the gradients, so that rounding stays small.
    return model, alone, [torch.optim.SGD(m.parameters(), lr=rate, momentum=0.9) for m in (model, alone)]


def fully_sharded_training(device):
    for name in models(device):
        model, alone, optimizers = pair_of(name, device)
        values = [p for n, p in model.named_parameters() if n.endswith("values")]
        assert all(p.placements[0].is_shard(0) for p in values)
        buffers = [b for n, b in model.named_buffers() if "indices" in n]
        assert buffers and all(type(b) is torch.Tensor for b in buffers)
        train(model, alone, optimizers)
        agree(model, alone)


def hybrid_sharding(device):
    """Replicated over one mesh dimension, sharded over the other."""
    world = dist.get_world_size()
    mesh = mesh_of(device, 2, world // 2, names=("replicate", "shard"))
    model, alone, optimizers = pair_of("each layer", device, mesh)
    train(model, alone, optimizers)
    for m, optimizer in zip((model, alone), optimizers, strict=True):
        prune_(m[0], 0.25, scores=torch.arange(m[0].nnz), optimizer=optimizer)
    train(model, alone, optimizers, seed=2)
    agree(model, alone)


def state_agrees(optimizers, model, alone):
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        states = [optimizer.state[p] for optimizer, p in zip(optimizers, (mine, theirs), strict=True)]
        assert states[0].keys() == states[1].keys()
        for key in states[0]:
            if isinstance(states[0][key], torch.Tensor) and states[0][key].dim():
                near(whole(states[0][key]), states[1][key], 4)


def pattern_changes(device):
    """prune_ and change_pattern_ while training: the pattern, values and optimizer state of one process."""
    for name in ("each layer", "root"):
        model, alone, optimizers = pair_of(name, device)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4) for m in (model, alone)]
        train(model, alone, optimizers)
        parameters = [p for p in model.parameters()]
        pairs = list(zip((model, alone), optimizers, strict=True))
        scores = torch.rand(model[1].nnz, generator=torch.Generator().manual_seed(9)).to(device)
        for m, optimizer in pairs:
            change_pattern_(m[0], 0.4, grow="random", optimizer=optimizer, drop=torch.arange(m[0].nnz, device=device),
                            generator=torch.Generator(device).manual_seed(3))  # fmt: skip
            prune_(m[1], 0.3, scores=scores, optimizer=optimizer)
        agree(model, alone)
        state_agrees(optimizers, model, alone)
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        train(model, alone, optimizers, seed=2)
        agree(model, alone, 3)
        for m, optimizer in pairs:
            change_pattern_(m[1], 0.5, grow=torch.arange(12.0).view(4, 3).to(device), optimizer=optimizer,
                            drop=-torch.arange(m[1].nnz))  # fmt: skip
            prune_(m[0], 1 / 12, scores=-torch.arange(m[0].nnz), optimizer=optimizer)
        train(model, alone, optimizers, seed=3)
        agree(model, alone, 3)
        raises(ValueError, "keep at least one block", prune_, model[0], 0.0)


def gradients_not_reduced(device):
    """FSDP2's accumulated gradients are of the earlier blocks: patterns do not change before they are reduced."""
    ranks = dist.get_world_size()
    wide = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for mesh, policy, sync in (
        (mesh_of(device), MixedPrecisionPolicy(), "set_requires_gradient_sync"),
        (mesh_of(device), wide, "set_requires_gradient_sync"),
        (mesh_of(device, ranks, 1, names=("replicas", "shards")), MixedPrecisionPolicy(), "set_requires_all_reduce"),
    ):
        alone = models(device)["root"][0]
        model = fully_shard(copy.deepcopy(alone), mesh=mesh, mp_policy=policy)
        x = normal(8, 128, device=device)
        for synchronized in (False, True):
            getattr(model, sync)(synchronized)
            model(x).float().square().mean().backward()
            alone(x).float().square().mean().backward()
            model.reshard()
            if not synchronized:
                raises(RuntimeError, "not reduced yet", prune_, model[0], 0.3)
                raises(RuntimeError, "not reduced yet", change_pattern_, model[1], 0.3, grow="random")
        for m in (model, alone):
            prune_(m[0], 0.3, scores=torch.arange(m[0].nnz, device=device))
        agree(model, alone)
        for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
            dtype = policy.param_dtype or expected.dtype
            near(whole(found.grad).to(dtype), expected.grad.to(dtype), 3)


def regrowth_by_gradients(device):
    model, alone, optimizers = pair_of("each layer", device)
    rank, world = dist.get_rank(), dist.get_world_size()
    x = normal(16, 128, device=device)
    with DenseGradients(model) as gradients, DenseGradients(alone) as whole_gradients:
        model(x.chunk(world)[rank]).float().square().mean().backward()
        alone(x).float().square().mean().backward()
    for i in range(2):
        norms = gradients.block_norms(model[i], group=dist.group.WORLD)
        near(norms / norms.max(), (n := whole_gradients.block_norms(alone[i])) / n.max(), 4)
        change_pattern_(model[i], 0.5, grow=n, optimizer=optimizers[0])
        change_pattern_(alone[i], 0.5, grow=n, optimizer=optimizers[1])
    agree(model, alone)
    for scores in ("magnitude", "gradient"):
        near(*(Blocks.of(m[0]).score(scores).to(dtype_of(device)) for m in (model, alone)), 4)
    prune_(model[0], 0.2, scores="gradient")
    assert model[0].nnz == round(0.2 * 12)


def choices_that_differ(device):
    model, alone, _ = pair_of("each layer", device)
    rank, before = dist.get_rank(), model[0].col_indices.clone()
    generator = torch.Generator(device).manual_seed(rank)
    raises(RuntimeError, "differs between ranks", change_pattern_, model[0], 0.4, grow="random", generator=generator)
    scores = (1.0 if rank % 2 else -1.0) * torch.arange(model[0].nnz)
    raises(RuntimeError, "differs between ranks", prune_, model[0], 0.2, scores=scores)
    assert torch.equal(before, model[0].col_indices)
    model[1].unshard()
    raises(RuntimeError, "gathered at present", prune_, model[1], 0.2)
    model[1].reshard()
    torch._dynamo.reset()
    more, x = {"device": device, "dtype": dtype_of(device)}, normal(4, 128, device=device)
    for change in (lambda layer: layer, lambda layer: torch.compile(layer, backend="aot_eager")):
        torch.manual_seed(rank)
        other = BsrLinear(128, 96, True, (32, 32), density=0.42, **more)
        raises(RuntimeError, "the pattern differs between ranks", fully_shard, other)
        layer = sharded(alone[0], [])
        near(change(layer)(x), alone[0](x))
        indices = {name: t for name, t in other.state_dict().items() if "indices" in name}
        layer.load_state_dict(layer.state_dict() | indices)
        raises(RuntimeError, "the pattern differs between ranks", change(layer), x)


def choices_that_differ_in_a_group(device):
    """All ranks of `group` raise, also those whose shard group agrees; none waits."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = mesh_of(device, 2, world // 2, names=("replicate", "shard"))
    layer = BsrLinear(128, 96, True, (32, 32), density=0.42, device=device, dtype=dtype_of(device))
    model = fully_shard(layer, mesh=mesh["shard"])
    generator = torch.Generator(device).manual_seed(int(rank == 1))
    raises(RuntimeError, "grow= or drop= differs between ranks", change_pattern_, model, 0.4, grow="random",
           generator=generator, group=dist.group.WORLD)  # fmt: skip


def arguments_of_one_rank(device):
    """Arguments that are wrong or differ on one rank raise on all, before anything is gathered; the next call works."""
    model, alone, optimizers = pair_of("each layer", device)
    train(model, alone, optimizers)
    layer, last, generator = model[0], dist.get_rank() == dist.get_world_size() - 1, torch.Generator(device)
    prune, change = {"density": 0.25}, {"fraction": 0.4, "grow": "random", "generator": generator}

    def failing(blocks):
        raise KeyError("no input of this layer")

    for function, right, wrong, kind, text in (
        (prune_, prune, {"density": 2.0}, ValueError, "density 2.0 is not in"),
        (prune_, prune, {"per_row": 1}, ValueError, "give either density or per_row"),
        (prune_, prune, {"density": None, "per_row": 5}, ValueError, "per_row is 5"),
        (prune_, prune, {"scores": "size"}, ValueError, "scores='size'"),
        (prune_, prune, {"scores": 3}, TypeError, "scores must be a name"),
        (prune_, prune, {"scores": torch.ones(3)}, ValueError, "scores have shape (3,)"),
        (prune_, prune, {"scores": failing}, KeyError, "no input of this layer"),
        (change_pattern_, change, {"fraction": -1.0}, ValueError, "fraction is -1.0"),
        (change_pattern_, change, {"grow": "most"}, ValueError, "grow='most'"),
        (change_pattern_, change, {"grow": torch.ones(3, 4)}, ValueError, 'a generator is for grow="random" alone'),
        (change_pattern_, change, {"drop": "size"}, ValueError, "scores='size'"),
        (change_pattern_, change, {"even_rows": True}, ValueError, "even_rows needs a layer"),
    ):
        refuses(last, kind, text, functools.partial(function, layer, **(right | wrong if last else right)))
    moments = {"optimizer": optimizers[0]}
    for function, right, other in (
        (prune_, prune, {"density": 0.33}),
        (prune_, prune, {"scores": torch.ones(layer.nnz)}),
        (prune_, prune | moments, {"optimizer": None}),
        (change_pattern_, change, {"fraction": 0.6}),
        (change_pattern_, change, {"drop": torch.ones(layer.nnz)}),
        (change_pattern_, change | moments, {"optimizer": None}),
    ):
        text, options = "optimizer state to move differs between ranks", right | other if last else right
        raises(RuntimeError, text, function, layer, **options)
    agree(model, alone)
    for m, optimizer in zip((model, alone), optimizers, strict=True):
        same = torch.arange(m[0].nnz, device=device)
        change_pattern_(m[0], 0.4, grow="random", drop=same, optimizer=optimizer, generator=generator.manual_seed(3))
        prune_(m[0], 0.25, scores=same, optimizer=optimizer)
    agree(model, alone)
    state_agrees(optimizers, model, alone)


def data_parallel(device):
    """DDP, whose buffers are broadcast in each forward or at the start alone; ranks start with other patterns."""
    for options in ({}, {"forward_sync_buffers": False}):
        alone, _ = models(device)["each layer"]
        torch.manual_seed(dist.get_rank())
        more = {"device": device, "dtype": dtype_of(device)}
        model = nn.Sequential(
            BsrLinear(128, 96, True, (32, 32), density=0.42, activation="silu", **more),
            BsrLinear(96, 128, True, (32, 32), density=0.5, **more),
        )
        if dist.get_rank() == 0:
            model.load_state_dict(alone.state_dict())
        if options and "forward_sync_buffers" not in inspect.signature(DistributedDataParallel).parameters:
            model.load_state_dict(alone.state_dict())
            options = {"broadcast_buffers": False}
        wrapped = DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device], **options)
        optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9) for m in (model, alone)]
        train(wrapped, alone, optimizers)
        for m, optimizer in zip((model, alone), optimizers, strict=True):
            change_pattern_(m[0], 0.5, grow=torch.arange(12.0).view(3, 4).to(device), optimizer=optimizer,
                            drop=torch.arange(m[0].nnz), group=dist.group.WORLD)  # fmt: skip
        before, group = [t.clone() for t in model.state_dict().values()], dist.group.WORLD
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        raises(RuntimeError, "grow= or drop= differs between ranks", change_pattern_, model[0], 0.4, grow="random",
               generator=generator, group=group)  # fmt: skip
        scores = (1.0 if dist.get_rank() % 2 else -1.0) * torch.arange(model[0].nnz)
        raises(RuntimeError, "scores= differs between ranks", prune_, model[0], 0.2, scores=scores, group=group)
        last = dist.get_rank() == dist.get_world_size() - 1
        prune = functools.partial(prune_, model[0], 2.0 if last else 0.2, group=group)
        refuses(last, ValueError, "density 2.0 is not in", prune)
        assert all(map(torch.equal, before, model.state_dict().values()))
        patterns = [layer.weight.pattern for layer in model]
        train(wrapped, alone, optimizers, seed=2)
        agree(model, alone)
        same = [layer.weight.pattern is pattern for layer, pattern in zip(model, patterns, strict=True)]
        assert all(same) or not options, "the pattern was taken for a new one"


def blocks_that_move(device):
    """Only blocks whose rank changes are sent."""
    layer = BsrLinear(128, 1280, False, (32, 32), density=0.5, device=device, dtype=dtype_of(device))
    fully_shard(layer)
    sent, exchange = [], dist.all_to_all_single

    def counted(out, given, *sizes, **options):
        sent.append(len(given))
        return exchange(out, given, *sizes, **options)

    world, rank, before, old = dist.get_world_size(), dist.get_rank(), layer.pattern.clone().keys(), layer.nnz
    dist.all_to_all_single = counted
    try:
        prune_(layer, 0.4, scores=torch.rand(old, generator=torch.Generator().manual_seed(2)))
    finally:
        dist.all_to_all_single = exchange
    kept = torch.isin(before, layer.pattern.keys()).nonzero().flatten().tolist()
    ranks_of = [[i // -(-n // world) for i in index] for n, index in ((old, kept), (layer.nnz, range(layer.nnz)))]
    expected = sum(a == rank != b for a, b in zip(*ranks_of, strict=True))
    assert sent == [expected] and expected < old // world


def another_number_of_blocks(device):
    layer = fully_shard(BsrLinear(128, 96, True, (32, 32), density=0.42, device=device, dtype=dtype_of(device)))
    state = BsrLinear(128, 96, True, (32, 32), density=1.0, device=device, dtype=dtype_of(device)).state_dict()
    raises(RuntimeError, "cannot be resized; load before it is sharded", layer.load_state_dict, state)
    empty = BsrLinear(64, 64, True, (32, 32), density=0.0, device=device, dtype=dtype_of(device))
    raises(ValueError, "stores no block", fully_shard, copy.deepcopy(empty))
    empty.values.requires_grad_(False)
    near(fully_shard(copy.deepcopy(empty))(x := normal(4, 64, device=device)), empty(x))
    model, alone, _ = pair_of("root", device)
    assert facts(model) == facts(alone)
    for _ in range(2):
        raises(TypeError, "fully_shard has split 0 over ranks; call densify_ before", densify_, model)
        model.unshard()


def full_state(device):
    """Full state dicts to rank 0, and from rank 0 to all."""
    model, alone, optimizers = pair_of("each layer", device)
    train(model, alone, optimizers)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        fresh = models(device)["each layer"][0]
        fresh.load_state_dict(state)
        agree(fresh, alone)
    else:
        assert not state
    torch.manual_seed(3)
    other, _, _ = pair_of("each layer", device)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    given = alone.state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, given, options=options)
    agree(other, alone)


def made_on_the_meta_device(device):
    """Sharded without memory, then filled from a checkpoint or from rank 0's state."""
    alone, _ = models(device)["each layer"]
    folder, x = same_folder(), normal(8, 128, device=device)
    dcp.save(alone.state_dict(), checkpoint_id=folder)
    for source in ("checkpoint", "rank 0"):
        with torch.device("meta"):
            more = {"device": "meta", "dtype": dtype_of(device)}
            model = nn.Sequential(
                BsrLinear(128, 96, True, (32, 32), density=0.42, activation="silu", **more),
                BsrLinear(96, 128, True, (32, 32), density=0.5, **more),
            )
        for layer in model:
            fully_shard(layer)
        fully_shard(model).to_empty(device=device)
        if source == "checkpoint":
            state = model.state_dict()
            dcp.load(state, checkpoint_id=folder)
            model.load_state_dict(state)
        else:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(model, alone.state_dict() if dist.get_rank() == 0 else {}, options=options)
        agree(model, alone)
        near(gradient_with_selective_checkpointing(model, x), gradient_with_selective_checkpointing(alone, x))
        near(model(x), alone(x))


def same_folder() -> str:
    found = [tempfile.mkdtemp(prefix="cute-kernels-checkpoint-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def checkpoints(device):
    """One process's checkpoint loaded into shards, and that of shards into one process."""
    model, alone, optimizers = pair_of("each layer", device)
    train(model, alone, optimizers)
    folder = same_folder()
    for name, source, targets in (("alone", alone, (model,)), ("shards", model, (alone,))):
        expected = {key: whole(t).clone() for key, t in source.state_dict().items()}
        dcp.save(source.state_dict(), checkpoint_id=f"{folder}/{name}")
        for target in targets:
            with torch.no_grad():
                for p in target.parameters():
                    p.zero_()
            state = target.state_dict()
            dcp.load(state, checkpoint_id=f"{folder}/{name}")
            target.load_state_dict(state)
            for key, t in target.state_dict().items():
                assert torch.equal(whole(t), expected[key]), key


def checkpoint_of_another_world(device, folder, number):
    """Load the checkpoint `number`, train, and save the next one; one process does the same beside."""
    model, alone, optimizers = pair_of("each layer", device)
    if number:
        for m in (model, alone):
            state = m.state_dict()
            dcp.load(state, checkpoint_id=f"{folder}/{number - 1}")
            m.load_state_dict(state)
        agree(model, alone)
    train(model, alone, optimizers, seed=number)
    agree(model, alone)
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/{number}")


CHECKS = [
    fully_sharded_training,
    hybrid_sharding,
    pattern_changes,
    gradients_not_reduced,
    regrowth_by_gradients,
    choices_that_differ,
    choices_that_differ_in_a_group,
    arguments_of_one_rank,
    data_parallel,
    blocks_that_move,
    another_number_of_blocks,
    full_state,
    checkpoints,
    made_on_the_meta_device,
]
