"""Bytes that a model holds between forward and backward, against what backward reads."""

import gc
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from attention import attention
from cute_kernels import gemm
from cute_kernels.testing.reference import normal
from sparse_collective.nn import BsrLinear

LAYERS, TOKENS, HEADS, HEAD_DIM = 4, 256, 4, 64
DIM = HEADS * HEAD_DIM
BF16 = 2  # bytes


class Layer(nn.Module):
    """Attention, a GEMM with GELU and a residual, and a block-sparse linear layer."""

    def __init__(self, device) -> None:
        super().__init__()
        shapes = {"qkv": (DIM, 3 * DIM), "out": (DIM, DIM)}
        for name, (rows, columns) in shapes.items():
            self.register_parameter(name, nn.Parameter(normal(rows, columns, k=rows, device=device)))
        mask = torch.ones(DIM // 64, DIM // 64, dtype=torch.bool).tril()
        self.down = BsrLinear(DIM, DIM, True, (64, 64), mask=mask, device=device, dtype=torch.bfloat16)

    def forward(self, x: Tensor, activation: str | None = "gelu") -> Tensor:
        q, k, v = gemm(x, self.qkv).view(1, TOKENS, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        y = attention(q, k, v, causal=True)
        y = y.transpose(1, 2).reshape(TOKENS, DIM)
        return self.down(gemm(y, self.out, activation=activation, residual=x * 0.5))


def bytes_to_save(activation: str | None) -> int:
    """x, q, k, v, LSE, the output of attention (and as a matrix), z of a GELU, and the input of `down`."""
    matrices = 1 + 3 + 2 + 1 + (activation == "gelu")
    return LAYERS * (matrices * TOKENS * DIM * BF16 + HEADS * TOKENS * 4)


@contextmanager
def saved_storages():
    """A dict that fills with the bytes of each storage that autograd saves."""
    found = {}

    def pack(t: Tensor) -> Tensor:
        if t.layout is torch.strided:
            storage = t.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield found


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_saved_bytes(place, activation):
    """A model of four layers saves nothing is saved but what backward reads."""
    model, x = nn.Sequential(*(Layer(place) for _ in range(LAYERS))), normal(TOKENS, DIM, device=place)
    x.requires_grad_()
    with saved_storages() as saved:
        y = x
        for layer in model:
            y = layer(y, activation)
    persistent = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found = sum(size for pointer, size in saved.items() if pointer not in persistent)
    assert found == bytes_to_save(activation)
    y.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_allocated_bytes(compiled):
    model, x = nn.Sequential(*(Layer("cuda") for _ in range(LAYERS))), normal(TOKENS, DIM, device="cuda")
    run = torch.compile(model, fullgraph=True) if compiled else model
    for _ in range(2):
        run(x).float().square().mean().backward()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = run(x).float().square().mean()
    gc.collect()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    # The last layer's output is held in fp32 by the loss, and torch rounds each tensor up to 512 bytes.
    most = bytes_to_save("gelu") + TOKENS * DIM * (BF16 + 4 + 4) + LAYERS * 20 * 512
    assert held <= most, f"{held} bytes, at most {most}"
    loss.backward()
    del loss
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 4096


def test_a_residual_may_be_written_to_before_backward(place):
    """Backward does not read it; torch used to say that it was modified by an inplace operation."""
    a, b = (normal(64, 64, device=place).requires_grad_() for _ in range(2))
    residual = normal(64, 64, device=place)
    expected = gemm(a, b, residual=residual)
    expected = torch.autograd.grad(expected, [a, b], torch.ones_like(expected))
    y = gemm(a, b, residual=residual)
    residual.zero_()
    found = torch.autograd.grad(y, [a, b], torch.ones_like(y))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("watched", ["a", "b"])
def test_an_operand_is_saved_for_the_gradient_of_the_other(place, watched):
    """With a frozen weight the input may be written to, as in torch.mm."""
    operands = {name: normal(64, 64, device=place) for name in ("a", "b")}
    operands[watched].requires_grad_()
    other = operands["b" if watched == "a" else "a"]
    y = gemm(**operands, activation="gelu")
    with torch.no_grad():
        operands[watched].zero_()
    (gradient,) = torch.autograd.grad(y, [operands[watched]], torch.ones_like(y))
    assert gradient.isfinite().all() and gradient.shape == other.shape
