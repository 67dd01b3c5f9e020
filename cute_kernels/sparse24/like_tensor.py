"""The tensor interface of Sparse24: `@`, the transposed view, sizes, and torch functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..runtime.torch_compat import forward_operator

WORKS = (
    "supported with a Sparse24 W: W @ b, x @ W.t(), torch.matmul and torch.mm of the same, "
    "torch.nn.functional.linear(x, W, bias) and cute_kernels.gemm(W, b); for anything else use W.to_dense()"
)
FUNCTIONS: dict[
    Callable, Callable
] = {}  # torch function -> its implementation for a Sparse24 argument; see torch_functions.py


class LikeTensor:
    """Base of Sparse24 and its transposed view."""

    __slots__ = ()
    __array_ufunc__ = None  # NumPy then passes `array @ W` to this class, whose error says what is supported

    if TYPE_CHECKING:  # of both subclasses
        shape: torch.Size

        @property
        def dtype(self) -> torch.dtype: ...

        def t(self) -> Any: ...

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Call a torch function that has a Sparse24 among its arguments.

        Raises:
            TypeError: the function is not supported; the message lists those that are.
        """
        func, args = forward_operator(func, args)
        if func not in FUNCTIONS:
            raise TypeError(f"{getattr(func, '__name__', func)} does not take a Sparse24; {WORKS}")
        return FUNCTIONS[func](*args, **(kwargs or {}))

    def __matmul__(self, b: Tensor) -> Tensor:
        return FUNCTIONS[torch.matmul](self, b)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return FUNCTIONS[torch.matmul](x, self)

    @property
    def T(self) -> Any:
        """The transposed view, as t()."""
        return self.t()

    @property
    def mT(self) -> Any:
        """The transposed view, as t()."""
        return self.t()

    def dim(self) -> int:
        return 2

    @property
    def ndim(self) -> int:
        return 2

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]


class Transposed24(LikeTensor):
    """The transposed view of a Sparse24 (M, K): the (K, M) right operand of x @ W.t().

    Attributes:
        base: the Sparse24, which `t()` returns.
        shape: torch.Size((K, M)).
    """

    __slots__ = ("base",)

    def __init__(self, base: Any):  # a Sparse24
        self.base = base

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # Sparse24 stores it
        return torch.Size(self.base.shape[::-1])

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def requires_grad(self) -> bool:
        return self.base.requires_grad

    def t(self) -> Any:
        """The Sparse24 itself."""
        return self.base

    def to_dense(self) -> Tensor:
        """(K, M), the transpose of the base's."""
        return self.base.to_dense().t()

    def __repr__(self) -> str:
        return f"{self.base!r}.t()"
