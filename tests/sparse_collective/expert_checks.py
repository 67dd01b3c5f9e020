"""Checks of expert parallelism, which each rank runs; see tests/ranks.py. Each compares with one process."""

import contextlib
import copy
import types
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from sparse_collective.distributed import BsrExpertParallel, full_state_dict
from sparse_collective.nn import BsrExperts, BsrGroupedLinear, BsrLinear, BsrMixtureOfExperts, densify_

from .distributed_checks import dtype_of, facts, mesh_of, near, normal, raises, refuses

DIM, EXPERTS = 64, 8
WEIGHTS = ("gate", "up", "down")


def mixture(device, one_pattern=True, bias=True, density=0.4, seed=5):
    torch.manual_seed(seed)
    moe = BsrMixtureOfExperts(
        DIM, 96, EXPERTS, 2, bias, (32, 32), density=density, one_pattern=one_pattern, group_rows=64, device=device,
        dtype=dtype_of(device),
    )  # fmt: skip
    moe.route = types.MethodType(exact_route, moe)
    return moe


def exact_route(moe, x):
    """Choices that do not depend on the number of tokens, as those of rounded logits that are nearly equal do."""
    logits, choices = nn.functional.linear(x.double(), moe.router.weight.double()).topk(moe.top_k)
    return logits.float().softmax(-1), choices


def parallelized(alone, mesh):
    return parallelize_module(copy.deepcopy(alone), mesh, BsrExpertParallel())


def own_tokens(t, counts):
    """This rank's part of all tokens."""
    return t.split(counts)[dist.get_rank()]


def expert_part(layer, name, whole):
    """This rank's experts' part of one process's `values` or `bias`."""
    index = layer.entries(name)[layer.place.mesh.get_local_rank()]
    return whole.index_select(layer.split_dim(name), index)


def compare(model, alone, x, counts, call=lambda m, x, counts: m(x), names=WEIGHTS):
    """Results, and gradients of tokens, experts and the router, beside one process with the tokens of all ranks."""
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x)
    whole, mine = x.clone().requires_grad_(), own_tokens(x, counts).clone().requires_grad_()
    y = call(alone, whole, [len(x)])
    y.backward(dy)
    found = call(model, mine, counts)
    near(found, own_tokens(y, counts))
    found.backward(own_tokens(dy, counts))
    near(mine.grad, own_tokens(whole.grad, counts))
    for name in names:
        mine, theirs = model.get_submodule(name), alone.get_submodule(name)
        for which in ("values", "bias"):
            if (expected := getattr(theirs, which)) is not None:
                local, room = getattr(mine, which).grad.to_local(), mine.split_dim(which)
                expected = expert_part(mine, which, expected.grad)
                near(local.narrow(room, 0, expected.shape[room]), expected, 2)
    if hasattr(alone, "router"):
        total = model.router.weight.grad.float()
        dist.all_reduce(total)
        near(total.to(x.dtype), alone.router.weight.grad, 4)
    return found


def counts_of(total):
    """Numbers of tokens: the first rank has none."""
    ranks = dist.get_world_size()
    rest = [max(total // (ranks - 1) - 3 * i, 0) for i in range(ranks - 1)]  # of many ranks the last ones have none
    return [0, *rest]


def mixture_of_experts(device):
    mesh = mesh_of(device)
    for one_pattern, bias, density in ((True, True, 0.4), (False, False, 0.4), (True, False, 1.0)):
        alone = mixture(device, one_pattern, bias, density)
        model = parallelized(alone, mesh)
        assert isinstance(model, BsrMixtureOfExperts) and model.gate.values.placements == (Shard(0),)
        assert len(model.gate.values.to_local()) * mesh.size() == len(alone.gate.values)
        even = [25] * mesh.size()
        for counts in (even, counts_of(150)):
            for m in (model, alone):
                m.zero_grad()
            compare(model, alone, normal(sum(counts), DIM, device=device), counts)
        with torch.no_grad():
            x = normal(3, sum(even), DIM, device=device)
            near(model(x[:, : even[0]]), alone(x[:, : even[0]]))


def some_experts_get_all_tokens(device):
    """Also ranks to which no token goes, and a call without any token."""
    mesh = mesh_of(device)
    alone = mixture(device)
    with torch.no_grad():
        alone.router.weight[2:, 0] = -50.0
    model = parallelized(alone, mesh)
    x = normal(80, DIM, device=device)
    x[:, 0] = 3.0
    compare(model, alone, x, [80 // mesh.size()] * mesh.size())
    y = model(x[:0].requires_grad_())
    y.sum().backward()
    assert y.shape == (0, DIM)


def experts_of_transformers(device):
    """BsrExperts, whose experts store different numbers of blocks."""
    mesh, more = mesh_of(device), {"device": device, "dtype": dtype_of(device)}
    masks = torch.rand(EXPERTS, 6, 2) < 0.5, torch.rand(EXPERTS, 2, 3) < 0.5
    masks[0][5], masks[1][1] = False, False
    alone = BsrExperts(
        BsrGroupedLinear(EXPERTS, DIM, 192, True, (32, 32), one_pattern=False, mask=masks[0], **more),
        BsrGroupedLinear(EXPERTS, 96, DIM, True, (32, 32), one_pattern=False, mask=masks[1], **more),
        "gelu", 64,
    )  # fmt: skip
    model = parallelized(alone, mesh)
    counts = counts_of(120)
    x = normal(sum(counts), DIM, device=device)
    index, weights = torch.randn(len(x), EXPERTS).topk(2, -1).indices.to(device), normal(len(x), 2, device=device)

    def call(m, x, counts):
        if len(counts) == 1:
            return m(x, index, weights)
        return m(x, own_tokens(index, counts), own_tokens(weights, counts))

    compare(model, alone, x, counts, call, ("gate_up", "down"))
    raises(TypeError, "parallelize_module has split", densify_, model)
    assert facts(model) == facts(alone)
    state = full_state_dict(model, rank0_only=False)
    assert all(torch.equal(state[name], t.cpu()) for name, t in alone.state_dict().items())
    other = parallelized(alone, mesh)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(state)
    assert torch.equal(call(other, own_tokens(x, counts), counts), call(model, own_tokens(x, counts), counts))


def choices_that_are_no_expert(device):
    """Wrong choices of one rank raise on all ranks, and the next call is right."""
    mesh = mesh_of(device)
    one, last = ({"device": device, "dtype": dtype_of(device), "density": 0.5}, dist.get_world_size() - 1)
    alone = BsrExperts(
        BsrGroupedLinear(EXPERTS, DIM, 192, False, (32, 32), **one),
        BsrGroupedLinear(EXPERTS, 96, DIM, False, (32, 32), **one), "silu", 64,
    )  # fmt: skip
    model = parallelized(alone, mesh)
    x, weights = normal(3, DIM, device=device), torch.ones(3, 2, device=device)
    right = torch.tensor([[0, 7], [1, 6], [2, 5]], device=device)
    for wrong in ([[0, EXPERTS], [1, -1], [2, 3]], [[0, 2**40], [1, -(2**40)], [2, 3]]):
        choices = torch.tensor(wrong, device=device) if dist.get_rank() == last else right
        text = f"choices must be in [0, 8), the experts of all ranks; 2 of 6 on rank {last} are not"
        raises(ValueError, text, model, x, choices, weights)
        near(model(x, right, weights), alone(x, right, weights))


def tokens_of_one_rank(device):
    """Tokens that one rank alone has wrong, or its router, raise on all ranks, and the next call is right."""
    alone, last = mixture(device), dist.get_rank() == dist.get_world_size() - 1
    model, x = parallelized(alone, mesh_of(device)), normal(10, DIM, device=device)
    others = ValueError, f"ranks [{dist.get_world_size() - 1}] raised an error of their tokens or router"
    for wrong, kind, text in (
        (x[:, :32], ValueError, "tokens have shape (10, 32), and experts 64 features"),
        (x.double(), TypeError, "tokens are torch.float64 but experts"),
    ):
        refuses(last, kind, text, model, wrong if last else x, others=others)
        near(model(x), alone(x))
    compiled = torch.compile(model, backend="aot_eager")
    near(compiled(x), alone(x))
    refuses(last, ValueError, "tokens have shape (10, 32)", compiled, x[:, :32] if last else x, others=others)
    broken = mock.patch.object(model, "route", side_effect=KeyError("an error of a router"))
    with broken if last else contextlib.nullcontext():
        refuses(last, KeyError, "an error of a router", model, x, others=others)
    near(model(x), alone(x))


def wrapped_and_cast_experts(device):
    """Layers of experts inside of checkpoint_wrapper; and under FSDP2, which casts tokens and values."""
    ranks = dist.get_world_size()
    mesh = mesh_of(device, ranks // 2, 2, names=("dp", "ep"))
    alone, x = mixture(device), normal(10, DIM, device=device)
    model = parallelize_module(copy.deepcopy(alone), mesh["ep"], BsrExpertParallel())
    for name in WEIGHTS:
        setattr(model, name, checkpoint_wrapper(getattr(model, name)))
    near(model(x), alone(x))
    model = parallelize_module(copy.deepcopy(alone), mesh["ep"], BsrExpertParallel())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in (*(getattr(model, name) for name in WEIGHTS), model):
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    model.route = types.MethodType(exact_route, model)
    near(model(x.bfloat16()), alone.bfloat16()(x.bfloat16()), 4)


def repeated_calls(device):
    """Results and gradients are bitwise identical in each call."""
    model = parallelized(mixture(device), mesh_of(device))
    x, runs = normal(400, DIM, device=device), []
    for _ in range(3):
        model.zero_grad()
        mine = x.clone().requires_grad_()
        y = model(mine)
        y.square().sum().backward()
        runs.append([y, mine.grad, *(p.grad.to_local() for p in model.get_submodule("up").parameters())])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def frozen_and_recomputed(device):
    """Tokens without gradients, frozen experts, activation checkpoints."""
    model, x = parallelized(mixture(device), mesh_of(device)), normal(30, DIM, device=device)
    parameters, found = (model.gate.values, model.down.values), []
    for leaf in (x, x.clone().requires_grad_()):
        model.zero_grad()
        checkpointed = torch.utils.checkpoint.checkpoint(model, leaf, use_reentrant=False)
        (checkpointed if leaf.requires_grad else model(leaf)).square().mean().backward()
        found.append([p.grad.to_local().clone() for p in parameters])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    model.requires_grad_(False)
    leaf.grad = None
    model(leaf).square().mean().backward()
    assert leaf.grad.isfinite().all() and leaf.grad.abs().max() > 0


def compiled_experts(device):
    alone = mixture(device)
    model = parallelized(alone, mesh_of(device))
    torch._dynamo.reset()
    net = nn.Sequential(nn.ReLU(), model)  # exact, so that choices are the same
    fast = torch.compile(net, backend="eager" if device.type == "cpu" else "inductor")
    for tokens in (40, 24 + dist.get_rank(), 33):
        x = normal(tokens, DIM, device=device)
        results = []
        for m in (fast, net):
            mine = x.clone().requires_grad_()
            net.zero_grad()
            y = m(mine)
            y.square().mean().backward()
            results.append((y, mine.grad, model.up.values.grad.to_local().clone()))
        for found, expected in zip(*results, strict=True):
            near(found, expected, 2)


def trained_experts(device):
    """Steps of an optimizer, the state before and after, and one process's state."""
    mesh, alone = mesh_of(device), mixture(device, one_pattern=False)
    model = parallelized(alone, mesh)
    pairs = [(m, torch.optim.AdamW([p for n, p in m.named_parameters() if "router" not in n], lr=1e-3, eps=1e-3))
             for m in (model, alone)]  # fmt: skip
    counts = [16] * mesh.size()
    for _ in range(3):
        x = normal(sum(counts), DIM, device=device)
        for m, optimizer in pairs:
            y = m(own_tokens(x, counts) if m is model else x)
            y.float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    slack = 300 if device.type == "cuda" else 3
    state = full_state_dict(model, rank0_only=False)
    assert state.keys() == alone.state_dict().keys()
    for name, t in alone.state_dict().items():
        near(state[name].double(), t.cpu().double(), slack)
    fresh = parallelized(mixture(device, one_pattern=False), mesh)
    for saved in ({name: t.clone() for name, t in model.state_dict().items()}, state):
        with torch.no_grad():
            for p in fresh.parameters():
                p.zero_()
        fresh.load_state_dict(saved)
        assert torch.equal(fresh(x), model(x))
    other = mixture(device, one_pattern=False, seed=6).state_dict()
    raises(RuntimeError, "another pattern; load it before", fresh.load_state_dict, other)


def experts_with_fully_shard(device):
    """Experts over one mesh dimension, FSDP2 of all parameters over the other."""
    world = dist.get_world_size()
    mesh = mesh_of(device, world // 2, 2, names=("dp", "ep"))
    last = BsrLinear(DIM, DIM, False, (32, 32), density=0.5, device=device, dtype=dtype_of(device))
    alone = nn.Sequential(mixture(device), last)
    model = parallelize_module(copy.deepcopy(alone), mesh["ep"], {"0": BsrExpertParallel()})
    fully_shard(model, mesh=mesh["dp"])
    x = normal(world * 12, DIM, device=device)
    y = alone(x)
    y.float().square().sum().backward()
    mine = x.chunk(world)[dist.get_rank()]
    found = model(mine)
    near(found, y.chunk(world)[dist.get_rank()])
    found.float().square().sum().backward()
    for name in WEIGHTS:  # FSDP averages over its mesh
        theirs = getattr(alone[0], name).values.grad
        near(getattr(model[0], name).values.grad.full_tensor() * (world // 2), theirs, 4)


def experts_beside_fully_shard(device):
    """Experts and FSDP2 of all other parameters over one mesh, as docs/howto/distributed.md says."""
    mesh, world = mesh_of(device), dist.get_world_size()
    last = BsrLinear(DIM, DIM, False, (32, 32), density=0.5, device=device, dtype=dtype_of(device))
    alone = nn.Sequential(mixture(device), last)
    model = parallelize_module(copy.deepcopy(alone), mesh, {"0": BsrExpertParallel()})
    fully_shard(model, mesh=mesh, ignored_params={p for p in model.parameters() if isinstance(p, DTensor)})
    x = normal(world * 12, DIM, device=device)
    y, found = alone(x), model(x.chunk(world)[dist.get_rank()])
    near(found, y.chunk(world)[dist.get_rank()])
    for out in (y, found):
        out.float().square().sum().backward()
    for name, p in model.named_parameters():  # those of experts are sums over ranks, FSDP2 averages
        of_experts = name.startswith("0.") and "router" not in name
        near(p.grad.full_tensor() * (1 if of_experts else world), alone.get_parameter(name).grad, 4)


def error_in_one_rank(device):
    """The last rank raises between two layers, whose transfers the others enter."""
    model = parallelized(mixture(device), mesh_of(device))
    x = model(normal(8, DIM, device=device))
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ArithmeticError("this rank had an error")
    model(x)


def refused_experts(device):
    mesh, style = mesh_of(device), BsrExpertParallel()
    more = {"density": 0.5, "device": device, "dtype": dtype_of(device)}
    odd = BsrMixtureOfExperts(DIM, 64, 3, 1, False, (32, 32), **more)
    raises(ValueError, f"3 experts are not a multiple of {mesh.size()} ranks", parallelize_module, odd, mesh, style)
    linear = BsrLinear(DIM, DIM, False, (32, 32), **more)
    raises(TypeError, "takes BsrMixtureOfExperts, BsrExperts; got BsrLinear", parallelize_module, linear, mesh, style)
    model = parallelized(mixture(device), mesh)
    raises(TypeError, "got ParallelMixtureOfExperts", parallelize_module, model, mesh, style)
    raises(TypeError, "pass this rank's tokens", model, distribute_tensor(normal(8, DIM, device=device), mesh))
    nested = mesh_of(device, 2, dist.get_world_size() // 2, names=("a", "b"))
    raises(ValueError, "the mesh has 2 dimensions", style._apply, mixture(device), nested)
    empty = BsrMixtureOfExperts(DIM, 64, 4, 1, False, (32, 32), density=0.5, device="meta")
    raises(ValueError, "meta device", parallelize_module, empty, mesh, style)
    other = mixture(device, seed=dist.get_rank())
    raises(RuntimeError, "pattern of the layer differs between ranks", parallelize_module, other, mesh, style)
    last, other = dist.get_rank() == dist.get_world_size() - 1, mixture(device)
    other.group_rows = 128 if last else 64
    raises(RuntimeError, "pattern of the layer differs between ranks", parallelize_module, other, mesh, style)
    refuses(last, TypeError, "got BsrLinear", parallelize_module, linear if last else mixture(device), mesh, style)
    refuses(last, ValueError, "3 experts are not a multiple", parallelize_module, odd if last else mixture(device),
            mesh, style)  # fmt: skip


def checkpoint_of_another_world(device, folder, number):
    """Load the checkpoint `number` into any number of ranks, change it, and save the next one."""
    for one_pattern in (True, False):
        alone = mixture(device, one_pattern)
        model, path = parallelized(alone, mesh_of(device)), f"{folder}/{one_pattern}"
        if number:
            for m in (model, alone):
                state = m.state_dict()
                dcp.load(state, checkpoint_id=f"{path}-{number - 1}")
                m.load_state_dict(state)
        x = normal(12, DIM, device=device)
        near(model(x), alone(x))
        state = full_state_dict(model, rank0_only=False)
        assert all(torch.equal(state[name], t.cpu()) for name, t in alone.state_dict().items())
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.25).add_(0.01)
        dcp.save(model.state_dict(), checkpoint_id=f"{path}-{number}")


CHECKS = [
    mixture_of_experts,
    some_experts_get_all_tokens,
    experts_of_transformers,
    choices_that_are_no_expert,
    tokens_of_one_rank,
    wrapped_and_cast_experts,
    repeated_calls,
    frozen_and_recomputed,
    compiled_experts,
    trained_experts,
    experts_with_fully_shard,
    experts_beside_fully_shard,
    refused_experts,
]
