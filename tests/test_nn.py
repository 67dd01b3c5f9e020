"""Layers with block-sparse weights against torch.nn.Linear with the same weight, zeros where no block is stored."""

import copy
import io
import math
import os
import pickle
import socket
import subprocess
import sys

import pytest
import torch
from torch import nn

from sparse_collective import BsrMatrix
from sparse_collective.nn import BsrGroupedLinear, BsrLinear, BsrMixtureOfExperts, SwiGLU
from sparse_collective.nn.feed_forward import routing_of

from . import emulate
from .reference import normal

BF16 = torch.bfloat16
ACTIVATIONS = {None: lambda z: z, "silu": nn.functional.silu, "gelu": nn.functional.gelu, "relu": torch.relu}


@pytest.fixture(params=["plain", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request, monkeypatch):
    """Where layers are: on CPU tensors as users have them, with torch in the kernels' place, and on a GPU."""
    if request.param == "emulated":
        emulate.install(monkeypatch)
    return "cuda" if request.param == "cuda" else "cpu"


def layer_of(device="cpu", *, density=0.6, block=(32, 32), grid=(3, 4), bias=True, dtype=BF16, **more) -> BsrLinear:
    features = grid[1] * block[1], grid[0] * block[0]
    return BsrLinear(*features, bias, block, density=density, device=device, dtype=dtype, **more)


def masked(layer: BsrLinear) -> tuple[nn.Linear, torch.Tensor]:
    """The dense layer in fp64, and a mask (M, K) of what is stored."""
    linear = copy.deepcopy(layer)
    linear.activation = None
    bm, bk = layer.blocksize
    mask = layer.pattern.mask().repeat_interleave(bm, 0).repeat_interleave(bk, 1)
    return linear.to_linear().double(), mask


def near(found, exact, slack=1.0):
    """Within what bf16 rounds, relative to the tensor's size."""
    assert found is not None and found.shape == exact.shape
    error, scale = (found.double() - exact).abs().max().item(), exact.abs().max().item()
    assert error <= slack * 0.02 * scale + 1e-6, f"{error:.3g} of {scale:.3g}"


def blocks_of(layer: BsrLinear, dense: torch.Tensor) -> torch.Tensor:
    (rows, cols), (bm, bk) = layer.grid, layer.blocksize
    blocks = dense.view(rows, bm, cols, bk).transpose(1, 2)
    return blocks[layer.pattern.rows(), layer.col_indices.long()]


# One layer


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("block", [(32, 32), (64, 64), (16, 48), (128, 128)], ids=str)
def test_as_the_masked_dense_layer(place, activation, block):
    layer = layer_of(place, block=block, activation=activation)
    dense, mask = masked(layer)
    assert torch.equal(dense.weight != 0, mask & (dense.weight != 0)) and mask.sum() == layer.nnz * math.prod(block)
    x = normal(2, 20, layer.in_features, device=place).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    y, exact = layer(x), ACTIVATIONS[activation](dense(x64))
    near(y, exact)
    dy = normal(*y.shape, device=place)
    y.backward(dy)
    exact.backward(dy.double())
    near(x.grad, x64.grad, 2)
    near(layer.bias.grad, dense.bias.grad, 2)
    near(layer.values.grad, blocks_of(layer, dense.weight.grad), 2)


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_no_blocks_and_all_of_them(place, density):
    layer = layer_of(place, density=density)
    dense, _ = masked(layer)
    x = normal(5, layer.in_features, device=place)
    near(layer(x), dense(x.double()))
    assert layer.density == density and (density or layer(x).eq(layer.bias).all())
    layer(x.requires_grad_()).sum().backward()
    assert layer.values.grad.shape == layer.values.shape and x.grad.shape == x.shape


def test_without_bias(place):
    layer = layer_of(place, bias=False)
    x = normal(5, layer.in_features, device=place)
    assert layer.bias is None and "bias" not in layer.state_dict()
    near(layer(x), masked(layer)[0](x.double()))


def test_random_patterns_are_balanced_and_have_the_density():
    for density, grid in ((0.3, (7, 10)), (0.5, (4, 8)), (0.17, (5, 9))):
        layer = layer_of(density=density, block=(16, 16), grid=grid)
        rows = layer.crow_indices.diff()
        assert layer.nnz == round(density * math.prod(grid)) == len(layer.values)
        assert rows.max() - rows.min() <= 1 and layer.pattern.error() == ""
    assert not torch.equal(layer_of().col_indices, layer_of().col_indices)


def test_mask_and_indices(place):
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 1]], dtype=torch.bool, device=place)
    by_mask = BsrLinear(128, 96, blocksize=(32, 32), mask=mask, device=place, dtype=BF16)
    assert torch.equal(by_mask.pattern.mask(), mask)
    crow, col = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 2, 0, 1, 3])
    by_indices = BsrLinear(128, 96, blocksize=(32, 32), indices=(crow, col), device=place, dtype=BF16)
    assert torch.equal(by_indices.pattern.mask(), mask) and by_indices.crow_indices.dtype is torch.int32


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"in_features": 100}, ValueError, "in_features is 100, no multiple of 32; pad it to 128"),
        ({"out_features": 65}, ValueError, "out_features is 65, no multiple of 32; pad it to 96"),
        ({"blocksize": (32, 24)}, ValueError, "block side bk is 24; use a positive multiple of 16"),
        ({"blocksize": 32}, TypeError, "blocksize must be two integers"),
        ({"density": None}, ValueError, "exactly one of density, mask and indices"),
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, ValueError, "exactly one of density, mask and indices"),
        ({"density": 1.5}, ValueError, r"density is 1.5; it must be in \[0, 1\]"),
        ({"activation": "tanh"}, ValueError, "activation 'tanh'; use None or one of relu, gelu"),
        ({"dtype": torch.int8}, TypeError, "values cannot be torch.int8"),
        ({"density": None, "mask": torch.ones(3, 2, dtype=torch.bool)}, ValueError, r"shape \(3, 2\); the blocks are"),
        ({"density": None, "mask": torch.ones(2, 2, device="meta") > 0}, ValueError, "mask is on the meta device"),
        ({"density": None, "mask": torch.ones(2, 2)}, TypeError, "mask must be a strided bool tensor"),
        ({"density": None, "indices": (torch.tensor([0, 1, 1]), torch.tensor([5]))}, ValueError, r"col_indices\[0\]"),
        ({"density": None, "indices": torch.tensor([0])}, TypeError, "indices must be"),
        ({"density": None, "indices": (torch.tensor([0, 1]), torch.tensor([0]))}, ValueError, r"must be \(3,\) and"),
        ({"density": None, "indices": (torch.ones(3), torch.ones(1))}, TypeError, "must be an int32 or int64 tensor"),
    ],
)
def test_bad_arguments(arguments, error, message):
    given = {"in_features": 64, "out_features": 64, "blocksize": (32, 32), "density": 0.5, **arguments}
    with pytest.raises(error, match=message):
        BsrLinear(**given)


def test_init_keeps_the_variance_of_a_dense_layer():
    dense = nn.Linear(1024, 1024, bias=False)
    x = torch.randn(64, 1024)
    for density in (1.0, 0.5, 0.125):
        layer = BsrLinear(1024, 1024, False, (32, 32), density=density)
        y = layer.to_linear()(x)
        assert y.std().item() == pytest.approx(dense(x).std().item(), rel=0.05)


def test_from_linear_and_back(place):
    linear = nn.Linear(128, 96, device=place, dtype=BF16).eval()
    linear.weight.requires_grad_(False)
    layer = BsrLinear.from_linear(linear, (32, 32), density=0.5)
    W = BsrMatrix.from_dense(linear.weight, (32, 32), density=0.5)
    assert torch.equal(layer.values, W.values) and torch.equal(layer.col_indices, W.col_indices)
    assert not layer.training and not layer.values.requires_grad and layer.bias.requires_grad
    assert layer.bias.data_ptr() != linear.bias.data_ptr()
    back = layer.to_linear()
    assert torch.equal(back.weight, W.to_dense()) and torch.equal(back.bias, linear.bias)
    assert not back.training and not back.weight.requires_grad
    mask = torch.zeros(3, 4, dtype=torch.bool, device=place)
    mask[1, 2] = True
    assert torch.equal(BsrLinear.from_linear(linear, (32, 32), mask=mask).pattern.mask(), mask)
    assert torch.equal(BsrLinear.from_linear(linear, (32, 32)).to_linear().weight, linear.weight)
    with pytest.raises(ValueError, match="in_features is 128, no multiple of 48; pad it to 144"):
        BsrLinear.from_linear(linear, (48, 48), density=0.5)
    with pytest.raises(TypeError, match="needs a torch.nn.Linear, got Conv2d"):
        BsrLinear.from_linear(nn.Conv2d(1, 1, 1), (32, 32), density=0.5)
    with pytest.raises(ValueError, match="applies silu to its output"):
        layer_of(activation="silu").to_linear()


def test_float32_and_float64_on_the_cpu():
    """As nn.Linear, which has float32 unless told."""
    for dtype, error in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        layer = layer_of(dtype=dtype, activation="gelu")
        dense, _ = masked(layer)
        x = torch.randn(9, 128, dtype=dtype)
        y, exact = layer(x), nn.functional.gelu(dense(x.double()))
        torch.testing.assert_close(y.double(), exact, rtol=error, atol=error)
        y.square().sum().backward()
        exact.square().sum().backward()
        expected = blocks_of(layer, dense.weight.grad)
        torch.testing.assert_close(layer.values.grad.double(), expected, rtol=10 * error, atol=10 * error)


def test_repr_and_error_of_float32(emulated):
    layer = layer_of(density=0.25, dtype=torch.float32, activation="silu")
    text = "in_features=128, out_features=96, bias=True, blocksize=(32, 32), density=0.25, blocks=3 of 12"
    assert repr(layer) == f"BsrLinear({text}, activation='silu')"
    with pytest.raises(TypeError, match="the kernels multiply torch.bfloat16 and torch.float16"):
        layer(torch.randn(4, 128))


def test_the_matrix_is_kept(place):
    """As long as the tensors are the same ones, so that checks and plans are made once."""
    layer = layer_of(place)
    W = layer.weight
    assert layer.weight is W and W.checked and W.stored is layer.values
    with torch.no_grad():
        layer.values.mul_(2)
    assert layer.weight is W
    layer.values = nn.Parameter(layer.values.detach().clone())
    assert layer.weight is not W and layer.weight.plans is W.plans and layer.weight.stored is layer.values
    layer.col_indices = layer.col_indices.clone()
    assert layer.weight.plans is not W.plans


def test_wrong_indices_are_seen():
    layer = layer_of()
    layer.col_indices = layer.col_indices + 7
    with pytest.raises(ValueError, match="the indices of this layer are no pattern .*load_state_dict"):
        layer(normal(2, 128))


# Moves


def test_dtypes_and_devices():
    layer = layer_of(dtype=torch.float32)
    for dtype in (torch.float16, BF16):
        layer.to(dtype)
        assert layer.values.dtype is layer.bias.dtype is dtype and layer.crow_indices.dtype is torch.int32
        assert layer(normal(3, 128, dtype=dtype)).dtype is dtype and dtype in layer.weight.key
    assert layer.half().values.dtype is torch.float16
    meta = copy.deepcopy(layer).to("meta")
    assert meta.values.is_meta and meta.crow_indices.is_meta
    assert not layer.values.is_meta


@pytest.mark.parametrize("given", ["density", "mask"])
def test_meta_device(given):
    mask = torch.rand(3, 4) < 0.5
    more = {"density": 0.5} if given == "density" else {"mask": mask}
    with torch.device("meta"):
        layer = BsrLinear(128, 96, blocksize=(32, 32), dtype=BF16, **more)
    assert layer.values.is_meta and layer.crow_indices.is_meta
    layer.to_empty(device="cpu")
    layer.crow_indices.fill_(-3)
    with pytest.raises(ValueError, match="no pattern .*after to_empty"):
        layer(normal(2, 128))
    layer.reset_parameters()
    near(layer(x := normal(2, 128)), masked(layer)[0](x.double()))
    assert layer.nnz == (6 if given == "density" else int(mask.sum()))
    assert given == "density" or torch.equal(layer.pattern.mask(), mask)


def test_a_lost_pattern():
    layer = BsrLinear(128, 96, blocksize=(32, 32), mask=torch.ones(3, 4, dtype=torch.bool))
    layer.to_empty(device="cpu").crow_indices.zero_()
    with pytest.raises(ValueError, match="they were given, and are not kept"):
        layer.reset_parameters()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("start", ["cpu", "meta"])
def test_load_a_state(place, assign, start):
    """Of another pattern, with the same number of blocks and with others."""
    if start == "meta" and not assign:
        pytest.skip("torch loads nothing into meta tensors without assign")
    for density in (0.5, 0.25, 1.0, 0.0):
        source = layer_of(place, density=density)
        layer = layer_of(start if start == "meta" else place, density=0.5)
        if start != "meta":
            before, x = layer.values, normal(3, 128, device=place)
            layer(x).sum().backward()
        assert str(layer.load_state_dict(source.state_dict(), assign=assign)) == "<All keys matched successfully>"
        assert layer.nnz == source.nnz == len(layer.values)
        x = normal(3, 128, device=place)
        assert torch.equal(layer(x), source(x))
        if not assign:
            assert layer.values is before
            assert layer.values.grad is None or density == 0.5
            layer(x).sum().backward()
            assert layer.values.grad.shape == layer.values.shape


def test_states_that_do_not_fit():
    layer = layer_of()
    state, x = layer.state_dict(), normal(2, 128)
    before = layer(x)

    def refused(message, **changes):
        wrong = {k: v for k, v in {**state, **changes}.items() if v is not None}
        with pytest.raises(RuntimeError, match=message):
            layer.load_state_dict(wrong)
        assert torch.equal(layer(x), before), "nothing has been loaded"

    refused("another number of block rows", crow_indices=state["crow_indices"][:-1])
    refused(r"the layer has blocks of \(32, 32\)", values=torch.zeros(layer.nnz, 16, 32, dtype=BF16))
    refused("col_indices has shape", col_indices=state["col_indices"][:-1])
    refused(r"col_indices\[0\] is 9", col_indices=torch.full_like(state["col_indices"], 9))
    refused("no int32 or int64", col_indices=state["col_indices"].float())
    refused("values alone", crow_indices=None, col_indices=None)


def test_a_state_that_is_not_aligned_is_copied():
    """As tensors of a file that is mapped into memory may be."""
    source, layer = layer_of(), layer_of("meta")
    state = source.state_dict()
    buffer = torch.empty(source.values.numel() + 4, dtype=BF16)[4:]
    state["values"] = buffer.view(source.values.shape).copy_(source.values.detach())
    assert state["values"].data_ptr() % 16
    layer.load_state_dict(state, assign=True)
    x = normal(3, 128)
    assert torch.equal(layer(x), source(x))


def test_int64_indices_are_loaded():
    source, layer = layer_of(), layer_of()
    state = source.state_dict()
    state["crow_indices"], state["col_indices"] = state["crow_indices"].long(), state["col_indices"].long()
    for assign in (False, True):
        layer.load_state_dict(state, assign=assign)
        assert layer.crow_indices.dtype is torch.int32 and torch.equal(layer.col_indices, source.col_indices)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(place, how):
    layer = layer_of(place, activation="gelu")
    x = normal(3, 128, device=place)
    y = layer(x)
    if how == "deepcopy":
        other = copy.deepcopy(layer)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(layer))
    else:
        torch.save(layer, file := io.BytesIO())
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert torch.equal(other(x), y) and other.values.data_ptr() != layer.values.data_ptr()
    assert other.weight.crow_indices is other.crow_indices
    with torch.no_grad():
        other.values.zero_()
    assert torch.equal(layer(x), y)


@pytest.mark.parametrize("how", ["torch.save", "safetensors", "dcp"])
def test_state_files(place, how, tmp_path):
    model = nn.Sequential(layer_of(place), nn.GELU(), layer_of(place, density=0.25, grid=(2, 3)))
    other = nn.Sequential(layer_of(place), nn.GELU(), layer_of(place, density=0.25, grid=(2, 3)))
    x = normal(3, 128, device=place)
    if how == "torch.save":
        torch.save(model.state_dict(), tmp_path / "state")
        other.load_state_dict(torch.load(tmp_path / "state"))
    elif how == "safetensors":
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file(model.state_dict(), tmp_path / "state")
        other.load_state_dict(safetensors.load_file(tmp_path / "state", device=place), assign=True)
    else:
        import torch.distributed.checkpoint as dcp

        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "state", no_dist=True)
        state = other.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / "state", no_dist=True)
        assert torch.equal(other(x), model(x)), "loaded in place"
        other.load_state_dict(state)
    assert torch.equal(other(x), model(x))


# What torch does with modules


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_autocast(place, dtype):
    layer = layer_of(place, dtype=torch.float32)
    dense, _ = masked(layer)
    x = torch.randn(20, 128, device=place, requires_grad=True)
    with torch.autocast(place, dtype):
        y = layer(x)
    assert y.dtype is dtype
    near(y, dense(x.detach().double()))
    y.float().square().sum().backward()
    dense(x.detach().double()).square().sum().backward()
    assert layer.values.grad.dtype is x.grad.dtype is torch.float32
    near(layer.values.grad, blocks_of(layer, dense.weight.grad), 2)
    near(layer.bias.grad, dense.bias.grad, 2)


def test_a_mixture_under_autocast(place):
    layer = BsrMixtureOfExperts(64, 64, 4, 2, True, (32, 32), density=0.5, group_rows=64, device=place)
    x = torch.randn(30, 64, device=place, requires_grad=True)
    with torch.autocast(place, BF16):
        y = layer(x)
    y.float().square().sum().backward()
    assert all(p.grad.dtype is torch.float32 and p.grad.isfinite().all() for p in layer.parameters())
    assert y.shape == x.shape and y.dtype is torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(place, reentrant):
    from torch.utils.checkpoint import checkpoint

    layer = layer_of(place, activation="silu")
    x, dy = normal(20, 128, device=place).requires_grad_(), normal(20, 96, device=place)
    layer(x).backward(dy)
    expected = [t.grad.clone() for t in (x, layer.values, layer.bias)]
    x.grad = layer.values.grad = layer.bias.grad = None
    checkpoint(layer, x, use_reentrant=reentrant).backward(dy)
    assert all(torch.equal(t.grad, e) for t, e in zip((x, layer.values, layer.bias), expected, strict=True))


def test_compile_with_any_number_of_tokens(place):
    torch._dynamo.reset()
    model = nn.Sequential(layer_of(place, activation="silu"), layer_of(place, grid=(2, 3)))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    counters = torch._dynamo.utils.counters
    for i, tokens in enumerate((24, 40, 56, 72)):
        x = normal(tokens, 128, device=place).requires_grad_()
        dy = normal(tokens, 64, device=place)
        model.zero_grad()
        compiled(x).backward(dy)
        found = [p.grad.clone() for p in (x, *model.parameters())]
        x.grad = None
        model.zero_grad()
        model(x).backward(dy)
        for a, b in zip(found, (x, *model.parameters()), strict=True):
            torch.testing.assert_close(a, b.grad)
        if i == 1:
            graphs = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == graphs, "compiled again for another number of tokens"


def test_a_compiled_layer_finds_what_is_known_of_its_pattern(emulated):
    """A graph makes its matrix anew in each call; tables are made once all the same."""
    torch._dynamo.reset()
    layer = layer_of()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    kept = layer.weight.plans.kept
    assert not kept
    compiled(normal(8, 128).requires_grad_()).sum().backward()
    tables = dict(kept)
    assert ("transposed",) in tables
    compiled(normal(8, 128).requires_grad_()).sum().backward()
    assert kept.keys() == tables.keys() and all(kept[k][0] is tables[k][0] for k in tables)


def test_compile_under_autocast(place):
    torch._dynamo.reset()
    layer = layer_of(place, dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(8, 128, device=place)
    with torch.autocast(place, BF16):
        y, expected = compiled(x), layer(x)
    assert y.dtype is BF16 and torch.equal(y, expected)


@pytest.mark.parametrize("strict", [False, True])
def test_export(place, strict):
    layer = layer_of(place, activation="gelu")
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    x = normal(5, 128, device=place)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: tokens},), strict=strict)
    for n in (5, 9):
        x = normal(n, 128, device=place)
        assert torch.equal(program.module()(x), layer(x))
    assert {"values", "bias", "crow_indices", "col_indices"} == set(program.state_dict)


def test_functional_call(place):
    layer = layer_of(place)
    x = normal(3, 128, device=place)
    W = layer.weight
    doubled = {name: p.detach() * 2 for name, p in layer.named_parameters()}
    near(torch.func.functional_call(layer, doubled, (x,)), 2 * layer(x).double())
    assert layer.weight is W
    other = layer_of(place, density=0.25)
    state = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    assert torch.equal(torch.func.functional_call(layer, state, (x,)), other(x))
    assert torch.equal(layer(x), copy.deepcopy(layer)(x)) and layer.weight.stored is layer.values


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_training_goes_as_with_the_masked_dense_layer(optimizer):
    """fp32 parameters under autocast, clipped gradients, weight decay; losses stay beside those of dense layers."""
    layer = layer_of(dtype=torch.float32, block=(16, 16), grid=(6, 8))
    dense, mask = masked(layer)
    dense.float()
    target, x = torch.randn(128, 96), torch.randn(128, 128)
    options = {"lr": 0.01, "weight_decay": 0.1}
    mine, theirs = optimizer(layer.parameters(), **options), optimizer(dense.parameters(), **options)
    losses = []
    for _ in range(15):
        pair = []
        for module, steps in ((layer, mine), (dense, theirs)):
            with torch.autocast("cpu", BF16):
                y = module(x)
            loss = nn.functional.mse_loss(y.float(), target)
            steps.zero_grad()
            loss.backward()
            if module is dense:
                dense.weight.grad *= mask
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            steps.step()
            pair.append(loss.item())
        losses.append(pair)
    assert losses[-1][0] < losses[0][0]
    for found, expected in losses:
        assert found == pytest.approx(expected, rel=0.01)
    # Adam divides by a gradient's size, so where that is small a rounding error is a step.
    slack = 1 if optimizer is torch.optim.SGD else 4
    near(layer.values.detach(), blocks_of(layer, dense.weight.detach().double()), slack)


# Several processes

WORKER = """
import copy, inspect, sys, torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from sparse_collective.nn import BsrLinear
rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
DDP = nn.parallel.DistributedDataParallel

def make():
    first = BsrLinear(128, 96, True, (32, 32), density=0.42, activation="silu", dtype=torch.bfloat16)
    return nn.Sequential(first, BsrLinear(96, 64, True, (32, 32), density=0.5, dtype=torch.bfloat16))

def ddp(**options):
    torch.manual_seed(rank)  # DDP gives all processes the first one's pattern
    if options and "forward_sync_buffers" not in inspect.signature(DDP).parameters:  # an older torch
        torch.manual_seed(0)
        options = {"broadcast_buffers": False}
    model = make()
    wrapped, alone = DDP(model, **options), make()
    alone.load_state_dict(model.state_dict())
    return model, wrapped, alone

def fsdp():
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer)
    return model, fully_shard(model), alone

def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t

def check(model, wrapped, alone):
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    plans = [m.weight.plans for m in alone]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, alone)]
    for step in range(3):
        out = []
        for m, part, optimizer in ((wrapped, x.chunk(world)[rank], optimizers[0]), (alone, x, optimizers[1])):
            y = m(part)
            if m is wrapped and step == 0:
                plans = [layer._weight.plans for layer in model]
            loss = y.float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out.append(y.detach().float())
        torch.testing.assert_close(out[0], out[1].chunk(world)[rank], rtol=0.02, atol=0.02)
    assert all(a._weight.plans is b for a, b in zip(model, plans)), "the pattern was taken for a new one"
    for a, b in zip(model.state_dict().items(), alone.state_dict().items()):
        assert a[0] == b[0]
        torch.testing.assert_close(whole(a[1]).float(), b[1].float(), rtol=0.03, atol=0.03)

def save_and_load(model):
    state = model.state_dict()
    dcp.save(state, checkpoint_id=folder)
    saved = {k: whole(v).clone() for k, v in state.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    for k, v in model.state_dict().items():
        assert torch.equal(whole(v), saved[k]), k

if sys.argv[5] == "ddp":
    check(*ddp())
    parts = ddp(forward_sync_buffers=False)
    check(*parts)
    save_and_load(parts[0])
else:
    parts = fsdp()
    check(*parts)
    save_and_load(parts[0])
    other = BsrLinear(128, 96, True, (32, 32), density=1.0, dtype=torch.bfloat16).state_dict()
    try:
        parts[0][0].load_state_dict(other)
        raise SystemExit("loaded another number of blocks into shards")
    except RuntimeError as error:
        assert "cannot be resized; load before it is sharded" in str(error), error
dist.barrier()
dist.destroy_process_group()
"""


def in_processes(tmp_path, kind):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, str(script), r, "2", port, str(tmp_path / "state"), kind] for r in "01"]
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(c, env=environment, **outputs) for c in commands]
    try:
        for process in processes:
            text, _ = process.communicate(timeout=120)
            assert process.returncode == 0, text
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes(tmp_path, kind):
    """DDP, whose buffers are broadcast in each forward or at the start alone, and FSDP2: as one process alone."""
    in_processes(tmp_path, kind)


# Feed-forward layers


def test_swiglu(place):
    layer = SwiGLU(128, 192, blocksize=(32, 32), density=0.5, bias=True, device=place, dtype=BF16)
    gate, up, down = (masked(m)[0] for m in (layer.gate, layer.up, layer.down))
    x = normal(20, 128, device=place).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    y, exact = layer(x), down(nn.functional.silu(gate(x64)) * up(x64))
    near(y, exact, 2)
    dy = normal(*y.shape, device=place)
    y.backward(dy)
    exact.backward(dy.double())
    near(x.grad, x64.grad, 2)
    for mine, theirs in ((layer.gate, gate), (layer.up, up), (layer.down, down)):
        near(mine.values.grad, blocks_of(mine, theirs.weight.grad), 2)


@pytest.mark.parametrize("one_pattern", [True, False])
@pytest.mark.parametrize("given", ["density", "mask"])
def test_grouped_linear(place, one_pattern, given):
    more = {"density": 0.5}
    if given == "mask":
        more = {"mask": torch.rand((3, 4) if one_pattern else (5, 3, 4), device=place) < 0.5}
    layer = BsrGroupedLinear(
        5, 128, 96, True, (32, 32), one_pattern=one_pattern, activation="silu", device=place, dtype=BF16, **more
    )
    assert layer.weight.batch == ("values" if one_pattern else "patterns") and layer.pattern.error() == ""
    if given == "mask":
        assert torch.equal(layer.pattern.mask(), more["mask"])
    x = normal(384, 128, device=place)
    offsets = torch.tensor([64, 64, 192, 256, 384], dtype=torch.int32, device=place)
    experts = torch.tensor([0, 2, 2, 3, 4, 4], device=place).repeat_interleave(64)
    dense = layer.weight.to_dense().double()[experts]  # (T, M, K)
    z = torch.einsum("tmk,tk->tm", dense, x.double()) + layer.bias.double()[experts]
    near(layer(x, offsets, 64), nn.functional.silu(z))
    other = copy.deepcopy(layer)
    assert torch.equal(other(x, offsets, 64), layer(x, offsets, 64))
    other.load_state_dict(layer.state_dict())


def test_routing():
    for tokens, k, experts, group in ((1, 1, 4, 64), (50, 2, 3, 64), (300, 3, 8, 64), (0, 2, 4, 64), (7, 4, 4, 128)):
        choices = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)]) if tokens else torch.zeros(0, k)
        rows, slots, offsets = routing_of(choices.long(), experts, group)
        assert slots.unique().numel() == tokens * k and rows % group == 0 and (offsets % group == 0).all()
        assert offsets[-1] <= rows and (offsets.diff() >= 0).all()
        assert torch.equal(torch.searchsorted(offsets, slots.int(), right=True), choices.long().flatten())


@pytest.mark.parametrize("one_pattern", [True, False])
def test_mixture_of_experts(place, one_pattern):
    layer = BsrMixtureOfExperts(
        64, 96, 4, 2, True, (32, 32), density=0.5, one_pattern=one_pattern, group_rows=64, device=place, dtype=BF16
    )
    x = normal(3, 25, 64, device=place)
    y = layer(x)
    tokens = x.flatten(0, 1)
    weights, choices = layer.route(tokens)
    gate, up, down = ((m.weight.to_dense().double(), m.bias.double()) for m in (layer.gate, layer.up, layer.down))
    exact = torch.zeros(75, 64, dtype=torch.float64, device=place)
    for t in range(75):
        for w, e in zip(weights[t].double(), choices[t].tolist(), strict=True):
            h = nn.functional.silu(gate[0][e] @ tokens[t].double() + gate[1][e])
            h = h * (up[0][e] @ tokens[t].double() + up[1][e])
            exact[t] += w * (down[0][e] @ h + down[1][e])
    near(y, exact.view_as(x), 2)
    assert y.shape == x.shape and y.dtype is BF16


def experts_densely(layer, x, weights, choices, parameters):
    """The same in fp64: every expert on every token, of which the chosen ones count."""
    (gate, gate_bias), (up, up_bias), (down, down_bias) = parameters
    h = nn.functional.silu(torch.einsum("emk,tk->tem", gate, x) + gate_bias)
    h = h * (torch.einsum("emk,tk->tem", up, x) + up_bias)
    y = torch.einsum("emk,tek->tem", down, h) + down_bias
    return (y.gather(1, choices[..., None].expand(-1, -1, y.shape[-1])) * weights[..., None]).sum(1)


@pytest.mark.parametrize("one_pattern", [True, False])
def test_gradients_of_a_mixture_of_experts(place, one_pattern):
    layer = BsrMixtureOfExperts(
        64, 96, 4, 2, True, (32, 32), density=0.5, one_pattern=one_pattern, group_rows=64, device=place, dtype=BF16
    )
    x = normal(75, 64, device=place).requires_grad_()
    x64, router = x.detach().double().requires_grad_(), layer.router.weight.detach().double().requires_grad_()
    modules = layer.gate, layer.up, layer.down
    weights = [[m.weight.to_dense().detach().double().requires_grad_() for m in modules]]
    weights += [[m.bias.detach().double().requires_grad_() for m in modules]]
    choices = layer.route(x)[1]
    shares = (x64 @ router.t()).gather(1, choices).softmax(-1)
    exact = experts_densely(layer, x64, shares, choices, list(zip(*weights, strict=True)))
    y, dy = layer(x), normal(75, 64, device=place)
    near(y, exact.detach(), 2)
    y.backward(dy)
    exact.backward(dy.double())
    near(x.grad, x64.grad, 3)
    near(layer.router.weight.grad, router.grad, 3)
    for module, weight, bias in zip(modules, *weights, strict=True):
        near(module.bias.grad, bias.grad, 3)
        stored = module.pattern.mask().repeat_interleave(32, -2).repeat_interleave(32, -1)
        near(module.weight.with_values(module.values.grad).to_dense(), weight.grad * stored, 3)


def test_mixture_of_experts_compiles(place):
    """In one graph with its gradient, for any number of tokens."""
    torch._dynamo.reset()
    layer = BsrMixtureOfExperts(64, 64, 4, 2, blocksize=(32, 32), density=0.5, group_rows=64, device=place, dtype=BF16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (30, 50):
        x, dy = normal(tokens, 64, device=place).requires_grad_(), normal(tokens, 64, device=place)
        found = []
        for module in (compiled, layer):
            layer.zero_grad()
            x.grad = None
            y = module(x)
            y.backward(dy)
            found.append([y, x.grad, *(p.grad for p in layer.parameters())])
        torch.testing.assert_close(*found)


def test_mixture_of_experts_does_not_synchronise(monkeypatch):
    """Nothing reads a tensor's contents on the host: on a GPU each of these would wait for it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoReads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "unique2", "masked_select")
            return func(*args, **(kwargs or {}))

    choices = torch.randint(4, (30, 2))
    with NoReads():
        routing_of(choices, 4, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"top_k": 5}, r"top_k is 5; it must be in \[1, 4\]"), ({"group_rows": 96}, "positive multiple of 64")],
)
def test_bad_mixtures(changes, message):
    arguments = {"dim": 64, "hidden": 64, "experts": 4, "top_k": 2, "blocksize": (32, 32), "density": 0.5, **changes}
    with pytest.raises(ValueError, match=message):
        BsrMixtureOfExperts(**arguments)


def test_importing_the_package_does_not_import_layers():
    code = "import sys, sparse_collective; assert 'sparse_collective.nn' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
