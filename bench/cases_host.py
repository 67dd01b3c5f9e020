"""Rows of `python -m bench host`: single calls with tiny tensors, eager and compiled, forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attention import attention, block_sparse_attention
from cute_kernels import gemm
from sparse_collective import bsr_linear, bsr_matmul, random_bsr
from sparse_collective.nn import BsrLinear, SwiGLU

from .cases_layers import DenseSwiGLU
from .peers import needs
from .peers_attention import FA4
from .rows import OURS

TORCH = "torch"
BLOCK = (64, 64)
DTYPE = torch.bfloat16
LIMITS = {"eager": 1.0, "compiled": 1.15, "reduce-overhead": 1.15, "eager backward": 1.1, "compiled backward": 1.15}


@dataclass(frozen=True)
class HostCase:
    """One row: a call of ours and calls of peers that compute the same.

    `ours` and `theirs` (torch's) are functions of `inputs`, or modules; `form` is a key of LIMITS. `fa4` returns the
    function of FlashAttention 4, whose inputs are those of the row as (B, S, H, D). Backward starts from ones, and
    gradients of inputs and parameters are set to None before each step.
    """

    name: str
    form: str
    ours: Callable
    theirs: Callable | None
    inputs: tuple[Tensor, ...]
    fa4: Callable[[], Callable] | None = None

    @property
    def title(self) -> str:
        return f"{self.name}, {self.form}"

    @property
    def limit(self) -> float:
        """The largest ratio of our host time to torch's that is asked for."""
        return LIMITS[self.form]

    @property
    def candidates(self) -> list[str]:
        """Names that `call` accepts: OURS, and those of the peers that this row has."""
        return [OURS, *([TORCH] if self.theirs else []), *([FA4] if self.fa4 else [])]

    def grad_mode(self) -> contextlib.AbstractContextManager:
        """The context in which the calls are made: torch.no_grad() unless the row runs backward."""
        return contextlib.nullcontext() if self.form.endswith("backward") else torch.no_grad()

    def call(self, candidate: str) -> Callable[[], None]:
        """The call of one of `candidates`, without arguments. Peers are imported here."""
        if candidate == FA4:
            return self._call(self.fa4(), tuple(t.transpose(1, 2).contiguous() for t in self.inputs))
        return self._call({OURS: self.ours, TORCH: self.theirs}[candidate], self.inputs)

    def _call(self, function: Callable, inputs: tuple[Tensor, ...]) -> Callable[[], None]:
        run = function
        if self.form.startswith("compiled"):
            run = torch.compile(function)
        elif self.form == "reduce-overhead":
            run = torch.compile(function, mode="reduce-overhead")
        if not self.form.endswith("backward"):
            inputs = tuple(t.detach() for t in inputs)

            def forward() -> None:
                run(*inputs)

            return forward
        leaves = inputs = tuple(t.detach().requires_grad_() for t in inputs)
        if isinstance(function, nn.Module):
            leaves += tuple(function.parameters())
        with torch.no_grad():
            dy = torch.ones_like(function(*inputs))

        def step() -> None:
            for leaf in leaves:
                leaf.grad = None
            run(*inputs).backward(dy)

        return step


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, causal=True)


def causal_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nnf.scaled_dot_product_attention(q, k, v, is_causal=True)


def causal_fa4() -> Callable:
    """FlashAttention 4. Its import changes CuTe DSL for the process: compile our kernels before."""
    attend = needs("flash_attn.cute.interface", "flash-attn-4").flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, causal=True)[0]

    return call


def cases(device: str = "cuda") -> Iterator[HostCase]:
    """All rows: 128 x 128 matrices, and attention over 128 tokens."""
    where = {"device": device, "dtype": DTYPE}
    sparse = {"blocksize": BLOCK, "density": 0.5, **where}
    a, b, dense = (torch.randn(128, 128, **where) for _ in range(3))
    W = random_bsr((128, 128), BLOCK, density=0.5, **where)
    qkv = tuple(torch.randn(1, 2, 128, 64, **where) for _ in range(3))
    matmuls = {
        "gemm": (gemm, torch.mm, (a, b)),
        "bsr_linear": (lambda x: bsr_linear(x, W), lambda x: nnf.linear(x, dense), (a,)),
        "bsr_matmul": (lambda x: bsr_matmul(W, x), lambda x: torch.mm(dense, x), (a,)),
        "BsrLinear": (BsrLinear(128, 128, **sparse), nn.Linear(128, 128, **where), (a,)),
    }
    dense_gelu = nn.Sequential(nn.Linear(128, 128, **where), nn.GELU())
    gelu = BsrLinear(128, 128, activation="gelu", **sparse), dense_gelu, (a,)
    swiglu = SwiGLU(128, 256, density=0.5, **where).eval(), DenseSwiGLU(128, 256, **where), (a,)
    causal = causal_attention, causal_sdpa, qkv
    fa4 = causal_fa4 if device == "cuda" else None
    mask = create_block_mask(lambda b, h, i, j: i - j < 64, None, None, 128, 128, device=device)
    flex = torch.compile(flex_attention)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_sparse_attention(q, k, v, mask)

    def masked_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex(q, k, v, block_mask=mask)

    for form in ("eager", "compiled"):
        for name, each in matmuls.items():
            yield HostCase(name, form, *each)
        yield HostCase("attention, causal", form, *causal, fa4=fa4 if form == "eager" else None)
    for form in ("eager", "compiled", "reduce-overhead"):
        yield HostCase("SwiGLU", form, *swiglu)
    for form in ("eager backward", "compiled backward"):
        for name in ("gemm", "BsrLinear"):
            yield HostCase(name, form, *matmuls[name])
        yield HostCase("BsrLinear, GELU", form, *gelu)
        yield HostCase("SwiGLU", form, *swiglu)
        yield HostCase("attention, causal", form, *causal, fa4=fa4 if form == "eager backward" else None)
    theirs = masked_flex if device == "cuda" else None  # FlexAttention has no backward on a CPU
    for form in ("eager", "eager backward"):
        yield HostCase("block_sparse_attention of FlexAttention's mask", form, masked, theirs, qkv)
