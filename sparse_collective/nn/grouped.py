"""BsrGroupedLinear: a linear layer for each expert, of which runs of tokens take one each, in one kernel."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from cute_kernels.annotations import Activation

from ..bsr import BsrMatrix
from ..ops import bsr_grouped_linear
from .module import BsrModule

__all__ = ["BsrGroupedLinear"]


class BsrGroupedLinear(BsrModule):
    """Grouped linear layers: y[i] = activation(x[i] @ W[e].T + bias[e]) for expert e of token i, in one kernel.

    Args:
        experts: E.
        in_features, out_features: K and M, multiples of the block's sides.
        bias: True adds a bias (E, M).
        blocksize: (bm, bk), multiples of 16.
        one_pattern: True if all experts store the same blocks: values (E, nnz, bm, bk), crow_indices (M / bm + 1,).
            False gives each its own pattern: values (blocks of all experts, bm, bk), crow_indices (E, M / bm + 1).
        density: in [0, 1], of each expert; random blocks as in BsrLinear.
        mask: instead of density: (M / bm, K / bk) bool, or with own patterns (E, M / bm, K / bk). Synchronizes.
        indices: instead of density: (crow_indices, col_indices) of a BsrMatrix; copied.
        activation, device, dtype: see BsrLinear.

    Forward takes x (T, K), sorted by expert, and offs (E,), the end of each expert's tokens; or, for padded x, the
    keyword expert_ids (see bsr_grouped_linear). It returns (T, M). prune_ supports only BsrLinear: prune experts before
    you stack them.

    Raises:
        TypeError, ValueError: as in BsrLinear.

    Example:
        layer = BsrGroupedLinear(8, 1024, 4096, blocksize=(128, 128), density=0.25, dtype=torch.bfloat16)
        y = layer(x, torch.tensor([100, 250, 250, 400, 512, 600, 800, 1024], dtype=torch.int32))  # x (1024, 1024)
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        blocksize: Sequence[int] = (128, 128),
        *,
        one_pattern: bool = True,
        density: float | None = None,
        mask: Tensor | None = None,
        indices: tuple[Tensor, Tensor] | None = None,
        activation: Activation | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if operator.index(experts) < 1:
            raise ValueError(f"BsrGroupedLinear: experts is {experts}; there must be one at least")
        super().__init__(
            in_features, out_features, blocksize, items=experts, one_pattern=one_pattern, density=density, mask=mask,
            indices=indices, activation=activation, device=device, dtype=dtype,
        )  # fmt: skip
        if bias:
            values = self.values
            self.bias = nn.Parameter(torch.empty(experts, out_features, device=values.device, dtype=values.dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @classmethod
    def from_bsr(cls, W: BsrMatrix, bias: Tensor | None = None, *, activation: Activation | None = None) -> Self:
        """Create the layer with a batch of matrices W (E, M, K) as its weight; copies it.

        Raises:
            TypeError: W is not a BsrMatrix.
            ValueError: W is not a batch or has invalid indices, or bias is not (E, M).

        Example:
            W = BsrMatrix.stack([BsrMatrix.from_dense(w, (128, 128), density=0.25) for w in weights])
            layer = BsrGroupedLinear.from_bsr(W)
        """
        if not isinstance(W, BsrMatrix) or W.structured:
            raise TypeError(f"from_bsr needs a BsrMatrix, got {type(W).__name__}")
        if W.batch is None:
            raise ValueError(
                f"from_bsr needs a batch (E, M, K), got one matrix of shape {W.shape}; see BsrMatrix.stack"
            )
        experts, rows, cols = W.shape
        if bias is not None and tuple(bias.shape) != (experts, rows):
            raise ValueError(f"bias has shape {tuple(bias.shape)}, must be ({experts}, {rows})")
        W.check_indices()
        layer = cls(
            experts, cols, rows, bias is not None, W.blocksize, one_pattern=W.batch == "values",
            indices=(W.crow_indices, W.col_indices), activation=activation, device="meta", dtype=W.dtype,
        )  # fmt: skip
        return layer._hold(W, bias)

    def forward(
        self, x: Tensor, offs: Tensor | None = None, *, expert_ids: Tensor | None = None, group_rows: int | None = None
    ) -> Tensor:
        return bsr_grouped_linear(
            x, self.weight, offs=offs, expert_ids=expert_ids, group_rows=group_rows, bias=self.bias,
            activation=self.activation,
        )  # fmt: skip
