"""Argument checks that every op runs before any launch. Error messages name what is wrong and what works."""

import torch

from .dtypes import FLOAT8, NAMES, ON_CPU, OPERANDS
from .overlap import overlap
from .runtime.device import plans_kernel
from .runtime.front import check_supported


def check_tensor(name: str, value) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    check_supported(name.partition(":")[0], value)
    if value.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {value.layout}")


def check_operands(
    op: str, *, kernel: bool = True, also: tuple = (), precision=False, instead: str = "torch.matmul", **tensors
) -> None:
    """Check that operands share one supported dtype and one device, CUDA or CPU.

    Args:
        kernel: True if a kernel runs; otherwise CPU tensors may also be float32 and float64.
        also: further dtypes that the op supports.
        precision: the call's precision argument, which allows float32; False for an op without one.
        instead: a call that supports float32 and float64 on a GPU.
    """
    (first_name, first), *rest = tensors.items()
    supported = (*(OPERANDS if kernel or first.device.type != "cpu" else ON_CPU), *also)
    supported += (torch.float32,) if precision else ()
    for name, tensor in tensors.items():
        if tensor.dtype not in supported:
            known = " and ".join(map(str, OPERANDS))
            others = f", on sm_89 and sm_90 also {' and '.join(map(str, also))}" if also else ""
            on_cpu = "" if kernel else "; CPU tensors may be torch.float32 and torch.float64, too"
            advice = in_place_of(tensor.dtype, precision is not False, instead)
            if tensor.dtype in FLOAT8:  # a cast would lose the scale
                advice = f"dequantize it with {dequantized(name, torch.bfloat16)}"
            known += f" ({advice}){others}{on_cpu}"
            raise TypeError(f"{op}: {name} is {tensor.dtype}; the kernels support {known}")
    for name, tensor in rest:
        if tensor.dtype != first.dtype:
            how = one_dtype((name, tensor.dtype), (first_name, first.dtype))
            raise TypeError(f"{op}: {name} is {tensor.dtype} but {first_name} is {first.dtype}; {how}")
    check_device(op, first.device, **tensors)


def in_place_of(dtype: torch.dtype, precision: bool = False, instead: str = "torch.matmul") -> str:
    """Advice for operands of an unsupported dtype. precision: True if the op has a precision argument."""
    if dtype.is_complex:
        return "multiply real and imaginary parts separately, cast with .to()"
    wide = dtype in (torch.float32, torch.float64)
    if precision and dtype == torch.float32:
        return 'pass precision="tf32" or precision="3xtf32", cast with .to(), or use torch.matmul'
    return f"cast with .to(), or use {instead}" if wide else "cast with .to()"


def one_dtype(operand: tuple[str, torch.dtype], other: tuple[str, torch.dtype]) -> str:
    """Advice for two operands, (name, dtype), whose dtypes differ."""
    narrow = [pair for pair in (operand, other) if pair[1] in FLOAT8]
    if len(narrow) == 2:
        both = " and ".join(dequantized(name, torch.bfloat16) for name, _ in (other, operand))
        return f"dequantize both with {both}, or quantize both to one of these dtypes"
    if narrow:
        ((small, _),) = narrow
        wide, to = other if operand in narrow else operand
        quantized = "W.quantize()" if wide == "W" else f"cute_kernels.quantize({wide}), which returns its scale, too"
        return f"dequantize {small} with {dequantized(small, to)}, or quantize {wide} with {quantized}"
    return f"cast one of them: {operand[0]}.to({other[1]})"


def dequantized(name: str, dtype: torch.dtype) -> str:
    """The expression that dequantizes an FP8 operand. A sparse W holds its scales, and its to() applies them."""
    return f"W.to({dtype})" if name == "W" else f"({name}.float() * scale).to({dtype})"


def check_device(op: str, device, **tensors) -> None:
    if device.type not in ("cuda", "cpu") and not (device.type == "meta" and plans_kernel(device)):
        raise ValueError(f"{op}: tensors on {device}; CUDA and CPU tensors are supported")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, the others on {device}; move it with .to()")


def check_scalar(op: str, name: str, value) -> None:
    if not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name} must be a Python number, got {type(value).__name__}; use float() or .item()")


def watched(*values) -> bool:
    """True if an argument requires a gradient. Values that are not tensors count as False; later checks reject them."""
    if torch.is_grad_enabled():
        for value in values:  # half the time of any()
            if getattr(value, "requires_grad", False):
                return True
    return False


def scaled(a, scale_a, scale_b, use_fast_accum) -> bool:
    """True if a call has FP8 operands or arguments for them. Such calls are not differentiable."""
    has_terms = scale_a is not None or scale_b is not None or use_fast_accum is not False
    return has_terms or getattr(a, "dtype", None) in FLOAT8


def narrow(out, out_dtype, scale_out, amax) -> bool:
    """True if a call has an FP8 output or arguments for one. Such calls are not differentiable."""
    has_terms = scale_out is not None or amax is not None or out_dtype in FLOAT8
    return has_terms or getattr(out, "dtype", None) in FLOAT8


def check_no_grad(op: str, *tensors) -> None:
    """Raise if a tensor requires a gradient in a call that computes none (attention, sddmm, FP8 GEMMs, calls with
    out=)."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{op} does not compute gradients, and an argument requires one; call it under torch.no_grad() or detach()"
        )


def check_out(op: str, out, inputs: tuple, residual=None) -> None:
    """Check that out does not require a gradient and shares no memory with an input, which the kernel reads while it
    writes. `residual` may be out itself, as exactly the same view.
    """
    if out.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{op}: out requires a gradient; pass out.detach() or call it under torch.no_grad()")
    for tensor in inputs:
        if tensor is not None and overlap(out, tensor) and not (tensor is residual and same_view(out, tensor)):
            also = "" if residual is None else ", or the residual itself with the same shape and strides"
            raise ValueError(
                f"{op}: out shares memory with an input of shape {tuple(tensor.shape)}, which the kernel reads while "
                f"it writes; pass a separate tensor{also}"
            )


def same_view(a, b) -> bool:
    """True if two tensors have the same address, shape, strides and dtype."""
    return a.data_ptr() == b.data_ptr() and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def check_out_dtype(op: str, out, out_dtype, default, also: tuple = ()):
    """Return the output's dtype: out's, out_dtype, or the default. also: further dtypes that the op can write."""
    if out is not None:
        check_tensor(f"{op}: out", out)
        if out_dtype is not None and out_dtype != out.dtype:
            raise TypeError(f"{op}: out is {out.dtype} but out_dtype={out_dtype}; pass one of the two")
        out_dtype = out.dtype
    out_dtype = default if out_dtype is None else out_dtype
    if out_dtype not in (*NAMES, *also) and out_dtype != default:  # float64 of float64 operands
        names = ", ".join(map(str, also))
        others = f", on sm_89 and sm_90 also {names}" if also else ""
        raise TypeError(
            f"{op}: output of {out_dtype}; torch.bfloat16, torch.float16 and torch.float32 are supported{others}"
        )
    return out_dtype


def check_result(op: str, name: str, tensor, shape, dtype) -> None:
    """Check that out or residual has exactly the result's shape and dtype, and that out does not overlap itself."""
    if tensor is None:
        return
    check_tensor(f"{op}: {name}", tensor)
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, the result has {tuple(shape)}")
    if tensor.dtype != dtype:
        raise TypeError(f"{op}: {name} is {tensor.dtype}, the result {dtype}; cast it or pass out_dtype=")
    if name == "out" and overlaps_itself(tensor.shape, tensor.stride()):
        raise ValueError(
            f"{op}: out is expanded or overlaps itself (shape {tuple(tensor.shape)}, strides {tensor.stride()}): "
            "elements share memory; pass a contiguous tensor"
        )


def overlaps_itself(shape, stride) -> bool:
    """True if elements may share an address: a stride is not larger than the span of the smaller ones."""
    span = 0
    for s, n in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if s <= span:
            return True
        span += s * (n - 1)
    return False
