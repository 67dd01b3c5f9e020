"""The epilogue: D = f(activation(alpha * S(A B) + bias + beta * residual)), in FP32, before D is stored.

S applies the dequantization scales of A and B. An FP8 D may be multiplied by an output scale after that.

The epilogue has a static half, `EpilogueSpec` (config.py: which terms there are, part of a kernel's facts), and a
dynamic half, `EpilogueArgs` (their tensors and scalars). Both stores, sm_80's and sm_90's, pass it *chunks*: fragments
of shape (2, 2, J), the accumulator layout that mma.sync and wgmma have in common. Value (c, r, j) of a thread lies at
row r * 8 and column j * 8 + c from the thread's first element.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr
from cutlass.cutlass_dsl import select_

from ...tile.fp8 import byte, larger_magnitude, packed, raise_to_magnitude
from ...traced.activations import ACTIVATIONS
from ...traced.lower import lower


@dataclass(frozen=True)
class EpilogueArgs:
    """Tensors and scalars of the terms.

    bias is (bias extent, outer_m) or (bias extent, outer_m, batch of A); residual is (M, N, outer_m, L) like mD; z is
    written. The scales of A are (M, L) and those of B (N, L), or (1, L) per tensor. Block scales, (M, K / 128, L) and
    (N / 128, K / 128, L), belong to the mainloop."""

    bias: cute.Tensor | None
    residual: cute.Tensor | None
    z: cute.Tensor | None
    alpha: Float32
    beta: Float32
    scale_m: cute.Tensor | None = None
    scale_n: cute.Tensor | None = None
    scale_out: cute.Tensor | None = None  # (1,) FP32, of an FP8 D
    amax: cute.Tensor | None = None  # (1,) FP32, not negative: raised to the largest magnitude of D before scale_out


def coordinates(tCcD: cute.Tensor, first: int, count: int, origin: tuple) -> list[tuple]:
    """(m, n) of `count` accumulators from flat index `first`; `origin` is (m, n) of the fragment's tile."""
    return [(origin[0] + c[0], origin[1] + c[1]) for c in (tCcD[first + v] for v in range(count))]


@cute.jit
def scaled(
    spec: cutlass.Constexpr,
    args: EpilogueArgs,
    rD: cute.Tensor,  # (2 * 2 * J,) fp32 fragment
    cD: list,  # (2 * 2 * J,) coordinates (m, n)
    extent: tuple,  # (M, N)
    outer: tuple,  # (outer_m, l, ...)
):
    """The values of a chunk times the operands' dequantization scales."""
    x = rD.load()
    for mode, kind, scale in ((0, spec.scale_m, args.scale_m), (1, spec.scale_n, args.scale_n)):
        if const_expr(kind == "tensor"):
            x = x * scale[0, outer[1]]
        elif const_expr(kind in ("row", "column")):
            rScale = cute.make_rmem_tensor(rD.shape, Float32)
            for v in range_constexpr(cute.size(rD)):
                # As for a bias: one value per r, or one per (c, j).
                first = const_expr(v & ~2 if mode else v & 2)
                if const_expr(v == first):
                    rScale[v] = scale[cutlass.min(cD[v][mode], extent[mode] - 1), outer[1]]
                else:
                    rScale[v] = rScale[first]
            x = x * rScale.load()
    return x


@cute.jit
def apply(
    spec: cutlass.Constexpr,
    args: EpilogueArgs,
    rD: cute.Tensor,  # (2 * 2 * J,) fp32 fragment, updated in place
    cD: list,  # (2 * 2 * J,) coordinates (m, n) of its values inside (M, N)
    extent: tuple,  # (M, N), at least 1: residual and bias are read inside it only
    outer: tuple,  # (outer_m, l) and, if the bias has one row per batch index of A, that index
    one: Float32 | None = None,  # a 1.0 to multiply the bias by: see StoreSm90.anchored
    rZ: cute.Tensor | None = None,  # (2 * 2 * J,), any dtype: receives the activation's input
):
    """Run the epilogue on one chunk of accumulators, in registers."""
    size = const_expr(cute.size(rD))
    x = rD.load()
    if const_expr(spec.scales_operands):
        x = scaled(spec, args, rD, cD, extent, outer)
    if const_expr(spec.scale):
        x = x * args.alpha
    if const_expr(spec.bias is not None):
        rBias = cute.make_rmem_tensor(rD.shape, Float32)
        mode = const_expr(0 if spec.bias == "row" else 1)
        for v in range_constexpr(size):
            # A row bias has one value per r, a column bias one per (c, j): load each once, then copy.
            first = const_expr(v & 2 if spec.bias == "row" else v & ~2)
            if const_expr(v == first):
                # Clamped rather than guarded: values outside are not stored, and loads without branches overlap.
                at = cutlass.min(cD[v][mode], extent[mode] - 1)
                if const_expr(spec.bias_items):
                    rBias[v] = args.bias[at, outer[0], outer[2]].to(Float32)
                else:
                    rBias[v] = args.bias[at, outer[0]].to(Float32)
                if const_expr(one is not None):
                    rBias[v] = rBias[v] * one
            else:
                rBias[v] = rBias[first]
        x = x + rBias.load()
    if const_expr(spec.residual is not None):
        rC = cute.make_rmem_tensor(rD.shape, Float32)
        # Stored blocks have constant strides: the block's address has 64 bits, offsets inside it 32.
        in_blocks = const_expr(all(isinstance(stride, int) for stride in args.residual.stride[:2]))
        residual = args.residual[None, None, outer[0], outer[1]] if const_expr(in_blocks) else args.residual
        for v in range_constexpr(size):
            m, n = cutlass.min(cD[v][0], extent[0] - 1), cutlass.min(cD[v][1], extent[1] - 1)
            at = (m, n) if const_expr(in_blocks) else (m, n, outer[0], outer[1])
            rC[v] = residual[at].to(Float32)
        x = x + args.beta * rC.load()
    if const_expr(spec.stores_z):
        rZ.store(x.to(rZ.element_type))
    if const_expr(spec.activation is not None):
        x = ACTIVATIONS[spec.activation](x)
    rD.store(x)
    if const_expr(spec.function is not None):
        for v in range_constexpr(size):
            rD[v] = lower(spec.function, [rD[v]]).to(Float32)


@cute.jit
def quantize(
    spec: cutlass.Constexpr,
    args: EpilogueArgs,
    rD: cute.Tensor,  # (4 * J,) fp32 fragment after `apply`, multiplied in place
    cD: list,  # (4 * J,) coordinates (m, n)
    extent: tuple,  # (M, N)
    rMax: cute.Tensor,  # (1,) fp32, this thread's largest magnitude so far
):
    """Record the largest magnitude inside D, then apply scale_out: the steps of an FP8 D after `apply`."""
    if const_expr(spec.amax):
        for v in range_constexpr(cute.size(rD)):
            inside = cute.elem_less(cD[v], extent)
            rMax[0] = larger_magnitude(rMax[0], Float32(select_(inside, rD[v], Float32(0.0))))
    if const_expr(spec.scale_out):
        rD.store(rD.load() * args.scale_out[0])


@cute.jit
def store_amax(spec: cutlass.Constexpr, args: EpilogueArgs, rMax: cute.Tensor):
    """Raise amax to the largest magnitude that the 32 lanes of a warp have seen; NaN counts as the largest."""
    if const_expr(spec.amax):
        raise_to_magnitude(args.amax.iterator.toint(), rMax[0])


@cute.jit
def store_bytes(rD: cute.Tensor, cD: list, mD: cute.Tensor, extent: tuple, outer: tuple, dtype: cutlass.Constexpr):
    """Store a fragment as FP8 to D (M, N, outer_m, L) with any strides, element by element."""
    bytes_of_d = cute.recast_tensor(mD, cutlass.Uint8)
    for first in range_constexpr(0, cute.size(rD), 4):
        word = packed(rD, first, dtype)
        for v in range_constexpr(min(4, cute.size(rD) - first)):
            at = cD[first + v]
            if cute.elem_less(at, extent):
                bytes_of_d[at[0], at[1], outer[0], outer[1]] = byte(word, v)
