"""cute_kernels.functions on torch's tensors and in kernels' own formulas, and an epilogue whose constant changes.

How functions are told apart is in test_traced_memo.py, what they must not do in test_traced_errors.py.
"""

import math

import pytest
import torch
import torch.nn.functional as nnf

from cute_kernels import dispatch as dense_ops
from cute_kernels import explain, gemm
from cute_kernels import functions as F
from cute_kernels.testing.reference import normal
from cute_kernels.traced import activations

VALUES = torch.cat([torch.linspace(-8, 8, 401, dtype=torch.float64), torch.tensor([-60.0, 60.0, 0.0, -0.0, 1e-30])])
OTHERS = {"relu": nnf.relu, "gelu": nnf.gelu, "gelu_tanh": lambda x: nnf.gelu(x, approximate="tanh"), "silu": nnf.silu}


@pytest.mark.parametrize("name", [*OTHERS, *"sigmoid exp exp2 tanh erf sin cos".split()])
@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float32, 1e-5, 1e-6), (torch.float64, 1e-12, 1e-14)])
def test_functions_mean_what_torch_means(name, dtype, rtol, atol):
    x = VALUES.to(dtype)
    mine, right = getattr(F, name)(x), OTHERS.get(name, getattr(torch, name, None))(x)
    assert mine.dtype is dtype
    torch.testing.assert_close(mine, right, rtol=rtol, atol=atol)
    x = torch.linspace(0.1, 9, 50)
    assert all(torch.equal(getattr(F, name)(x), getattr(torch, name)(x)) for name in ("log", "sqrt", "rsqrt"))


def test_gelu_as_kernels_compute_it(monkeypatch):
    """Within 7.48e-7 of the truth, and right in the limits."""
    monkeypatch.setattr(activations, "_exp2", torch.exp2)
    monkeypatch.setattr(activations.cute.math, "absf", torch.abs)
    gelu = activations.gelu
    x = torch.arange(-300_000, 300_001) / 10_000  # torch.linspace rounds by the machine, and so does the largest error
    # Here without fused multiply-adds, which a kernel has. torch's own fp32 gelu errs by 3.7e-7 to 1.07e-6, by the
    # machine, which decides the formula: the bound is 0.7 of the largest.
    assert (gelu(x).double() - nnf.gelu(x.double())).abs().max() <= 7.48e-7
    limits = torch.tensor([-1e30, -1e4, 1e4, 1e30, math.inf, 0.0])
    assert torch.equal(gelu(limits), limits.clamp_min(0))
    assert gelu(torch.tensor([math.nan, -math.inf])).isnan().all(), "as torch has it"


def test_selections():
    x = torch.tensor([-1.0, 0.5, 3.0, math.nan])
    assert F.maximum(x, 0.0).tolist()[:3] == [0.0, 0.5, 3.0] and F.maximum(x, 0.0)[3].isnan()
    assert F.minimum(x, 1.0).tolist()[:3] == [-1.0, 0.5, 1.0] and F.minimum(x, 1.0)[3].isnan()
    assert F.where(x > 0, x, 0.25 * x).tolist()[:3] == [-0.25, 0.5, 3.0]
    assert F.where(x > 0, 1.0, -1.0).tolist() == [-1.0, 1.0, 1.0, -1.0]
    assert F.maximum(x, torch.ones(4)).tolist()[:3] == [1.0, 1.0, 3.0]
    assert F.relu(x)[3].isnan()


def test_a_captured_variable_that_changes(emulated):
    """The emulated kernel is made once for a plan, as the compiled one is."""
    by = 2.0

    def scaled(x):
        return x * by

    a, b = normal(8, 8), normal(8, 8)
    first = repr(explain(gemm, a, b, epilogue=scaled).facts)
    gemm(a, b, epilogue=scaled)
    by = 3.0
    assert repr(explain(gemm, a, b, epilogue=scaled).facts) != first
    plans = len(dense_ops._PLANS.plans)
    gemm(a, b, epilogue=scaled)
    assert len(dense_ops._PLANS.plans) > plans, "the second call ran the plan, and so the kernel, of the old constant"
