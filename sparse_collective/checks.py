"""Argument checks of BSR constructors, before anything is read from a GPU."""

import operator
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from cute_kernels.checks import in_place_of
from cute_kernels.dtypes import FLOAT8
from cute_kernels.runtime.front import check_supported

VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)
INT32_MAX = 2**31 - 1
RUN_MULTIPLE = 64  # rows of a run: the widest tile that every kind of block has a kernel for, and a K-tile of sddmm
BLOCK_MULTIPLE = 16  # the K extent of a 16-bit tensor-core MMA; also keeps every row of a block 16-byte aligned


def check_group_numbers(op: str, expert_ids: Tensor) -> None:
    """Check expert_ids, the matrix of each group of rows; its values are not checked."""
    if not is_strided(expert_ids):
        raise TypeError(f"{op}: expert_ids must be a torch.Tensor, got {type(expert_ids).__name__}")
    if expert_ids.dtype != torch.int32:
        raise TypeError(f"{op}: expert_ids are {expert_ids.dtype}; the kernels read torch.int32 (cast with .int())")
    if expert_ids.dim() != 1 or not expert_ids.is_contiguous():
        found = f"shape {tuple(expert_ids.shape)}, strides {expert_ids.stride()}"
        raise ValueError(f"{op}: expert_ids must have one contiguous dimension, one entry a run of rows; got {found}")


def is_strided(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.layout is torch.strided


def describe(x: object) -> str:
    return f"a {x.layout} tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__


def extents(shape: Sequence[int], batch: str | None) -> tuple[int, ...]:
    """`shape` as two integers, or three of a batch."""
    if batch is None:
        return pair(shape, "shape")
    try:
        found = tuple(map(operator.index, shape))
    except TypeError:
        found = ()
    if len(found) != 3 or found[0] < 1:
        raise ValueError(
            f"shape must be (L, M, K) with L at least 1, because {'values' if batch == 'values' else 'crow_indices'} "
            f"has a dimension for the items of a batch; got {found or shape}"
        )
    return found


def pair(x: Sequence[int], name: str) -> tuple[int, int]:
    try:
        first, second = map(operator.index, x)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} must be two integers, got {x!r}") from None
    return first, second


def block_grid(shape: Sequence[int], blocksize: Sequence[int]) -> tuple[int, int]:
    """(M / bm, K / bk), or a ValueError where such blocks are unsupported or do not tile the matrix."""
    for name, side in zip(("bm", "bk"), blocksize, strict=True):
        if side <= 0 or side % BLOCK_MULTIPLE:
            raise ValueError(f"block side {name} is {side}; use a positive multiple of {BLOCK_MULTIPLE}")
    for name, extent, side in zip(("M", "K"), shape, blocksize, strict=True):
        if extent < 0 or extent % side:
            raise ValueError(f"{name} is {extent}, no multiple of {side}; pad it to {-(-extent // side) * side}")
    return shape[0] // blocksize[0], shape[1] // blocksize[1]


def check_dtypes(
    value_dtype: torch.dtype, index_dtype: torch.dtype, device: torch.device, float8: bool = False
) -> None:
    """Values of float64 are for the CPU, which multiplies them; no kernel does. float8: whether they may be of that."""
    if value_dtype is torch.float64 and device.type == "cuda":
        known = ", ".join(map(str, VALUE_DTYPES))
        raise TypeError(f"values cannot be {value_dtype} on {device}, only on the CPU; use one of {known}")
    if value_dtype not in (*VALUE_DTYPES, torch.float64, *(FLOAT8 if float8 else ())):
        known = ", ".join(map(str, (*VALUE_DTYPES, *(FLOAT8 if float8 else ()))))
        raise TypeError(
            f"values cannot be {value_dtype}; use one of {known}, on the CPU also torch.float64 "
            f"({in_place_of(value_dtype)})"
        )
    if index_dtype not in INDEX_DTYPES:
        raise TypeError(f"indices cannot be {index_dtype}; use one of {', '.join(map(str, INDEX_DTYPES))}")


def check_density(density: float) -> None:
    if not 0 <= density <= 1:
        raise ValueError(f"density is {density}; it must be in [0, 1]")


def check_extents(
    crow_indices: Tensor, col_indices: Tensor, values: Tensor, shape: tuple[int, ...], batch: str | None
) -> None:
    """Check that the constructor's tensors fit `shape`."""
    *_, nnz, bm, bk = values.shape
    rows, cols = block_grid(shape[-2:], (bm, bk))
    if crow_indices.shape[-1] != rows + 1:
        raise ValueError(f"crow_indices has {crow_indices.shape[-1]} entries; {rows} rows need {rows + 1}")
    if len(col_indices) != nnz:
        raise ValueError(f"col_indices has {len(col_indices)} entries; the {nnz} blocks need {nnz}")
    items = 1 if batch is None else shape[0]
    stored = 1 if batch is None else len(values if batch == "values" else crow_indices)
    if stored != items:
        name = "values" if batch == "values" else "crow_indices"
        raise ValueError(f"{name} holds {stored} items, but shape {shape} has {items}")
    total = items * nnz if batch == "values" else nnz
    if total > INT32_MAX:
        raise ValueError(f"{total} blocks do not fit in int32, at most {INT32_MAX}; use larger blocks")
    if total > items * rows * cols:
        raise ValueError(f"values has {total} blocks, but shape {shape} has only {items * rows * cols}")


def check_scales(scales: Tensor | None, values: Tensor) -> Tensor | None:
    """Check the constructor's scales; returns those of one element as (1,)."""
    if scales is None:
        return None
    if not is_strided(scales):
        raise TypeError(f"scales must be a strided tensor, got {describe(scales)}")
    if values.dtype not in FLOAT8:
        raise TypeError(f"scales of {values.dtype} values; {' and '.join(map(str, FLOAT8))} have them")
    if scales.dtype != torch.float32:
        raise TypeError(f"scales are {scales.dtype}; they must be torch.float32 (cast with .float())")
    if scales.device != values.device:
        raise ValueError(f"scales are on {scales.device}, values on {values.device}; move them to one device")
    if not scales.is_contiguous():
        raise ValueError(f"scales must be contiguous, got strides {scales.stride()}; pass scales.contiguous()")
    if scales.numel() == 1:
        return scales.view(1)
    each = tuple(values.shape[:-2])
    if tuple(scales.shape) != each:
        raise ValueError(
            f"scales have shape {tuple(scales.shape)}; they must be one element, or {each}, one for each stored block "
            "(one for each block row r: r[W.row_of_block()])"
        )
    return scales


def check_tensors(crow_indices: Tensor, col_indices: Tensor, values: Tensor) -> str | None:
    """Check the constructor's tensors, individually and together; returns BsrMatrix.batch."""
    tensors = {"crow_indices": (crow_indices, (1, 2)), "col_indices": (col_indices, (1,)), "values": (values, (3, 4))}
    for name, (t, _) in tensors.items():
        if not is_strided(t):
            raise TypeError(f"{name} must be a strided tensor, got {describe(t)}")
        if (
            t.is_nested or name != "values" and type(t) is not Tensor
        ):  # values may be sharded, until they are multiplied
            check_supported(f"BsrMatrix: {name}", t)
    check_dtypes(values.dtype, crow_indices.dtype, values.device, float8=True)
    if col_indices.dtype is not crow_indices.dtype:
        got = f"{crow_indices.dtype} and {col_indices.dtype}"
        raise TypeError(f"crow_indices and col_indices must have the same dtype, got {got}; convert one")
    for name, (t, dim) in tensors.items():
        if t.dim() not in dim:
            several = f", or {dim[1]} of a batch" if len(dim) > 1 else ""
            raise ValueError(f"{name} must have {dim[0]} dimension(s){several}, got shape {tuple(t.shape)}")
        if t.device != values.device:
            raise ValueError(f"{name} is on {t.device}, values on {values.device}; move them to one device")
        if not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {t.stride()}; pass {name}.contiguous()")
    if crow_indices.dim() == 2 and values.dim() == 4:
        raise ValueError(
            "crow_indices (L, rows + 1) and values (L, nnz, bm, bk) are two ways to store a batch: give one pattern "
            "with values for each item, or a pattern for each item with all values as (total, bm, bk)"
        )
    return "patterns" if crow_indices.dim() == 2 else "values" if values.dim() == 4 else None
