"""Backward takes the path that its forward was called in, also in threads of autograd's that know of no path."""

import threading

import pytest
import torch

import cute_kernels
from attention import attention
from attention import gradients as attention_gradients
from cute_kernels import gemm, gradients
from cute_kernels.runtime.device import forced_path
from sparse_collective import BsrMatrix, bsr_linear
from sparse_collective import gradients as bsr_gradients

from .attention.parts import qkv


def elsewhere(run):
    """run() in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("name", ["gemm", "bsr_linear", "attention"])
def test_backward_in_another_thread(name, monkeypatch):
    seen = []

    def noted(function):
        def run(*args, **kwargs):
            seen.append(forced_path())
            return function(*args, **kwargs)

        return run

    if name == "gemm":
        monkeypatch.setattr(gradients, "gemm_backward", noted(gradients.gemm_backward))
        inputs = [torch.randn(8, 8, requires_grad=True) for _ in range(2)]
        call = gemm
    elif name == "bsr_linear":
        monkeypatch.setattr(bsr_gradients, "operand_gradient", noted(bsr_gradients.operand_gradient))
        W = BsrMatrix.from_dense(torch.randn(32, 32), (16, 16))
        inputs = [torch.randn(8, 32, requires_grad=True)]

        def call(x):
            return bsr_linear(x, W)
    else:
        monkeypatch.setattr("attention.gradients.gradients_of", noted(attention_gradients.gradients_of))
        inputs = [t.requires_grad_() for t in qkv(8, 8, 16, dtype=torch.float64)]
        call = attention
    for path in ("sm_80", None):
        if path:
            with cute_kernels.path(path):
                out = call(*inputs)
        else:
            out = call(*inputs)
        elsewhere(lambda out=out: torch.autograd.grad(out.sum(), inputs))
    assert seen == ["sm_80", None]
