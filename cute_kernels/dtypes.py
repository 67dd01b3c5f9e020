"""Supported dtypes, by torch's and by the compiler's names."""

import torch

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
NAMES_OF_INDEX = {torch.int32: "int32", torch.int64: "int64"}
OPERANDS = (torch.bfloat16, torch.float16)
FLOAT8 = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}  # operands of gemm and BSR GEMMs
NAMES_OF_OPERANDS = NAMES | FLOAT8
TORCH = {name: dtype for dtype, name in NAMES_OF_OPERANDS.items()}
ON_CPU = (*OPERANDS, torch.float32, torch.float64)  # operands of the CPU reference


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Accumulator dtype for operands of this dtype: float32; float64 for float64."""
    return torch.float32 if dtype in FLOAT8 else torch.promote_types(dtype, torch.float32)


def default_out_dtype(dtype: torch.dtype) -> torch.dtype:
    """Default output dtype for operands of this dtype: bfloat16 for FP8, otherwise the same."""
    return torch.bfloat16 if dtype in FLOAT8 else dtype


def cutlass_dtype(name: str):
    """The compiler's numeric type by name; a bool is a byte in memory."""
    import cutlass

    return {
        "float8_e4m3fn": cutlass.Float8E4M3FN,
        "float8_e5m2": cutlass.Float8E5M2,
        "bfloat16": cutlass.BFloat16,
        "float16": cutlass.Float16,
        "float32": cutlass.Float32,
        "int32": cutlass.Int32,
        "int64": cutlass.Int64,
        "bool": cutlass.Uint8,
    }[name]
