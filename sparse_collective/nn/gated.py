"""GatedBsrLinear: the first half of a gated feed-forward layer, with a block-sparse weight; and its dense form."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor, nn

from cute_kernels.annotations import Activation
from cute_kernels.gate.dispatch import gate
from cute_kernels.reference import GATE

from ..bsr import BsrMatrix
from ..ops import bsr_gated_linear, bsr_linear, interleaved
from .linear import BsrLinear

__all__ = ["GatedBsrLinear", "GatedLinear", "gated_linear"]


def gated_linear(x: Tensor, W: Any, bias: Tensor | None, activation: Activation | None, fused: bool = True) -> Tensor:
    """activation(g) * u, where x @ W.T + bias has 64 columns of g, 64 of u, and so on. W: a BsrMatrix or Bsr24.

    fused: use the kernel that also computes the gate where there is one, which does not round g and u.
    """
    if bias is None and fused:
        return bsr_gated_linear(x, W, activation=activation)
    return gate(bsr_linear(x, W, bias=bias), activation)


class GatedLinear(nn.Linear):
    """An nn.Linear whose output (..., 2 H) becomes activation(g) * u (..., H); GatedBsrLinear.to_linear makes one."""

    activation: Activation | None = "silu"
    gated = True

    def forward(self, x: Tensor) -> Tensor:
        return gate(super().forward(x), self.activation)


class GatedBsrLinear(BsrLinear):
    """Gated linear layer: y = activation(x @ G.T + a) * (x @ U.T + b), where G and U share one block-sparse weight W.

    Rows of W and bias alternate: 64 of G, 64 of U, and so on (see sparse_collective.interleaved).

    Args:
        in_features: K.
        out_features: 2 H, the rows of W; a multiple of 128.
        activation: of the gate: None, "relu", "gelu", "gelu_tanh" or "silu".
        bias, blocksize, density, mask, indices, device, dtype: see BsrLinear.

    Forward maps x (..., K) to (..., H). After `eval()`, without gradients and bias, it is one kernel if
    bsr_gated_linear supports the call; that kernel does not round x @ G.T and x @ U.T. In training mode results are
    bitwise identical with and without grad mode, so that checkpoints (use_reentrant or not) recompute the same values.
    Pruning, hooks, state and sharding work as in BsrLinear.

    Raises:
        TypeError, ValueError: as in BsrLinear, and if out_features is not a multiple of 128.

    Example:
        layer = GatedBsrLinear(1024, 2 * 4096, blocksize=(128, 128), density=0.25)
    """

    gated = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        blocksize: Sequence[int] = (128, 128),
        *,
        activation: Activation | None = "silu",
        **weight: Any,
    ) -> None:
        if operator.index(out_features) % (2 * GATE):
            raise ValueError(
                f"GatedBsrLinear: out_features is {out_features}, the rows of gate and up together; use a multiple of "
                f"{2 * GATE}"
            )
        super().__init__(in_features, out_features, bias, blocksize, activation=activation, **weight)

    def forward(self, x: Tensor) -> Tensor:
        W = self.weight
        fused = not (self.training and (W.requires_grad or x.requires_grad))
        return gated_linear(x, W, self.bias, self.activation, fused)

    @classmethod
    def from_linears(
        cls,
        gate: nn.Linear,
        up: nn.Linear,
        blocksize: Sequence[int] = (128, 128),
        density: float | None = None,
        mask: Tensor | None = None,
        *,
        activation: Activation | None = "silu",
    ) -> Self:
        """Create the layer from blocks of two dense layers (H, K), gate and up; see BsrLinear.from_linear.

        Raises:
            ValueError: only one of them has a bias, or H is not a multiple of 64.
        """
        if (gate.bias is None) != (up.bias is None):
            raise ValueError("from_linears: gate and up must both have a bias, or neither")
        joint = nn.Linear(gate.in_features, 2 * gate.out_features, gate.bias is not None, device="meta")
        joint.weight = nn.Parameter(interleaved(gate.weight.detach(), up.weight.detach()), gate.weight.requires_grad)
        if gate.bias is not None:
            joint.bias = nn.Parameter(interleaved(gate.bias.detach(), up.bias.detach()), gate.bias.requires_grad)
        return cls.from_linear(joint.train(gate.training), blocksize, density, mask, activation=activation)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        blocksize: Sequence[int] = (128, 128),
        density: float | None = None,
        mask: Tensor | None = None,
        *,
        activation: Activation | None = "silu",
    ) -> Self:
        """As BsrLinear.from_linear, of a linear layer whose rows alternate as this layer's do."""
        return super().from_linear(linear, blocksize, density, mask, activation=activation)

    @classmethod
    def from_bsr(cls, W: BsrMatrix, bias: Tensor | None = None, *, activation: Activation | None = "silu") -> Self:
        """As BsrLinear.from_bsr, of a matrix whose rows alternate as this layer's do."""
        return super().from_bsr(W, bias, activation=activation)

    def to_linear(self) -> GatedLinear:
        """A dense layer with the same weight and gate, zeros where no block is stored; copies."""
        linear = self._dense(GatedLinear)
        linear.activation = self.activation
        return linear
