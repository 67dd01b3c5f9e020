"""Checks of what sharded layers refuse, and of ranks that fail, which each rank runs; see tests/ranks.py.

A rank that raises alone must not leave the others waiting.
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from sparse_collective import random_bsr
from sparse_collective.distributed import (
    BsrColwiseParallel,
    BsrExpertParallel,
    BsrRowwiseParallel,
    distribute_bsr,
    partition_hidden,
)
from sparse_collective.distributed.partition import Partition
from sparse_collective.nn import BsrExperts, BsrGroupedLinear, BsrLinear, BsrMixtureOfExperts, SwiGLU, densify_, prune_
from sparse_collective.nn.shards import check_same

from .distributed_checks import dtype_of, mesh_of, near, normal, pair, parallelized, raises, refuses


def distributed_matrix_of_other_patterns(device):
    torch.manual_seed(dist.get_rank())
    W = random_bsr((256, 256), (32, 32), density=0.3, dtype=dtype_of(device), device=device)
    mesh = mesh_of(device)
    text = "an argument (placements, balance) or the shape, dtype or pattern of W differs between ranks"
    raises(RuntimeError, text, distribute_bsr, W, mesh, [Shard(0)])
    raises(ValueError, "Shard(0) for rows or Shard(1) for columns", distribute_bsr, W, mesh, [Shard(2)])
    raises(ValueError, "balance is 'even'", distribute_bsr, W, mesh, [Replicate()], balance="even")
    raises(TypeError, "placements must be a list", distribute_bsr, W, mesh, Shard(0))
    raises(TypeError, "mesh must be a DeviceMesh, got NoneType", distribute_bsr, W, None, [Shard(0)])


def difference_in_a_mesh(device):
    """All ranks of a mesh of two dimensions learn that one has another number."""
    last, mesh = dist.get_world_size() - 1, mesh_of(device, 2, dist.get_world_size() // 2)
    check_same("op", "the pattern", 7, mesh, "advice")
    number = 8 if dist.get_rank() == last else 7
    raises(RuntimeError, "the pattern differs between ranks", check_same, "op", "the pattern", number, mesh, "advice")


def error_of_one_rank(device):
    """All ranks learn why one refused its arguments, and none waits for it."""
    last = dist.get_world_size() - 1

    def number():
        if dist.get_rank() == last:
            raise ValueError("8 rows are too few")
        return 7

    kind = ValueError if dist.get_rank() == last else RuntimeError
    for dims in (1, 2):
        mesh = mesh_of(device, dims, dist.get_world_size() // dims) if dims > 1 else mesh_of(device)
        raises(kind, "8 rows are too few", check_same, "op", "the pattern", number, mesh, "advice")


def refused(device):
    """Layers, layouts and splits that no style can split."""
    mesh, more = mesh_of(device), {"density": 0.5, "device": device, "dtype": dtype_of(device)}
    torch.manual_seed(dist.get_rank())
    column, row = BsrColwiseParallel(), BsrRowwiseParallel()
    layer = BsrLinear(128, 128, False, (32, 32), **more)
    raises(RuntimeError, "pattern of the layer differs between ranks", parallelize_module, layer, mesh, column)
    torch.manual_seed(0)
    swiglu = SwiGLU(128, 256, False, (32, 32), **more)
    raises(ValueError, "the gate of a GatedBsrLinear", parallelize_module, swiglu.gate_up, mesh, row)
    partition = partition_hidden(swiglu.gate_up, swiglu.down, mesh.size())
    raises(ValueError, "the partition is of 256", parallelize_module, BsrLinear(128, 128, blocksize=(32, 32), **more),
           mesh, BsrRowwiseParallel(partition=partition))  # fmt: skip
    for parts in (1, mesh.size() + 2):
        other = partition_hidden(swiglu.gate_up, swiglu.down, parts)
        for layer, style in ((swiglu.gate_up, BsrColwiseParallel), (swiglu.down, BsrRowwiseParallel)):
            raises(ValueError, f"the partition has {parts} parts; use partition_hidden(..., {mesh.size()})",
                   parallelize_module, layer, mesh, style(partition=other))  # fmt: skip
    raises(ValueError, "parts is 0", partition_hidden, swiglu.gate_up, swiglu.down, 0)
    raises(TypeError, "takes one layer, got SwiGLU; give each of its layers a style: gate_up, down",
           parallelize_module, swiglu, mesh, column)  # fmt: skip
    uneven = partition_hidden(swiglu.gate_up, swiglu.down, 3)
    raises(ValueError, "equal, contiguous ranges", parallelize_module, swiglu.gate_up, mesh,
           BsrColwiseParallel(partition=uneven, output_layouts=Replicate()))  # fmt: skip
    raises(TypeError, "partition is for block-sparse layers", parallelize_module, nn.Linear(8, 8), mesh,
           BsrColwiseParallel(partition=partition))  # fmt: skip
    overlapped = (
        BsrColwiseParallel(input_layouts=Shard(0), overlap=True),
        BsrRowwiseParallel(output_layouts=Shard(0), overlap=True),
    )
    for style in overlapped:
        raises(TypeError, "overlap is for block-sparse layers", parallelize_module, nn.Linear(8, 8), mesh, style)
    grouped = BsrGroupedLinear(3, 128, 128, False, (32, 32), **more)
    split = Shard(0)
    for style in (
        BsrColwiseParallel(input_layouts=split),
        BsrRowwiseParallel(input_layouts=split),
        BsrRowwiseParallel(output_layouts=split),
    ):
        raises(ValueError, "the routing of a BsrGroupedLinear", parallelize_module, grouped, mesh, style)
    ranks = list(range(mesh.size()))
    reversed_mesh, layer = DeviceMesh(device.type, ranks[::-1]), BsrLinear(128, 128, False, (32, 32), **more)
    text = f"ranks of the mesh must ascend, got {ranks[::-1]}; pass a mesh of {ranks}"
    for module, style in ((layer, column), (layer, row), (nn.Identity(), BsrExpertParallel())):
        raises(ValueError, text, parallelize_module, module, reversed_mesh, style)
    layer = parallelize_module(layer, mesh, column)
    raises(TypeError, "ParallelBsrLinear", parallelize_module, layer, mesh, column)
    raises(TypeError, "change it before parallelize_module", prune_, layer, 0.1)
    raises(TypeError, "has split this ParallelBsrLinear over ranks; call to_linear before", layer.to_linear)
    model = nn.Sequential(BsrLinear(128, 128, blocksize=(32, 32), **more), layer)
    raises(TypeError, "parallelize_module has split 1 over ranks; call densify_ before", densify_, model)
    assert type(model[0]) is BsrLinear


def other_features_in_the_next_layer(device):
    """Two layers that split their hidden features differently raise, where one module calls both."""
    mesh, more = mesh_of(device), {"density": 0.3, "device": device, "dtype": dtype_of(device)}
    text = "pass one partition, from partition_hidden, to the styles of both layers"
    for balances in (("blocks", "extent"), ("extent", "blocks")):
        torch.manual_seed(6)
        swiglu = SwiGLU(128, 512, False, (32, 32), **more)
        mixture = BsrMixtureOfExperts(128, 512, 3, 2, False, (32, 32), group_rows=64, **more)
        for model, names in ((swiglu, ("gate_up", "down")), (mixture, ("gate", "up", "down"))):
            layers = [model.get_submodule(name) for name in names]
            first, last = (partition_hidden(layers[:-1], layers[-1], mesh.size(), balance=b) for b in balances)
            assert first.units != last.units
            if model is swiglu:
                ungated = SwiGLU.of(BsrLinear(128, 512, False, (32, 32), activation="gelu", **more), model.down)
                plan = {"gate_up": BsrColwiseParallel(partition=first), "down": BsrRowwiseParallel(partition=last)}
                other = parallelize_module(copy.deepcopy(ungated), mesh, plan)
                raises(ValueError, text, other, normal(20, 128, device=device))
            plan = {name: BsrColwiseParallel(partition=first) for name in names[:-1]}
            parallelize_module(model, mesh, plan | {names[-1]: BsrRowwiseParallel(partition=last)})
            raises(ValueError, text, model, normal(20, 128, device=device))
    rows = BsrRowwiseParallel(input_layouts=Replicate())
    down = parallelize_module(BsrLinear(128, 64, blocksize=(32, 32), **more), mesh, rows)
    raises(
        ValueError,
        "x has shape (20, 64), and with input_layouts=Replicate() this rank passes 128",
        down,
        normal(20, 64, device=device),
    )
    experts = BsrExperts(
        BsrGroupedLinear(3, 64, 256, False, (32, 32), **more), BsrGroupedLinear(3, 128, 64, False, (32, 32), **more)
    )
    parallelize_module(experts, mesh, {"gate_up": BsrColwiseParallel(), "down": BsrRowwiseParallel()})
    x, choices = normal(20, 64, device=device), torch.zeros(20, 1, dtype=torch.int64, device=device)
    raises(ValueError, "gate_up is split over ranks", experts, x, choices, torch.ones_like(choices).float())


def uneven_tokens(device):
    """Ranks with different numbers of tokens raise in a layer's first call, and may call it again."""
    mesh, rank = mesh_of(device), dist.get_rank()
    alone, tokens = pair(device)[0], normal(12 * mesh.size(), 128, device=device)
    for layout in (Replicate(), Shard(0)):
        model = parallelize_module(copy.deepcopy(alone), mesh, BsrColwiseParallel(input_layouts=layout))
        shown = f"({12 + rank}, 128) of {dtype_of(device)}"
        text = f"the shape or dtype of the tokens, here {shown}, differs between ranks: ranks [0] agree"
        raises(RuntimeError, text, model, normal(12 + rank, 128, device=device))
        x = tokens.chunk(mesh.size())[rank] if layout.is_shard() else tokens
        near(model(x), alone(tokens).chunk(mesh.size(), -1)[rank])


def wrong_on_one_rank(device):
    """An argument that is wrong on one rank alone raises on all, so that none waits, and the next call is right."""
    mesh, last = mesh_of(device), dist.get_rank() == dist.get_world_size() - 1
    W = random_bsr((256, 256), (32, 32), density=0.3, dtype=dtype_of(device), device=device)
    refuses(last, ValueError, "is not supported", distribute_bsr, W, mesh, [Partial() if last else Shard(0)])
    refuses(last, TypeError, "must be a list", distribute_bsr, W, mesh, Shard(0) if last else [Shard(0)])
    refuses(last, TypeError, "W must be a BsrMatrix", distribute_bsr, W.values if last else W, mesh, [Shard(0)])

    alone, x = pair(device), normal(20, 128, device=device)
    model = parallelized(alone, mesh)
    refuses(last, ValueError, "x has shape (20, 96)", model, x[:, :96] if last else x)
    refuses(last, ValueError, "x has shape ()", model, x[0, 0] if last else x)
    raises(RuntimeError, "differs between ranks", model, x.double() if last else x)
    near(model(x), alone(x))
    row, hidden = parallelize_module(copy.deepcopy(alone[1]), mesh, BsrRowwiseParallel()), alone[0](x)
    hidden = hidden.chunk(mesh.size(), -1)[dist.get_rank()]
    refuses(last, ValueError, "of the layer's 256 features", row, hidden[:, 32:] if last else hidden)
    near(row(hidden.contiguous()), alone(x))
    column = parallelize_module(copy.deepcopy(alone[0]), mesh, BsrColwiseParallel(input_layouts=Shard(-1)))
    parts = x.chunk(mesh.size(), -1)
    refuses(last, ValueError, "of the layer's 128 features", column, x if last else parts[dist.get_rank()])
    near(column(parts[dist.get_rank()]), alone[0](x).chunk(mesh.size(), -1)[dist.get_rank()])


def other_arguments_on_one_rank(device):
    """Arguments that differ between ranks raise on all of them before anything moves, and the next call is right."""
    mesh, last = mesh_of(device), dist.get_rank() == dist.get_world_size() - 1
    more, ranks = {"density": 0.5, "device": device, "dtype": dtype_of(device)}, range(mesh.size())
    W = random_bsr((256, 256), (32, 32), **more)
    text = "an argument (placements, balance) or the shape, dtype or pattern of W differs between ranks: ranks [0"
    raises(RuntimeError, text, distribute_bsr, W, mesh, [Shard(0)], balance="blocks" if last else "extent")
    raises(RuntimeError, text, distribute_bsr, W, mesh, [Replicate() if last else Shard(0)])
    assert distribute_bsr(W, mesh, [Shard(0)]).shape[0] == 256 // mesh.size()

    up, down = (BsrLinear(*shape, True, (32, 32), **more) for shape in ((64, 256), (256, 64)))
    first, second, *others = (tuple(range(8 * i // mesh.size(), 8 * (i + 1) // mesh.size())) for i in ranks)
    forward = Partition(32, (first, second, *others))
    backward, uneven = Partition(32, forward.units[::-1]), Partition(32, (first[:-1], (first[-1], *second), *others))
    split, text = Shard(0), "an argument of the style (partition, layouts, ...) or the shape, dtype or pattern of the "
    text += "layer differs between ranks: ranks [0"
    for style, layer, same, other in (
        (BsrColwiseParallel, up, {"partition": forward}, {"partition": backward}),
        (BsrColwiseParallel, up, {"partition": forward}, {"partition": uneven}),
        (BsrColwiseParallel, up, {}, {"output_layouts": Replicate()}),
        (BsrColwiseParallel, up, {}, {"input_layouts": split}),
        (BsrColwiseParallel, up, {}, {"use_local_output": False}),
        (BsrColwiseParallel, up, {"input_layouts": split}, {"input_layouts": split, "overlap": True}),
        (BsrRowwiseParallel, down, {"partition": forward}, {"partition": backward}),
        (BsrRowwiseParallel, down, {}, {"output_layouts": split}),
        (BsrRowwiseParallel, down, {}, {"input_layouts": Replicate()}),
        (BsrRowwiseParallel, down, {"output_layouts": split}, {"output_layouts": split, "overlap": True}),
    ):
        raises(RuntimeError, text, parallelize_module, layer, mesh, style(**(other if last else same)))
        assert type(layer) is BsrLinear and type(layer.values.data) is torch.Tensor
    for style, option, reason in (
        (BsrColwiseParallel, {"overlap": True}, "overlap=True needs input_layouts=Shard(0)"),
        (BsrColwiseParallel, {"partition": backward, "output_layouts": Replicate()}, "equal, contiguous ranges"),
        (BsrRowwiseParallel, {"output_layouts": Partial()}, "use Replicate() or Shard(dim) of tokens"),
    ):
        layer = up if style is BsrColwiseParallel else down
        refuses(last, ValueError, reason, parallelize_module, layer, mesh, style(**(option if last else {})))
    source = None if last else 0
    raises(RuntimeError, text, parallelize_module, up, mesh, BsrColwiseParallel(), src_data_rank=source)
    cast = copy.deepcopy(up).half() if last else up
    raises(RuntimeError, text, parallelize_module, cast, mesh, BsrColwiseParallel())

    alone, x = nn.Sequential(up, down), normal(20, 64, device=device)
    plan = {"0": BsrColwiseParallel(partition=backward), "1": BsrRowwiseParallel(partition=backward)}
    near(parallelize_module(copy.deepcopy(alone), mesh, plan)(x), alone(x))


def error_in_one_rank(device):
    """The last rank raises between two layers, whose collectives the others enter."""
    model = parallelized(pair(device), mesh_of(device))
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ArithmeticError("this rank had an error")
    model(normal(20, 128, device=device))


def death_of_one_rank(device):
    model = parallelized(pair(device), mesh_of(device))
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(3)
    model(normal(20, 128, device=device))


CHECKS = [
    distributed_matrix_of_other_patterns,
    difference_in_a_mesh,
    error_of_one_rank,
    refused,
    other_features_in_the_next_layer,
    uneven_tokens,
    wrong_on_one_rank,
    other_arguments_on_one_rank,
]
