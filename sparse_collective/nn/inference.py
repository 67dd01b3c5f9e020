"""Base classes of layers for inference: a weight as buffers, one matrix of them, and their state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from cute_kernels.annotations import Activation
from cute_kernels.dtypes import FLOAT8
from cute_kernels.functions import ACTIVATIONS

from ..alignment import aligned
from ..pattern import Pattern, pattern_of
from .module import misfit

__all__ = ["InferenceLinear", "StoredBlocks"]


class InferenceLinear(nn.Module):
    """A linear layer whose weight is a set of buffers, which .to(), copies, state_dict, safetensors and distributed
    checkpoints know. One matrix of them is kept for as long as they are the same tensors."""

    TENSORS: ClassVar[tuple[str, ...]]  # the weight's buffers, by their names in the matrix
    trained: ClassVar[str]  # the layer that it is made of
    gated: bool  # True if the output (..., 2 H) becomes activation(g) * u (..., H), as in GatedBsrLinear
    in_features: int
    out_features: int
    activation: Activation | None
    values: Tensor
    bias: Tensor | None

    def __init__(
        self, W: Any, bias: Tensor | None, activation: Activation | None, training: bool, gated: bool = False
    ) -> None:
        super().__init__()
        if activation is not None and activation not in ACTIVATIONS:
            name = type(self).__name__
            raise ValueError(f"{name}: activation {activation!r}; use None or one of {', '.join(ACTIVATIONS)}")
        self.out_features, self.in_features = W.shape
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            name = type(self).__name__
            raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}, must be ({self.out_features},)")
        self.activation, self.gated = activation, gated
        for tensor in self.TENSORS:
            t = getattr(W, tensor)
            self.register_buffer(tensor, t.clone() if t.is_contiguous() and t._is_view() else t)  # safetensors wants it
        if bias is not None:
            bias = bias.detach().to(W.device, bias.dtype if W.dtype in FLOAT8 else W.dtype, copy=True)
        self.register_buffer("bias", bias)
        self._weight: Any = None
        self._checked = False  # True if the contents of the indices are known to be right
        self._adopt()
        self.train(training)

    @property
    def weight(self) -> Any:
        """The weight, sharing the buffers; the same object as long as they are the same.

        Raises:
            TypeError: the values have a dtype that the layer does not take, as after .to(torch.float8_e4m3fn).
            ValueError: the buffers are no such matrix, as after to_empty().
        """
        if torch.compiler.is_compiling():  # the graph's op finds by these tensors what is known of their pattern
            return self._matrix()
        kept, buffers = self._weight, self._buffers
        if kept is None or any(getattr(kept, name) is not buffers[name] for name in self.TENSORS):
            kept = self._weight = self._checked_matrix()
        return kept

    def _matrix(self) -> Any:
        """A matrix of the buffers as they are."""
        raise NotImplementedError

    def _checked_matrix(self) -> Any:
        """The same with indices that are right. May synchronize."""
        return self._matrix()

    def _adopt(self) -> None:
        """Look at new buffers as soon as they are there, so that no call has to, nor a compiled graph.

        Wrong ones raise when they are used.
        """
        self._weight, self._checked = None, False
        if any(type(t := self._buffers[name]) is not Tensor or t.is_meta for name in self.TENSORS):
            return
        try:
            self._weight = self._checked_matrix()
        except (TypeError, ValueError):
            self._weight = None

    def _apply(self, fn: Callable, recurse: bool = True) -> Self:
        before = [self._buffers[name] for name in self.TENSORS]
        super()._apply(fn, recurse)
        if any(old is not self._buffers[name] for old, name in zip(before, self.TENSORS, strict=True)):
            self._adopt()
        return self

    def __delattr__(self, name: str) -> None:
        if name in self.TENSORS:  # so does register_parametrization
            raise TypeError(
                f"{name} of a {type(self).__name__} cannot be deleted or parametrized; parametrize {self.trained}, and "
                f"make a {type(self).__name__} of it"
            )
        super().__delattr__(name)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_weight": None}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._adopt()

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        """Without the room between rows that TMA needs, which safetensors refuses."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.TENSORS:
            destination[prefix + name] = destination[prefix + name].contiguous()

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        """Load a state of the same shape; of stored blocks also one of a pattern with another number of blocks."""
        found = {name: state_dict.get(prefix + name) for name in self.TENSORS}
        given = [name for name, t in found.items() if t is not None]
        if given:
            if len(given) < len(self.TENSORS):
                error = (
                    f"the state has {', '.join(given)} alone; the weight of this layer is {', '.join(self.TENSORS)}. "
                    f"Load that of {self.trained} into one, and make a {type(self).__name__} of it"
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

    def _fit(self, found: dict[str, Any], assign: bool) -> str:
        """Make room for a state's weight; what is wrong with it, or "". Wrong shapes without more torch names."""
        return ""

    def extra_repr(self) -> str:
        facts = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
        facts += f"{self._kind()}dtype={self.values.dtype}"
        facts += ", gated=True" if self.gated else ""
        return facts if self.activation is None else f"{facts}, activation={self.activation!r}"

    def _kind(self) -> str:
        """Facts about the weight for extra_repr."""
        return ""


class StoredBlocks(InferenceLinear):
    """An InferenceLinear with a block-sparse weight: buffers crow_indices, col_indices, values, and more of them."""

    crow_indices: Tensor
    col_indices: Tensor
    items = None
    stored_columns = 1  # columns of a block over those that are stored

    @property
    def blocksize(self) -> tuple[int, int]:
        """(bm, bk), of the whole block."""
        bm, stored = self.values.shape[-2:]
        return bm, self.stored_columns * stored

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
        shape = self.out_features, self.in_features
        return pattern_of(self.crow_indices, self.col_indices, shape, self.blocksize, check=False)

    def _checked_matrix(self) -> Any:
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

    def _fit(self, found: dict[str, Any], assign: bool) -> str:
        if error := misfit(self, found) or self._misfit(found):
            return error
        for name in self.TENSORS[2:]:
            t = found[name]
            if assign and type(t) is Tensor and not t.is_meta:
                found[name] = aligned(t.contiguous())  # of a mapped file; a product would copy it
        for name in self.TENSORS:
            old, new = getattr(self, name), found[name]
            if old.shape != new.shape:
                setattr(self, name, old.new_empty(new.shape))
        return ""

    def _misfit(self, found: dict[str, Tensor]) -> str:
        """The reason why a state does not fit, apart from indices and shapes of values, or ""."""
        return ""

    def _kind(self) -> str:
        blocks = math.prod(self.grid)
        density = self.nnz / max(1, blocks)
        return f"blocksize={self.blocksize}, density={density:.4g}, blocks={self.nnz} of {blocks}, {super()._kind()}"
