"""Writes by kernels are counted as torch counts its own: autograd raises where a kernel has overwritten a saved tensor.

Kernels write without torch's knowledge. On a machine without a GPU calls are planned as on one, and kernels do nothing.
"""

import contextlib
import inspect

import pytest
import torch

import attention as attention_package
import cute_kernels
import sparse_collective
from attention import BlockMask, attention, block_sparse_attention
from bench.host import launches_replaced
from cute_kernels import gemm
from cute_kernels.testing.reference import normal
from sparse_collective import BsrMatrix, bsr_gated_linear, bsr_grouped_linear, bsr_linear, bsr_matmul, sddmm
from sparse_collective.nn import BsrLinear, change_pattern_, prune_

from .test_overlap import calls

E4M3 = torch.float8_e4m3fn
MODIFIED = "modified by an inplace operation"


@pytest.fixture(params=["cpu", "kernels that do nothing", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    with launches_replaced() if "nothing" in request.param else contextlib.nullcontext():
        yield "cuda" if request.param == "cuda" else "cpu"


def writes(place: str) -> dict:
    """name -> (op, a function of the keyword arguments that are written to, those arguments)"""
    ops = {
        f.__name__: f for f in (gemm, bsr_matmul, bsr_linear, bsr_gated_linear, bsr_grouped_linear, sddmm, attention)
    }
    ops["block_sparse_attention"] = block_sparse_attention

    def new(*shape, dtype=torch.bfloat16):
        return torch.zeros(shape, dtype=dtype, device=place)

    found = {}
    for name, (run, inputs, shape) in calls(place).items():
        op = ops[name.partition(" ")[0]]
        found[name] = op, lambda run=run, inputs=inputs, **to: run(**inputs, **to), {"out": new(*shape)}
    a, b = (normal(128, 128, device=place) for _ in range(2))
    W = BsrMatrix.from_dense(normal(128, 128, device=place), (64, 64))
    W128 = BsrMatrix.from_dense(normal(128, 128, device=place), (128, 64))
    W24, experts = W.prune_2_4(), BsrMatrix.stack([W] * 2)
    ends = torch.tensor([30, 100], device=place)
    narrow = {"out": new(128, 128, dtype=E4M3)}
    small = [t.to(E4M3).contiguous() for t in (a, b.mT)]
    q = normal(1, 2, 128, 64, device=place)
    mask = BlockMask.from_blocks(torch.ones(1, 1, dtype=torch.bool, device=place))
    return found | {
        "gemm into FP8": (gemm, lambda **to: gemm(a, b, **to), narrow),
        "gemm of FP8": (gemm, lambda **to: gemm(small[0], small[1].mT, **to), {"out": new(128, 128)}),
        "gemm through a copy": (gemm, lambda **to: gemm(a, b, **to), {"out": new(256, 256)[::2, ::2]}),
        "gemm of nothing": (gemm, lambda **to: gemm(a[:0], b, **to), {"out": new(0, 128)}),
        "bsr_matmul into FP8": (bsr_matmul, lambda **to: bsr_matmul(W, b, **to), narrow),
        "bsr_linear into FP8": (bsr_linear, lambda **to: bsr_linear(a, W, **to), narrow),
        "bsr_linear of a Bsr24": (bsr_linear, lambda **to: bsr_linear(a, W24, **to), {"out": new(128, 128)}),
        "bsr_gated_linear, fused": (
            bsr_gated_linear, lambda **to: bsr_gated_linear(a, W128, **to), {"out": new(128, 64)}
        ),
        "bsr_grouped_linear, offsets": (
            bsr_grouped_linear, lambda **to: bsr_grouped_linear(a, experts, offs=ends, **to), {"out": new(128, 128)}
        ),
        "sddmm, accumulate": (sddmm, lambda **to: sddmm(a, b, W, accumulate=True, **to), {"out": new(4, 64, 64)}),
        "FP8 attention": (attention, lambda **to: attention(*[q.to(E4M3)] * 3, **to), {"out": new(1, 2, 128, 64)}),
        "block_sparse_attention, mask": (
            block_sparse_attention, lambda **to: block_sparse_attention(q, q, q, mask, **to),
            {"out": new(1, 2, 128, 64)},
        ),
    }  # fmt: skip


NAMES = list(writes("cpu"))


class Saves(torch.autograd.Function):
    """w, with t saved for backward."""

    @staticmethod
    def forward(ctx, w, t):
        ctx.save_for_backward(t)
        return w.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * len(ctx.saved_tensors), None


def saved(t: torch.Tensor) -> torch.Tensor:
    """A loss that has saved t."""
    return Saves.apply(torch.ones((), device=t.device, requires_grad=True), t)


def assert_counted(run, to: dict) -> None:
    for _ in range(3):  # later calls find a plan
        losses = [saved(t) for t in to.values()]
        run(**to)
        for loss in losses:
            with pytest.raises(RuntimeError, match=MODIFIED):
                loss.backward()
    for name in to:  # views share their base's version
        base = to[name].expand(2, *to[name].shape).clone()
        loss = saved(base)
        run(**to | {name: base[1]})
        with pytest.raises(RuntimeError, match=MODIFIED):
            loss.backward()


def test_all_ops_that_write_are_walked():
    found = {op for op, *_ in writes("cpu").values()}
    for package in (cute_kernels, sparse_collective, attention_package):
        for name in package.__all__:
            op = getattr(package, name)
            reads_out = op is attention_package.attention_backward  # its `out` is the output of the forward call
            if inspect.isfunction(op) and "out" in inspect.signature(op).parameters and not reads_out:
                assert op in found, name


@pytest.mark.parametrize("name", NAMES)
def test_writes_are_counted(place, name):
    if "FP8" in name and place == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs sm_89")
    _, run, to = writes(place)[name]
    assert_counted(run, to)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", NAMES)
def test_writes_of_compiled_calls_are_counted(place, name, backend):
    if name == "block_sparse_attention":
        pytest.skip("its mask is made in the call; another case has one from outside")
    if "FP8" in name and place == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs sm_89")
    _, run, to = writes(place)[name]
    torch.compiler.reset()
    assert_counted(torch.compile(run, backend=backend), to)


def test_the_input_of_a_loss_is_overwritten(place):
    """As torch.mm(a, b, out=x) does; once the gradient was wrong."""
    a, b, x = (normal(64, 64, device=place) for _ in range(3))
    w = normal(64, 64, device=place).requires_grad_()
    loss = (x * w).sum()
    gemm(a, b, out=x)
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()


def test_inference_mode(place):
    """Tensors of inference mode have no version; others are counted inside of it, too."""
    a, x = normal(64, 64, device=place), normal(64, 64, device=place)
    loss = saved(x)
    with torch.inference_mode():
        for _ in range(2):
            out = torch.empty_like(a)
            gemm(a, a, out=out)
        gemm(a, a, out=x)
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("change", ["even", "uneven", "prune"])
def test_patterns_that_change_before_backward(where, change):
    layer = BsrLinear(256, 256, blocksize=(64, 64), density=0.5, device=where, dtype=torch.bfloat16)
    x = normal(32, 256, device=where).requires_grad_()
    for density in (0.25, 0.125):
        loss = layer(x).sum()
        if change == "prune":
            prune_(layer, density)
        else:
            change_pattern_(layer, 0.5, grow="random", even_rows=change == "even")
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()
        layer(x).sum().backward()
