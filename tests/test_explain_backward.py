"""explain(..., backward=True): the kernels of a call and of its backward pass, in order."""

import pytest
import torch

import cute_kernels
from attention import attention, block_sparse_attention, create_block_mask
from cute_kernels import explain, gemm
from cute_kernels.report import report_of_kernel
from cute_kernels.runtime.cache import KernelCache
from cute_kernels.testing.reference import normal
from sparse_collective import bsr_linear, random_bsr
from sparse_collective.nn import BsrLinear, SwiGLU

from .emulator.ops import needs_compiler, on_emulator

BF16 = torch.bfloat16


def wanted(*shape):
    return normal(*shape).requires_grad_()


def families_of(kernels):
    return [facts.family for facts in kernels]


def operands():
    W = random_bsr((256, 192), (64, 64), density=0.5)
    W.requires_grad_()
    q, k, v = (wanted(1, 2, 256, 64) for _ in range(3))
    mask = create_block_mask(lambda b, h, q, kv: q // 128 == kv // 128, None, None, 256, 256, "cpu")
    return {
        "gemm": (gemm, (wanted(256, 192), wanted(192, 128)), {"bias": wanted(128), "activation": "gelu"}),
        "bsr_linear": (bsr_linear, (wanted(128, 192), W), {}),
        "attention": (attention, (q, k, v), {"causal": True}),
        "block_sparse_attention": (block_sparse_attention, (q, k, v, mask), {}),
    }


BACKWARD = {
    "gemm": ["epilogue gradient", "dense", "dense"],
    "bsr_linear": ["sampled", "bsr"],
    "attention": ["backward prepare", "flash backward", "backward dQ"],
    "block_sparse_attention": ["backward prepare", "flash backward", "backward dQ"],
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", BACKWARD)
def test_kernels_in_order(name, arch):
    op, args, kwargs = operands()[name]
    plan = explain(op, *args, **kwargs, arch=arch, backward=True)
    assert str(plan.plan) == str(explain(op, *args, **kwargs, arch=arch))
    assert families_of(plan.backward) == BACKWARD[name]
    assert all(facts.arch.startswith(arch) for facts in plan.forward + plan.backward)
    text = str(plan)
    assert f"backward: {len(BACKWARD[name])} kernels" in text and f"1. {BACKWARD[name][0]}: " in text


@needs_compiler
@pytest.mark.parametrize("name", ["gemm", "bsr_linear"])
def test_they_are_those_that_run(name, monkeypatch):
    op, args, _ = operands()[name]
    plan, launched = explain(op, *args, arch="sm_90", backward=True), []
    with on_emulator("sm_90", sms=132):
        get = KernelCache.get

        def noted(cache, facts, build):
            run = get(cache, facts, build)
            return lambda *call: launched.append(facts) or run(*call)

        with monkeypatch.context() as patch:  # before the emulator's own is undone
            patch.setattr(KernelCache, "get", noted)
            result = op(*args)
            result.backward(torch.ones_like(result))
    assert launched == [*plan.forward, *plan.backward]


def test_layers_and_functions():
    layer, x = SwiGLU(192, 256, blocksize=(64, 64), density=0.5, dtype=BF16), wanted(64, 192)
    plan = explain(layer, x, arch="sm_90", backward=True)
    assert plan.plan is None and families_of(plan.forward) == ["bsr", "gate", "bsr"]
    assert sorted(families_of(plan.backward)) == ["bsr", "bsr", "gate", "sampled", "sampled"]
    of_function = explain(lambda x: layer(x), x, arch="sm_90", backward=True)
    assert of_function.backward == plan.backward and of_function.forward == plan.forward
    assert x.grad is None and all(p.grad is None for p in layer.parameters())


def test_only_the_gradients_that_are_required():
    layer = BsrLinear(192, 256, blocksize=(64, 64), density=0.5, dtype=BF16)
    assert families_of(explain(layer, normal(64, 192), arch="sm_90", backward=True).backward) == ["sampled"]
    layer.requires_grad_(False)
    assert families_of(explain(layer, wanted(64, 192), arch="sm_90", backward=True).backward) == ["bsr"]


def test_a_kernel_of_the_backward_pass_can_be_inspected():
    a, b = (torch.empty(512, 512, dtype=BF16, device="meta", requires_grad=True) for _ in range(2))
    first, second = explain(gemm, a, b, arch="sm_90", backward=True).backward
    report = report_of_kernel(first)
    assert "HGMMA" in report.sass and not report.problems and first != second


def test_torch_only():
    a = torch.empty(64, 64, device="meta", dtype=BF16, requires_grad=True)
    plan = explain(lambda x: x * 2, a, arch="sm_90", backward=True)
    assert (plan.forward, plan.backward) == ((), ()) and "backward: no kernel, torch only" in str(plan)


def test_errors():
    a = normal(64, 64)
    with pytest.raises(ValueError, match="no output of the call requires a gradient; use requires_grad_"):
        explain(gemm, a, a, arch="sm_90", backward=True)
    with pytest.raises(ValueError, match="cannot explain 3"):
        explain(3, arch="sm_90", backward=True)
    with pytest.raises(ValueError, match=r"cannot explain 'Linear'; .*backward=True\) supports any module"):
        explain(torch.nn.Linear(8, 8), a, arch="sm_90")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match='explain: there is no GPU.*arch="sm_90"'):
            explain(gemm, a.requires_grad_(), a, backward=True)


def test_path():
    a = wanted(256, 256)
    with cute_kernels.path("sm_80"):
        assert {f.path for f in explain(gemm, a, a, arch="sm_90", backward=True).backward} == {"sm_80"}
