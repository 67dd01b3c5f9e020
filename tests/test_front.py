"""Every op under what its kernels cannot see by themselves: torch.func, forward-mode AD, second derivatives, batched
gradients, dispatch modes, tensor subclasses, and tensors without memory."""

import functools
from unittest import mock

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from attention import attention, block_sparse_attention, scaled_dot_product_attention, selected_attention
from cute_kernels import gemm
from cute_kernels.testing.reference import normal
from sparse_collective import BsrMatrix, bsr_gated_linear, bsr_grouped_linear, bsr_linear, bsr_matmul, random_bsr

FRAMES = 20  # that Dynamo may try in a call

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),  # of torch's own attention
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    """The device of torch's FP64 reference, and a GPU."""
    return request.param


def ops(place) -> dict:
    """name -> (a function of one tensor, that tensor, the same by torch's own ops or None)"""
    dtype = torch.float64 if place == "cpu" else torch.bfloat16
    functional = torch.nn.functional

    def tensor(*shape):
        return normal(*shape, device=place).to(dtype)

    a, b, q, x = tensor(16, 32), tensor(32, 24), tensor(2, 2, 16, 64), tensor(128, 64)
    W = random_bsr((64, 64), (32, 32), density=0.7).to(place).to(dtype)
    W128 = random_bsr((256, 64), (128, 32), density=0.7).to(place).to(dtype)
    experts = BsrMatrix.stack([random_bsr((64, 64), (32, 32), density=0.7).to(place).to(dtype) for _ in range(2)])
    groups = torch.tensor([1, 0], dtype=torch.int32, device=place)
    blocks = torch.ones(1, 1, dtype=torch.bool, device=place)

    indices = torch.zeros(2, 16, 1, dtype=torch.int32, device=place)

    def steeper(score, b, h, q, kv):
        return score - 0.1 * (q - kv).abs()

    def silu(z):
        return z * torch.sigmoid(z)

    sdpa = functional.scaled_dot_product_attention
    return {
        "gemm": (lambda a: gemm(a, b, activation="silu"), a, lambda a: functional.silu(a @ b)),
        "gemm, function": (lambda a: gemm(a, b, epilogue=silu), a, lambda a: functional.silu(a @ b)),
        "bsr_linear": (lambda x: bsr_linear(x, W, activation="gelu"), x,
                       lambda x: functional.gelu(x @ W.to_dense().T)),
        "bsr_matmul": (lambda x: bsr_matmul(W, x.mT), x, lambda x: W.to_dense() @ x.mT),
        "bsr_gated_linear": (lambda x: bsr_gated_linear(x, W128), x, None),
        "bsr_grouped_linear": (lambda x: bsr_grouped_linear(x, experts, expert_ids=groups), x, None),
        "bsr_grouped_linear, offsets": (
            lambda x: bsr_grouped_linear(x, experts, offs=torch.tensor([37, 90], device=place)), x, None,
        ),
        "attention": (lambda q: attention(q, q, q, causal=True), q, lambda q: sdpa(q, q, q, is_causal=True)),
        "attention, score_mod": (lambda q: attention(q, q, q, score_mod=steeper), q, None),
        "block_sparse_attention": (lambda q: block_sparse_attention(q, q, q, blocks), q, lambda q: sdpa(q, q, q)),
        "selected_attention": (lambda q: selected_attention(q, q, q, indices, 16), q, lambda q: sdpa(q, q, q)),
    }  # fmt: skip


@pytest.fixture(params=ops("cpu"))
def case(request, place):
    return ops(place)[request.param]


def near(found, expected, place) -> None:
    bound = 1e-10 if place == "cpu" else 0.05
    error = (found.double() - expected.double()).abs().max()
    assert error <= bound * expected.double().abs().max().clamp(min=1), error


def loss(f):
    return lambda x: f(x).square().sum()


def test_reverse_mode_of_torch_func(case, place):
    f, x, reference = case
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(f)(leaf), leaf)
    near(grad(loss(f))(x), expected, place)
    both = torch.stack([x, x / 2])
    near(vmap(f)(both), torch.stack([f(t) for t in both]), place)
    near(vmap(grad(loss(f)))(both)[0], expected, place)
    if reference is not None:
        near(expected, grad(loss(reference))(x), place)
        few = lambda f: lambda x: f(x).flatten()[:2]  # noqa: E731
        near(jacrev(few(f))(x), jacrev(few(reference))(x), place)


def test_forward_mode_raises(case):
    f, x, _ = case
    for run in (lambda: jvp(f, (x,), (x,)), lambda: jacfwd(loss(f))(x), lambda: hessian(loss(f))(x)):
        with pytest.raises(RuntimeError, match="has no forward-mode derivative .* use reverse mode"):
            run()
    with forward_ad.dual_level():
        with pytest.raises(RuntimeError, match="has no forward-mode derivative"):
            f(forward_ad.make_dual(x, x))
        assert f(x).shape == f(x.detach()).shape, "a tensor without a tangent is an ordinary one"


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.parametrize("name", ["gemm", "bsr_linear", "bsr_gated_linear", "attention", "block_sparse_attention"])
def test_compiled_forward_mode_raises(place, name):
    f, x, _ = ops(place)[name]
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="has no forward-mode derivative"):
        torch.compile(lambda x: jvp(f, (x,), (x,)), backend="eager")(x)
    torch._dynamo.reset()  # Dynamo of torch 2.11 skips each frame of the failed call from now on
    run = torch.compile(f, backend="eager")
    expected = run(x)
    with forward_ad.dual_level():
        with pytest.raises(RuntimeError, match="has no forward-mode derivative"):
            run(forward_ad.make_dual(x, x))
        if name == "bsr_gated_linear":  # torch computes its gate in such a level, and rounds otherwise
            near(run(x), expected, place)
        else:
            assert torch.equal(run(x), expected), "a tensor without a tangent is an ordinary one"


def test_the_host_code_is_not_compiled(case):
    """In a level of forward-mode AD Dynamo gives up the frame of a public function, and then tries those that it calls,
    100 and more, were they not kept from it."""
    f, x, _ = case
    for requires_grad in (False, True):
        torch._dynamo.reset()
        with mock.patch.dict(torch._dynamo.utils.counters, clear=True), forward_ad.dual_level():
            torch.compile(f, backend="eager")(x.detach().requires_grad_(requires_grad))
            assert torch._dynamo.utils.counters["frames"]["total"] <= FRAMES


@pytest.mark.parametrize("captured", ["score_mod", "attn_mask"])
def test_forward_mode_of_captured_tensors_raises(place, captured):
    q = normal(1, 2, 16, 64, device=place)

    def f(t):
        if captured == "attn_mask":
            return scaled_dot_product_attention(q, q, q, t.expand(16, 2)[:, :1])
        return attention(q, q, q, score_mod=lambda score, b, h, q, kv: score + t[h])

    t = torch.ones(2, device=place)
    with forward_ad.dual_level():
        with pytest.raises((RuntimeError, TypeError), match="has no forward-mode derivative"):
            f(forward_ad.make_dual(t, t))
    with pytest.raises((RuntimeError, TypeError), match="has no forward-mode derivative"):
        jvp(f, (t,), (t,))


def test_second_derivatives_raise(case, place):
    """Also where the incoming gradient is a constant, and the dependence goes through saved tensors alone."""
    f, x, _ = case
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(leaf).sum(), leaf, create_graph=True)
    (expected,) = torch.autograd.grad(f(leaf).sum(), leaf)
    near(first, expected, place)
    if not first.requires_grad:  # of a linear function the first derivative is a constant, as torch has it
        other = (2 * x + 1).requires_grad_()
        near(torch.autograd.grad(f(other).sum(), other)[0], expected, place)
    else:
        with pytest.raises(RuntimeError, match="differentiable once"):
            first.square().sum().backward()
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad(lambda x: grad(loss(f))(x).sum())(x)


def test_second_derivatives_by_inputs_raise(case):
    """For a loss that depends on these inputs in another way, too: the second derivative is not left out."""
    f, x, _ = case
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(leaf).square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(first.square().sum() + leaf.sum(), leaf)


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
def test_gradients_with_a_graph_are_written_in_place():
    """Use by backward(create_graph=True) and optimizers of with a gradient that has a grad_fn."""
    x, W = (torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    (first,) = torch.autograd.grad(gemm(x, W).sum(), x, create_graph=True)
    torch.testing.assert_close(first.mul_(2), 2 * W.sum(1).expand(8, 8))
    gemm(x, W).sum().backward(create_graph=True)
    torch.optim.SGD([x, W], 0.1).zero_grad(set_to_none=False)
    assert not x.grad.any() and x.grad.grad_fn is None


def test_gradients_with_the_negative_bit(case, place):
    """The imaginary part of a conjugate tensor, as backward of torch.complex passes it."""
    f, x, _ = case
    leaf = x.clone().requires_grad_()
    y = f(leaf)
    dy = torch.complex(torch.zeros(y.shape, device=y.device), normal(*y.shape, device=place).float()).conj().imag
    if y.dtype is not torch.float32:
        dy = torch._neg_view(dy.resolve_neg().neg().to(y.dtype))
    assert dy.is_neg()
    found = torch.autograd.grad(y, leaf, dy, retain_graph=True)[0]
    near(found, torch.autograd.grad(y, leaf, dy.resolve_neg())[0], place)


def test_vmap_of_no_items(case):
    f, x, _ = case
    none = x.new_empty(0, *x.shape)
    assert vmap(f)(none).shape == (0, *f(x).shape)
    assert vmap(grad(loss(f)))(none).shape == none.shape


def test_second_derivatives_of_what_comes_before_raise():
    x, W = (torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    (first,) = torch.autograd.grad(gemm(torch.nn.functional.silu(x), W).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        first.square().sum().backward()


def test_batched_gradients(case, place):
    f, x, _ = case
    leaf = x.clone().requires_grad_()
    y = f(leaf)
    seeds = normal(3, *y.shape, device=place).to(y.dtype)
    found = torch.autograd.grad(y, leaf, seeds, is_grads_batched=True, retain_graph=True)[0]
    one_by_one = [torch.autograd.grad(y, leaf, seed, retain_graph=True)[0] for seed in seeds]
    near(found, torch.stack(one_by_one), place)


def test_dispatch_modes_see_the_op(case, place):
    f, x, _ = case
    leaf, seen = x.clone().requires_grad_(), []
    f(leaf).square().sum().backward()
    expected, leaf.grad = leaf.grad, None

    def policy(ctx, op, *args, **kwargs):
        if op.namespace != "aten":
            seen.append(op)
        return CheckpointPolicy.MUST_SAVE if op.namespace != "aten" else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    checkpoint(f, leaf, use_reentrant=False, context_fn=contexts).square().sum().backward()
    assert seen
    near(leaf.grad, expected, place)
    graph = make_fx(f)(x)
    assert any("aten" not in str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    near(graph(x / 2), f(x / 2), place)
    near(torch.jit.trace(f, x)(x / 2), f(x / 2), place)


def test_plain_subclasses_and_tensors_without_memory(case, place):
    f, x, _ = case

    class Plain(torch.Tensor):
        pass

    assert torch.equal(f(x.as_subclass(Plain)), f(x))
    for nested in (torch.nested.nested_tensor([x, x], layout=layout) for layout in (torch.jagged, torch.strided)):
        with pytest.raises(TypeError, match=r"got a nested tensor; .*pass its packed rows, x.values\(\)"):
            f(nested)
    W = random_bsr((64, 64), (32, 32), density=0.7).to(place)
    with pytest.raises(TypeError, match="got a nested tensor"):
        W.with_values(torch.nested.nested_tensor([W.values, W.values]))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=["jagged", "strided"])
@pytest.mark.parametrize("watched", [False, True], ids=["", "requires_grad"])
def test_nested_keys_and_values(place, layout, watched):
    """With the strided layout they aborted the process after a plain call."""
    q, k, v = (normal(1, 2, 16, 64, device=place) for _ in range(3))
    q, blocks = q.requires_grad_(watched), torch.ones(1, 1, dtype=torch.bool, device=place)
    nested = torch.nested.nested_tensor([k[0], v[0]], layout=layout)
    for f in (attention, functools.partial(block_sparse_attention, block_mask=blocks)):
        f(q, k, v)
        for args in ((q, nested, v), (q, k, nested)):
            with pytest.raises(TypeError, match=r"got a nested tensor; .*cu_seqlens_q=x.offsets"):
                f(*args)


def test_attention_of_no_tensors_beside_some_that_require_gradients():
    k = torch.zeros(1, 2, 16, 64, requires_grad=True)
    blocks = torch.ones(1, 1, dtype=torch.bool)
    for f in (attention, functools.partial(block_sparse_attention, block_mask=blocks)):
        for args in ((k, k, None), ([1.0], k, k), (None, k, k)):
            with pytest.raises(TypeError, match="must be a torch.Tensor"):
                f(*args)
    for args in ((torch.tensor(1.0), k, k), (k, k, torch.tensor(1.0))):
        with pytest.raises(ValueError, match="has shape"):
            attention(*args)


def test_meta_and_fake_tensors():
    """For one device: shapes and dtypes; on the meta device and another, an error."""
    with pytest.raises(ValueError, match="tensors on meta; CUDA and CPU tensors are supported"):
        gemm(torch.empty(16, 16, dtype=torch.bfloat16, device="meta"), torch.empty(16, 16, dtype=torch.bfloat16))
    a, b = (torch.empty(16, 16, dtype=torch.bfloat16, device="meta") for _ in range(2))
    assert gemm(a, b).shape == (16, 16) and gemm(a, b).is_meta
    q = torch.empty(2, 2, 16, 64, dtype=torch.bfloat16, device="meta")
    assert attention(q, q, q).is_meta
    with torch._subclasses.FakeTensorMode():
        a, q = torch.empty(16, 16, dtype=torch.bfloat16), torch.empty(2, 2, 16, 64, dtype=torch.bfloat16)
        assert gemm(a, a).shape == (16, 16) and attention(q, q, q).shape == q.shape


def test_functional_tensors():
    x = torch.randn(16, 16)
    a = torch._to_functional_tensor(x)
    assert torch.equal(torch._from_functional_tensor(gemm(a, a)), gemm(x, x))


def test_the_negative_bit_raises(place):
    """Imaginary parts of a conjugate are negated where they are read, which kernels do not."""
    x = torch.randn(16, 16, dtype=torch.complex64, device=place).conj().imag
    assert x.is_neg()
    with pytest.raises(TypeError, match="negative bit; pass x.resolve_neg"):
        gemm(x, x, precision="tf32")
    near(
        gemm(x.resolve_neg(), x.resolve_neg(), precision="tf32"),
        x.resolve_neg().double() @ x.resolve_neg().double(),
        "",
    )


@pytest.fixture
def mesh(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_dtensors_raise(mesh, compiled):
    cases = ops("cpu")
    for name in ("gemm", "bsr_linear", "attention", "block_sparse_attention") if compiled else cases:
        f, x, _ = cases[name]
        sharded = DTensor.from_local(x, mesh, [Shard(0)])
        run = torch.compile(f, backend="aot_eager") if compiled else f
        with pytest.raises(TypeError, match="got a DTensor; .* x.to_local()"):
            run(sharded)
        assert torch.equal(f(sharded.to_local()), f(x)), name


@pytest.mark.parametrize("name", ["crow_indices", "col_indices"])
def test_dtensors_of_indices_raise(mesh, name):
    W = random_bsr((64, 64), (32, 32), density=0.7)
    tensors = {n: getattr(W, n) for n in ("crow_indices", "col_indices", "values")}
    tensors[name] = DTensor.from_local(tensors[name], mesh, [Shard(0)])
    with pytest.raises(TypeError, match=f"{name} got a DTensor; .* x.to_local()"):
        BsrMatrix(**tensors, shape=W.shape)


def test_masks_and_captured_tensors_that_no_kernel_reads(mesh):
    q = torch.randn(1, 1, 256, 64)
    mask = torch.ones(1, 2, 2, dtype=torch.bool)
    sharded = DTensor.from_local(mask, mesh, [Shard(0)])
    for blocks, kind in ((sharded, "DTensor"), (torch.nested.nested_tensor([mask, mask]), "nested tensor")):
        with pytest.raises(TypeError, match=f"block_sparse_attention got a {kind}; .*pass"):
            block_sparse_attention(q, q, q, blocks)
        with pytest.raises(TypeError, match=r"a captured tensor is a DTensor or .*; capture x.to_local\(\)"):
            attention(q, q, q, score_mod=lambda score, b, h, q, kv, blocks=blocks: score * blocks[b, h, h])


def test_flops_are_counted(place):
    """As torch counts its own: two for each product of the operands' elements, stored ones of a sparse operand."""
    dtype = torch.float32 if place == "cpu" else torch.bfloat16
    a, b, x = (normal(*shape, device=place).to(dtype) for shape in ((16, 32), (32, 24), (128, 64)))
    W = random_bsr((64, 64), (32, 32), density=0.5).to(place).to(dtype)
    V = random_bsr((128, 64), (128, 64), density=1.0).to(place).to(dtype)
    q = normal(2, 2, 16, 64, device=place).to(dtype)
    a.requires_grad_(), b.requires_grad_()
    leaf, rows, long = q.clone().requires_grad_(), q.movedim(2, 1).flatten(0, 1).contiguous(), q.new_ones(1, 1, 256, 64)
    cu = torch.tensor([0, 4, 32], dtype=torch.int32, device=place)
    blocks = torch.tensor([[True, False], [True, True]], device=place)
    for run, expected in (
        (lambda: gemm(a.detach(), b.detach()), 2 * 16 * 24 * 32),
        (lambda: gemm(a, b, activation="gelu").sum().backward(), 3 * 2 * 16 * 24 * 32),
        (lambda: bsr_linear(x, W), 2 * W.values.numel() * 128),
        (lambda: bsr_linear(x, V.prune_2_4()), V.values.numel() * 128),
        (lambda: attention(q, q, q), 4 * 2 * 2 * 16 * 16 * 64),
        (lambda: attention(leaf, q, q, causal=True).sum().backward(), 14 * 2 * 2 * 16 * 16 * 64),
        (lambda: attention(rows, rows, rows, cu_seqlens_q=cu, cu_seqlens_k=cu), 4 * 2 * (4 * 4 + 28 * 28) * 64),
        (lambda: block_sparse_attention(long, long, long, blocks), 4 * 3 * 128 * 128 * 64),
    ):
        with FlopCounterMode(display=False) as counter:
            run()
        assert counter.get_total_flops() == expected


@pytest.mark.parametrize("name", ["bias", "residual", "of bsr_linear", "sinks"])
def test_nested_terms_after_plain_ones(name):
    """Strided nested tensors beside the operands raise, also where a plan of a plain call exists; once it aborted."""
    a, q, W = normal(64, 64), normal(1, 2, 64, 64), random_bsr((64, 64), (32, 32), density=1.0)
    call, plain = {
        "bias": (lambda t: gemm(a, a, bias=t), normal(64)),
        "residual": (lambda t: gemm(a, a, residual=t), normal(64, 64)),
        "of bsr_linear": (lambda t: bsr_linear(a, W, bias=t), normal(64)),
        "sinks": (lambda t: attention(q, q, q, sinks=t), normal(2)),
    }[name]
    call(plain)
    with pytest.raises(TypeError, match="nested"):
        call(torch.nested.nested_tensor([normal(32), normal(32)]))
