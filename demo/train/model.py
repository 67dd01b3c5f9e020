"""A byte-level transformer whose feed-forward layers or attention are dense or block-sparse, and what it computes."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import BlockMask, block_sparse_attention, patterns
from sparse_collective.nn import BsrLinear

BYTES = 256


@dataclass(frozen=True)
class Shape:
    """A decoder's extents. hidden and density are those of its feed-forward layers; density None: dense ones.

    window: how many of the last bytes each sees, its own among them, beside the first `global_bytes`; None: all.
    """

    dim: int
    hidden: int
    layers: int
    heads: int
    context: int
    block: int
    density: float | None = None
    window: int | None = None
    global_bytes: int = 0

    def seen(self) -> float:
        """Keys that a byte sees, on average."""
        window = self.context if self.window is None else self.window
        counts = (min(n, window) + min(max(n - window, 0), self.global_bytes) for n in range(1, self.context + 1))
        return sum(counts) / self.context


class DenseFeedForward(nn.Module):
    """down(gelu(up(x))), (..., dim) -> (..., dim)"""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def feed_forward(shape: Shape) -> nn.Module:
    """Dense, or two BsrLinear of which the first applies GELU in its kernel."""
    if shape.density is None:
        return DenseFeedForward(shape.dim, shape.hidden)
    more = {"blocksize": (shape.block, shape.block), "density": shape.density}
    up = BsrLinear(shape.dim, shape.hidden, activation="gelu", **more)
    return nn.Sequential(up, BsrLinear(shape.hidden, shape.dim, **more))


def rotations(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (length, width / 2) of rotary positions (Su et al. 2021)."""
    rates = 1e4 ** -(torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(length, device=device)[:, None] * rates
    return angles.cos(), angles.sin()


def rotated(t: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Queries or keys (..., S, D) that know their positions; feature i is paired with i + D / 2."""
    a, b = t.chunk(2, -1)
    return torch.cat([a * cosines - b * sines, b * cosines + a * sines], -1).to(t.dtype)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); x (B, S, dim)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norms = nn.ModuleList(nn.LayerNorm(shape.dim) for _ in range(2))
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)
        with torch.random.fork_rng(devices=[]):  # so that all else starts alike, whatever the feed-forward layers are
            self.feed_forward = feed_forward(shape)

    def attend(self, x: Tensor, positions: tuple, mask: BlockMask | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, S, D)
        q, k = rotated(q, *positions), rotated(k, *positions)
        if mask is None:
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            found = block_sparse_attention(q, k, v, mask)
        return self.out(found.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor], mask: BlockMask | None = None) -> Tensor:
        x = x + self.attend(self.norms[0](x), positions, mask)
        return x + self.feed_forward(self.norms[1](x))


class Decoder(nn.Module):
    """Logits of each next byte: (B, S) int64 -> (B, S, 256)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.bytes = nn.Embedding(BYTES, shape.dim)
        nn.init.normal_(self.bytes.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, BYTES, bias=False)
        self.masks: dict[tuple, BlockMask] = {}  # by length and device

    def mask(self, length: int, device: torch.device) -> BlockMask | None:
        """What all layers' attention sees, made once; None: all bytes before."""
        if self.shape.window is None:
            return None
        key = length, device
        if key not in self.masks:
            terms = {"global_columns": self.shape.global_bytes, "causal": True, "device": device}
            self.masks[key] = patterns.sliding_window((length, length), (self.shape.window - 1, 0), **terms)
        return self.masks[key]

    def forward(self, tokens: Tensor) -> Tensor:
        x, length, device = self.bytes(tokens), tokens.shape[1], tokens.device
        positions, mask = rotations(length, self.shape.dim // self.shape.heads, device), self.mask(length, device)
        for layer in self.layers:
            x = layer(x, positions, mask)
        return self.head(self.norm(x))

    def loss(self, windows: Tensor) -> Tensor:
        """() mean cross-entropy in nats of each next byte; windows (B, S + 1) uint8."""
        windows = windows.long()
        return F.cross_entropy(self(windows[:, :-1]).flatten(0, 1).float(), windows[:, 1:].flatten())

    def flops(self) -> float:
        """Useful operations to train on one token: forward, and twice as many backward.

        Products count with the elements that are stored, attention with the keys that a token sees on average.
        """
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        weights += sum(m.values.numel() for m in self.modules() if isinstance(m, BsrLinear))
        attention = self.shape.layers * 2 * self.shape.dim * self.shape.seen()  # Q K' and P V
        return 3 * 2 * (weights + attention)
