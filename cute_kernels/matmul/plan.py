"""Plans of GEMM calls: from an op's tensors to the kernel that runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..operand import flatten_batch, layout_of_tensor
from ..runtime.call_plan import CallPlan
from ..tf32 import dispatch as tf32
from ..tile.element import VECTOR_BYTES

# Elements between the scales of two rows of A, or of two blocks of B's columns: kernels compute distances inside of a
# tile of 256 rows in bytes, as 32-bit numbers.
MOST_SCALE_STRIDE = (2**31 - 1) // (4 * 255)


@dataclass(repr=False)
class Plan(CallPlan):
    """The plan of a GEMM call."""

    group: int | None = 1
    max_ctas: int | None = 1
    staged: bool = False  # True if the kernel writes a contiguous result that is then copied to out
    uneven_ctas: int | None = 1  # max_ctas of a block-sparse GEMM whose block rows differ in length
    family: Any = None  # of a block-sparse GEMM's kernel
    tiles: Any = ()  # with more work tiles than workers: sparse_collective.bsr_gemm.tile_order's Tiles, to order them
    split_blocks: bool = False  # block-sparse GEMM: True if values are multiplied in three parts, see precision
    unfused: bool = False  # gated GEMM: True if the gate follows a plain GEMM
    ordered: tuple | None = None  # (function with an order of work tiles, tiles, CTAs), made when first needed

    def instead(self) -> str:
        return "that of the plain GEMM" if self.unfused else super().instead()

    def kernel_lines(self) -> list[str]:
        f = self.facts
        lines = [f"configuration: {f.config}" + (f", raster panels of {self.group}" if self.group else "")]
        lines.append(f"operands: {f.dtype} -> {f.out_dtype}, majors {f.majors}, alignments {f.aligns} elements")
        if f.element.width == 1 or f.promoted or f.acc_dtype != "float32":
            lines.append(f"accumulation: {accumulation_text(f)}")
        if f.dtype == "float32":
            where = "when they are copied" if f.promoted else "by TMA" if f.warp_specialised else "in registers"
            lines.append(f"precision: operands rounded to TF32 {where}")
        if f.source is not None:
            lines.append(f"source: tiles of {f.source.tile_m}x{f.source.tile_k}, of a KTileSource")
        if f.block:
            steps = f", MMA steps per K-tile {f.k_blocks}" if all(f.k_blocks) else ""
            lines.append(f"blocks: {f.block.bm}x{f.block.bk}{steps}")
            if f.block.batch:
                runs = f", grouped in runs of {f.block.run} rows" if f.block.run else ""
                lines.append(f"batch: {'one pattern' if f.block.batch == 'values' else 'one pattern per matrix'}{runs}")
        return lines


def accumulation_text(f) -> str:
    """Describe the accumulation of a kernel with these facts."""
    if f.acc_dtype != "float32":
        return f"{f.acc_dtype} in the tensor cores"
    if not f.promotes and not f.converts:
        return "fast, in the tensor cores' accumulators of about 14 bits of mantissa"
    steps = min(4 * f.config.stored, max(f.k_blocks)) if f.warp_specialised else f.config.stored
    products = f.element.mma_k * steps
    text = "FP32, of operands converted to FP16" if f.converts else f"promoted to FP32 every {products} elements of K"
    text += ", multiplied by their scales" if f.epilogue.scales_blocks else ""
    return text + (", times the scale of their block" if f.block and f.block.scaled else "")


def viewed(views: tuple, tensors: tuple) -> list:
    """The tensors that the kernel has as arguments, as it views them; see launch_views."""
    return [tensors[i] if view is None else view(tensors[i]) for i, view in views]


def launch_views(names: Sequence[str], views: dict, kernel: Sequence[str]) -> tuple:
    """CallPlan.views of a launch: (index of a tensor, view or None) of each kernel argument; () without any view.

    names: of the tensors that the call has. kernel: of those that the kernel has arguments for, in its order.
    """
    if list(names) == list(kernel) and all(views.get(name) is None for name in names):
        return ()
    return tuple((names.index(name), views.get(name)) for name in kernel)


def stage(plan: Plan, out, needed: bool) -> None:
    """Note whether `out` is written through a contiguous result: one whose leading dimensions have no single stride."""
    plan.staged = needed
    if needed:
        plan.notes.append(f"out is copied to: its leading dimensions, strides {out.stride()}, do not fold into one")


def bias_view(bias):
    """A bias as the kernel takes it: one mode of stride 1. A strided one is copied, a few kilobytes."""
    return None if bias.dim() == 1 and bias.stride(0) == 1 else lambda t: t.flatten().contiguous()


def along_k(name: str, t, view, plan: Plan, rows: bool):
    """`view` of an FP8 or FP32 operand, followed by a copy if tensor cores could not read its result.

    They read such operands contiguous along K only, with rows of a multiple of 16 bytes. Other K are padded.
    rows: True if t is (..., rows, K), and not (..., K, columns).
    """
    K, vector = t.shape[-1 if rows else -2], VECTOR_BYTES // t.element_size()
    layout = layout_of_tensor(t if view is None else view(t))
    if (layout.contiguous, layout.align) == ("row" if rows else "col", vector) and K % vector == 0:
        return view
    plan.notes.append(
        f"{name} is copied: tensor cores read {t.dtype} contiguous along K, rows and address multiples of 16 bytes"
    )

    def copied(t):
        bits = t if view is None else view(t)
        bits = bits if rows else bits.mT  # (..., rows, K)
        if t.dtype == torch.float32 and (found := tf32.along_k(bits)) is not None:
            return found if rows else found.mT
        bits = bits.view(torch.uint8) if t.element_size() == 1 else bits
        padding = -K % vector
        padded = (bits.new_zeros if padding else bits.new_empty)(*bits.shape[:-1], K + padding)
        padded[..., :K] = bits
        return (padded if rows else padded.mT).view(t.dtype)

    return copied


def split_view(name: str, view, plan: Plan, rows: bool, of_b: bool, group: int | None = None):
    """`view` of an operand, followed by a copy of its parts side by side along K.

    rows: True if the view is (..., rows, K), and not (..., K, columns). group: as of side_by_side.
    """
    plan.notes.append(
        f"{name} is copied: 3xtf32 multiplies the TF32 parts of its numbers, side by side along K, three times as long"
    )

    def copied(t):
        t = t if view is None else view(t)
        found = tf32.side_by_side(t if rows else t.mT, of_b, group)
        return found if rows else found.mT

    return copied


def vector_view(t):
    """A function that views a tensor of one element as (1,); None for None, and for one of that shape."""
    return None if t is None or t.dim() == 1 else lambda t: t.view(1)


def scale_view(scale, batch, L: int, kind: str | None = None):
    """A function that views a scale as the kernel takes it: (1 or L, 1), (L, extent), or for block scales, as `kind`
    says, (L, M or N / 128, K / 128). None if the scale is absent or needs no view. batch: of the result."""
    if scale is None:
        return None
    if kind in ("1x128", "128x128"):
        view = partial(_blocks_view, kind, batch, L)
        far = abs(scale.stride(-2 if kind == "1x128" else -1)) > MOST_SCALE_STRIDE
        return (lambda t: view(t.contiguous())) if far else view
    if scale.shape == (1, 1) and L == 1:
        return None
    if scale.numel() == 1:  # the kernel reads that of the item
        return lambda t: t.view(1, 1).expand(L, 1)
    if L == 1 and scale.is_contiguous():
        return lambda t: t.view(1, -1)

    def viewed(t):
        t = t.flatten(-2) if t.dim() > 1 else t  # (..., extent)
        t = t.reshape(1, -1) if L == 1 else t.expand(*batch, t.shape[-1]).reshape(L, -1)
        return t if t.stride(-1) == 1 else t.contiguous()

    return viewed


def _blocks_view(kind: str, batch, L: int, t):
    """(L, M, K / 128) of scales (..., M, K / 128), or (L, N / 128, K / 128) of (..., K / 128, N / 128), of any strides;
    copied only where batch dimensions have no single stride."""
    t = t if kind == "1x128" else t.mT
    if L == 1:
        return t.unsqueeze(0) if t.dim() == 2 else t.reshape(1, -1, t.shape[-1])
    return flatten_batch(t.expand(*batch, *t.shape[-2:]), 3)[0]
