"""Layers with block-sparse weights against torch.nn.Linear with the same weight, zeros where no block is stored."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

from cute_kernels.testing.reference import normal
from sparse_collective import BsrMatrix
from sparse_collective.nn import BsrLinear

from .nn_parts import ACTIVATIONS, BF16, blocks_of, layer_of, masked, near

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
    with pytest.raises(TypeError, match="the kernels support torch.bfloat16 and torch.float16"):
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
    assert layer.weight is not W and layer.weight.pattern is W.pattern and layer.weight.stored is layer.values
    layer.col_indices = layer.col_indices.clone()
    assert layer.weight.pattern is not W.pattern


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
        assert layer(normal(3, 128, dtype=dtype)).dtype is dtype and dtype in layer.weight.form
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
    """For another pattern, with the same number of blocks and with others."""
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
