"""Attention layers. Imported on request: `import attention.nn`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .masks.block_mask import BlockMask
from .ops import attention, block_sparse_attention
from .selected.checks import check_block_size
from .selected.ops import selected_attention
from .selected.top_blocks import CHUNK, lists_of_scores

__all__ = ["NativeSparseAttention"]

SIDE = 128  # of blocks of scores


@dataclass(frozen=True)
class Complete:
    """A mask_mod: compressed key j is visible once all `size` keys from j * stride on are."""

    size: int
    stride: int

    def __call__(self, b, h, q, kv):
        return kv * self.stride + self.size - 1 <= q


class Compress(nn.Module):
    """One key, or value, for every `size` tokens, at distances of `stride`: an MLP of the tokens and learned positions.

    (B, Hkv, S, D) to (B, Hkv, Sc, D), Sc = (S - size) // stride + 1; none if there are fewer than `size` tokens.
    """

    def __init__(self, head_dim: int, size: int, stride: int, device=None, dtype=None) -> None:
        super().__init__()
        self.size, self.stride = size, stride
        self.position = nn.Parameter(torch.zeros(size, head_dim, device=device, dtype=dtype))
        self.first = nn.Linear(size * head_dim, head_dim, device=device, dtype=dtype)
        self.last = nn.Linear(head_dim, head_dim, device=device, dtype=dtype)

    def forward(self, t: Tensor) -> Tensor:
        if t.shape[2] < self.size:
            return t[:, :, :0]
        tokens = t.unfold(2, self.size, self.stride).mT + self.position  # (B, Hkv, Sc, size, D)
        return self.last(nn.functional.gelu(self.first(tokens.flatten(3))))


class NativeSparseAttention(nn.Module):
    """Causal self-attention in three branches that each head mixes: compressed, selected and sliding.

    The compressed branch attends to one learned key and value for each `compress_size` tokens, the selected branch to
    the `top` blocks of `block_size` tokens that the compressed branch gives most weight, summed over the query heads of
    a KV head, and the sliding branch to the newest `window` tokens. Each branch has keys and values of its own. From
    "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention" (Yuan et al., 2025).

    Args:
        dim: features of x and of the result.
        heads, kv_heads, head_dim: query heads, key and value heads, and their dimension.
        block_size: tokens of a block of the selected branch: 1, 4, 16, 64 or 128.
        top: blocks that are selected for each token, `initial` and `local` included.
        initial, local: number of first, and of newest, blocks that are always selected.
        compress_size, compress_stride: tokens of a compressed key, and from one of them to the next.
        window: tokens of the sliding branch, the token itself included.
        bias: whether the projections have biases.

    Selection has no gradient; everything else trains. Weights of the compressed branch are computed again in parts of
    the rows to select, Sq * Sk / compress_stride of them per head, in the dtype of x: for 64k tokens and 64 heads that
    takes longer than attention.

    Raises:
        ValueError: an argument does not fit the others, or has an unsupported value.

    Example:
        layer = NativeSparseAttention(1024, 16, 4, 64, device="cuda", dtype=torch.bfloat16)
        y = layer(torch.randn(2, 4096, 1024, device="cuda", dtype=torch.bfloat16))  # (2, 4096, 1024)
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int = 128,
        *,
        block_size: int = 64,
        top: int = 16,
        initial: int = 1,
        local: int = 2,
        compress_size: int = 32,
        compress_stride: int = 16,
        window: int = 512,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        ones = {"kv_heads": kv_heads, "top": top, "window": window, "compress_stride": compress_stride}
        for least, sizes in ((1, ones), (0, {"initial": initial, "local": local})):
            for name, value in sizes.items():
                if value < least:
                    raise ValueError(f"{name} must be at least {least}, got {value}")
        if heads % kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
        if initial + local > top:
            raise ValueError(f"initial + local must be at most top, got {initial} + {local} and {top}")
        if compress_size < compress_stride:
            raise ValueError(
                f"compress_size must be at least compress_stride, so that no token is left out, got {compress_size} "
                f"and {compress_stride}"
            )
        check_block_size(block_size, type(self).__name__)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.block_size, self.top, self.initial, self.local = block_size, top, initial, local
        self.compress_size, self.compress_stride, self.window = compress_size, compress_stride, window
        # Made here, since torch.compile of torch 2.11 does not trace the constructor of a frozen dataclass
        self.complete = Complete(compress_size, compress_stride)
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q = nn.Linear(dim, heads * head_dim, bias, **kind)
        self.kv = nn.Linear(dim, 6 * kv_heads * head_dim, bias, **kind)  # k and v of each branch
        self.gate = nn.Linear(dim, 3 * heads, True, **kind)
        self.out = nn.Linear(heads * head_dim, dim, bias, **kind)
        self.compress_k, self.compress_v = (
            Compress(head_dim, compress_size, compress_stride, **kind) for _ in range(2)
        )

    def forward(self, x: Tensor, rotary: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """(B, S, dim) from x (B, S, dim); `rotary` is applied to q and to the keys of all branches, (B, H, S, D)."""
        q = self.q(x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
        kv = self.kv(x).unflatten(-1, (6, self.kv_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        keys, values = kv[:3], kv[3:]
        if rotary is not None:
            q, keys = rotary(q), [rotary(k) for k in keys]
        k, v = self.compress_k(keys[0]), self.compress_v(values[0])  # (B, Hkv, Sc, D)
        visible = self._visible(x.shape[1], k.shape[2], x.device)
        compressed, lse = block_sparse_attention(q, k, v, visible, return_lse=True)
        indices = self.select(q, k, lse)
        selected = selected_attention(q, keys[1], values[1], indices, self.block_size, causal=True)
        sliding = attention(q, keys[2], values[2], causal=True, window_size=(self.window - 1, 0))
        gates = self.gate(x).sigmoid().unflatten(-1, (self.heads, 3)).transpose(1, 2)  # (B, H, S, 3)
        mixed = sum(gates[..., i : i + 1] * out for i, out in enumerate((compressed, selected, sliding)))
        return self.out(mixed.transpose(1, 2).flatten(2))

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
        """The selected blocks of each token and KV head, (B, S, Hkv, top) int32, ascending and padded with -1.

        Args:
            q, k, lse: queries (B, H, S, D), compressed keys (B, Hkv, Sc, D) and LSE (B, H, S) of the compressed branch.

        The score of a block is the sum over the compressed keys that overlap it of their softmax weight times the
        overlap in units of compress_stride.
        """
        (batch, heads, rows, width), columns = q.shape, k.shape[2]
        share, blocks = heads // self.kv_heads, -(-rows // self.block_size)
        overlap = self._overlap(columns, blocks, q.device)
        visible = self.complete
        key = torch.arange(columns, device=q.device)
        found = []
        part = max(1, CHUNK // max(1, batch * heads * (8 * columns + 32 * blocks)))
        for begin in range(0, rows, part):
            row = torch.arange(begin, min(begin + part, rows), device=q.device)[:, None]
            grouped = q[:, :, begin : begin + part].unflatten(1, (self.kv_heads, share))  # (B, Hkv, share, rows, D)
            logits = (grouped @ k[:, :, None].mT).float() * width**-0.5
            norm = lse[:, :, begin : begin + part].float().unflatten(1, (self.kv_heads, share))
            weight = (logits - norm[..., None]).exp()
            with torch.autocast("cuda" if q.is_cuda else "cpu", enabled=False):  # scores stay FP32
                score = weight.masked_fill(~visible(0, 0, row, key), 0.0).sum(2) @ overlap
            found.append(lists_of_scores(score, row, rows, self.top, self.block_size, self.local, self.initial))
        return torch.cat(found, 1) if found else q.new_empty(batch, 0, self.kv_heads, self.top, dtype=torch.int32)

    def _overlap(self, columns: int, blocks: int, device: torch.device) -> Tensor:
        """Tokens that compressed keys have in common with blocks, in units of compress_stride, (Sc, blocks) float32."""
        first = (torch.arange(columns, device=device) * self.compress_stride)[:, None]
        begin = torch.arange(blocks, device=device) * self.block_size
        end = torch.minimum(first + self.compress_size, begin + self.block_size)
        return (end - torch.maximum(first, begin)).clamp(min=0).float() / self.compress_stride

    def _visible(self, rows: int, columns: int, device: torch.device) -> BlockMask:
        """The compressed keys that each row attends to."""
        visible = self.complete
        first = torch.arange(0, rows, SIDE, device=device)[:, None]
        begin = torch.arange(0, columns, SIDE, device=device)
        some, every = visible(0, 0, first + SIDE - 1, begin), visible(0, 0, first, begin + SIDE - 1)
        return BlockMask.from_blocks(some, lengths=(rows, columns), partial=~every, mask_mod=visible)

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, kv_heads={self.kv_heads}, block_size={self.block_size}, top={self.top}, "
            f"compress={self.compress_size}/{self.compress_stride}, window={self.window}"
        )
