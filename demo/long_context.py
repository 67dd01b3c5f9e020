"""Attention of a long prompt: a sliding window, a few tokens that all see, and documents; checked, timed on a GPU."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from attention import BlockMask, attention, block_sparse_attention, patterns
from attention.masks.mask_mods import Or

from .accuracy import relative_error, rounding
from .timing import explain, interleaved

TORCH, DENSE, SPARSE = "torch SDPA, causal", "ours, causal", "ours, block-sparse"
HEADS, DEPTH = 16, 128
LENGTH, WINDOW, GLOBAL = 32768, 1024, 512  # tokens
SMALL_LENGTH, SMALL_HEADS, SMALL_DEPTH = 2048, 2, 64  # where the CPU computes it
DOCUMENTS = (0.15, 0.06, 0.21, 0.1, 0.28, 0.13, 0.07)  # shares of the tokens
CHECKED_PLACES, CHECKED_ROWS = 5, 32  # rows compared with fp32, in runs


@dataclass(frozen=True)
class LongContext:
    """Attention with the pattern, (1, heads, length, depth) bf16."""

    mask: BlockMask
    heads: int
    depth: int
    share: float  # of the causal mask's blocks, how many are computed
    error: float  # of ours on some rows, relative to fp32; NaN if ours failed
    bound: float  # what rounding the output explains of it
    micros: dict[str, float | str]  # by TORCH, DENSE, SPARSE: the median in us, or the error it ended in; {} on a CPU

    @property
    def agrees(self) -> bool:
        """Whether ours errs no more than rounding explains; False where it failed."""
        return self.error <= self.bound

    @property
    def speedup(self) -> float | None:
        """How many times faster than our own dense causal attention; None where one of them has no time."""
        dense, sparse = self.micros.get(DENSE, ""), self.micros.get(SPARSE, "")
        return None if isinstance(dense, str) or isinstance(sparse, str) else dense / sparse


def pattern(length: int, window: int, global_tokens: int, device: torch.device | str) -> BlockMask:
    """Tokens see those of their document, the last `window` ones, and the first `global_tokens`; none after them."""
    near = patterns.sliding_window(
        (length, length), (window - 1, 0), global_columns=global_tokens, causal=True, device=device
    )
    ends = [round(length * sum(DOCUMENTS[:i])) for i in range(len(DOCUMENTS) + 1)]
    starts = torch.tensor(ends, dtype=torch.int32, device=device)
    own = patterns.packed_documents(starts, lengths=(length, length), causal=True)
    (near_partial, near_full), (own_partial, own_full) = near.tables(), own.tables()
    full = near_full | own_full
    return BlockMask.from_blocks(
        full | near_partial | own_partial,
        near.blocksize,
        lengths=(length, length),
        partial=~full,
        mask_mod=Or(near.mask_mod, own.mask_mod),
    )


def check(out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> float:
    """Relative error of some rows of `out`, each run of them by itself, since the first ones outweigh the others."""
    worst, length = 0.0, q.shape[2]
    for i in range(CHECKED_PLACES):
        begin = (length - CHECKED_ROWS) * i // (CHECKED_PLACES - 1)
        rows = slice(begin, begin + CHECKED_ROWS)
        scores = q[:, :, rows].float() @ k.float().mT / math.sqrt(q.shape[-1])
        truth = scores.masked_fill(~mask.elements(rows.start, rows.stop), -math.inf).softmax(-1) @ v.float()
        error = relative_error(out[:, :, rows], truth)
        worst = error if error > worst or math.isnan(error) else worst
    return worst


def study(device: torch.device | str) -> LongContext:
    """Compute, check, and on a GPU time it; on a CPU a small case by the reference."""
    gpu = torch.device(device).type == "cuda"
    length, heads, depth = (LENGTH, HEADS, DEPTH) if gpu else (SMALL_LENGTH, SMALL_HEADS, SMALL_DEPTH)
    mask = pattern(length, WINDOW * length // LENGTH, GLOBAL * length // LENGTH, device)
    generator = torch.Generator(device).manual_seed(0)
    facts = {"device": device, "dtype": torch.bfloat16, "generator": generator}
    q, k, v = (torch.randn(1, heads, length, depth, **facts) for _ in range(3))
    failed = ""
    try:
        error = check(block_sparse_attention(q, k, v, mask), q, k, v, mask)
    except Exception as raised:
        error, failed = math.nan, explain(raised)
    micros: dict[str, float | str] = {SPARSE: failed} if failed else {}
    if gpu:
        calls = {
            TORCH: lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            DENSE: lambda: attention(q, k, v, causal=True),
            SPARSE: lambda: block_sparse_attention(q, k, v, mask),
        }
        micros = interleaved(calls)
    causal = patterns.causal((length, length), mask.blocksize)
    share = mask.block_density() / causal.block_density()
    return LongContext(mask, heads, depth, share, error, rounding(q.dtype), micros)


def table(found: LongContext) -> Table:
    """What was computed, and what it took."""
    length, side = found.mask.lengths[0], found.mask.blocksize
    shape = f"{length} tokens, {found.heads} heads of {found.depth}, bf16, {side[0]}x{side[1]} blocks"
    shown = Table(title=f"Attention of a long prompt: {shape}")
    for name in ("attention", "blocks computed", "us", "x ours dense", "rel. error"):
        shown.add_column(name, justify="left" if name == "attention" else "right")
    dense = found.micros.get(DENSE, "")
    for name in (TORCH, DENSE, SPARSE):
        us = found.micros.get(name, "")
        timed = not isinstance(us, str) and not isinstance(dense, str)
        error = (f"{found.error:.1e}" if found.agrees else f"[bold red]{found.error:.1e}[/]") if name == SPARSE else ""
        share = f"{found.share:.1%}" if name == SPARSE else "100.0%"
        micros = f"{us:.1f}" if not isinstance(us, str) else "failed" if us else "not timed"
        shown.add_row(name, share, micros, f"{dense / us:.2f}" if timed else "", error)
    return shown
