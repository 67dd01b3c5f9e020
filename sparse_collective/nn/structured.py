"""Layers for inference whose weights are 2:4 sparse; pruning/prune24.py has the way from trained ones to them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cute_kernels import gemm
from cute_kernels.annotations import Activation
from cute_kernels.checks import watched
from cute_kernels.dtypes import FLOAT8
from cute_kernels.gate.dispatch import gate
from cute_kernels.runtime.autocast import autocast_dtype
from cute_kernels.sparse24.format import (
    KEPT,
    Sparse24,
    check_groups,
    compress,
    pack_metadata,
    prune_2_4,
    rows_for_tma,
)

from ..alignment import aligned
from ..bsr import BsrMatrix
from ..bsr24.matrix import Bsr24
from ..ops import bsr_linear
from .gated import GatedLinear
from .inference import InferenceLinear, StoredBlocks
from .linear import BsrLinear

__all__ = ["Bsr24Linear", "Sparse24Linear"]


class StructuredLinear(InferenceLinear):
    """A 2:4 sparse weight as buffers."""

    def __init__(
        self,
        W: Bsr24 | Sparse24,
        bias: Tensor | None,
        activation: Activation | None,
        training: bool,
        gated: bool = False,
    ) -> None:
        refuse_float8(type(self).__name__, W.dtype)
        super().__init__(W, bias, activation, training, gated)

    def _refuse_gradient(self, x: Tensor) -> None:
        if watched(x):
            name = type(self).__name__
            raise RuntimeError(
                f"{name} is for inference and computes no gradients, and x requires one: call it under "
                f"torch.no_grad(), or train {self.trained} with the masks of mask_2_4_, and make a {name} of it "
                "afterwards"
            )

    def _kind(self) -> str:
        return "2:4, "


def refuse_float8(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError for FP8: a layer has no scales, and FP8 metadata has another order."""
    if dtype in FLOAT8:
        raise TypeError(
            f"{name}: the weight is {dtype}; it must be torch.bfloat16 or torch.float16, on the CPU also torch.float32 "
            "or torch.float64. For FP8 use gemm with a Sparse24 or bsr_linear with a Bsr24"
        )


class Bsr24Linear(StoredBlocks, StructuredLinear):
    """Block-sparse linear layer for inference whose stored blocks are 2:4 sparse: y = activation(x @ W.T + bias).

    Args:
        layer: a BsrLinear or GatedBsrLinear whose blocks' sides are multiples of 64. Keeps the two elements of largest
            magnitude of every four neighbors in a row, which is all of them after training with 2:4 masks. Copies the
            weight; bias, activation and gate are kept.

    Forward maps x (..., K) to (..., M), in the weight's dtype, or autocast's, with one kernel: bfloat16 and float16 on
    sm_80 and newer (see bsr_linear with a Bsr24), also under torch.compile. The layer has no parameters and no
    gradients. BsrLinear.from_bsr(layer.weight.to_bsr(), layer.bias) converts it back.

    Buffers: crow_indices and col_indices int32, values (nnz, bm, bk / 2), metadata int32 (see Bsr24), and bias (M,),
    all in state_dict(). A state with another number of blocks can be loaded.

    Raises:
        TypeError: `layer` is not a BsrLinear, or its values are FP8.
        ValueError: the blocks' sides are not multiples of 64.
        RuntimeError: in forward, x requires a gradient.

    Example:
        layer = Bsr24Linear(BsrLinear(1024, 4096, blocksize=(128, 128), density=0.25, dtype=torch.bfloat16))
    """

    TENSORS = ("crow_indices", "col_indices", "values", "metadata")
    metadata: Tensor
    trained = "a BsrLinear"
    stored_columns = KEPT

    def __init__(self, layer: BsrLinear) -> None:
        if not isinstance(layer, BsrLinear):
            raise TypeError(f"Bsr24Linear needs a BsrLinear, got {type(layer).__name__}; see from_bsr for a Bsr24")
        self._hold(layer.weight.prune_2_4(), layer.bias, layer.activation, layer.training, layer.gated)

    @classmethod
    def from_bsr(cls, W: Bsr24, bias: Tensor | None = None, *, activation: Activation | None = None) -> Bsr24Linear:
        """Create the layer, in evaluation mode, with a matrix W (M, K) as its weight; copies it.

        Raises:
            TypeError: W is not a Bsr24, or is FP8.
            ValueError: W is a batch or has invalid indices, or bias is not (M,).
        """
        if not isinstance(W, Bsr24):
            raise TypeError(f"Bsr24Linear.from_bsr needs a Bsr24, got {type(W).__name__}; see BsrMatrix.prune_2_4")
        if W.batch is not None:
            raise ValueError(f"Bsr24Linear.from_bsr needs one matrix, got a batch of shape {W.shape}")
        if W.device.type != "meta":
            W.check_indices()
        layer, half = cls.__new__(cls), W.compressed
        crow, col = (t.int().clone() for t in (half.crow_indices, half.col_indices))
        own = BsrMatrix(crow, col, half.values.detach().clone(), half.shape)
        layer._hold(Bsr24(own, W.metadata.clone()), bias, activation, False)
        return layer

    def _hold(self, *arguments) -> None:
        super().__init__(*arguments)

    def forward(self, x: Tensor) -> Tensor:
        self._refuse_gradient(x)
        if self.gated:
            return gate(bsr_linear(x, self.weight, bias=self.bias), self.activation)
        return bsr_linear(x, self.weight, bias=self.bias, activation=self.activation)

    def _matrix(self) -> Bsr24:
        refuse_float8("Bsr24Linear", self.values.dtype)
        shape = self.out_features, self.in_features // KEPT
        half = BsrMatrix(self.crow_indices, self.col_indices, self.values, shape, check=not self._checked)
        return Bsr24(half, self.metadata)

    def _misfit(self, found: dict[str, Tensor]) -> str:
        metadata = found["metadata"]
        expected = (len(found["values"]), *self.metadata.shape[1:])
        if tuple(metadata.shape) != expected or metadata.dtype is not torch.int32:
            return f"metadata is {tuple(metadata.shape)} of {metadata.dtype}; it must be {expected} of torch.int32"
        return ""


class Sparse24Linear(StructuredLinear):
    """2:4 sparse linear layer for inference: y = activation(x @ W.T + bias), with two of every four neighbors of W.

    Args:
        linear: a torch.nn.Linear or GatedLinear whose in_features is a multiple of 4. Keeps the two elements of largest
            magnitude of every four. Copies the weight; bias, gate and activation are kept.
        activation: None, "relu", "gelu" (exact), "gelu_tanh" or "silu", fused into the GEMM.

    Forward maps x (..., K) to (..., M), in the weight's dtype, or autocast's, with one kernel: bfloat16 and float16 on
    sm_80 and newer (see gemm with a Sparse24), also under torch.compile. The layer has no parameters and no gradients;
    `layer.weight.to_dense()` is the dense weight.

    Buffers: values (M, K / 2), metadata int32 (see Sparse24), and bias (M,), all in state_dict().

    Raises:
        TypeError: `linear` is not an nn.Linear, or has an unsupported dtype.
        ValueError: K is not a multiple of 4, or activation is unknown.
        RuntimeError: in forward, x requires a gradient.

    Example:
        layer = Sparse24Linear(torch.nn.Linear(1024, 4096, dtype=torch.bfloat16), activation="gelu")
    """

    TENSORS = ("values", "metadata")
    metadata: Tensor
    trained = "an nn.Linear"

    def __init__(self, linear: nn.Linear, *, activation: Activation | None = None) -> None:
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"Sparse24Linear needs a torch.nn.Linear, got {type(linear).__name__}")
        w = linear.weight.detach()  # of a Masked24Linear what its mask leaves is the same
        check_groups("Sparse24Linear: the weight", w)
        values, places, _ = compress(prune_2_4(w))
        rows, columns = w.shape
        W = Sparse24(rows_for_tma(values), pack_metadata(places, values.dtype.itemsize), (rows, columns))
        gated = isinstance(linear, GatedLinear)
        if isinstance(linear, GatedLinear):
            activation = linear.activation
        super().__init__(W, linear.bias, activation, linear.training, gated)

    def forward(self, x: Tensor) -> Tensor:
        self._refuse_gradient(x)
        W, dtype = self.weight, autocast_dtype(x)
        if dtype is not None:  # gemm does not cast beside out=
            x, W = x.to(dtype), W.to(dtype)
        y = self._product(x, W, self.bias)
        return gate(y, self.activation) if self.gated else y

    def _product(self, x: Tensor, W: Sparse24, bias: Tensor | None) -> Tensor:
        tokens = x.flatten(0, -2) if x.dim() > 1 else x[None]
        out = tokens.new_empty(tokens.shape[0], self.out_features)
        bias = None if bias is None else bias[:, None]
        gemm(W, tokens.t(), bias=bias, activation=None if self.gated else self.activation, out=out.t())
        return out.view(*x.shape[:-1], self.out_features)

    def _matrix(self) -> Sparse24:
        refuse_float8("Sparse24Linear", self.values.dtype)
        return Sparse24(self.values, self.metadata, (self.out_features, self.in_features))

    def _adopt(self) -> None:
        values, metadata = self.values, self.metadata
        if type(values) is Tensor and not values.is_meta:  # a move to another device leaves no room between rows
            self.values = rows_for_tma(aligned(values))
        if type(metadata) is Tensor and not metadata.is_meta:  # of a mapped file, which a Sparse24 may refuse
            self.metadata = aligned(metadata)
        super()._adopt()
