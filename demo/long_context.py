"""Attention of a long prompt: a sliding window, a few tokens that all see, and documents; checked, timed on a GPU."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from attention import BlockMask, attention, block_sparse_attention, patterns
from attention.masks.mask_mods import Or
from bench.rows import reason
from bench.table import grid

from .accuracy import block_name, relative_error, rounding
from .timing import Compared, medians

TORCH, DENSE, SPARSE = "torch SDPA, causal", "ours, causal", "ours, block-sparse"
HEADS, DEPTH = 16, 128
LENGTH, WINDOW, GLOBAL = 32768, 1024, 512  # tokens
SMALL_LENGTH, SMALL_HEADS, SMALL_DEPTH = 2048, 2, 64  # where the CPU computes it
DOCUMENTS = (0.15, 0.06, 0.21, 0.1, 0.28, 0.13, 0.07)  # shares of the tokens
CHECKED_PLACES, CHECKED_ROWS = 5, 32  # rows compared with fp32, in runs


@dataclass(frozen=True)
class LongContext(Compared):
    """Attention with the pattern, (1, heads, length, depth) bf16; `micros` by TORCH, DENSE, SPARSE, {} on a CPU."""

    mask: BlockMask
    heads: int
    depth: int
    share: float  # of the causal mask's blocks, how many are computed

    def speedup(self) -> float | None:
        """Over our own dense causal attention."""
        return super().speedup(DENSE, SPARSE)


def pattern(length: int, window: int, global_tokens: int, device: torch.device | str) -> BlockMask:
    """Tokens see those of their document, the last `window` ones, and the first `global_tokens`; none after them."""
    lengths = (length, length)
    more = {"global_columns": global_tokens, "causal": True, "device": device}
    near = patterns.sliding_window(lengths, (window - 1, 0), **more)
    ends = [round(length * sum(DOCUMENTS[:i])) for i in range(len(DOCUMENTS) + 1)]
    starts = torch.tensor(ends, dtype=torch.int32, device=device)
    own = patterns.packed_documents(starts, lengths=lengths, causal=True)
    (near_partial, near_full), (own_partial, own_full) = near.tables(), own.tables()
    full = near_full | own_full
    terms = {"lengths": lengths, "partial": ~full, "mask_mod": Or(near.mask_mod, own.mask_mod)}
    return BlockMask.from_blocks(full | near_partial | own_partial, near.blocksize, **terms)


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
    facts = {"device": device, "dtype": torch.bfloat16, "generator": torch.Generator(device).manual_seed(0)}
    q, k, v = (torch.randn(1, heads, length, depth, **facts) for _ in range(3))
    error, micros = math.nan, {}
    try:
        error = check(block_sparse_attention(q, k, v, mask), q, k, v, mask)
    except Exception as raised:
        micros = {SPARSE: reason(raised)}
    if gpu:
        calls = {
            TORCH: lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            DENSE: lambda: attention(q, k, v, causal=True),
            SPARSE: lambda: block_sparse_attention(q, k, v, mask),
        }
        micros = medians(calls)
    share = mask.block_density() / patterns.causal((length, length), mask.blocksize).block_density()
    return LongContext(error, rounding(q.dtype), micros, mask, heads, depth, share)


def table(found: LongContext) -> Table:
    """What was computed, and what it took."""
    length, side = found.mask.lengths[0], block_name(found.mask.blocksize)
    title = f"Attention of a long prompt: {length} tokens, {found.heads} heads of {found.depth}, bf16, {side} blocks"
    shown = grid(["attention"], ["blocks computed", "us", "x ours dense", "rel. error"], title=title)
    for name in (TORCH, DENSE, SPARSE):
        us, ratio = found.micros.get(name, ""), Compared.speedup(found, DENSE, name)
        share, error = (f"{found.share:.1%}", found.shown_error) if name == SPARSE else ("100.0%", "")
        micros = f"{us:.1f}" if not isinstance(us, str) else "failed" if us else "not timed"
        shown.add_row(name, share, micros, "" if ratio is None else f"{ratio:.2f}", error)
    return shown
