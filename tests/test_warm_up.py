"""warm_up collects the kernels that eager calls request, changes nothing, and compiles what is missing."""

import copy
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import cute_kernels
from attention import attention, block_sparse_attention, patterns, scaled_dot_product_attention, score_mods
from cute_kernels import gemm, quantize, warm_up
from cute_kernels.runtime import cache
from cute_kernels.runtime.device import assume, collecting
from cute_kernels.testing.reference import normal
from sparse_collective import BsrMatrix, bsr_linear, bsr_matmul, random_bsr, sddmm
from sparse_collective.nn import BsrLinear

from .cute_kernels.cache_fixtures import environment_fixture, is_function, objects  # noqa: F401
from .test_one_graph import ALL, INFERRED, INFERRED_ROWS, OF_ROWS, K, heads

BF16 = torch.bfloat16
MASK = patterns.sliding_window((256, 256), (63, 0), device="cpu")
UNCHECKED = random_bsr((K, K), (32, 32), density=0.5, dtype=BF16)
COLUMN_MAJOR = normal(K, K).t()
LENGTHS = torch.tensor([100], dtype=torch.int32)
ALIBI = score_mods.Alibi(score_mods.alibi_slopes(2))
CALLS = {
    "gemm, column-major": lambda x: gemm(x, COLUMN_MAJOR),
    "gemm, misaligned": lambda x: gemm(x[:, 1:], COLUMN_MAJOR[1:]),
    "gemm, user function": lambda x: gemm(x, COLUMN_MAJOR, epilogue=lambda z: z * torch.sigmoid(z), alpha=0.5),
    "gemm, FP8": lambda x: gemm(quantize(x.detach(), per="row"), quantize(COLUMN_MAJOR.t(), per="row").mT),
    "gemm, TF32": lambda x: gemm(x.float(), x.float().mT, precision="3xtf32"),
    "gemm, out": lambda x: gemm(x.detach(), COLUMN_MAJOR, out=torch.empty(x.shape[0], K, dtype=BF16)),
    "bsr_linear, unchecked indices": lambda x: bsr_linear(x, UNCHECKED),
    "bsr_matmul, transposed": lambda x: bsr_matmul(UNCHECKED.t(), x.mT),
    "sddmm": lambda x: sddmm(x.detach().mT, x.detach(), UNCHECKED).values,
    "1 token": lambda x: bsr_linear(x[:1], UNCHECKED, activation="relu"),
    "block_sparse_attention": lambda x: block_sparse_attention(tokens(x), tokens(x), tokens(x), MASK, causal=True),
    "score_mod": lambda x: attention(tokens(x), tokens(x), tokens(x), score_mod=ALIBI, return_lse=True),
    "decode": lambda x: attention(*(tokens(x.detach())[:, :, -n:] for n in (1, 256, 256)), seqused_k=LENGTHS),
    "head dimension 48": lambda x: scaled_dot_product_attention(*(tokens(x)[..., :48] for _ in "qkv")),
}


WITH_KERNELS = [name for name in (*ALL, *CALLS) if name != "mask_2_4_"]


def tokens(x):
    """(1, 2, rows, 64)"""
    return heads(x)[None]


def gradients_of(result, inputs):
    outputs = [t for t in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(t) and t.requires_grad]
    if outputs:
        torch.autograd.grad(outputs, inputs, [torch.ones_like(t) for t in outputs], allow_unused=True)
    return bool(outputs)


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_same_kernels_as_eager_calls(name, monkeypatch):
    call = CALLS[name] if name in CALLS else ALL[name]("cpu")
    inference = name in {**INFERRED, **INFERRED_ROWS}
    x = normal(256, K) if name in {**CALLS, **OF_ROWS, **INFERRED_ROWS} else normal(2, 256, K)
    x.requires_grad_(not inference)
    leaves = [x, *(p for p in call.parameters() if p.requires_grad)] if isinstance(call, nn.Module) else [x]
    with assume("sm_90"), collecting() as eager:
        backward = gradients_of(call(x), leaves)
    monkeypatch.setattr("cute_kernels.first_call._compile", lambda *_: None)
    found = warm_up(call, x, backward=backward, arch="sm_90", progress=False)
    assert eager
    assert set(found.kernels) == set(eager), (set(found.kernels) - set(eager), set(eager) - set(found.kernels))


def test_same_kernels_after_masks_of_other_numbers(monkeypatch):
    """Numbers of the first mask of its kind remain constants, and warm_up's trace of it finds the same. So it is with a
    causal mask beside it, which eager calls trace as a pair and others in two parts."""
    monkeypatch.setattr("cute_kernels.first_call._compile", lambda *_: None)
    for table in ("numbers._SEEN", "numbers._CHOSEN", "memo._OF_STATE"):
        monkeypatch.setattr(f"cute_kernels.traced.{table}", {})
    x, calls = normal(256, K), []
    for left, causal in ((59, False), (61, True), (62, True), (60, True)):
        mask = patterns.sliding_window((256, 256), (left, 0), device="cpu")
        calls.append(lambda x, mask=mask, causal=causal: block_sparse_attention(*[tokens(x)] * 3, mask, causal=causal))

    def of_eager_calls(call):
        with assume("sm_90"), collecting() as eager:
            call(x)
        return set(eager)

    kernels = [of_eager_calls(call) for call in calls]
    assert kernels[0] != kernels[1]
    monkeypatch.setattr("cute_kernels.traced.memo._OF_STATE", {})
    for call, eager in zip(calls, kernels, strict=True):
        assert set(warm_up(call, x, arch="sm_90", progress=False).kernels) == eager == of_eager_calls(call)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, monkeypatch):
    """The kernels of inference: attention stores no LSE."""
    monkeypatch.setattr("cute_kernels.first_call._compile", lambda *_: None)
    x = normal(256, K).requires_grad_()

    def call(x):
        return attention(tokens(x), tokens(x), tokens(x))

    with mode():
        with assume("sm_90"), collecting() as eager:
            call(x)
        found = warm_up(call, x, arch="sm_90").kernels
    assert set(found) == set(eager)
    assert not {*found} & {*warm_up(call, x, arch="sm_90").kernels}


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = BsrLinear(K, K, blocksize=(32, 32), density=0.5, dtype=BF16)
        self.norm, self.dropout = nn.BatchNorm1d(K, dtype=BF16), nn.Dropout()
        self.calls, self.outputs = 0, []

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        y = self.dropout(self.norm(self.layer(x))) * scale
        self.outputs.append(y)
        return {"y": y}


def test_nothing_changes(monkeypatch):
    monkeypatch.setattr("cute_kernels.first_call._compile", lambda *_: None)
    model, x = Stateful(), normal(64, K)
    model({"x": x}["x"])["y"].sum().backward()
    model.calls, model.outputs = 0, []
    before = copy.deepcopy({**model.state_dict(), **{f"{n}.grad": p.grad for n, p in model.named_parameters()}})
    generators = torch.get_rng_state(), random.getstate()
    objects_before = [id(p) for p in (*model.parameters(), *model.buffers())]
    found = warm_up(model, (x,), {"x": x[:2], "scale": 2.0}, backward=True, arch="sm_90", progress=False)
    assert len(found.kernels) >= 2 and str(found).startswith(f"{len(found.kernels)} kernels for sm_90a: ")
    after = {**model.state_dict(), **{f"{n}.grad": p.grad for n, p in model.named_parameters()}}
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert type(after[name]) is type(value) and torch.equal(after[name], value), name
    assert [id(p) for p in (*model.parameters(), *model.buffers())] == objects_before
    assert (model.calls, model.outputs, x.grad) == (0, [], None)
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    y, W = model.layer(x[:2]), model.layer.weight  # by the CPU's plan, not by warm_up's
    assert_close(y.float(), x[:2].float() @ W.to_dense().float().t(), atol=0.1, rtol=0.02)


@pytest.mark.parametrize("grad", [None, torch.ones(32, K, dtype=BF16)])
def test_a_function_that_calls_backward(monkeypatch, grad):
    monkeypatch.setattr("cute_kernels.first_call._compile", lambda *_: None)
    x = normal(32, K).requires_grad_()
    x.grad = grad
    found = warm_up(lambda: gemm(x, COLUMN_MAJOR, activation="gelu").float().sum().backward(), (), arch="sm_90")
    assert x.grad is grad and {facts.family for facts in found.kernels} == {"dense", "epilogue gradient"}
    assert grad is None or (grad == 1).all()


def test_meta_tensors(monkeypatch):
    monkeypatch.setattr("cute_kernels.first_call._compile", lambda *_: None)
    a = torch.empty(1 << 16, 1 << 16, dtype=BF16, device="meta")
    [facts] = warm_up(lambda a: gemm(a, a), a, arch="sm_90").kernels
    assert facts == cute_kernels.explain(gemm, a, a, arch="sm_90").facts


def test_the_next_call_finds_the_kernels(clean_environment, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_DEFAULT", None)
    a = normal(256, K)
    first = warm_up(lambda a: gemm(a, a.mT), a, arch="sm_80", progress=False)
    assert first.compiled == len(first.kernels) == len(objects(tmp_path / "from_environment")) == 1
    assert is_function(cache.default_cache().get(first.kernels[0], lambda: pytest.fail("compiled again")))
    assert warm_up(lambda a: gemm(a, a.mT), a, arch="sm_80").compiled == 0
    monkeypatch.setattr(cache, "_DEFAULT", None)  # as in another process
    assert warm_up(lambda a: gemm(a, a.mT), a, arch="sm_80").compiled == 0
    assert cache.default_cache().stats().disk_hits == 1


def reads_a_value(x):
    return gemm(x, x) if gemm(x, x).sum().item() > 0 else x


def makes_indices(x):
    W = BsrMatrix(UNCHECKED.crow_indices.clone(), UNCHECKED.col_indices.clone(), UNCHECKED.values, UNCHECKED.shape)
    return bsr_linear(x.repeat(1, 2), W)


class NotCopied(nn.Module):
    def __deepcopy__(self, memo):
        raise RuntimeError("a process group")


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "at least one call", lambda x: warm_up(nn.Identity(), arch="sm_90")),
        (TypeError, "a call is a tuple .* got list", lambda x: warm_up(nn.Identity(), [x], arch="sm_90")),
        (ValueError, "jobs must be at least 1", lambda x: warm_up(nn.Identity(), x, arch="sm_90", jobs=0)),
        (ValueError, "sm_99", lambda x: warm_up(nn.Identity(), x, arch="sm_99")),
        (RuntimeError, "CUTE_KERNELS_RECORD", lambda x: warm_up(reads_a_value, x, arch="sm_90")),
        (TypeError, "cannot be copied .a process group", lambda x: warm_up(NotCopied(), x, arch="sm_90")),
        (ValueError, "no output .* requires a gradient", lambda x: warm_up(gemm, (x, x), backward=True, arch="sm_90")),
        (RuntimeError, "reads the value", lambda x: warm_up(makes_indices, x, arch="sm_90")),
        (ValueError, "columns meet", lambda x: warm_up(gemm, (x, x[:1]), arch="sm_90")),
    ],
)
def test_errors(error, message, call):
    with pytest.raises(error, match=message):
        call(normal(64, 64))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu():
    with pytest.raises(RuntimeError, match='arch="sm_90"'):
        warm_up(nn.Identity(), normal(64, 64))


SCRIPT = """
print("started")
from cute_kernels.runtime.parallel import in_parallel
print(sorted(outcome.value for outcome in in_parallel(int, ["1", "2", "3"], jobs=2)))
"""


def test_processes_do_not_run_the_script_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.stdout.split("\n")[:2] == ["started", "[1, 2, 3]"], done.stderr


PLANS = """
import sys, torch
from attention import block_sparse_attention, patterns
from cute_kernels import explain, gemm
a, q = torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(1, 1, 256, 64, dtype=torch.bfloat16)
mask = patterns.sliding_window((256, 256), (63, 0), device="cpu")
explain(gemm, a, a, arch="sm_90")
explain(gemm, a, a, epilogue=lambda z: z * torch.sigmoid(z) + 1, arch="sm_90")
explain(block_sparse_attention, q, q, q, mask, arch="sm_90")
print([name for name in ("sympy", "torch._dynamo", "torch._inductor") if name in sys.modules])
"""


def test_a_first_call_imports_no_compiler_of_torch():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PLANS], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
