"""Checks of context-parallel attention, which run in several processes at once (tests/ranks.py)."""

import contextlib
import copy
import functools
import io
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from attention import attention, block_sparse_attention, create_block_mask, patterns, score_mods
from attention.distributed import ContextParallel, context_parallel_attention, plan_context_parallel
from attention.masks.element_mask import trace_mask
from attention.masks.score_mod import bound

LENGTH = 900  # 8 tiles, the last one ragged: with 4 processes 2 tiles each
CU = (0, 70, 300, 301, 640, 880)


def mesh_of(device):
    return init_device_mesh(device.type, (dist.get_world_size(),))


def documents(device):
    return torch.tensor(CU, dtype=torch.int32, device=device)


def masks(device):
    """(mask, arguments of plan_context_parallel) of each kind."""
    lengths = (LENGTH, LENGTH)
    causal, window = patterns.causal(lengths, device=device), patterns.sliding_window(lengths, (200, 0), device=device)
    torch.manual_seed(1)
    listed = torch.rand(4, 8, 8, device="cpu") < 0.4
    per_head = patterns.BlockMask.from_blocks(listed.to(device), lengths=lengths, causal=True)
    packed = patterns.packed_documents(documents(device), lengths=lengths, causal=True)
    yield causal, {"length": LENGTH, "causal": True}
    yield window, {"length": LENGTH, "causal": True, "window_size": (200, None)}
    yield packed, {"length": LENGTH, "causal": True, "cu_seqlens": documents(device)}
    yield per_head, {"mask": per_head}
    yield causal, {"mask": causal.to_flex(), "deal": "balanced"}
    yield causal, {"mask": causal, "deal": "contiguous"}


def qkv(device):
    """The same in each process: 4 heads of q, 2 of k and v."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = (2, 4, LENGTH, 64), (2, 2, LENGTH, 64), (2, 2, LENGTH, 64), (2, 4, LENGTH, 64)
    return [torch.randn(shape, device="cpu").to(device, dtype) for shape in shapes]


def truth(q, k, v, dout, mask, score_mod=None):
    """out, dq, dk and dv in float64, computed on the CPU by one process."""
    q, k, v, dout = (t.detach().cpu().double() for t in (q, k, v, dout))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = block_sparse_attention(*leaves, mask.to("cpu"), score_mod=score_mod)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def compare(found, wanted, what):
    """Errors are those of the dtype."""
    names = "out", "dq", "dk", "dv"
    for name, a, b in zip(names, found, wanted, strict=True):
        assert not a.isnan().any(), f"{what}: {name} has NaN"
        bound = 2e-2 if a.dtype is torch.bfloat16 else 1e-4
        error = (a.double().cpu() - b).norm() / b.norm()
        assert error < bound, f"{what}: {name} errs by {error:.2e}"


def whole(plan, parts):
    """The tensors of the whole sequence, of those of this process."""
    found = []
    for part in parts:
        each = [torch.empty_like(part.contiguous()) for _ in range(plan.size)]
        dist.all_gather(each, part.contiguous())
        found.append(plan.unshard(each, 2))
    return found


def compare_whole(plan, parts, tensors, dout, mask, what, score_mod=None):
    """In the first process, for all: each gathers the same tensors."""
    found = whole(plan, parts)
    if dist.get_rank() == 0:
        compare(found, truth(*tensors, dout, mask, score_mod), what)


def attend(plan, q, k, v, dout, **options):
    """out, dq, dk and dv of this process."""
    leaves = [plan.shard(t, 2).requires_grad_() for t in (q, k, v)]
    out = context_parallel_attention(*leaves, plan, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, plan.shard(dout, 2))


def one_process_and_many(device):
    """Outputs and gradients are those of one process, for each mask; bitwise the same in a second run."""
    *tensors, dout = qkv(device)
    for number, (mask, arguments) in enumerate(masks(device)):
        plan = plan_context_parallel(mesh=mesh_of(device), **arguments)
        found = attend(plan, *tensors, dout, deterministic=True)
        compare_whole(plan, found, tensors, dout, mask, f"mask {number}")
        for a, b in zip(found, attend(plan, *tensors, dout, deterministic=True, keep_kv=True), strict=True):
            assert torch.equal(a, b)


def further_is_less(score, b, h, q, kv):
    return score - 0.01 * (h + 1) * (q - kv)


def score_functions(device):
    """They get positions in the whole sequence."""
    *tensors, dout = qkv(device)
    mask = patterns.causal((LENGTH, LENGTH), device=device)
    plan = plan_context_parallel(mask, mesh_of(device))

    found = attend(plan, *tensors, dout, score_mod=further_is_less)
    compare_whole(plan, found, tensors, dout, mask, "score_mod", further_is_less)
    slopes = torch.ones(4, device=device, requires_grad=True)

    def sloped(score, b, h, q, kv):
        return score - slopes[h] * (q - kv)

    shards = [plan.shard(t, 2) for t in tensors]
    q, kv = torch.arange(LENGTH, device=device)[:, None], torch.arange(LENGTH, device=device)
    bias = further_is_less(0.0, 0, torch.arange(4, device=device)[:, None, None], q, kv)[None]
    out = context_parallel_attention(*shards, plan, score_mod=score_mods.Bias(bias))  # of the whole sequence
    torch.testing.assert_close(out, found[0], rtol=1e-2, atol=1e-2)
    local = torch.zeros(1, 4, LENGTH // 2, LENGTH // 2, device=device)  # of this rank's tokens

    def indexed(score, b, h, q, kv):
        return score + local[0, h, 0, kv]

    compiled = torch.compile(context_parallel_attention, backend="aot_eager")
    for run in (context_parallel_attention, compiled):
        with pytest.raises(RuntimeError, match="get no gradients here"):
            run(*shards, plan, score_mod=sloped)
        with pytest.raises(ValueError, match="q and kv are positions in the whole sequence, so capture"):
            run(*shards, plan, score_mod=score_mods.Bias(local))
    with no_collectives(), pytest.raises(ValueError, match="with kv, which goes up to 899; q and kv are positions"):
        context_parallel_attention(*shards, plan, score_mod=indexed)
    two = torch.ones(2, device=device)
    with pytest.raises(IndexError, match=r"with h, which goes up to 3$"):
        context_parallel_attention(*shards, plan, score_mod=lambda score, b, h, q, kv: score + two[h])
    columns = [t.transpose(2, 3).contiguous().mT for t in shards[1:]]  # k and v are copied, whatever their strides
    assert columns[0].stride(-1) != 1
    expected = context_parallel_attention(*shards, plan)
    assert torch.equal(context_parallel_attention(shards[0], *columns, plan), expected)


def checkpointing_and_compile(device):
    """Activation checkpointing and torch.compile, in one graph, change nothing; also with a plan of inference mode."""
    *tensors, dout = qkv(device)
    with torch.inference_mode():
        plan = plan_context_parallel(mesh=mesh_of(device), length=LENGTH, causal=True)

    def attended(q, k, v, **options):
        return context_parallel_attention(q, k, v, plan, deterministic=True, **options)

    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(attended, backend=backend, fullgraph=True)
    scored = {"keep_kv": True, "score_mod": further_is_less}
    for call, options in (
        (compiled, {}),  # the first call with the plan
        (lambda *t: checkpoint(attended, *t, use_reentrant=False), {}),
        (lambda *t: compiled(*t, **scored), scored),
    ):
        leaves = [plan.shard(t, 2).requires_grad_() for t in tensors]
        out = call(*leaves)
        found = out.detach(), *torch.autograd.grad(out, leaves, plan.shard(dout, 2))
        wanted = attend(plan, *tensors, dout, deterministic=True, **options)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b)


class Inner(torch.nn.Module):
    def forward(self, q, k, v, *, scale=None):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=True, enable_gqa=True)


def with_a_capacity(device):
    """Plans that do not wait give the same result and share one compilation; a CUDA graph plans anew in each replay."""
    *tensors, dout = qkv(device)
    mesh = mesh_of(device)
    for number, (mask, arguments) in enumerate(masks(device)):
        exact = plan_context_parallel(mesh=mesh, **arguments)
        arguments["deal"] = exact
        for capacity in {exact.capacity, exact.tiles.shape[1]}:
            plan = plan_context_parallel(mesh=mesh, **arguments, capacity=capacity)
            assert plan.moved_tiles() == capacity * (plan.size - 1) >= exact.moved_tiles()
            compare_whole(plan, attend(plan, *tensors, dout), tensors, dout, mask, f"mask {number}, {capacity} tiles")
        if device.type == "cpu" and exact.capacity:
            with pytest.raises(ValueError, match=f"capacity must be at least {exact.capacity}, the most tiles"):
                plan_context_parallel(mesh=mesh, **arguments, capacity=exact.capacity - 1)

    capacity, side = 2, 64  # 15 tiles: rows see two of five around their own, so at most two of another process
    scores = torch.zeros(15, 15, device=device)
    causal = patterns.causal((LENGTH, LENGTH), (side, side), device=device)
    shards = plan_context_parallel(causal, mesh, deal="contiguous")
    leaves = [shards.shard(t, 2).requires_grad_() for t in tensors]
    local_dout = shards.shard(dout, 2)

    def chosen():
        return patterns.top_k(scores, 2, (side, side), lengths=(LENGTH, LENGTH))

    def step(attend=context_parallel_attention):
        anew = plan_context_parallel(chosen(), mesh, deal="contiguous", capacity=capacity)
        out = attend(*leaves, anew, deterministic=True)
        return out.detach(), *torch.autograd.grad(out, leaves, local_dout)

    run = step
    if device.type == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()

        def run():
            graph.replay()
            return results

    frames = CompileCounterWithBackend("inductor" if device.type == "cuda" else "aot_eager")

    @functools.partial(torch.compile, backend=frames, fullgraph=True)
    def compiled(*args, **options):
        return context_parallel_attention(*args, **options)

    distance = torch.arange(15, device="cpu")[:, None] - torch.arange(15, device="cpu")
    for seed in range(3):
        torch.manual_seed(seed)
        scores.copy_(torch.rand(15, 15, device="cpu").masked_fill(distance.abs() > 2, float("-inf")))
        found = [t.clone() for t in run()]
        compare_whole(plan, found, tensors, dout, chosen(), f"scores {seed}")
        for other in (step(), step(compiled)):
            assert all(torch.equal(a, b) for a, b in zip(found, other, strict=True))
    assert frames.frame_count == 1

    if device.type == "cpu":  # an assertion on a GPU
        first, second = (dist.get_rank() == rank for rank in (0, 1))
        far = distance.abs() > 2
        scores.copy_((distance if first else -distance).float().masked_fill(far, float("-inf")))
        with pytest.raises(RuntimeError, match="deals, stages, capacities or lengths differ, or one has an error"):
            plan_context_parallel(chosen(), mesh, deal="contiguous", capacity=capacity + first)
        kind, wrong = (ValueError, -1) if first else (RuntimeError, capacity)
        with pytest.raises(kind, match="capacity must not be negative" if first else "or one has an error"):
            plan_context_parallel(chosen(), mesh, deal="contiguous", capacity=wrong)
        # The first process sends the tiles before the second one's own, which expects any; of two it sends both anyway.
        refused = pytest.raises(RuntimeError, match="processes' masks differ")
        with refused if second and shards.tiles.shape[1] > capacity else contextlib.nullcontext():
            plan_context_parallel(chosen(), mesh, deal="contiguous", capacity=capacity)


def parallel_style(device):
    """A module whose forward is attention, and its copy, with tensors and DTensors."""
    *tensors, dout = qkv(device)
    mesh = mesh_of(device)
    plan = plan_context_parallel(mesh=mesh, length=LENGTH, causal=True)
    model = torch.nn.ModuleDict({"inner_attention": Inner()})
    parallelize_module(model, mesh, {"inner_attention": ContextParallel(plan, keep_kv=True)})
    with pytest.raises(TypeError, match="a plan cannot be pickled"):
        torch.save(model, io.BytesIO())
    inner = copy.deepcopy(model)["inner_attention"]
    assert inner.forward.func.__self__.plan is plan
    wanted = attend(plan, *tensors, dout, scale=0.1, deterministic=True)
    for sharded in (False, True):
        leaves = [plan.shard(t, 2).requires_grad_() for t in tensors]
        inputs = [DTensor.from_local(t, mesh, [Shard(2)]) for t in leaves] if sharded else leaves
        out = inner(*inputs, scale=0.1, deterministic=True, is_causal=False, attn_mask=None, dropout_p=0.0)
        assert isinstance(out, DTensor) == sharded
        out = out.to_local() if sharded else out
        for a, b in zip((out, *torch.autograd.grad(out, leaves, plan.shard(dout, 2))), wanted, strict=True):
            assert torch.equal(a, b)
    shards = [plan.shard(t, 2) for t in tensors]
    named = inner(shards[0], v=shards[2], k=shards[1], scale=0.1, deterministic=True)
    assert torch.equal(named, wanted[0])
    for arguments, names in (
        ((), {"query": shards[0], "key": shards[1], "value": shards[2]}),
        ((*shards, None), {"scale": 0.1}),
        (shards[:2], {}),
        (shards[:2], {"q": shards[0], "v": shards[2]}),
        (shards, {"q": shards[0]}),
    ):
        got = f"got {len(arguments)} by position and the names {', '.join(names) or 'none'}; call it as"
        with pytest.raises(TypeError, match=f"takes three tensors, q, k and v, by position or by these names.*{got}"):
            inner(*arguments, **names)
    for name, value in (("is_causal", True), ("attn_mask", plan.mask), ("dropout_p", 0.1)):
        with pytest.raises(ValueError, match=f"{name} must be None, False or 0"):
            inner(*shards, **{name: value})
    replicated = [DTensor.from_local(t, mesh, [Replicate()]) for t in shards]
    with pytest.raises(ValueError, match=r"must have placements \[Shard\(2\)\]"):
        inner(*replicated)
    with pytest.raises(TypeError, match="all tensors or all DTensors"):
        inner(shards[0], *replicated[1:])
    with pytest.raises(TypeError, match="plan must be what"):
        ContextParallel(mesh)
    other = init_device_mesh(device.type, (1, dist.get_world_size()))
    with pytest.raises(ValueError, match="must get the mesh of the plan"):
        parallelize_module(Inner(), other, ContextParallel(plan))


class Layer(torch.nn.Module):
    """Attention of 4 heads of q and 2 of k and v; causal without a plan."""

    def __init__(self, device, dtype):
        super().__init__()
        self.qkv, self.out = (torch.nn.Linear(*n, device=device, dtype=dtype) for n in ((128, 512), (256, 128)))

    def forward(self, x, plan=None):
        q, k, v = self.qkv(x).unflatten(-1, (8, 64)).transpose(1, 2).split((4, 2, 2), 1)
        out = attention(q, k, v, causal=True) if plan is None else context_parallel_attention(q, k, v, plan)
        return self.out(out.transpose(1, 2).flatten(2))


def beside_data_parallel(device):
    """Pairs of ranks share a sequence each, and FSDP2 shards over the ranks of a pair: the gradients of one process."""
    mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "cp"))
    sequences, rank = mesh["dp"].size(), mesh["dp"].get_local_rank()
    torch.manual_seed(2)
    alone = Layer("cpu", torch.float32)
    x, dy = (torch.randn(sequences, LENGTH, 128, device="cpu") for _ in range(2))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    alone, x, dy = (t.to(device, dtype) for t in (alone, x, dy))
    model = fully_shard(copy.deepcopy(alone), mesh=mesh)
    plan = plan_context_parallel(mesh=mesh["cp"], length=LENGTH, causal=True)
    mine, my_dy = (plan.shard(t[rank : rank + 1], 1) for t in (x, dy))
    (mesh.size() * (model(mine, plan) * my_dy).sum() / (sequences * LENGTH)).backward()
    alone.double().cpu()
    ((alone(x.double().cpu()) * dy.double().cpu()).sum() / (sequences * LENGTH)).backward()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        found, expected = found.grad.full_tensor().double().cpu(), expected.grad
        error = (found - expected).norm() / expected.norm()
        assert error < (2e-2 if dtype is torch.bfloat16 else 1e-4), f"{error:.2e}"


def under_autocast(device):
    *tensors, dout = (t.float() for t in qkv(device))
    plan = plan_context_parallel(mesh=mesh_of(device), length=LENGTH, causal=True)
    wanted = attend(plan, *(t.bfloat16() for t in tensors), dout.bfloat16(), deterministic=True)
    with torch.autocast(device.type, torch.bfloat16):
        leaves = [plan.shard(t, 2).requires_grad_() for t in tensors]
        out = context_parallel_attention(*leaves, plan, deterministic=True)
    found = out, *torch.autograd.grad(out, leaves, plan.shard(dout.bfloat16(), 2))
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.bfloat16(), b)


def different_masks_are_refused(device):
    """By all processes."""
    length = 256 if dist.get_rank() else 384
    with pytest.raises(RuntimeError, match="differ from those of process 0"):
        plan_context_parallel(mesh=mesh_of(device), length=length, causal=True)
    mask = patterns.causal((LENGTH, LENGTH), device=device)
    blocks = (mask.tables()[0] | mask.tables()[1])[0, 0]
    blocks[-1, 0] ^= dist.get_rank() == 1
    with pytest.raises(RuntimeError, match="differ from those of process 0"):
        plan_context_parallel(patterns.BlockMask.from_blocks(blocks, lengths=(LENGTH, LENGTH)), mesh_of(device))
    last = 639 if dist.get_rank() else 640  # within the same blocks
    cu = torch.tensor([0, last, LENGTH], dtype=torch.int32, device=device)
    for other in ({"window_size": (last, 0)}, {"cu_seqlens": cu}, {"stages": last}):
        with pytest.raises(RuntimeError, match="differ from those of process 0"):
            plan_context_parallel(mesh=mesh_of(device), length=LENGTH, **other)
    document = torch.arange(LENGTH, device=device) // (LENGTH - 640 + last)

    def near(b, h, q, kv, most):
        return (q >= kv) & (q - kv < most)

    for mask_mod in (
        lambda b, h, q, kv: (q >= kv) & (q - kv < last),
        lambda b, h, q, kv: document[q] == document[kv],
        functools.partial(near, most=last),
    ):
        mask = create_block_mask(mask_mod, 1, 1, LENGTH, LENGTH, device=device)
        with pytest.raises(RuntimeError, match="differ from those of process 0"):
            plan_context_parallel(mask, mesh_of(device))
    with pytest.raises(RuntimeError, match="differ from those of process 0"):
        plan_context_parallel(mesh=mesh_of(device), length=LENGTH, window_size=(12, 3) if last == 639 else (1, 23))


def equal_functions_are_not_refused(device):
    """Also if one process has traced the same code with other numbers, so that its kernels have these as arguments."""
    q, k, v, _ = qkv(device)

    def window(size):
        return create_block_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < size), 1, 1, LENGTH, LENGTH, device=device)

    def scaled(factor):
        return lambda score, b, h, q, kv: score * factor

    if dist.get_rank() == 0:
        for size, factor in ((11, 0.5), (12, 0.25)):
            trace_mask(window(size).mask_mod, q.device)
            bound(scaled(factor), q.device)
    plan = plan_context_parallel(window(13), mesh_of(device))
    context_parallel_attention(*(plan.shard(t, 2) for t in (q, k, v)), plan, score_mod=scaled(2.0))


def error_of_one_process(device):
    """All processes learn why one refused its arguments, and none waits for it."""
    kind, deal = (ValueError, "zigzag") if dist.get_rank() else (RuntimeError, "auto")
    with pytest.raises(kind, match="deal must be 'auto' or one of"):
        plan_context_parallel(mesh=mesh_of(device), length=LENGTH, causal=True, deal=deal)


def different_calls_are_refused(device):
    """By all processes, in the first call with a plan; later calls exchange nothing but keys and values."""
    *tensors, dout = qkv(device)
    plan = plan_context_parallel(mesh=mesh_of(device), length=LENGTH, causal=True)
    q, k, v = (plan.shard(t, 2).bfloat16() for t in tensors)
    last = dist.get_rank() == dist.get_world_size() - 1
    leaf, shift = q.clone().requires_grad_(), int(last)
    slopes = torch.full((4,), 0.5 + shift, device=device)
    for name, (right, wrong), options in (
        ("q is ", ((q, k, v), (q[:1], k[:1], v[:1])), {}),
        ("k is ", ((q, k, v), (q, k[:, :1], v[:, :1])), {}),
        ("v is ", ((q, k, v), (q, k, v[..., :32])), {}),
        ("q is ", ((q, k, v), (q.half(), k.half(), v.half())), {}),
        ("requires_grad is ", ((q, k, v), (leaf, k, v)), {}),
        ("keep_kv is ", ((q, k, v), (q, k, v)), {"keep_kv": last}),
        ("reduce_dtype is ", ((q, k, v), (q, k, v)), {"reduce_dtype": torch.bfloat16 if last else torch.float32}),
        ("scale is ", ((q, k, v), (q, k, v)), {"scale": 0.5 if last else None}),
        ("score_mod is Alibi ", ((q, k, v), (q, k, v)), {"score_mod": score_mods.Alibi(slopes)}),
        ("score_mod is .*<lambda> ", ((q, k, v), (q, k, v)), {"score_mod": lambda s, b, h, q, kv: s + (h + shift)}),
    ):
        with pytest.raises(RuntimeError, match=f"arguments differ between ranks: {name}.* on ranks .*{plan.size - 1}]"):
            context_parallel_attention(*(wrong if last else right), plan, **options)
    short = k[:, :, 1:] if last else k
    with pytest.raises(ValueError if last else RuntimeError, match="k must be .* the shard of this process"):
        context_parallel_attention(q, short, v, plan)

    attend(plan, *tensors, dout)
    with mock.patch.object(dist, "all_gather", side_effect=AssertionError("compared again")):
        context_parallel_attention(q, k, v, plan)
        unchecked = plan_context_parallel(mesh=mesh_of(device), length=LENGTH, causal=True, check=False)
        context_parallel_attention(q, k, v, unchecked)


def no_collectives():
    """Makes collectives of context-parallel attention errors, also the comparison of a first call."""
    fail = AssertionError("a collective")
    return mock.patch.multiple(
        dist, all_gather=mock.Mock(side_effect=fail), all_to_all_single=mock.Mock(side_effect=fail)
    )


def local_bias_of_one_process(device):
    """Its first call is refused by all."""
    plan = plan_context_parallel(mesh=mesh_of(device), length=LENGTH, causal=True)
    *tensors, _ = qkv(device)
    last = dist.get_rank() == dist.get_world_size() - 1
    side = LENGTH // 2 if last else LENGTH
    bias = score_mods.Bias(torch.zeros(1, 4, side, side, device=device))
    with pytest.raises(ValueError if last else RuntimeError, match="q and kv are positions in the whole sequence"):
        context_parallel_attention(*(plan.shard(t, 2) for t in tensors), plan, score_mod=bias)


def error_in_one_rank(device):
    """The last rank raises before its first call with a plan; others wait for it in the comparison."""
    plan = plan_context_parallel(mesh=mesh_of(device), length=LENGTH, causal=True)
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ArithmeticError("this rank had an error")
    attend(plan, *qkv(device))


def death_of_one_rank(device):
    """The last rank ends before its second call; others wait for it in the transfer of keys and values."""
    plan = plan_context_parallel(mesh=mesh_of(device), length=LENGTH, causal=True)
    attend(plan, *qkv(device))
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(3)
    attend(plan, *qkv(device))


def errors(device):
    mesh = mesh_of(device)
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh of one dimension"):
        plan_context_parallel(length=8, causal=True)
    with pytest.raises(TypeError, match="length must be the number of tokens"):
        plan_context_parallel(mesh=mesh, causal=True)
    with pytest.raises(TypeError, match="pass a mask, or length"):
        plan_context_parallel(patterns.causal((256, 256), device=device), mesh, causal=True)
    with pytest.raises(TypeError, match="device is for a plan without mask and cu_seqlens"):
        plan_context_parallel(patterns.causal((256, 256), device=device), mesh, device=device)
    with pytest.raises(ValueError, match="the mask must be on a device of the mesh"):
        plan_context_parallel(patterns.causal((256, 256), device="meta"), mesh)
    whole = {"mesh": mesh, "length": LENGTH}
    for name, value in (("check", "no"), ("check", 1), ("causal", "no"), ("causal", 0)):
        with pytest.raises(TypeError, match=f"{name} must be True or False, got {value!r}"):
            plan_context_parallel(**whole, **{name: value})
    with pytest.raises(TypeError, match="causal must be True or False"):
        plan_context_parallel(patterns.causal((256, 256), device=device), mesh, causal=0)
    with pytest.raises(TypeError, match="make one with attention.create_block_mask"):
        plan_context_parallel(torch.ones(256, 256, dtype=torch.bool, device=device), mesh)
    for starts in ([0, 300, 200, LENGTH], [0, 100, LENGTH + 88], [5, LENGTH], [0, -3, LENGTH]):
        cu = torch.tensor(starts, dtype=torch.int32, device=device)
        with pytest.raises(ValueError, match=f"begin at 0, never decrease and end at or before length, {LENGTH}, got"):
            plan_context_parallel(**whole, cu_seqlens=cu)
    for kind, value, text in ((TypeError, 2.0, "an int or None, got 2.0"), (ValueError, 0, "at least 1, got 0")):
        with pytest.raises(kind, match=f"stages must be {text}"):
            plan_context_parallel(**whole, stages=value)
    plan = plan_context_parallel(**whole, causal=True, check=False)
    *tensors, _ = qkv(device)
    shards = [plan.shard(t, 2) for t in tensors]
    for kind, text, options in (
        (TypeError, "reduce_dtype must be torch.float32 or q's dtype", {"reduce_dtype": torch.int32}),
        (TypeError, "keep_kv must be True or False, got 'no'", {"keep_kv": "no"}),
        (TypeError, "return_lse must be True or False, got 1", {"return_lse": 1}),
        (TypeError, "deterministic must be True, False or None, got 'no'", {"deterministic": "no"}),
        (TypeError, "scale must be a Python number", {"scale": "1"}),
        (ValueError, "scale is -1.0; it must be above 0", {"scale": -1.0}),
        (ValueError, "softcap is 0; it must be above 0", {"softcap": 0}),
        (ValueError, "score_mod excludes softcap", {"softcap": 2.0, "score_mod": further_is_less}),
        (TypeError, "score_mod must be a function", {"score_mod": 3}),
    ):
        with no_collectives(), pytest.raises(kind, match=f"{text}"):
            context_parallel_attention(*shards, plan, **options)
    with no_collectives(), pytest.raises(ValueError, match="differ in heads"):
        context_parallel_attention(*shards[:2], shards[2][:, :1], plan)
    with no_collectives(), pytest.raises(ValueError, match="the shard of this process; got"):
        context_parallel_attention(*tensors, plan)
    with pytest.raises(TypeError, match="plan must be what"):
        context_parallel_attention(*tensors, mesh)
    of_three = patterns.BlockMask.from_blocks(
        torch.ones(3, 8, 8, dtype=torch.bool, device=device), lengths=(LENGTH,) * 2
    )
    with no_collectives(), pytest.raises(ValueError, match="the plan's mask has 1 batch items and 3 heads; it"):
        context_parallel_attention(*shards, plan_context_parallel(of_three, mesh, deal=plan, check=False))
    with pytest.raises(ValueError, match="length must be at least 0, got -1"):
        plan_context_parallel(mesh=mesh, length=-1)
    with pytest.raises(ValueError, match=f"{LENGTH + 1} tokens in tiles of 128 for {mesh.size()} processes"):
        plan_context_parallel(mesh=mesh, length=LENGTH + 1, deal=plan)
    first = DeviceMesh(device.type, [0])  # all processes make it
    if dist.get_rank():
        with pytest.raises(ValueError, match="this process is not in the mesh"):
            plan_context_parallel(mesh=first, length=LENGTH)
    for options, text in (({"dim": "2"}, "shard: dim must be an int"), ({"dim": 2, "value": None}, "value must be a")):
        with pytest.raises(TypeError, match=text):
            plan.shard(tensors[0], **options)


CHECKS = [
    one_process_and_many,
    score_functions,
    checkpointing_and_compile,
    with_a_capacity,
    parallel_style,
    beside_data_parallel,
    under_autocast,
    different_masks_are_refused,
    equal_functions_are_not_refused,
    error_of_one_process,
    different_calls_are_refused,
    local_bias_of_one_process,
    errors,
]
