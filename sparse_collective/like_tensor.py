"""The torch.Tensor interface of a BsrMatrix: conversions, sizes, `@`, and torch functions."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from cute_kernels.dtypes import FLOAT8
from cute_kernels.runtime.torch_compat import forward_operator

from . import checks as arguments

WORKS = (
    "with a BsrMatrix W these work: W @ b, x @ W.T and x @ W, torch.matmul of the same, torch.nn.functional.linear(x, "
    "W, bias), and bsr_matmul, bsr_linear, bsr_gated_linear, bsr_grouped_linear and sddmm of sparse_collective; for "
    "anything else take W.values, W.to_dense() or W.to_torch()"
)
FUNCTIONS: dict[Callable, Callable] = {}  # torch function -> what it is with a BsrMatrix; see torch_functions.py
FORMS = "(device), (dtype), (device, dtype) or (other), then non_blocking and copy"


class LikeTensor:
    """The methods of torch.Tensor that make sense of a BsrMatrix. Of a transposed view they give one again."""

    if TYPE_CHECKING:  # attributes of BsrMatrix, which inherits these methods

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

        _make: ClassVar[Any]

    __slots__ = ()
    __array_ufunc__ = None  # so that a NumPy array leaves `array @ W` to this class, which says what works

    def __matmul__(self, b: Tensor) -> Tensor:
        """bsr_matmul(self, b); of a vector b (K,) the vector (M,)."""
        return FUNCTIONS[torch.matmul](self, b)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        """bsr_linear(x, self.t())."""
        return FUNCTIONS[torch.matmul](x, self)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """A torch function that was called with a BsrMatrix among its arguments.

        Raises:
            TypeError: it is none of those that work, which the message lists.
        """
        func, args = forward_operator(func, args)
        if func not in FUNCTIONS:
            raise TypeError(f"{getattr(func, '__name__', func)} does not take a BsrMatrix; {WORKS}")
        return FUNCTIONS[func](*args, **(kwargs or {}))

    def to(self, *args, **kwargs):
        """Convert the dtype of the values, or move to another device, like torch.Tensor.to. Differentiable.

        Takes (device), (dtype), (device, dtype) or (other), a tensor or BsrMatrix, by position or by name; then
        non_blocking and copy. The index tensors are shared if the device does not change. Returns self if nothing
        changes, unless copy=True requests new values.

        FP8 values with scales are multiplied by them when converted to another dtype. Conversion to FP8 casts without
        scales; `quantize` computes scales.

        Raises:
            TypeError: the arguments have none of these forms, or the device does not support that dtype.
        """
        if self.base is not None:
            base = self.base.to(*args, **kwargs)
            return self if base is self.base else base.t()
        device, dtype, non_blocking, copy = self._conversion(args, kwargs)
        arguments.check_dtypes(dtype, self.crow_indices.dtype, device, float8=True)
        scales = self.stored_scales
        if scales is not None and dtype is not self.dtype:
            if dtype in FLOAT8:
                raise TypeError(f"BsrMatrix.to: {self.dtype} with scales to {dtype}: go by .float().quantize({dtype})")
            return self.with_values(_scaled(self.stored, scales).to(dtype)).to(device, non_blocking=non_blocking)
        values = self.stored.to(device, dtype, non_blocking=non_blocking, copy=copy)
        scales = None if scales is None else scales.to(device, non_blocking=non_blocking, copy=copy)
        crow, col = (t.to(device, non_blocking=non_blocking) for t in (self.crow_indices, self.col_indices))
        if crow is not self.crow_indices or col is not self.col_indices:
            return self._with_tensors(crow, col, values, scales)
        return self if values is self.stored else self.with_values(values, scales)

    def _conversion(self, args: tuple, kwargs: dict) -> tuple[torch.device, torch.dtype, bool, bool]:
        """(device, dtype, non_blocking, copy) of a call of `to`."""
        names: tuple[str, ...] = ("device", "dtype", "non_blocking", "copy")
        if args and isinstance(args[0], torch.dtype):
            names = names[1:]
        elif args and isinstance(args[0], (Tensor, LikeTensor)):
            names = ("other", *names[2:])
        known = {**{name: None for name in ("device", "dtype", "other")}, "non_blocking": False, "copy": False}
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        form = given.pop("memory_format", None)
        if len(given) + (form is not None) < len(args) + len(kwargs) or any(name not in known for name in given):
            raise TypeError(f"BsrMatrix.to takes {FORMS}; got {args} {kwargs}")
        if form not in (None, torch.preserve_format, torch.contiguous_format):
            raise TypeError(f"BsrMatrix.to: values are contiguous, not {form}")
        device, dtype, other, non_blocking, copy = {**known, **given}.values()
        if other is not None:
            if device is not None or dtype is not None or not isinstance(other, (Tensor, LikeTensor)):
                raise TypeError(f"BsrMatrix.to takes {FORMS}; got {args} {kwargs}")
            device, dtype = other.device, other.dtype
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"BsrMatrix.to takes {FORMS}; got {dtype!r} as a dtype")
        if not isinstance(non_blocking, bool) or not isinstance(copy, bool):
            raise TypeError(f"BsrMatrix.to takes {FORMS}; got {args} {kwargs}")
        device = self.device if device is None else torch.device(device)
        return device, self.dtype if dtype is None else dtype, non_blocking, copy

    def _mapped(self, change):
        """The same pattern with change(values) and change(scales), of the same shape."""
        if self.base is not None:
            return self.base._mapped(change).t()
        return self.with_values(change(self.stored), None if self.stored_scales is None else change(self.stored_scales))

    def cuda(self, device: torch.device | int | None = None, non_blocking: bool = False):
        """This matrix on a GPU, the current one unless told."""
        index = torch.device("cuda", device) if isinstance(device, int) else device
        return self.to("cuda" if index is None else index, non_blocking=non_blocking)

    def cpu(self):
        """This matrix on the CPU."""
        return self.to("cpu")

    def half(self):
        """This matrix with values of float16."""
        return self.to(torch.float16)

    def bfloat16(self):
        """This matrix with values of bfloat16."""
        return self.to(torch.bfloat16)

    def float(self):
        """This matrix with values of float32."""
        return self.to(torch.float32)

    def double(self):
        """This matrix with values of float64, which only CPU tensors may have."""
        return self.to(torch.float64)

    def clone(self):
        """With a copy of the values; shares the indices, which nothing writes to. Differentiable."""
        return self._mapped(torch.clone)

    def detach(self):
        """The same memory, without a gradient."""
        return self._mapped(torch.Tensor.detach)

    def contiguous(self):
        """Self; of a transposed view a matrix of its own, as transpose() makes it."""
        return self if self.base is None else self.base.transpose()

    def pin_memory(self):
        """With all three tensors in page-locked memory, for a copy to a GPU with non_blocking=True."""
        if self.base is not None:
            return self.base.pin_memory().t()
        tensors = self.crow_indices, self.col_indices, self.stored, self.stored_scales
        pinned = [None if t is None else t.pin_memory() for t in tensors]
        same = all(t is p for t, p in zip(tensors, pinned, strict=True))
        return self if same else self._with_tensors(*pinned)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape of the matrix, (M, K) or (L, M, K), or one extent of it."""
        return torch.Size(self.shape) if dim is None else torch.Size(self.shape)[dim]

    def dim(self) -> int:
        """2, or 3 of a batch."""
        return len(self.shape)

    @property
    def ndim(self) -> int:
        """2, or 3 of a batch."""
        return len(self.shape)

    def numel(self) -> int:
        """Elements of the matrix, as torch counts those of a sparse tensor; the stored ones are values.numel()."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Bytes of one value."""
        return self.stored.element_size()

    @property
    def is_cuda(self) -> bool:
        """True if the tensors are on a GPU."""
        return self.stored.is_cuda

    @property
    def requires_grad(self) -> bool:
        """True if the values require a gradient."""
        return self.stored.requires_grad

    def requires_grad_(self, requires_grad: bool = True):
        """Says whether autograd records operations on the values. Returns self."""
        self.stored.requires_grad_(requires_grad)
        return self

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the values, of their shape; of a transposed view a copy. None where there is none yet."""
        return None if self.stored.grad is None else self._as_values(self.stored.grad)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    """values * scales in float32; scales (1,), or one for each block."""
    return values.to(torch.float32) * (scales if scales.shape == (1,) else scales[..., None, None])
