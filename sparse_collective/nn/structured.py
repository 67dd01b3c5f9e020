"""Layers for inference whose weights are 2:4 sparse; prune24.py has the way from trained ones to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from cute_kernels import gemm
from cute_kernels.checks import watched
from cute_kernels.dtypes import FLOAT8
from cute_kernels.functions import ACTIVATIONS
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
from .linear import BsrLinear
from .module import misfit, multiply
from .pattern import Pattern

__all__ = ["Bsr24Linear", "Sparse24Linear"]


class StructuredLinear(nn.Module):
    """What both layers share: a 2:4 sparse weight as buffers, which .to(), copies and state_dict know, and one matrix
    of them, which is kept for as long as they are the same tensors."""

    TENSORS: ClassVar[tuple[str, ...]]  # the weight's buffers, by their names in the matrix
    trained: ClassVar[str]  # the layer that it is made of

    def __init__(self, W: Bsr24 | Sparse24, bias: Tensor | None, activation: str | None, training: bool) -> None:
        super().__init__()
        name = type(self).__name__
        refuse_float8(name, W.dtype)
        if activation is not None and activation not in ACTIVATIONS:
            raise ValueError(f"{name}: activation {activation!r}; use None or one of {', '.join(ACTIVATIONS)}")
        self.out_features, self.in_features = W.shape
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}, must be ({self.out_features},)")
        self.activation = activation
        for tensor in self.TENSORS:
            self.register_buffer(tensor, getattr(W, tensor))
        self.register_buffer("bias", None if bias is None else bias.detach().to(W.device, W.dtype, copy=True))
        self._weight: Bsr24 | Sparse24 | None = None
        self._checked = False  # whether the contents of indices are known to be right
        self._adopt()
        self.train(training)

    @property
    def weight(self) -> Bsr24 | Sparse24:
        """The weight, sharing the buffers; the same object as long as they are the same.

        Raises:
            TypeError: the values are of float8, as after .to(torch.float8_e4m3fn).
            ValueError: the buffers are no such matrix, as after to_empty().
        """
        if torch.compiler.is_compiling():  # the graph's op finds by these tensors what is known of their pattern
            return self._matrix()
        kept, buffers = self._weight, self._buffers
        if kept is None or any(getattr(kept, name) is not buffers[name] for name in self.TENSORS):
            kept = self._weight = self._checked_matrix()
        return kept

    def _matrix(self) -> Bsr24 | Sparse24:
        """Of the buffers as they are."""
        raise NotImplementedError

    def _checked_matrix(self) -> Bsr24 | Sparse24:
        """The same with indices that are right. May synchronise."""
        return self._matrix()

    def _adopt(self) -> None:
        """Look at new buffers as soon as they are there, so that no call has to, nor a compiled graph.

        Wrong ones raise when they are used.
        """
        self._weight, self._checked = None, False
        if any(type(self._buffers[name]) is not Tensor or self._buffers[name].is_meta for name in self.TENSORS):
            return
        try:
            self._weight = self._checked_matrix()
        except (TypeError, ValueError):
            self._weight = None

    def _refuse_gradient(self, x: Tensor) -> None:
        if watched(x):
            name = type(self).__name__
            raise RuntimeError(
                f"{name} is for inference and computes no gradients, and x requires one: call it under "
                f"torch.no_grad(), or train {self.trained} with the masks of mask_2_4_, and make a {name} of it "
                "afterwards"
            )

    def _apply(self, fn: Callable, recurse: bool = True) -> StructuredLinear:
        before = [self._buffers[name] for name in self.TENSORS]
        super()._apply(fn, recurse)
        if any(old is not self._buffers[name] for old, name in zip(before, self.TENSORS, strict=True)):
            self._adopt()
        return self

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_weight": None}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._adopt()

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        """Of the same shape; of a Bsr24Linear also of a pattern with another number of blocks."""
        found = {name: state_dict.get(prefix + name) for name in self.TENSORS}
        given = [name for name, t in found.items() if t is not None]
        if given:
            if len(given) < len(self.TENSORS):
                error = (
                    f"the state has {', '.join(given)} alone; a 2:4 weight is {', '.join(self.TENSORS)}. Load that of "
                    f"{self.trained} into one, and make a {type(self).__name__} of it"
                )
            else:
                error = self._fit(found, local_metadata.get("assign_to_params_buffers", False))
            if error:
                error_msgs.append(f"{prefix[:-1] or type(self).__name__}: {error}")
                return
            state_dict.update({prefix + name: t for name, t in found.items()})
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if given:
            self._adopt()

    def _fit(self, found: dict[str, Tensor], assign: bool) -> str:
        """Make room for a state's weight; what is wrong with it, or "". Wrong shapes without more torch names."""
        return ""

    def extra_repr(self) -> str:
        facts = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
        facts += f"{self._of_blocks()}2:4, dtype={self.values.dtype}"
        return facts if self.activation is None else f"{facts}, activation={self.activation!r}"

    def _of_blocks(self) -> str:
        return ""


def refuse_float8(name: str, dtype: torch.dtype) -> None:
    """TypeError: a layer has no scales, and metadata of 8-bit floats have another order."""
    if dtype in FLOAT8:
        raise TypeError(
            f"{name}: the weight is {dtype}; it must be torch.bfloat16 or torch.float16, on the CPU also torch.float32 "
            "or torch.float64. gemm of a Sparse24 and bsr_linear of a Bsr24 multiply 8-bit floats"
        )


class Bsr24Linear(StructuredLinear):
    """y = activation(x @ W.T + bias) for inference: W block-sparse, and 2:4 sparse inside of its stored blocks.

    Args:
        layer: a BsrLinear whose blocks' sides are multiples of 64. Of every four neighbours in a row of a block the two
            of largest magnitude are kept: of one that was trained with such a mask, all that there is. Copies; bias and
            activation are taken over.

    Forward takes x (..., K) and gives (..., M), both of the weight's dtype, or autocast's: one kernel, of bfloat16 and
    float16 on sm_80 and newer (see bsr_linear of a Bsr24). Works under torch.compile. There is no parameter and no
    gradient. `from_bsr` makes one of a Bsr24, and BsrLinear.from_bsr(layer.weight.to_bsr(), layer.bias) is the way
    back.

    Buffers: crow_indices and col_indices int32, values (nnz, bm, bk / 2), metadata int32 (see Bsr24), and bias (M,),
    which state_dict() has. A state of another number of blocks is taken, too.

    Raises:
        TypeError: `layer` is no BsrLinear, or its values are of float8.
        ValueError: blocks are no multiples of 64.
        RuntimeError: in forward, x requires a gradient.
    """

    TENSORS = ("crow_indices", "col_indices", "values", "metadata")
    trained = "a BsrLinear"
    items = None

    def __init__(self, layer: BsrLinear) -> None:
        if not isinstance(layer, BsrLinear):
            raise TypeError(f"Bsr24Linear needs a BsrLinear, got {type(layer).__name__}; see from_bsr for a Bsr24")
        self._hold(layer.weight.prune_2_4(), layer.bias, layer.activation, layer.training)

    @classmethod
    def from_bsr(cls, W: Bsr24, bias: Tensor | None = None, *, activation: str | None = None) -> Bsr24Linear:
        """The layer, in evaluation mode, with a matrix (M, K) as its weight; copies.

        Raises:
            TypeError: W is no Bsr24, or of float8.
            ValueError: W is a batch or has wrong indices, or bias is not (M,).
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

    def _hold(self, W: Bsr24, bias: Tensor | None, activation: str | None, training: bool) -> None:
        super().__init__(W, bias, activation, training)

    @property
    def blocksize(self) -> tuple[int, int]:
        """(bm, bk), of the whole block."""
        bm, stored = self.values.shape[-2:]
        return bm, KEPT * stored

    @property
    def nnz(self) -> int:
        """Stored blocks."""
        return self.col_indices.shape[0]

    @property
    def grid(self) -> tuple[int, int]:
        """(M / bm, K / bk)"""
        bm, bk = self.blocksize
        return self.out_features // bm, self.in_features // bk

    @property
    def pattern(self) -> Pattern:
        """The indices, sharing memory."""
        return Pattern(self.crow_indices, self.col_indices, (self.out_features, self.in_features), self.blocksize)

    def forward(self, x: Tensor) -> Tensor:
        self._refuse_gradient(x)
        return multiply(partial(bsr_linear, activation=self.activation), x, self.weight, self.bias)

    def _matrix(self) -> Bsr24:
        refuse_float8("Bsr24Linear", self.values.dtype)
        shape = self.out_features, self.in_features // KEPT
        half = BsrMatrix(self.crow_indices, self.col_indices, self.values, shape, check=not self._checked)
        return Bsr24(half, self.metadata)

    def _checked_matrix(self) -> Bsr24:
        self._checked = False
        matrix = self._matrix()
        if not self.crow_indices.is_meta:
            try:
                matrix.check_indices()
            except ValueError as error:
                lost = f"the indices of this layer are no pattern ({error})"
                raise ValueError(f"{lost}; after to_empty() or a write to them, call load_state_dict()") from None
            self._checked = True
        return matrix

    def _fit(self, found: dict[str, Tensor], assign: bool) -> str:
        if error := misfit(self, found):
            return error
        values, metadata = found["values"], found["metadata"]
        expected = (len(values), *self.metadata.shape[1:])
        if tuple(metadata.shape) != expected or metadata.dtype is not torch.int32:
            return f"metadata is {tuple(metadata.shape)} of {metadata.dtype}; it must be {expected} of torch.int32"
        for name in ("values", "metadata"):
            t = found[name]
            if assign and type(t) is Tensor and not t.is_meta:
                found[name] = aligned(t.contiguous())  # of a mapped file; a product would copy it
        if len(values) != self.nnz:
            for name in ("col_indices", "values", "metadata"):
                old = getattr(self, name)
                setattr(self, name, old.new_empty(len(values), *old.shape[1:]))
        return ""

    def _of_blocks(self) -> str:
        blocks = math.prod(self.grid)
        density = self.nnz / max(1, blocks)
        return f"blocksize={self.blocksize}, density={density:.4g}, blocks={self.nnz} of {blocks}, "


class Sparse24Linear(StructuredLinear):
    """y = activation(x @ W.T + bias) for inference, in the place of nn.Linear: of every four neighbours in a row of W
    two are stored.

    Args:
        linear: a torch.nn.Linear of which K is a multiple of 4; the two of largest magnitude of every four are kept.
            Copies; the bias is taken over.
        activation: None, "relu", "gelu" (exact), "gelu_tanh" or "silu", fused into the product.

    Forward takes x (..., K) and gives (..., M), both of the weight's dtype, or autocast's: one kernel, of bfloat16 and
    float16 on sm_80 and newer (see gemm of a Sparse24). Works under torch.compile. There is no parameter and no
    gradient; `layer.weight.to_dense()` is the weight again.

    Buffers: values (M, K / 2), metadata int32 (see Sparse24), and bias (M,), which state_dict() has.

    Raises:
        TypeError: `linear` is no nn.Linear, or has an unsupported dtype.
        ValueError: K is no multiple of 4, or activation is unknown.
        RuntimeError: in forward, x requires a gradient.
    """

    TENSORS = ("values", "metadata")
    trained = "an nn.Linear"

    def __init__(self, linear: nn.Linear, *, activation: str | None = None) -> None:
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"Sparse24Linear needs a torch.nn.Linear, got {type(linear).__name__}")
        w = linear.weight.detach()  # of a Masked24Linear what its mask leaves is the same
        check_groups("Sparse24Linear: the weight", w)
        values, places, _ = compress(prune_2_4(w))
        W = Sparse24(rows_for_tma(values), pack_metadata(places, values.dtype.itemsize), tuple(w.shape))
        super().__init__(W, linear.bias, activation, linear.training)

    def forward(self, x: Tensor) -> Tensor:
        self._refuse_gradient(x)
        return multiply(self._product, x, self.weight, self.bias)

    def _product(self, x: Tensor, W: Sparse24, bias: Tensor | None) -> Tensor:
        tokens = x.flatten(0, -2) if x.dim() > 1 else x[None]
        out = tokens.new_empty(tokens.shape[0], self.out_features)
        bias = None if bias is None else bias[:, None]
        gemm(W, tokens.t(), bias=bias, activation=self.activation, out=out.t())
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
