"""Eager dispatch to the quantization kernels; tensors that they do not support use torch functions."""

from dataclasses import replace

import torch
from torch import Tensor

from ..dtypes import FLOAT8, NAMES
from ..runtime.device import collected, device_arch, plans_kernel
from ..runtime.families import function_for, unsupported
from ..runtime.torch_compat import dispatch_modes, functorch_active
from . import family  # noqa: F401 (importing it registers the family)
from .config import AMAX_CTAS, BLOCK, MOST_BYTES, THREADS, TOKENS_SERVED, QuantizeFacts, facts_for

SERVED = ("tensor", "row", "tokens", "1x128", "128x128")
MOST_FOLLOWING = 16  # rows up to which the gated kernel is a secondary of the GEMM before it


def quantized(x: Tensor, dtype: torch.dtype, per: str, *, leads: bool = False) -> tuple[Tensor, Tensor] | None:
    """quantize's (values, scale) of a nonempty x; None if no kernel supports it.

    leads: with per="row", True if a GEMM of the result is launched next, as the secondary kernel; see
        tile/dependent_launch.py.

    Kernels support bfloat16, float16 and float32 on sm_89 and sm_90, with `per` in SERVED and fewer than 2^31 elements.
    x must be dense and contiguous along its last mode; with per "tensor" or "128x128" the mode before it may be the
    contiguous one. Address and rows must be multiples of 16 bytes. In a batch with per "128x128" or "tokens" the rows
    must be a multiple of 128. Tokens have 64, 128 or 256 columns, in float32 64 or 128.
    """
    if per not in SERVED or not _readable(x):
        return None
    if per == "tokens" and (x.shape[-1] not in TOKENS_SERVED or x.shape[-1] * x.element_size() > MOST_BYTES):
        return None
    if not x.is_contiguous():
        if per not in ("tensor", "128x128") or x.dim() < 2 or not x.mT.is_contiguous():
            return None
        result = quantized(x.mT, dtype, per)
        return result and (result[0].mT, result[1].mT if per == "128x128" else result[1])
    spec, sms = device_arch(x.get_device())
    names = spec.target, NAMES[x.dtype], FLOAT8[dtype]
    facts = QuantizeFacts(*names, step="values") if per == "tensor" else facts_for(*names, per, x.shape[-1])
    facts = replace(facts, leads=True) if leads and spec.capability >= (9, 0) else facts
    matrix = x.view(1, -1) if per == "tensor" else x.view(-1, x.shape[-1])
    ragged = facts.rows > 1 and x.dim() > 2 and x.shape[-2] % BLOCK
    if unsupported(facts) or ragged or matrix.shape[1] % facts.elements:
        return None
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    if per == "tensor":
        return values, _by_one_scale(facts, matrix, values.view(matrix.shape), sms)
    (rows, columns), width = matrix.shape, facts.columns or x.shape[-1]
    shape = (*x.shape[:-2], -(-x.shape[-2] // facts.rows), -(-columns // width))
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    ctas = -(-scale.numel() // (THREADS // facts.lanes * facts.each))
    function_for(facts)(matrix, values.view(rows, columns), scale.view(-1), None, ctas)
    return values, scale[..., 0] if per == "tokens" else scale


def _readable(x: Tensor) -> bool:
    """True if type, dtype, device, address and size of x allow a kernel to read it."""
    if torch.compiler.is_compiling() or not plans_kernel(x.device) or x.device.type == "meta":
        return False
    if collected() is None:
        if functorch_active() or dispatch_modes():
            return False
        if type(x) is not Tensor:  # fake tensors and other subclasses without memory
            return False
    try:
        return x.dtype in NAMES and x.data_ptr() & 15 == 0 and x.numel() < 1 << 31
    except RuntimeError:  # a torch.func wrapper has no data_ptr
        return False


def _by_one_scale(facts: QuantizeFacts, x: Tensor, values: Tensor, sms: int) -> Tensor:
    """Fill in values and return the scale."""
    amax, scale = (torch.zeros(1, dtype=torch.float32, device=x.device) for _ in range(2))
    chunks = -(-x.shape[1] // (facts.lanes * facts.vectors * facts.elements))
    first = QuantizeFacts(facts.arch, facts.dtype, facts.out_dtype, step="amax")
    function_for(first)(x, None, None, amax, min(chunks, AMAX_CTAS * sms))
    function_for(facts)(x, values, scale, amax, chunks)
    return scale


def quantized_gated(
    z: Tensor, activation: str | None, dtype: torch.dtype, *, chained: bool = False
) -> tuple[Tensor, Tensor] | None:
    """quantize_gated's (values, scale) of a nonempty z; None if no kernel supports it.

    chained: True if z is the result of a primary kernel, and a GEMM of the values is launched next as a secondary
    kernel; see tile/dependent_launch.py.

    Kernels support contiguous bfloat16 and float16 on sm_89 and sm_90 whose address is a multiple of 16 bytes.
    """
    if not _readable(z) or not z.is_contiguous():
        return None
    columns = z.shape[-1] // 2
    spec, _ = device_arch(z.get_device())
    facts = facts_for(spec.target, NAMES[z.dtype], FLOAT8[dtype], "row", columns)
    rows, chained = z.numel() // z.shape[-1], chained and spec.capability >= (9, 0)
    # With more rows all CTAs of a secondary kernel would be on the few SMs that the GEMM has left idle.
    facts = replace(facts, gate=activation or "none", leads=chained, follows=chained and rows <= MOST_FOLLOWING)
    if unsupported(facts):
        return None
    values = torch.empty((*z.shape[:-1], columns), dtype=dtype, device=z.device)
    scale = torch.empty((*z.shape[:-1], 1), dtype=torch.float32, device=z.device)
    matrices = (t.view(-1, t.shape[-1]) for t in (z, values))
    ctas = -(-scale.numel() // (THREADS // facts.lanes))
    function_for(facts)(*matrices, scale.view(-1), None, ctas)
    return values, scale
