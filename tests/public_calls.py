"""Calls of public functions as a user's file makes them, which mypy checks and nothing runs.

Each call that must be an error ignores exactly that error; mypy reports an ignore that is not needed.
"""

from typing import assert_type

import torch
from torch import Tensor, nn

import cute_kernels
import sparse_collective as sc
from attention import BlockMask, attention, block_sparse_attention, select_blocks, selected_attention
from cute_kernels import Quantized, Sparse24, gemm, prune_2_4, quantize
from sparse_collective.nn import BsrLinear, GatedBsrLinear, SwiGLU


def dense(a: Tensor, b: Tensor, activation: str) -> None:
    assert_type(gemm(a, b), Tensor)
    assert_type(gemm(a, b, return_amax=False, bias=None), Tensor)
    assert_type(gemm(a, b, return_amax=True, out_dtype=torch.float8_e4m3fn), tuple[Tensor, Tensor])
    assert_type(quantize(a, per="row"), Quantized)
    assert_type(gemm(quantize(a, per="row"), quantize(b, per="column")), Tensor)
    assert_type(gemm(Sparse24.from_dense(prune_2_4(a)), b, activation="gelu"), Tensor)
    gemm(a, b, epilogue=torch.tanh)
    with cute_kernels.path("sm_80"):
        gemm(a, b, precision="3xtf32")
    print(cute_kernels.explain(gemm, a, b, arch="sm_90"))

    gemm(a, b, activation="swish")  # type: ignore[call-overload]
    gemm(a, b, activation=activation)  # type: ignore[call-overload]
    gemm(a, b, precision="fp32")  # type: ignore[call-overload]
    gemm(a, b, bias=1.0)  # type: ignore[call-overload]
    gemm(a, b, None)  # type: ignore[call-overload]
    quantize(a, per="rows")  # type: ignore[arg-type]
    cute_kernels.path("sm_70")  # type: ignore[arg-type]


def block_sparse(x: Tensor, w: Tensor) -> None:
    W = sc.BsrMatrix.from_dense(w, (128, 128))
    assert_type(W, sc.BsrMatrix)
    assert_type(W.t(), sc.BsrMatrix)
    assert_type(W.quantize(per="block"), sc.BsrMatrix)
    assert_type(sc.bsr_linear(x, W, activation="relu"), Tensor)
    assert_type(sc.bsr_matmul(W, x.t(), residual=None), Tensor)
    assert_type(sc.bsr_linear(x, W, return_amax=True), tuple[Tensor, Tensor])
    assert_type(sc.bsr_gated_linear(x, W), Tensor)
    assert_type(sc.sddmm(x.t(), x, W), Tensor)
    assert_type(W @ x.t(), Tensor)
    assert_type(W.with_values(W.values), sc.BsrMatrix)

    sc.bsr_linear(x, W, residual=x)  # type: ignore[call-overload]
    sc.bsr_matmul(x=x, W=W)  # type: ignore[call-overload]
    W.quantize(per="row")  # type: ignore[arg-type]


def attentions(q: Tensor, mask: BlockMask, with_lse: bool) -> None:
    assert_type(attention(q, q, q, causal=True), Tensor)
    assert_type(attention(q, q, q, window_size=(None, 0), return_lse=True), tuple[Tensor, Tensor])
    assert_type(attention(quantize(q, per="head"), q, q, return_lse=with_lse), Tensor | tuple[Tensor, Tensor])
    assert_type(block_sparse_attention(q, q, q, mask, return_lse=False), Tensor)
    assert_type(block_sparse_attention(q, q, q, mask, return_lse=True, q_offset=3), tuple[Tensor, Tensor])

    assert_type(select_blocks(q, q, 8, 64, causal=True), Tensor)
    assert_type(selected_attention(q, q, q, select_blocks(q, q, 8, 64), 64, causal=True), Tensor)
    assert_type(selected_attention(q, q, q, q, 64, return_lse=True), tuple[Tensor, Tensor])

    selected_attention(q, q, q, q, 64, window_size=(None, 0))  # type: ignore[call-overload]
    select_blocks(q, q, 8, 64, pool="min")  # type: ignore[arg-type]
    attention(q, q, q, mask)  # type: ignore[call-overload]
    attention(q, q, q, window=(None, 0))  # type: ignore[call-overload]
    block_sparse_attention(q, q, q, mask, window_size=(None, 0))  # type: ignore[call-overload]


def layers(x: Tensor) -> None:
    layer = BsrLinear(256, 256, density=0.5, activation="gelu_tanh")
    assert_type(layer.weight, sc.BsrMatrix)
    assert_type(layer.values, nn.Parameter)
    assert_type(BsrLinear.from_linear(nn.Linear(256, 256), density=0.5), BsrLinear)
    assert_type(GatedBsrLinear.from_linear(nn.Linear(256, 256), density=0.5), GatedBsrLinear)
    SwiGLU(256, 512, density=0.5)(x)

    BsrLinear(256, 256, density=0.5, activation="tanh")  # type: ignore[arg-type]
    BsrLinear(256, 256, densty=0.5)  # type: ignore[call-arg]
