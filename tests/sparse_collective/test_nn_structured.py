"""Layers for inference with 2:4 sparse weights, and the recipe from the documents that leads to them."""

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from cute_kernels import prune_2_4
from cute_kernels.testing.reference import ACTIVATIONS, assert_as_good_as_torch
from sparse_collective import Bsr24, BsrMatrix, bsr_linear, random_bsr
from sparse_collective.nn import (
    Bsr24Linear,
    BsrGroupedLinear,
    BsrLinear,
    Sparse24Config,
    Sparse24Linear,
    SwiGLU,
    mask_2_4_,
    prune_2_4_,
    quantize_,
)

from ..emulator.ops import needs_compiler, on_emulator

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3 = torch.float8_e4m3fn
ONE_PLACE = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def blocks(where="cpu", M=192, K=256, *, density=0.5, dtype=BF16, **more) -> BsrLinear:
    return BsrLinear(K, M, True, (64, 64), density=density, device=where, dtype=dtype, **more).eval()


def linear(where="cpu", M=200, K=72, dtype=BF16, bias=True) -> nn.Linear:
    """For stored rows that are no multiples of 16 bytes."""
    return nn.Linear(K, M, bias, device=where).to(dtype).eval()


def tokens(*shape, where="cpu", dtype=BF16):
    return torch.randn(*shape, device=where).to(dtype)


def dense_of(layer) -> torch.Tensor:
    """The layer's weight as it is after pruning."""
    return prune_2_4(layer.weight.to_dense() if isinstance(layer, BsrLinear) else layer.weight).detach()


def check(layer, weight, bias, x, activation=None):
    """A layer's product against fp64 ones of the same numbers."""
    y = layer(x)

    def exact(dtype):
        z = x.to(dtype) @ weight.to(dtype).t()
        return ACTIVATIONS[activation](z if bias is None else z + bias.detach().to(dtype))

    assert y.dtype == x.dtype and y.shape == (*x.shape[:-1], len(weight)) and y.is_contiguous()
    assert_as_good_as_torch(y, exact(FP64), exact(FP32).to(y.dtype), k=x.shape[-1])


# -- the layers -----------------------------------------------------------------------------------------------------


@ONE_PLACE
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("shape", [(), (1,), (40,), (2, 3), (0,)], ids=str)
def test_block_sparse(where, activation, shape):
    layer = blocks(where, activation=activation)
    made = Bsr24Linear(layer)
    check(made, dense_of(layer), layer.bias, tokens(*shape, 256, where=where), activation)
    assert isinstance(made.weight, Bsr24) and made.weight is made.weight and not made.training
    assert not list(made.parameters()) and made.pattern.nnz == layer.nnz and made.blocksize == (64, 64)


@ONE_PLACE
@pytest.mark.parametrize(("activation", "bias"), [(None, True), ("gelu", False), ("relu", True)])
@pytest.mark.parametrize("shape", [(), (1,), (40,), (2, 3), (0,)], ids=str)
def test_dense(where, activation, bias, shape):
    layer = linear(where, bias=bias)
    made = Sparse24Linear(layer, activation=activation)
    check(made, dense_of(layer), layer.bias, tokens(*shape, 72, where=where), activation)
    assert made.weight is made.weight and not list(made.parameters())


def test_of_a_matrix():
    V = random_bsr((192, 256), (64, 64), density=0.5, index_dtype=torch.int64).prune_2_4()
    bias, x = torch.randn(192), tokens(8, 256)
    made = Bsr24Linear.from_bsr(V, bias, activation="relu")
    assert torch.equal(made(x), bsr_linear(x, V, bias=bias.to(BF16), activation="relu")) and not made.training
    assert made.values.data_ptr() != V.values.data_ptr() and made.crow_indices.dtype == torch.int32
    back = BsrLinear.from_bsr(made.weight.to_bsr(), made.bias, activation=made.activation)
    with torch.no_grad():
        assert torch.equal(back(x), made(x))


def test_what_is_2_4_already_is_kept():
    layer = blocks()
    with torch.no_grad():
        layer.values.copy_(prune_2_4(layer.values))
    x, made = tokens(8, 256), Bsr24Linear(layer)
    assert torch.equal(made.weight.to_dense(), layer.weight.to_dense())
    with torch.no_grad():
        assert torch.equal(made(x), layer(x))


def test_it_says_so():
    layer = blocks(activation="silu")
    stored = f"density={layer.density:.4g}, blocks={layer.nnz} of 12"
    facts = f"in_features=256, out_features=192, bias=True, blocksize=(64, 64), {stored}, 2:4, dtype=torch.bfloat16"
    assert repr(Bsr24Linear(layer)) == f"Bsr24Linear({facts}, activation='silu')"
    assert repr(Sparse24Linear(linear(bias=False))) == (
        "Sparse24Linear(in_features=72, out_features=200, bias=False, 2:4, dtype=torch.bfloat16)"
    )


def both() -> list[tuple[nn.Module, torch.Tensor]]:
    return [(Bsr24Linear(blocks()), tokens(8, 256)), (Sparse24Linear(linear()), tokens(8, 72))]


@pytest.mark.parametrize("number", range(2))
def test_moves_copies_and_files(number):
    layer, x = both()[number]
    y = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), y) and other.values.data_ptr() != layer.values.data_ptr()
    assert layer.to(BF16) is layer and layer.values.stride(0) * 2 % 16 == 0
    half = copy.deepcopy(layer).to(FP16)
    assert half.weight.dtype == half.bias.dtype == FP16 and half.metadata.dtype == torch.int32
    assert half.values.stride(0) * 2 % 16 == 0 and half(x.half()).dtype == FP16
    layer.values.mul_(2.0)  # in place: the kept matrix shares it
    layer.bias.mul_(2.0)
    assert torch.equal(layer(x), y * 2.0)
    with torch.autocast("cpu", dtype=BF16):
        wide = copy.deepcopy(layer).float()
        assert torch.equal(wide(x.float()), layer(x))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("number", range(2))
def test_state(number, assign):
    (layer, x), (other, _) = both()[number], both()[number]
    assert set(layer.state_dict()) == {*layer.TENSORS, "bias"}
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other(x)
    other.load_state_dict(state, assign=assign)
    assert torch.equal(other(x), layer(x)) and other.values.stride(0) * 2 % 16 == 0
    empty = copy.deepcopy(layer).to("meta")
    assert empty.weight.shape == layer.weight.shape
    if not assign:
        empty.to_empty(device="cpu")
    empty.load_state_dict(state, assign=assign)
    assert torch.equal(empty(x), layer(x))


@pytest.mark.parametrize("number", range(2))
def test_a_state_at_odd_addresses(number):
    """As of a mapped file, whose tensors a layer takes as they are."""
    (layer, x), (other, _) = both()[number], both()[number]

    def odd(t):
        return torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)

    other.load_state_dict({name: odd(t) for name, t in layer.state_dict().items()}, assign=True)
    found = other.values.data_ptr(), other.metadata.data_ptr()
    assert torch.equal(other(x), layer(x)) and not any(at % 16 for at in found)


@pytest.mark.parametrize("assign", [False, True])
def test_state_of_another_pattern(assign):
    layer, other, x = Bsr24Linear(blocks(density=0.3)), Bsr24Linear(blocks(density=0.8)), tokens(8, 256)
    other(x)
    other.load_state_dict(layer.state_dict(), assign=assign)
    assert other.nnz == layer.nnz and torch.equal(other(x), layer(x))
    model = nn.Sequential(blocks(density=0.6))
    prune_2_4_(model)
    model.load_state_dict({f"0.{name}": t for name, t in layer.state_dict().items()}, assign=assign)
    assert torch.equal(model(x), layer(x))


def test_layers_on_the_meta_device():
    """Their shapes alone; a state fills them."""
    full = nn.Sequential(blocks(), linear(M=64, K=192))
    with torch.device("meta"):
        empty = nn.Sequential(BsrLinear(256, 192, True, (64, 64), density=0.1, dtype=BF16), nn.Linear(192, 64)).to(BF16)
    for model in (full, empty):
        assert len(prune_2_4_(model, Sparse24Config(dense=True)).changed) == 2
    empty.load_state_dict(full.state_dict(), assign=True)
    x = tokens(8, 256)
    assert torch.equal(empty(x), full(x))


def test_states_that_do_not_fit():
    layer = Bsr24Linear(blocks())
    state = layer.state_dict()
    wrong = {
        "has crow_indices, col_indices, values alone; .*that of a BsrLinear into one": {"metadata": None},
        "another number of block rows": {"crow_indices": state["crow_indices"][1:]},
        "the layer has blocks of": {"values": state["values"][:, :32]},
        "metadata is .* of torch.int64; it must be": {"metadata": state["metadata"].long()},
        "Bsr24Linear: .*crow_indices": {"crow_indices": state["crow_indices"].flip(0)},
    }
    for words, change in wrong.items():
        given = {name: t for name, t in {**state, **change}.items() if t is not None}
        with pytest.raises(RuntimeError, match=words):
            layer.load_state_dict(given)
    with pytest.raises(RuntimeError, match="size mismatch for values"):
        Sparse24Linear(linear()).load_state_dict(Sparse24Linear(linear(M=100)).state_dict())
    with pytest.raises(RuntimeError, match=r"has values alone; .* an nn.Linear into one|Missing key"):
        Sparse24Linear(linear()).load_state_dict(linear().state_dict())
    layer.crow_indices = layer.crow_indices + 1
    with pytest.raises(ValueError, match="no pattern .*load_state_dict"):
        layer(tokens(8, 256))


def refusals() -> list:
    (sparse, x), (dense, z) = both()
    batch = BsrMatrix.stack([random_bsr((64, 64), (64, 64), density=1.0)] * 2).prune_2_4()
    narrow = BsrLinear(64, 64, blocksize=(32, 32), density=1.0)
    return [
        (lambda: sparse(x.requires_grad_()), RuntimeError, r"no gradients.*torch.no_grad.*a BsrLinear with the masks"),
        (lambda: dense(z.requires_grad_()), RuntimeError, r"no gradients.*an nn.Linear with the masks of mask_2_4_"),
        (lambda: sparse(x[:, :64]), ValueError, "W is 192x256 and x"),
        (lambda: dense(z[:, :64]), ValueError, "72 columns meet 64 rows"),
        (lambda: sparse(x.half()), TypeError, "x is torch.float16 but W is torch.bfloat16"),
        (lambda: Bsr24Linear(linear()), TypeError, "needs a BsrLinear, got Linear; see from_bsr"),
        (lambda: Bsr24Linear(narrow), ValueError, "blocks of 32x32; metadata are those of multiples of 64"),
        (lambda: Bsr24Linear.from_bsr(blocks().weight), TypeError, "needs a Bsr24, got BsrMatrix; see BsrMatrix.prune"),
        (lambda: Bsr24Linear.from_bsr(batch), ValueError, "got a batch"),
        (lambda: Bsr24Linear.from_bsr(sparse.weight, torch.ones(3)), ValueError, r"must be \(192,\)"),
        (lambda: Bsr24Linear.from_bsr(sparse.weight, activation="tanh"), ValueError, "activation 'tanh'; use None"),
        (lambda: Sparse24Linear(blocks()), TypeError, "needs a torch.nn.Linear, got BsrLinear"),
        (lambda: Sparse24Linear(linear(K=70)), ValueError, r"\(200, 70\); its last dimension must be a multiple of 4"),
        (lambda: prune_2_4_(blocks()), ValueError, r"of one layer use Bsr24Linear\(layer\)"),
        (lambda: prune_2_4_(linear()), ValueError, r"of one layer use Sparse24Linear\(layer\)"),
        (lambda: Bsr24Linear.from_bsr(sparse.weight.quantize()), TypeError, "weight is torch.float8_e4m3fn; it must"),
        (lambda: Sparse24Linear(linear(dtype=E4M3)), TypeError, "weight is torch.float8_e4m3fn; it must be"),
        (lambda: sparse.to(E4M3)(x.to(E4M3)), TypeError, "Bsr24Linear: the weight is torch.float8_e4m3fn"),
        (lambda: dense.to(E4M3)(z.to(E4M3)), TypeError, "Sparse24Linear: the weight is torch.float8_e4m3fn"),
    ]


@pytest.mark.parametrize("number", range(19))
def test_what_is_refused(number):
    call, error, words = refusals()[number]
    with pytest.raises(error, match=words):
        call()


# -- models ---------------------------------------------------------------------------------------------------------


def test_a_model():
    """Layers are swapped once, others stay and are reported."""
    shared, hooked, plain = blocks(M=256), blocks(M=256), linear(K=256, M=256)
    hooked.register_forward_hook(lambda *_: None)
    small = BsrLinear(256, 256, blocksize=(32, 32), density=0.5, dtype=BF16)
    model = nn.Sequential(shared, SwiGLU(256, 384, blocksize=(64, 64), density=0.5, dtype=BF16), shared, hooked, small)
    model.append(plain)
    model.append(BsrGroupedLinear(2, 256, 256, blocksize=(64, 64), density=0.5, dtype=BF16))
    report = prune_2_4_(model)
    assert [type(m).__name__ for m in model] == [
        *("Bsr24Linear", "SwiGLU", "Bsr24Linear", "BsrLinear", "BsrLinear", "Linear", "BsrGroupedLinear")
    ]
    assert model[0] is model[2] and isinstance(model[1].gate_up, Bsr24Linear) and isinstance(model[1].down, Bsr24Linear)
    assert [c.name for c in report.changed] == ["0", "1.gate_up", "1.down"]
    text = str(report)
    for words in ("has hooks", "blocks of 32x32", "bsr_grouped_linear takes a Bsr24", "3 of 6 layers"):
        assert words in text
    assert report.changed[0].after == shared.values.numel() // 2 + 256
    report = prune_2_4_(model, Sparse24Config(dense=True))
    assert isinstance(model[5], Sparse24Linear) and " -  " in str(report)
    with torch.no_grad():
        assert nn.Sequential(*model[:6])(tokens(8, 256)).isfinite().all()


def test_layers_that_stay_dense():
    tied = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": tied, "b": nn.Linear(64, 64), "c": nn.Linear(66, 64), "d": nn.Linear(64, 64)})
    model["b"].weight = tied.weight
    model["attention"] = nn.MultiheadAttention(64, 2)
    model["e"] = nn.Linear(64, 64).to(E4M3)
    report = prune_2_4_(model, Sparse24Config(dense=True), lambda module, fqn: fqn != "d")
    why = {c.name: c.skipped for c in report.skipped}
    assert set(why) == {"a", "b", "c", "e", "attention.out_proj"} and not report.changed
    assert "shares a parameter" in why["a"] and "multiple of 4" in why["c"] and "is a Non" in why["attention.out_proj"]
    assert why["e"] == "its weight is torch.float8_e4m3fn"


@ONE_PLACE
def test_gated_layers(where):
    """SwiGLU with 2:4 layers inside, beside one of the same numbers."""
    layer = SwiGLU(256, 384, blocksize=(64, 64), density=0.5, device=where, dtype=BF16).eval()
    with torch.no_grad():
        for part in (layer.gate_up, layer.down):
            part.values.copy_(prune_2_4(part.values))
    model, x = nn.Sequential(copy.deepcopy(layer)), tokens(40, 256, where=where)
    prune_2_4_(model)
    with torch.no_grad():
        wanted = layer(x).float()
        assert ((model(x).float() - wanted).norm() / wanted.norm()) < 0.02


# -- masks ----------------------------------------------------------------------------------------------------------


@ONE_PLACE
@pytest.mark.parametrize("compiled", [False, True])
def test_masks(where, compiled):
    """Forward of what is kept, gradients of all; states are those of plain layers."""
    torch._dynamo.reset()
    layer, plain = blocks(where, activation="silu"), linear(where, K=192, M=136)
    wanted = nn.Sequential(copy.deepcopy(layer), copy.deepcopy(plain))
    model = nn.Sequential(layer, plain)
    state = model.state_dict()
    report = mask_2_4_(model, Sparse24Config(dense=True))
    assert len(report.changed) == 2 and not mask_2_4_(model, Sparse24Config(dense=True)).changes
    assert type(layer).__name__ == "Masked24BsrLinear" and type(plain).__name__ == "Masked24Linear"
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    with torch.no_grad():
        wanted[0].values.copy_(prune_2_4(layer.values))
        wanted[1].weight.copy_(prune_2_4(plain.weight))
    x, dy = tokens(40, 256, where=where), tokens(40, 136, where=where)
    backend = "inductor" if where == "cuda" else "aot_eager"
    run = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
    run(x).backward(dy)
    wanted(x).backward(dy)
    for mine, right in zip(model.parameters(), wanted.parameters(), strict=True):
        off = (mine.grad.float() - right.grad.float()).norm() / right.grad.float().norm()
        assert off < (0.02 if where == "cuda" else 1e-6)
    made = copy.deepcopy(model)
    prune_2_4_(made, Sparse24Config(dense=True))
    for new, old in zip(made, wanted, strict=True):
        assert torch.equal(new.weight.to_dense(), old.weight.to_dense() if isinstance(old, BsrLinear) else old.weight)
    torch._dynamo.reset()


def test_masks_of_models():
    model = nn.Sequential(SwiGLU(256, 384, blocksize=(64, 64), density=0.5, dtype=BF16), linear(K=256, M=256))
    model.append(BsrLinear(256, 256, blocksize=(32, 32), density=0.5, dtype=BF16))
    hook = model[0].down.register_forward_hook(lambda *_: None)
    report = mask_2_4_(model, Sparse24Config(dense=True), lambda module, fqn: fqn != "1")
    assert [c.name for c in report.changed] == ["0.gate_up", "0.down"] and "blocks of 32x32" in str(report)
    x = tokens(8, 256)
    y = model(x)
    y.sum().backward()
    assert (model[0].gate_up.values.grad != 0).float().mean() > 0.9
    other = copy.deepcopy(model)
    report = prune_2_4_(other)
    assert [c.name for c in report.changed] == ["0.gate_up"] and "has hooks" in str(report)
    hook.remove()
    quantize_(model)
    quantize_(other)
    assert type(model[0]).__name__ == "Float8SwiGLU" and type(model[0].gate_up).__name__ == "Float8BsrLinear"
    assert type(other[0]).__name__ == "SwiGLU" and type(other[0].down).__name__ == "Float8BsrLinear"
    single = blocks()
    assert len(mask_2_4_(single).changed) == 1 and type(single).__name__ == "Masked24BsrLinear"


def test_masks_of_torch_that_stay():
    """As the documents have them."""
    model = nn.Sequential(blocks(), nn.ReLU(), linear(K=192))
    places = (model[0], "values"), (model[2], "weight")
    for layer, name in places:
        prune.custom_from_mask(layer, name, prune_2_4(getattr(layer, name)) != 0)
    kept = model[0].values != 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tokens(8, 256)).float().square().mean().backward()
    optimizer.step()
    assert "has hooks" in str(prune_2_4_(model, Sparse24Config(dense=True))) and isinstance(model[0], BsrLinear)
    for layer, name in places:
        prune.remove(layer, name)
    assert not (model[0].values[~kept]).any() and torch.equal(prune_2_4(model[0].values), model[0].values)
    x = tokens(8, 256)
    with torch.no_grad():
        wanted = model(x).float()
    assert len(prune_2_4_(model, Sparse24Config(dense=True)).changed) == 2
    assert ((model(x).float() - wanted).norm() / wanted.norm()) < 0.02


# -- torch.compile --------------------------------------------------------------------------------------------------


@ONE_PLACE
def test_a_compiled_model_has_no_break(where):
    """One graph, of any number of tokens; after a move and a new state the same."""
    torch._dynamo.reset()
    model = nn.Sequential(
        *(blocks(where, activation="silu"), nn.LayerNorm(192, device=where, dtype=BF16), linear(where, 256, 192)),
        SwiGLU(256, 384, blocksize=(64, 64), density=0.5, device=where, dtype=BF16),
    )
    prune_2_4_(model.eval(), Sparse24Config(dense=True))
    backend = "inductor" if where == "cuda" else "aot_eager"
    run, x = torch.compile(model, fullgraph=True, backend=backend), tokens(40, 256, where=where)
    with torch.no_grad():
        for n in (40, 8, 24):
            assert torch.allclose(run(x[:n]), model(x[:n]), rtol=0.02, atol=0.02)
        other = copy.deepcopy(model)
        for t in other.buffers():
            if t.is_floating_point():
                t.mul_(-1.0)
        model.load_state_dict(other.state_dict())
        assert torch.allclose(run(x), other(x), rtol=0.02, atol=0.02)
        explained = torch._dynamo.explain(model)(x)
        assert explained.graph_count == 1 and explained.graph_break_count == 0
    torch._dynamo.reset()


def test_compiled_refusal_and_export():
    torch._dynamo.reset()
    model = nn.Sequential(blocks(), linear(K=192))
    prune_2_4_(model, Sparse24Config(dense=True))
    x = tokens(8, 256)
    with pytest.raises(Exception, match="for inference and computes no gradients"):
        torch.compile(model, fullgraph=True, backend="eager")(x.clone().requires_grad_())
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), model(x))
    torch._dynamo.reset()


# -- the emulator ---------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
def test_layers_on_the_emulator(arch):
    layer, plain = blocks(activation="gelu"), linear(K=192, M=136)
    made = Bsr24Linear(layer), Sparse24Linear(plain, activation="silu")
    with on_emulator(arch, sms=3):
        x = tokens(20, 256)
        check(made[0], dense_of(layer), layer.bias, x, "gelu")
        check(made[1], dense_of(plain), plain.bias, made[0](x), "silu")
        for new, old in zip(made, (layer, plain), strict=True):  # one token
            check(new, dense_of(old), old.bias, x[0, : old.in_features], new.activation)
        torch._dynamo.reset()
        model = nn.Sequential(*made)
        assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))
        torch._dynamo.reset()


# -- the recipe -----------------------------------------------------------------------------------------------------


def test_the_recipe():
    """Masks while training, by which the model learns; then the layers, which compute the same."""
    torch.manual_seed(0)
    model = nn.Sequential(BsrLinear(256, 192, blocksize=(64, 64), density=0.5, dtype=FP32), nn.ReLU(), linear(K=192))
    model = model.float().train()
    mask_2_4_(model, Sparse24Config(dense=True))
    layer, x, target = model[0], torch.randn(40, 256), torch.randn(40, 200)
    whole, parameters = layer.values, {id(p) for p in model.parameters()}
    assert torch.equal(layer.weight.values, prune_2_4(whole)) and not torch.equal(layer.weight.values, whole)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert (layer.values.grad != 0).float().mean() > 0.9  # straight through, to what the mask hides, too
    assert parameters == {id(p) for p in model.parameters()}
    assert losses[-1] < 0.8 * losses[0] and all(map(math.isfinite, losses))
    with torch.no_grad():
        wanted = model(x)
    prune_2_4_(model.eval(), Sparse24Config(dense=True))
    model.to(BF16)
    assert isinstance(model[0], Bsr24Linear) and model[0].values.dtype == BF16 and isinstance(model[2], Sparse24Linear)
    found = model(x.to(BF16)).float()
    assert (found - wanted).norm() / wanted.norm() < 0.02
