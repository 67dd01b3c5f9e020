"""BsrLinear: torch.nn.Linear with a block-sparse weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, TypeVar

import torch
from torch import Tensor, nn

from cute_kernels.annotations import Activation

from ..bsr import BsrMatrix
from ..bsr24.matrix import Bsr24
from ..ops import bsr_linear
from .module import BsrModule, block_grid
from .shards import check_held

__all__ = ["BsrLinear"]

Dense = TypeVar("Dense", bound=nn.Linear)


class BsrLinear(BsrModule):
    """Block-sparse linear layer: y = activation(x @ W.T + bias), where W stores some of its blocks. Replaces nn.Linear.

    Args:
        in_features, out_features: K and M, multiples of the block's sides.
        bias: True adds a bias (M,).
        blocksize: (bm, bk), multiples of 16.
        density: in [0, 1]; stores round(density * blocks) random blocks, with equally many in each block row, or one
            more.
        mask: (M / bm, K / bk) bool, instead of density; True where a block is stored. Synchronizes with the GPU.
        indices: (crow_indices, col_indices) of a BsrMatrix, instead of density; copied.
        activation: None, "relu", "gelu" (exact), "gelu_tanh" or "silu", fused into the GEMM.
        device, dtype: of values and bias: bfloat16, float16, float32, or float64 on the CPU. Kernels need 16-bit
            operands: on a GPU run a float32 layer under torch.autocast, or convert it with .to(torch.bfloat16).

    Forward maps x (..., K) to (..., M), in the weight's dtype, or autocast's. `values` (stored blocks, bm, bk) is the
    parameter.

    Values are initialized as in nn.Linear, with a bound larger by 1 / sqrt(density), so that outputs have the same
    variance.

    DistributedDataParallel broadcasts buffers, so it writes the indices in each forward, and tables of the pattern are
    built again; pass forward_sync_buffers=False. If torch does not have it, pass broadcast_buffers=False and start all
    processes with the same pattern: use the same seed, or load one state. fully_shard takes the layer as it is.

    Raises:
        TypeError: the dtype is not supported.
        ValueError: features are not multiples of the block's sides (the message has the padded extent), or not exactly
            one of density, mask and indices is passed, or it is out of range.

    Example:
        layer = BsrLinear(4096, 14336, blocksize=(128, 128), density=0.25, device="cuda", dtype=torch.bfloat16)
        y = layer(torch.randn(8, 512, 4096, device="cuda", dtype=torch.bfloat16))
    """

    bias: nn.Parameter | None
    gated = False  # True of a GatedBsrLinear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        blocksize: Sequence[int] = (128, 128),
        *,
        density: float | None = None,
        mask: Tensor | None = None,
        indices: tuple[Tensor, Tensor] | None = None,
        activation: Activation | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features, out_features, blocksize, density=density, mask=mask, indices=indices, activation=activation,
            device=device, dtype=dtype,
        )  # fmt: skip
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=self.values.device, dtype=self.values.dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        parameters = self._parameters
        bias = parameters["bias"] if "bias" in parameters else self.bias  # see BsrModule.weight
        return bsr_linear(x, self.weight, bias=bias, activation=self.activation)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        blocksize: Sequence[int] = (128, 128),
        density: float | None = None,
        mask: Tensor | None = None,
        *,
        activation: Activation | None = None,
    ) -> Self:
        """Create the layer from blocks of a dense one, copied, with its requires_grad and training mode.

        Args:
            linear: a torch.nn.Linear; on the meta device only density and mask are used.
            blocksize: (bm, bk).
            density: in [0, 1]; keeps the round(density * blocks) blocks of largest Frobenius norm.
            mask: (M / bm, K / bk) bool, instead of density.
            activation: see BsrLinear.

        Without density and mask, all blocks with a nonzero element are kept.

        Raises:
            TypeError: `linear` is not an nn.Linear, or has an unsupported dtype.
            ValueError: features are not multiples of the block's sides, or density or mask is invalid.

        Example:
            layer = BsrLinear.from_linear(torch.nn.Linear(4096, 4096), (128, 128), density=0.25)
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"from_linear needs a torch.nn.Linear, got {type(linear).__name__}")
        features, weight = (linear.in_features, linear.out_features), linear.weight
        block_grid(*features, blocksize)
        bias = linear.bias is not None
        if weight.is_meta:
            if density is None and mask is None:
                raise ValueError("from_linear of a layer on the meta device needs density or mask")
            where = {"density": density} if mask is None else {"mask": mask}
            layer = cls(*features, bias, blocksize, **where, activation=activation, device="meta", dtype=weight.dtype)
        else:
            W = BsrMatrix.from_dense(weight.detach(), blocksize, density=density, mask=mask)
            layer = cls.from_bsr(W, linear.bias, activation=activation)
        layer.values.requires_grad_(weight.requires_grad)
        if layer.bias is not None:
            layer.bias.requires_grad_(linear.bias.requires_grad)
        return layer.train(linear.training)

    @classmethod
    def from_bsr(cls, W: BsrMatrix, bias: Tensor | None = None, *, activation: Activation | None = None) -> Self:
        """Create the layer with a matrix W (M, K) as its weight; copies it.

        Raises:
            TypeError: W is not a BsrMatrix.
            ValueError: W is a batch or has invalid indices, or bias is not (M,).

        Example:
            layer = BsrLinear.from_bsr(random_bsr((512, 256), (64, 64), density=0.5))
        """
        if isinstance(W, Bsr24):
            raise TypeError(
                "from_bsr needs a BsrMatrix, got a Bsr24, whose products have no gradients; Bsr24Linear.from_bsr(W, "
                "bias) holds one for inference, and W.to_bsr() is a BsrMatrix of the same numbers"
            )
        if not isinstance(W, BsrMatrix):
            raise TypeError(f"from_bsr needs a BsrMatrix, got {type(W).__name__}")
        if W.batch is not None:
            raise ValueError(f"from_bsr needs one matrix, got a batch of shape {W.shape}; see unbind")
        if bias is not None and tuple(bias.shape) != (W.shape[0],):
            raise ValueError(f"bias has shape {tuple(bias.shape)}, must be ({W.shape[0]},)")
        W.check_indices()
        indices = W.crow_indices, W.col_indices
        layer = cls(
            W.shape[1], W.shape[0], bias is not None, W.blocksize, indices=indices, activation=activation,
            device="meta", dtype=W.dtype,
        )  # fmt: skip
        return layer._hold(W, bias)

    def to_linear(self) -> nn.Linear:
        """Return a torch.nn.Linear with the same weight and zeros in place of dropped blocks; copies.

        Raises:
            TypeError: the layer is tensor-parallel.
            ValueError: it has a fused activation, which nn.Linear cannot have.
        """
        if self.activation is not None:
            raise ValueError(
                f"this layer applies {self.activation} to its output, which nn.Linear does not; convert a layer with "
                "activation=None and put the activation behind it"
            )
        return self._dense(nn.Linear)

    def _dense(self, kind: type[Dense]) -> Dense:
        """A linear layer of this class with the same weight and bias."""
        check_held("to_linear", f"this {type(self).__name__}", self)
        weight, bias = self.values, self.bias
        linear = kind(self.in_features, self.out_features, bias is not None, device="meta", dtype=weight.dtype)
        if weight.is_meta:
            dense = torch.empty(self.matrix_shape, device="meta", dtype=weight.dtype)
        else:
            with torch.no_grad():
                dense = self.weight.to_dense()
        linear.weight = nn.Parameter(dense, requires_grad=weight.requires_grad)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        return linear.train(self.training)
