"""Checks of sharded layers, which each rank runs; see tests/ranks.py. Each compares with one process.

Weights are FP32 on the CPU and BF16 on a GPU, and every rank draws the same numbers.
"""

import copy
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from sparse_collective import bsr_linear, random_bsr
from sparse_collective.distributed import (
    BsrColwiseParallel,
    BsrRowwiseParallel,
    distribute_bsr,
    full_state_dict,
    partition_hidden,
)
from sparse_collective.distributed.partition import Partition
from sparse_collective.nn import (
    BsrGroupedLinear,
    BsrLinear,
    BsrMixtureOfExperts,
    SwiGLU,
    sparsity,
)

from ..recomputed import recomputed


def dtype_of(device):
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def near(found, expected, slack=1.0):
    """Within FP32's or BF16's rounding of a tensor of this size."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if found.numel():
        found, expected, rounding = found.detach(), expected.detach(), 3e-2 if found.dtype is torch.bfloat16 else 1e-4
        error, size = (found.double() - expected.double()).abs().max().item(), expected.abs().max().item()
        assert error <= slack * rounding * max(1e-3, size), error


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def normal(*shape, device, dtype=None):
    return torch.randn(*shape).to(device, dtype or dtype_of(device))


def mesh_of(device, *shape, names=None):
    return init_device_mesh(device.type, shape or (dist.get_world_size(),), mesh_dim_names=names)


def distributed_matrix(device):
    W = random_bsr((384, 256), (32, 32), density=0.3, dtype=dtype_of(device), device=device)
    mesh, x = mesh_of(device), normal(9, 256, device=device)
    rank, y = dist.get_rank(), bsr_linear(x, W)
    rows = distribute_bsr(W, mesh, [Shard(0)])
    heights = [part.shape[0] for part in W.split(0, mesh.size())]
    near(bsr_linear(x, rows), y.split(heights, -1)[rank])
    columns = distribute_bsr(W, mesh, [Shard(1)], balance="blocks")
    widths = [part.shape[1] for part in W.split(1, mesh.size(), balance="blocks")]
    total = bsr_linear(x.split(widths, -1)[rank].contiguous(), columns).float()
    dist.all_reduce(total)
    near(total.to(y.dtype), y)
    assert distribute_bsr(W, mesh, [Replicate()]) is W


def raises(kind, text, function, *args, **options):
    try:
        function(*args, **options)
    except kind as error:
        assert text in str(error), error
        return
    raise AssertionError(f"no {kind.__name__}")


def refuses(here, kind, text, function, *args, others=(RuntimeError, "")):
    """The error on the rank that has a wrong argument, and on the others one that tells of it."""
    if here:
        raises(kind, text, function, *args)
    else:
        raises(others[0], others[1] or f"raised {kind.__name__}: ", function, *args)


def compare(parallel, alone, inputs, *, part=lambda t: t, out=lambda t: t, check_weights=True):
    """Outputs and gradients of x of a tensor-parallel module beside those of the whole one."""
    x = inputs[0].clone().requires_grad_()
    mine = part(x.detach()).clone().requires_grad_()
    y = alone(x, *inputs[1:])
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
    y.backward(dy)
    found = parallel(mine, *inputs[1:])
    near(found, out(y))
    found.backward(out(dy))
    near(mine.grad, part(x.grad))
    return x


def values_agree(layer, alone):
    """This rank's values, and their gradients, are those of the whole layer at its blocks."""
    from sparse_collective.distributed.place import indices_of

    pattern = alone.pattern
    _, _, positions = indices_of(pattern, layer.place)[layer.place.mesh.get_local_rank()]
    for mine, theirs in ((layer.values, alone.values), (layer.values.grad, alone.values.grad)):
        local = mine.to_local().narrow(-3, 0, layer.nnz)
        near(local, theirs.index_select(-3, positions))


def pair(device, bias=True, activation="silu", block=(32, 32)):
    up = BsrLinear(128, 256, bias, block, density=0.4, activation=activation, device=device, dtype=dtype_of(device))
    down = BsrLinear(256, 96, bias, block, density=0.4, device=device, dtype=dtype_of(device))
    return nn.Sequential(up, down)


def column_then_row(device):
    for balance in (None, "blocks"):
        for bias in (True, False):
            alone = pair(device, bias)
            model, mesh = copy.deepcopy(alone), mesh_of(device)
            partition = None if balance is None else partition_hidden(model[0], model[1], mesh.size(), balance=balance)
            plan = {"0": BsrColwiseParallel(partition=partition), "1": BsrRowwiseParallel(partition=partition)}
            parallelize_module(model, mesh, plan)
            assert isinstance(model[0], BsrLinear)
            compare(model, alone, [normal(20, 128, device=device)])
            for layer, other in zip(model, alone, strict=True):
                values_agree(layer, other)
            if bias:
                near(model[1].bias.grad.full_tensor(), alone[1].bias.grad)


def sequence_parallel(device):
    mesh = mesh_of(device)
    rank, parts = dist.get_rank(), mesh.size()
    for dim in (0, 1):
        alone = pair(device)
        model = copy.deepcopy(alone)
        plan = {
            "0": BsrColwiseParallel(input_layouts=Shard(dim)), "1": BsrRowwiseParallel(output_layouts=Shard(dim)),
        }  # fmt: skip
        parallelize_module(model, mesh, plan)

        def part(t, dim=dim):
            return t.chunk(parts, dim)[rank]

        compare(model, alone, [normal(2 * parts, 3 * parts, 128, device=device)], part=part, out=part)
        for layer, other in zip(model, alone, strict=True):
            values_agree(layer, other)
        near(model[1].bias.grad.full_tensor(), alone[1].bias.grad)
        with torch.autocast(device.type, torch.bfloat16):
            y = model.float()(part(x := normal(2 * parts, 3 * parts, 128, device=device).float()))
            near(y, part(alone.float()(x)))
        assert y.dtype is torch.bfloat16


def overlapped(device):
    """Communication beside the GEMMs, forward and backward, with and without gradients."""
    mesh = mesh_of(device)
    rank, parts = dist.get_rank(), mesh.size()

    def part(t):
        return t.chunk(parts)[rank]

    for bias in (True, False):
        linear = pair(device, bias, activation="gelu")
        gated = SwiGLU(128, 512, bias, (64, 32), density=0.4, device=device, dtype=dtype_of(device))
        for alone, names in ((linear, ("0", "1")), (gated, ("gate_up", "down"))):
            model = copy.deepcopy(alone)
            partition = partition_hidden(model.get_submodule(names[0]), model.get_submodule(names[1]), parts)
            parallelize_module(model, mesh, {
                names[0]: BsrColwiseParallel(input_layouts=Shard(0), partition=partition, overlap=True),
                names[1]: BsrRowwiseParallel(output_layouts=Shard(0), partition=partition, overlap=True),
            })  # fmt: skip
            compare(model, alone, [normal(64, 3, 128, device=device)], part=part, out=part)
            for name in names:
                values_agree(model.get_submodule(name), alone.get_submodule(name))
            x = normal(64, 128, device=device)
            for mode in (True, False):
                with torch.no_grad():
                    near(model.train(mode)(part(x)), part(alone.train(mode)(x)), 2)
        if bias:
            near(model.down.bias.grad.full_tensor(), alone.down.bias.grad)
        assert model(normal(0, 3, 128, device=device)).shape == (0, 3, 128), "no tokens"
    for name in names:
        layer = model.get_submodule(name)
        layer.forward = mock.Mock(side_effect=layer.forward)
        near(model(part(x)), part(alone(x)), 2)
        layer.forward.assert_called_once()
        del layer.forward
    style = BsrColwiseParallel(overlap=True)
    raises(ValueError, "overlap=True needs", parallelize_module, pair(device)[0], mesh, style)


def overlapped_sizes(device):
    """Numbers of tokens that change from call to call; twice, with bitwise equal results.

    With a hook the layers run one after the other, each with its own schedule.
    """
    mesh = mesh_of(device)
    rank, parts = dist.get_rank(), mesh.size()
    alone = SwiGLU(256, 512, blocksize=(128, 128), density=0.5, device=device, dtype=dtype_of(device))
    model = copy.deepcopy(alone)
    partition = partition_hidden(model.gate_up, model.down, parts)
    parallelize_module(model, mesh, {
        "gate_up": BsrColwiseParallel(input_layouts=Shard(0), partition=partition, overlap=True),
        "down": BsrRowwiseParallel(output_layouts=Shard(0), partition=partition, overlap=True),
    })  # fmt: skip

    def results(x, dy, mode):
        with torch.set_grad_enabled(mode):
            leaf = x.chunk(parts)[rank].requires_grad_(mode)
            y = model.train(mode)(leaf)
        return (y, *torch.autograd.grad(y, (leaf, *model.parameters()), dy.chunk(parts)[rank])) if mode else (y,)

    for hooked in (False, True):
        if hooked:
            model.down.register_forward_hook(lambda *_: None)
        for tokens in (512, 1400, 512, 300):
            x, dy = (normal(parts * tokens, 256, device=device) for _ in range(2))
            leaf = x.clone().requires_grad_()
            expected = alone.train()(leaf)
            dx = torch.autograd.grad(expected, leaf, dy)[0]
            for mode in (True, False):
                first, second = results(x, dy, mode), results(x, dy, mode)
                assert all(torch.equal(whole(a), whole(b)) for a, b in zip(first, second, strict=True))
                for found, of_all in zip(first[:2], (expected, dx), strict=False):
                    near(found, of_all.chunk(parts)[rank], 2)


def a_rank_without_features(device):
    """One block of hidden features, which one rank has."""
    mesh, more = mesh_of(device), {"density": 1.0, "device": device, "dtype": dtype_of(device)}
    alone = nn.Sequential(BsrLinear(64, 32, True, (32, 32), **more), BsrLinear(32, 64, True, (32, 32), **more))
    model = copy.deepcopy(alone)
    parallelize_module(model, mesh, {
        "0": BsrColwiseParallel(input_layouts=Shard(0), overlap=True),
        "1": BsrRowwiseParallel(output_layouts=Shard(0), overlap=True),
    })  # fmt: skip
    assert sum(layer.nnz > 0 for layer in model) == (2 if dist.get_rank() == 0 else 0)
    rank, parts = dist.get_rank(), mesh.size()
    compare(model, alone, [normal(4 * parts, 64, device=device)], part=lambda t: t.chunk(parts)[rank],
            out=lambda t: t.chunk(parts)[rank])  # fmt: skip


def outputs_of_a_column(device):
    alone = pair(device)[0]
    mesh = mesh_of(device)
    gathered = parallelize_module(copy.deepcopy(alone), mesh, BsrColwiseParallel(output_layouts=Replicate()))
    compare(gathered, alone, [normal(20, 128, device=device)])
    kept = parallelize_module(copy.deepcopy(alone), mesh, BsrColwiseParallel(use_local_output=False))
    y = kept(x := normal(20, 128, device=device))
    assert y.placements == (Shard(1),)
    near(y.full_tensor(), alone(x))


def inputs_of_a_row(device):
    """Replicated and token-sharded x, of a weight whose columns are partly empty."""
    mesh = mesh_of(device)
    rank, parts = dist.get_rank(), mesh.size()
    mask = torch.rand(3, 8) < 0.4
    mask[:, [1, 6]] = False
    alone = BsrLinear(256, 96, True, (32, 32), mask=mask, activation="gelu", device=device, dtype=dtype_of(device))
    x = normal(2 * parts, parts, 256, device=device)
    row = parallelize_module(copy.deepcopy(alone), mesh, BsrRowwiseParallel(input_layouts=Replicate()))
    assert sum(map(len, row.place.blocks)) <= 6
    compare(row, alone, [x])
    for dim, layout in ((0, Shard(0)), (1, Shard(1)), (1, Shard(-2))):
        style = BsrRowwiseParallel(input_layouts=layout, output_layouts=Shard(dim))
        row = parallelize_module(copy.deepcopy(alone), mesh, style)
        alone.zero_grad()

        def part(t, dim=dim):
            return t.chunk(parts, dim)[rank]

        compare(row, alone, [x], part=part, out=part)
        values_agree(row, alone)
    style = BsrRowwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0), use_local_output=False)
    row = parallelize_module(copy.deepcopy(alone), mesh, style)
    near(row(distribute_tensor(x[:5], mesh, [Shard(0)])).full_tensor(), alone(x[:5]))  # 5 tokens: ranks differ


def dtensors_of_uneven_rows(device):
    """A DTensor with whole tokens, of a layer whose ranks have unequal or permuted parts of its columns."""
    mesh, ranks = mesh_of(device), range(dist.get_world_size())
    more, x = {"device": device, "dtype": dtype_of(device)}, normal(9, 32 * (len(ranks) + 1), device=device)
    alone = BsrLinear(x.shape[1], 96, True, (32, 32), density=0.6, activation="gelu", **more)
    permuted = Partition(32, tuple((rank, len(ranks)) if rank == 1 else (rank,) for rank in ranks[::-1]))
    for partition, reason in ((None, "unequal"), (permuted, "permuted")):
        row = parallelize_module(copy.deepcopy(alone), mesh, BsrRowwiseParallel(partition=partition))
        style = BsrRowwiseParallel(input_layouts=Replicate(), partition=partition)
        whole = parallelize_module(copy.deepcopy(alone), mesh, style)
        for placement in (Replicate(), Shard(0), Shard(1)):
            placed = distribute_tensor(x, mesh, [placement])
            if placement == Shard(1):
                text = f"this layer's ranks are {reason}; pass input_layouts=Replicate() to the style"
                raises(ValueError, text, row, placed)
            for layer in (whole,) if placement == Shard(1) else (whole, row):
                mine, theirs = placed.detach().requires_grad_(), x.detach().requires_grad_()
                y, found = alone(theirs), layer(mine)
                near(found, y)
                dy = normal(*y.shape, device=device)
                y.backward(dy)
                found.backward(dy)
                near(mine.grad.full_tensor(), theirs.grad)


def gated(device):
    mesh = mesh_of(device)
    for block, balance in (((128, 64), None), ((32, 32), "blocks"), ((64, 128), "blocks"), ((64, 32), "extent")):
        alone = SwiGLU(128, 512, True, block, density=0.4, device=device, dtype=dtype_of(device))
        model = copy.deepcopy(alone)
        partition = (
            None if balance is None else partition_hidden(model.gate_up, model.down, mesh.size(), balance=balance)
        )
        plan = {"gate_up": BsrColwiseParallel(partition=partition), "down": BsrRowwiseParallel(partition=partition)}
        parallelize_module(model, mesh, plan)
        compare(model, alone, [normal(20, 128, device=device)])
        values_agree(model.gate_up, alone.gate_up)
        values_agree(model.down, alone.down)
        near(model.eval()(x := normal(20, 128, device=device)), alone.eval()(x), 2)


def experts(device):
    mesh = mesh_of(device)
    for one_pattern in (True, False):
        more = {"one_pattern": one_pattern, "density": 0.4, "device": device, "dtype": dtype_of(device)}
        up = BsrGroupedLinear(3, 64, 256, True, (32, 32), activation="silu", **more)
        down = BsrGroupedLinear(3, 256, 96, True, (32, 32), **more)
        alone = nn.ModuleList([up, down])
        model = copy.deepcopy(alone)
        partition = partition_hidden(model[0], model[1], mesh.size())
        parallelize_module(
            model, mesh, {"0": BsrColwiseParallel(partition=partition), "1": BsrRowwiseParallel(partition=partition)}
        )
        offs = torch.tensor([5, 5, 40], dtype=torch.int32, device=device)
        x, dy = normal(40, 64, device=device), normal(40, 96, device=device)
        results = []
        for layers in (model, alone):
            y = layers[1](layers[0](x, offs), offs)
            y.backward(dy)
            results.append(y)
        near(*results)
        for layer, other in zip(model, alone, strict=True):
            values_agree(layer, other)
        near(model[1].bias.grad.full_tensor(), alone[1].bias.grad)


def mixture(device):
    mesh, more = mesh_of(device), {"group_rows": 64, "device": device, "dtype": dtype_of(device)}
    for one_pattern in (True, False):
        alone = BsrMixtureOfExperts(
            128, 256, 3, 2, False, (32, 32), density=0.4, one_pattern=one_pattern, **more
        )  # fmt: skip
        model = copy.deepcopy(alone)
        partition = partition_hidden([model.gate, model.up], model.down, mesh.size())
        column, row = BsrColwiseParallel(partition=partition), BsrRowwiseParallel(partition=partition)
        parallelize_module(model, mesh, {"gate": column, "up": column, "down": row})
        compare(model, alone, [normal(40, 128, device=device)])
        for name in ("gate", "up", "down"):
            values_agree(model.get_submodule(name), alone.get_submodule(name))
        near(model.router.weight.grad, alone.router.weight.grad)


def gradient_with_selective_checkpointing(model, x):
    """The gradient of x, with concatenations saved."""

    def block(x):
        return torch.cat((model(x), x), -1).square()

    leaf = x.clone().requires_grad_()
    recomputed(block, leaf).sum().backward()
    return leaf.grad


def selective_checkpointing(device):
    alone, x = pair(device), normal(20, 128, device=device)
    found, expected = (
        gradient_with_selective_checkpointing(model, x) for model in (parallelized(alone, mesh_of(device)), alone)
    )
    near(found, expected)


def compiled(device):
    """Tensor-parallel layers that are compiled before any eager call: results and gradients of eager calls.

    Ranks hold different numbers of blocks, so that some read a part of their values' memory.
    """
    mesh, x, alone = mesh_of(device), normal(20, 128, device=device), pair(device)
    model, eager = parallelized(alone, mesh), parallelized(alone, mesh)
    assert any(len(set(map(len, layer.entries("values")))) > 1 for layer in model)
    torch._dynamo.reset()
    results = [torch.compile(model, backend="aot_eager", fullgraph=True)(x), eager(x)]
    near(*results)
    for y in results:
        y.float().square().sum().backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        near(mine.grad.to_local(), theirs.grad.to_local())
    more, frames = {"density": 0.3, "device": device, "dtype": dtype_of(device)}, CompileCounter()
    swiglu = SwiGLU(128, 512, False, (32, 32), **more)
    mixture = BsrMixtureOfExperts(128, 512, 3, 2, False, (32, 32), group_rows=64, **more)
    for alone, names in ((swiglu, ("gate_up", "down")), (mixture, ("gate", "up", "down"))):
        torch._dynamo.reset()
        frames.clear()
        model, layers = copy.deepcopy(alone), [alone.get_submodule(name) for name in names]
        partition = partition_hidden(layers[:-1], layers[-1], mesh.size())
        plan = {name: BsrColwiseParallel(partition=partition) for name in names[:-1]}
        parallelize_module(model, mesh, plan | {names[-1]: BsrRowwiseParallel(partition=partition)})
        call = torch.compile(model, backend=frames)
        for _ in range(3):
            near(call(x), alone(x))
        assert frames.frame_count == 1, frames.frame_count


def parallelized(alone, mesh, **options):
    """A copy of a SwiGLU or of a pair, over a mesh."""
    model = copy.deepcopy(alone)
    names = ("gate_up", "down") if isinstance(model, SwiGLU) else ("0", "1")
    partition = partition_hidden(model.get_submodule(names[0]), model.get_submodule(names[1]), mesh.size())
    plan = {
        names[0]: BsrColwiseParallel(partition=partition, **options),
        names[1]: BsrRowwiseParallel(partition=partition),
    }
    return parallelize_module(model, mesh, plan)


def optimized(device):
    """Steps of AdamW with clipped gradients, and the full state, as in one process."""
    torch.manual_seed(4)
    mesh, alone = mesh_of(device), SwiGLU(128, 512, True, (64, 32), density=0.3, device=device, dtype=dtype_of(device))
    model = parallelized(alone, mesh)
    assert all(hasattr(p, "full_tensor") for p in model.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-4) for m in (model, alone)]
    for _ in range(3):
        x, norms = normal(20, 128, device=device), []
        for m, optimizer in zip((model, alone), optimizers, strict=True):
            m(x).float().square().mean().backward()
            norms.append(whole(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        near(*norms)
    near(model(x), alone(x), 2)
    slack = 300 if device.type == "cuda" else 3
    state = full_state_dict(model, rank0_only=False)
    assert state.keys() == alone.state_dict().keys()
    for name, t in alone.state_dict().items():
        near(state[name].double(), t.cpu().double(), slack)
    assert not full_state_dict(model) or dist.get_rank() == 0


def facts(model):
    """sparsity(model) without the names of classes."""
    return [(c.name, c.shape, c.stored, c.blocks, c.before, c.after) for c in sparsity(model).changes]


def states(device):
    """A layer's own state, and one process's, load into tensor-parallel layers."""
    mesh = mesh_of(device)
    for alone in (pair(device), SwiGLU(128, 512, True, (64, 32), density=0.3, device=device, dtype=dtype_of(device))):
        model, x = parallelized(alone, mesh), normal(20, 128, device=device)
        saved = {name: t.clone() for name, t in model.state_dict().items()}
        assert facts(model) == facts(alone)
        y, whole_state = model(x).clone(), full_state_dict(model, rank0_only=False)
        assert all(torch.equal(whole_state[name], t.cpu()) for name, t in alone.state_dict().items())
        for state in (saved, whole_state):
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            model.load_state_dict(state)
            assert torch.equal(model(x), y)
    other = pair(device).state_dict()
    raises(RuntimeError, "another pattern; load it before", parallelized(pair(device), mesh).load_state_dict, other)


def with_fully_shard(device):
    """Tensor parallel over one mesh dimension, FSDP2 over the other."""
    world = dist.get_world_size()
    mesh = mesh_of(device, world // 2, 2, names=("dp", "tp"))
    torch.manual_seed(4)
    alone = SwiGLU(128, 512, True, (64, 32), density=0.3, device=device, dtype=dtype_of(device))
    model = fully_shard(parallelized(alone, mesh["tp"]), mesh=mesh["dp"])
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9) for m in (model, alone)]
    rank = mesh["dp"].get_local_rank()
    for _ in range(3):
        x = normal(20, 128, device=device)
        for m, part, optimizer in ((model, x.chunk(world // 2)[rank], optimizers[0]), (alone, x, optimizers[1])):
            optimizer.zero_grad()
            m(part).float().square().mean().backward()
            optimizer.step()
    state, slack = full_state_dict(model, rank0_only=False), 300 if device.type == "cuda" else 3
    for name, t in alone.state_dict().items():
        near(state[name].double(), t.cpu().double(), slack)
    again = copy.deepcopy(parallelized(alone, mesh["tp"]))  # a copy is sharded as the original
    near(fully_shard(again, mesh=mesh["dp"])(x), alone(x), 300 if device.type == "cuda" else 3)
    if world > 2:
        torch.manual_seed(rank)
        other = parallelized(pair(device), mesh["tp"])
        raises(RuntimeError, "the pattern differs between ranks", fully_shard, other, mesh=mesh["dp"])


CHECKS = [
    distributed_matrix,
    column_then_row,
    sequence_parallel,
    overlapped,
    overlapped_sizes,
    a_rank_without_features,
    outputs_of_a_column,
    inputs_of_a_row,
    dtensors_of_uneven_rows,
    gated,
    experts,
    mixture,
    selective_checkpointing,
    compiled,
    optimized,
    states,
    with_fully_shard,
]
