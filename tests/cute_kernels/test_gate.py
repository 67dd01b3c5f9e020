"""The gate of a layer in training and its gradient: the kernels, and torch in calls that these do not support."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels import explain, reference
from cute_kernels.functions import ACTIVATIONS
from cute_kernels.gate import dispatch
from cute_kernels.gate.dispatch import gate, gate_gradient_into, gate_into
from cute_kernels.testing.reference import normal, poisoned
from sparse_collective import bsr_linear
from sparse_collective.nn import GatedBsrLinear

from ..emulator.ops import needs_compiler, on_emulator

BF16 = torch.bfloat16
NAMES = (None, *ACTIVATIONS)
DTYPES = pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
PLACES = pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def gate_by_torch(z, dh, activation):
    """h and dz by torch's operations, in the dtype of the tensors."""
    z = z.detach().requires_grad_()
    h = reference.gate(z, activation)
    return h.detach(), *torch.autograd.grad(h, z, dh)


def has_kernel(z) -> bool:
    """True on a GPU, or in the emulator; torch's autograd and gate_gradient_into round differently."""
    return dispatch._function("silu", False, z) is not None


def check(z, dh, activation):
    """Compare with FP64: errors are half a step of the result's dtype, or at most those of torch's operations."""
    h, dz = gate(z.requires_grad_(), activation), poisoned(*z.shape, dtype=z.dtype, device=z.device)
    gradient = torch.autograd.grad(h, z, dh)[0]
    z, out = z.detach(), poisoned(*h.shape, dtype=h.dtype, device=h.device)
    versions = out._version, dz._version
    gate_into(z, activation, out)
    gate_gradient_into(z, dh, activation, dz)
    assert out._version > versions[0] and dz._version > versions[1]
    assert torch.equal(out, h) and (not has_kernel(z) or torch.equal(dz, gradient))
    assert h.shape == dh.shape and h.dtype is z.dtype and h.is_contiguous() and dz.is_contiguous()
    exact, by_torch = gate_by_torch(z.double(), dh.double(), activation), gate_by_torch(z, dh, activation)
    step, of_fp32 = torch.finfo(z.dtype).eps, 5e-6 * (z.abs().amax() * (1 + dh.abs().amax())).double()
    for i, found in ((0, h), (1, dz), (1, gradient)):
        error, allowed = ((t.double() - exact[i]).abs() for t in (found, by_torch[i]))
        assert ((error <= 0.501 * step * exact[i].abs() + of_fp32) | (error <= allowed)).all()
    return h, dz


@PLACES
@DTYPES
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("shape", [(64, 256), (1, 128), (3, 37, 384), (333, 1152), (128,)], ids=str)
def test_against_fp64(place, dtype, activation, shape):
    z = normal(*shape, device=place, dtype=dtype) * 3
    check(z, normal(*shape[:-1], shape[-1] // 2, device=place, dtype=dtype), activation)


@needs_compiler
@DTYPES
@pytest.mark.parametrize("activation", NAMES)
def test_on_the_emulator(activation, dtype):
    """Whole CTAs and a last one of which some threads have one vector, and some none."""
    z, dh = normal(27, 3 * 128, dtype=dtype) * 3, normal(27, 3 * 64, dtype=dtype)
    with on_emulator("sm_90"):
        h, dz = check(z, dh, activation)
    same = torch.equal(h, reference.gate(z, activation))  # rounds the activation, too
    assert same is (activation in (None, "relu"))


@needs_compiler
@pytest.mark.parametrize("shape", [(1, 128), (128,), (1, 1, 128), (2, 1, 128), (2, 3, 256)], ids=str)
def test_shapes_and_strides_on_the_emulator(shape):
    z = normal(*shape[:-1], shape[-1] + (4 if shape[-2:] == (1, 128) and shape[0] == 1 else 0))[..., : shape[-1]]
    dh = normal(*shape[:-1], 1).expand(*shape[:-1], shape[-1] // 2)  # as of a sum
    with on_emulator("sm_90"):
        h = gate(z.requires_grad_(), "silu")
        (dz,) = torch.autograd.grad(h, z, dh)
    for found, wanted in zip((h, dz), gate_by_torch(z, dh, "silu"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.01)


@needs_compiler
@pytest.mark.parametrize("activation", NAMES)
def test_nan_and_infinity(activation):
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1.0, -1.0, 100.0, -100.0], dtype=BF16)
    g, u = (t.reshape(64) for t in torch.meshgrid(values, values, indexing="ij"))
    z, dh = torch.cat([g, u])[None], torch.ones(1, 64, dtype=BF16)
    with on_emulator("sm_90"):
        h, out = gate(z, activation), torch.empty_like(z)
        gate_gradient_into(z, dh, activation, out)
    dtype = torch.float64 if activation == "gelu" else BF16  # torch's gelu(inf) in FP32 is NaN on some CPUs
    wanted, gradient = gate_by_torch(z.to(dtype), dh.to(dtype), activation)
    assert torch.equal(h.isnan(), wanted.isnan()) and torch.equal(h.isinf(), wanted.isinf())
    finite = z.isfinite().view(2, 64).all(0).repeat(2)[None]
    assert torch.equal(out.isfinite()[finite], gradient.isfinite()[finite])
    assert not (gradient.isnan() & out.isfinite() & z.isnan()).any()


def kernels_of(call, monkeypatch) -> list:
    """Facts of the kernels that a call asks for on an emulated GPU."""
    found, find = [], dispatch._kernel.__wrapped__

    def noted(*key):
        found.append(key)
        return find(*key)

    with on_emulator("sm_90"), monkeypatch.context() as patch:
        patch.setattr(dispatch, "_kernel", noted)
        noted.__wrapped__ = noted
        call()
    return found


@needs_compiler
def test_what_torch_computes(monkeypatch):
    z, h = normal(4, 256), torch.empty(4, 128, dtype=BF16)
    others = {
        "float32": z.float(), "float64": z.double(), "strides": z.t().contiguous().t(), "no rows": z[:0],
        "address": normal(4 * 256 + 1)[1:].view(4, 256), "sliced": normal(4, 512)[:, :256],
        "subclass": z.as_subclass(type("Own", (torch.Tensor,), {})),
    }  # fmt: skip
    for name, t in others.items():
        wanted = reference.gate(t, "silu")

        def call(t=t, wanted=wanted, name=name):
            assert torch.equal(gate(t, "silu"), wanted), name
            gate_into(t, "silu", out := torch.empty_like(wanted))
            assert torch.equal(out, wanted), name

        assert not kernels_of(call, monkeypatch), name
    assert not kernels_of(lambda: gate_into(z, None, h.t().contiguous().t()), monkeypatch)
    assert not kernels_of(lambda: torch.func.vmap(lambda z: gate(z, "silu"))(z[None]), monkeypatch)
    assert not kernels_of(lambda: torch.func.grad(lambda z: gate(z, "silu").float().sum())(z), monkeypatch)
    assert len(kernels_of(lambda: gate(z, "silu"), monkeypatch)) == 1


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_calls_trace_torch(grad):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    run = torch.compile(lambda z: gate(z, "silu"), fullgraph=True, backend=backend)
    z = normal(4, 256).requires_grad_(grad)
    assert torch.equal(run(z), reference.gate(z, "silu"))
    assert any("silu" in str(node.target) for node in graphs[0].graph.nodes)


@pytest.mark.parametrize("fake_gpu", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_compiled_calls_on_a_gpu(fake_gpu, monkeypatch):
    """They trace the op, forward and backward, whose results are those of eager calls."""
    targets = []

    def noted(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph)

    if fake_gpu:
        monkeypatch.setattr(dispatch, "_on_gpu", lambda z: True)
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=noted, bw_compiler=noted)
    run = torch.compile(lambda z: gate(z, "silu"), fullgraph=True, backend=backend)
    for rows in (4, 6):
        z, dh = (normal(rows, n, device="cpu" if fake_gpu else "cuda") for n in (256, 128))
        h, expected = run(z.requires_grad_()), gate(z, "silu")
        assert torch.equal(h, expected)
        found, wanted = (torch.autograd.grad(t, z, dh)[0] for t in (h, expected))
        near = 0.02 if fake_gpu else 0.0  # without kernels the op computes in FP32
        torch.testing.assert_close(found, wanted, rtol=near, atol=near)
    ops = {target.split(".")[1] for target in targets if target.startswith("cute_kernels")}
    assert ops == {"gate", "gate_gradient"}


@pytest.mark.parametrize("shape", [(3, 128), (0, 128), (2, 3, 256), (128,)], ids=str)
def test_ops(shape):
    """Also of strided tensors; whose results are contiguous."""
    half = (*shape[:-1], shape[-1] // 2)
    strided = normal(*shape, 2)[..., 0], normal(*shape[:-1], 1).expand(half)
    for z, dh in ((normal(*shape), normal(*half)), strided):
        torch.library.opcheck(torch.ops.cute_kernels.gate.default, (z.requires_grad_(), "silu"))
        torch.library.opcheck(torch.ops.cute_kernels.gate_gradient.default, (z.detach(), dh, "gelu"))
    for wrong in (dh[..., :32], dh.float()):
        with pytest.raises((ValueError, TypeError), match="gate_gradient: a tensor of shape"):
            torch.ops.cute_kernels.gate_gradient(z.detach(), wrong, "silu")


TRANSFORMS = {
    "grad": lambda f, z, v: torch.func.grad(lambda z: f(z).float().square().sum())(z),
    "vmap": lambda f, z, v: torch.func.vmap(f)(z),
    "vjp": lambda f, z, v: torch.func.vjp(f, z)[1](f(v))[0],
    "jvp": lambda f, z, v: torch.func.jvp(f, (z,), (v,))[1],
    "hessian": lambda f, z, v: torch.func.hessian(lambda z: f(z).float().square().sum())(z[:1]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_compiled_transforms(name, monkeypatch):
    """They have torch's operations."""
    monkeypatch.setattr(dispatch, "_on_gpu", lambda z: True)
    torch._dynamo.reset()
    z, v = normal(2, 128), normal(2, 128)
    run = torch.compile(lambda z, v: TRANSFORMS[name](lambda z: gate(z, "silu"), z, v), backend="eager")
    expected = TRANSFORMS[name](lambda z: reference.gate(z, "silu"), z, v)
    assert expected.any() and torch.equal(run(z, v), expected)


def test_compiled_tangents(monkeypatch):
    monkeypatch.setattr(dispatch, "_on_gpu", lambda z: True)
    torch._dynamo.reset()
    run, z, v = torch.compile(lambda z: gate(z, "silu"), backend="eager"), normal(2, 128), normal(2, 128)
    run(z)
    with forward_ad.dual_level():
        tangents = [forward_ad.unpack_dual(f(forward_ad.make_dual(z, v))).tangent for f in (run, by_silu)]
    assert torch.equal(*tangents)


def by_silu(z):
    return reference.gate(z, "silu")


def test_dispatch_modes_see_the_op(monkeypatch):
    """Forward, backward, and a second time; the first derivative's numbers are those of calls without a mode."""
    monkeypatch.setattr(dispatch, "_on_gpu", lambda z: True)
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **kwargs or {})

    z, dh, v = normal(3, 128).requires_grad_(), normal(3, 64), normal(3, 128)
    with Mode():
        h = gate(z, "silu")
        (dz,) = torch.autograd.grad(h, z, dh, create_graph=True)
    assert [name for name in seen if "cute_kernels" in name] == [
        "cute_kernels.gate.default", "cute_kernels.gate_gradient.default",
    ]  # fmt: skip
    (found,) = torch.autograd.grad(dz, z, v)
    (first,) = torch.autograd.grad(by_silu(z), z, dh, create_graph=True)
    torch.testing.assert_close(dz, first, rtol=0.02, atol=0.02)
    torch.testing.assert_close(found, torch.autograd.grad(first, z, v)[0], rtol=0.02, atol=0.02)


@needs_compiler
def test_hooks_run_once():
    """Also where the gradient is differentiable again."""
    calls, z, dh = [], normal(3, 128).requires_grad_(), normal(3, 64)
    z.register_hook(calls.append)
    with on_emulator("sm_90"):
        torch.autograd.grad(gate(z, "silu"), z, dh, create_graph=True)
    assert len(calls) == 1


@needs_compiler
@pytest.mark.parametrize("activation", NAMES)
def test_second_derivatives(activation):
    """Also of batched gradients: torch's operations, behind a forward pass of the kernel."""
    z, dh, v = (normal(*shape).float() for shape in ((3, 128), (3, 64), (3, 128)))

    def twice(gate, z, dh):
        z, dh = (t.clone().requires_grad_() for t in (z, dh))
        (dz,) = torch.autograd.grad(gate(z, activation), z, dh, create_graph=True)
        return *torch.autograd.grad((dz * v.to(z.dtype)).sum(), (z, dh), allow_unused=True), dz.detach()

    low = z.bfloat16(), dh.bfloat16()
    with on_emulator("sm_90"):
        found = twice(gate, *low)
        t = low[0].clone().requires_grad_()
        h = gate(t, activation)
        batched = torch.autograd.grad(h, t, torch.stack([low[1]] * 2), is_grads_batched=True)[0]
    for mine, torchs in zip(found, twice(reference.gate, *low), strict=True):
        torch.testing.assert_close(mine, torchs, rtol=0.02, atol=0.02)
    torch.testing.assert_close(batched[1], gate_by_torch(*low, activation)[1])


def test_errors():
    z, dh, dz = normal(4, 256), normal(4, 128), normal(4, 256)
    with pytest.raises(
        ValueError, match=r"gate_into: z is \(4, 96\); it must be \(\.\.\., 2 H\) with H a multiple of 64"
    ):
        gate_into(normal(4, 96), "silu", normal(4, 48))
    with pytest.raises(ValueError, match=r"a tensor of shape \(4, 128\), .*must be \(4, 256\)"):
        gate_gradient_into(z, dh, "silu", dh)
    with pytest.raises(TypeError, match="gate_into: a tensor .* torch.float32"):
        gate_into(z, "silu", dh.float())
    with pytest.raises(RuntimeError, match="gate_gradient_into does not compute gradients"):
        gate_gradient_into(z, dh.requires_grad_(), "silu", dz)
    with pytest.raises(KeyError, match="tanh"):
        gate(z, "tanh")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_of_a_training_step(arch):
    layer = GatedBsrLinear(128, 512, blocksize=(128, 128), density=0.5, dtype=BF16)
    plan = explain(layer, normal(64, 128), arch=arch, backward=True)
    names = [
        [(facts.family, getattr(facts, "gradient", None)) for facts in part] for part in (plan.forward, plan.backward)
    ]
    assert names == [[("bsr", None), ("gate", False)], [("gate", True), ("sampled", None)]]


@pytest.mark.gpu
@pytest.mark.parametrize("activation", NAMES)
def test_a_training_layer(activation):
    """Against torch's gate behind the same GEMM; autograd saves z alone, and every run has the same bits."""
    layer = GatedBsrLinear(
        256, 1024, blocksize=(128, 128), density=0.5, activation=activation, device="cuda", dtype=BF16
    )
    x = normal(300, 256, device="cuda").requires_grad_()
    dh = normal(300, 512, device="cuda")
    inputs = (x, *layer.parameters())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        h = layer(x)
    assert saved.count((300, 1024)) == 1 and (300, 512) not in saved
    found = torch.autograd.grad(h, inputs, dh)
    again = layer(x)
    assert torch.equal(again, h)
    assert all(map(torch.equal, found, torch.autograd.grad(again, inputs, dh)))
    wanted = reference.gate(bsr_linear(x, layer.weight), activation)
    for mine, torchs in zip((h, *found), (wanted, *torch.autograd.grad(wanted, inputs, dh)), strict=True):
        assert (mine.double() - torchs.double()).norm() <= 0.01 * torchs.double().norm()
