"""8-bit floats and their scales by the kernels, of tensors that these serve; torch's functions serve the others."""

from dataclasses import replace

import torch
from torch import Tensor

from ..dtypes import FLOAT8, NAMES
from ..runtime.device import device_arch, plans_kernel
from ..runtime.families import function_for, unsupported
from ..runtime.torch_compat import dispatch_modes, functorch_active
from . import family  # noqa: F401 (importing it registers the family)
from .config import AMAX_CTAS, BLOCK, MOST_BYTES, THREADS, TOKENS_SERVED, QuantizeFacts, facts_for

SERVED = ("tensor", "row", "tokens", "1x128", "128x128")
MOST_FOLLOWING = 16  # rows of gates whose kernel begins before their product ends


def quantized(x: Tensor, dtype: torch.dtype, per: str, *, leads: bool = False) -> tuple[Tensor, Tensor] | None:
    """quantize's (values, scale) of an x with elements; None where no kernel serves it.

    leads: whether a product of them is launched next, see tile/chain.py; of a scale per "row".

    They serve bfloat16, float16 and float32 on sm_89 and sm_90, per what SERVED names. Memory is without gaps, and
    contiguous along x's last mode, or of one scale or blocks of 128x128 the one before; it begins at a multiple of 16
    bytes, and a row is a multiple of them. Of a batch of blocks of 128x128 or of tokens rows are a multiple of 128.
    Tokens have 64, 128 or 256 columns, of fp32 64 or 128. Elements are numbered in 32 bits.
    """
    if per not in SERVED or not _readable(x):
        return None
    if per == "tokens" and (x.shape[-1] not in TOKENS_SERVED or x.shape[-1] * x.element_size() > MOST_BYTES):
        return None
    if not x.is_contiguous():
        if per not in ("tensor", "128x128") or x.dim() < 2 or not x.mT.is_contiguous():
            return None
        found = quantized(x.mT, dtype, per)
        return found and (found[0].mT, found[1].mT if per == "128x128" else found[1])
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
    """Whether a kernel may read x as far as type, dtype, device, address and size go."""
    if torch.compiler.is_compiling() or not plans_kernel(x.device) or x.device.type == "meta":
        return False
    if functorch_active() or dispatch_modes():
        return False
    if type(x) is not Tensor:  # fake tensors and others that have no memory of their own
        return False
    try:
        return x.dtype in NAMES and x.data_ptr() & 15 == 0 and x.numel() < 1 << 31
    except RuntimeError:  # inside of torch.func, where a tensor stands for others
        return False


def _by_one_scale(facts: QuantizeFacts, x: Tensor, values: Tensor, sms: int) -> Tensor:
    """Fill in values; the scale."""
    amax, scale = (torch.zeros(1, dtype=torch.float32, device=x.device) for _ in range(2))
    turns = -(-x.shape[1] // (facts.lanes * facts.vectors * facts.elements))
    first = QuantizeFacts(facts.arch, facts.dtype, facts.out_dtype, step="amax")
    function_for(first)(x, None, None, amax, min(turns, AMAX_CTAS * sms))
    function_for(facts)(x, values, scale, amax, turns)
    return scale


def quantized_gated(
    z: Tensor, activation: str | None, dtype: torch.dtype, *, chained: bool = False
) -> tuple[Tensor, Tensor] | None:
    """quantize_gated's (values, scale) of a z with elements; None where no kernel serves it.

    chained: whether z is of a product that leads, and a product of the values is launched next; see tile/chain.py.

    They serve contiguous bfloat16 and float16 on sm_89 and sm_90 that begin at a multiple of 16 bytes.
    """
    if not _readable(z) or not z.is_contiguous():
        return None
    columns = z.shape[-1] // 2
    spec, _ = device_arch(z.get_device())
    facts = facts_for(spec.target, NAMES[z.dtype], FLOAT8[dtype], "row", columns)
    rows, chained = z.numel() // z.shape[-1], chained and spec.capability >= (9, 0)
    # Of more rows the CTAs that follow would all be on the few SMs that the product has left idle.
    facts = replace(facts, gate=activation or "none", leads=chained, follows=chained and rows <= MOST_FOLLOWING)
    if unsupported(facts):
        return None
    values = torch.empty((*z.shape[:-1], columns), dtype=dtype, device=z.device)
    scale = torch.empty((*z.shape[:-1], 1), dtype=torch.float32, device=z.device)
    matrices = (t.view(-1, t.shape[-1]) for t in (z, values))
    ctas = -(-scale.numel() // (THREADS // facts.lanes))
    function_for(facts)(*matrices, scale.view(-1), None, ctas)
    return values, scale
