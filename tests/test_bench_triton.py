"""The training suite's peers of Triton kernels, with torch in the kernels' place: what they are given, and compute."""

import importlib
import sys
import types

import pytest
import torch

from bench import peers
from bench import peers_training as training
from bench.peers import WrongResult
from sparse_collective import random_bsr

from .reference import normal

TOKENS, M, K = 128, 96, 64
BF16 = torch.bfloat16


def quickly(calls, **_):
    return {name: [float(number)] for number, name in enumerate(calls, 1)}


def operands(block=(32, 16)):
    """(W, dy', x)"""
    W = random_bsr((M, K), block, density=0.5, dtype=BF16)
    return W, normal(TOKENS, M).t(), normal(TOKENS, K)


@pytest.fixture
def kernels(monkeypatch):
    """What the kernels were called with; `off` is added to what they write."""
    seen = types.SimpleNamespace(addmm=[], sdd=[], off=0.0)

    def addmm(added, a, b, *, beta, out, meta):
        assert beta == 0 and added.shape == out.shape and a.layout is torch.sparse_bsr
        seen.addmm.append(meta)
        return out.copy_(a.to_dense().float() @ b.float() + seen.off)

    def sdd(a, b, rows, columns, out, depth, warps, stages):
        assert rows.dtype == columns.dtype == torch.int32 and out.is_contiguous() and a.shape[1] % depth == 0
        seen.sdd.append((depth, warps, stages))
        bm, bk = out.shape[1:]
        for p, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
            part = a[row * bm : (row + 1) * bm].float() @ b[:, column * bk : (column + 1) * bk].float()
            out[p] = part + seen.off
        return out

    def sampled_addmm(pattern, a, b, *, beta, out, skip_checks):
        assert beta == 0 and skip_checks and pattern.layout is out.layout is torch.sparse_bsr
        out.values().copy_(training.some_blocks(a, b, operands_of[0])[1] + seen.off)
        return out

    ops = importlib.import_module("torch.sparse._triton_ops")
    found = {"triton": ops, "torch.sparse._triton_ops": ops, "bench.triton_sdd": types.SimpleNamespace(sdd=sdd)}
    for module in (peers, training):
        monkeypatch.setattr(module, "needs", lambda name, package: found[name])
    monkeypatch.setattr(ops, "bsr_dense_addmm", addmm)
    monkeypatch.setattr(ops, "sampled_addmm", sampled_addmm, raising=False)
    operands_of = seen.operands = operands()
    return seen


def test_a_sampled_product(kernels):
    candidate = training.triton_sdd(lambda: kernels.operands, 1.0, quick=True, measure=quickly)
    call = candidate.setup()
    assert call.note == str(training.SDD_SETTINGS[0])
    assert set(kernels.sdd) == set(training.SDD_SETTINGS[: peers.QUICK])
    W, a, b = kernels.operands
    chosen, blocks = training.some_blocks(a, b, W)
    peers.compare(call()[chosen], blocks)
    assert len(chosen) == min(W.nnz, training.BLOCKS)
    kernels.off = 0.5
    with pytest.raises(WrongResult):
        training.triton_sdd(lambda: kernels.operands, 1.0, measure=quickly).setup()
    with pytest.raises(ValueError, match="K is 100, no multiple of 64"):
        training.sdd_call(W, a[:, :100], b[:100], torch.empty_like(W.values), training.SDD_SETTINGS[0])


def test_torch_s_sampled_product(kernels, monkeypatch):
    monkeypatch.setattr(training, "BLOCKS", 1000)  # all of them
    candidate = training.sampled_addmm(lambda: kernels.operands, 1.0)
    assert candidate.setup()().shape == kernels.operands[0].values.shape
    kernels.off = 0.5
    with pytest.raises(WrongResult):
        candidate.setup()


def test_a_transposed_copy(kernels):
    W, a, _ = kernels.operands
    candidate = training.transposed_copy(lambda: (W, a.t()), 1.0, quick=True, measure=quickly)
    call = candidate.setup()
    assert candidate.name == training.TRANSPOSED_COPY and call.note
    peers.compare(call().t(), a.t().float() @ W.to_dense().float())


def test_a_layer(kernels):
    W, a, x = kernels.operands
    x, dy, values = x.requires_grad_(), a.t().contiguous(), W.values.clone().requires_grad_()

    def step(layer):
        def call():
            x.grad = values.grad = None
            layer(x, values).backward(dy)
            return x.grad

        return call

    call = training.fastest_layer(step, x, dy, W, values, quickly)
    with torch.no_grad():
        values.mul_(2)  # as an optimizer would
    dense = W.with_values(values.detach()).to_dense().float()
    peers.compare(call(), dy.float() @ dense)
    y = training.triton_layer(x, W, values, peers.settings_for(32, TOKENS)[0], training.SDD_SETTINGS[0])(x, values)
    peers.compare(y.detach(), x.detach().float() @ dense.t())
    chosen, blocks = training.some_blocks(a, x.detach(), W)
    peers.compare(values.grad[chosen], blocks)
    assert {meta["SPLIT_N"] for meta in kernels.addmm} == {1}
    kernels.off = 0.5
    with pytest.raises(WrongResult):
        training.fastest_layer(step, x, dy, W, values, quickly)


def test_without_triton(monkeypatch):
    for name in ("triton", "triton.language"):
        monkeypatch.setitem(sys.modules, name, None)
    W, a, x = given = operands()
    for candidate in (
        training.triton_sdd(lambda: given, 1.0),
        training.sampled_addmm(lambda: given, 1.0),
        training.transposed_copy(lambda: (W, a.t()), 1.0),
    ):
        with pytest.raises(ImportError, match="^triton cannot be imported"):
            candidate.setup()
    with pytest.raises(ImportError, match="^triton cannot be imported"):
        training.triton_layer(x, W, W.values, peers.SETTINGS[0], training.SDD_SETTINGS[0])


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (16, 16)])
def test_on_a_gpu(block):
    """The kernels themselves; each set-up compares with the truth."""
    pytest.importorskip("triton")
    W = random_bsr((512, 512), block, density=0.5, dtype=BF16, device="cuda")
    dy, x = normal(1024, 512, device="cuda"), normal(1024, 512, device="cuda").requires_grad_()
    training.triton_sdd(lambda: (W, dy.t(), x.detach()), 1.0, quick=True).setup()
    training.transposed_copy(lambda: (W, dy), 1.0, quick=True).setup()
    values = W.values.clone().requires_grad_()

    def step(layer):
        def call():
            x.grad = values.grad = None
            layer(x, values).backward(dy)
            return x.grad

        return call

    training.fastest_layer(step, x, dy, W, values)
