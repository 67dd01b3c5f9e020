"""A byte-level transformer whose feed-forward layers are dense or block-sparse, and the operations that it takes."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_collective.nn import BsrLinear

BYTES = 256


@dataclass(frozen=True)
class Shape:
    """A decoder's extents. hidden and density are those of its feed-forward layers; density None: dense ones."""

    dim: int
    hidden: int
    layers: int
    heads: int
    context: int
    block: int
    density: float | None = None


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

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, S, D)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norms[0](x))
        return x + self.feed_forward(self.norms[1](x))


class Decoder(nn.Module):
    """Logits of each next byte: (B, S) int64 -> (B, S, 256)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.bytes = nn.Embedding(BYTES, shape.dim)
        self.places = nn.Embedding(shape.context, shape.dim)
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
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
        attention = self.shape.layers * 2 * self.shape.dim * (self.shape.context + 1) / 2  # Q K' and P V
        return 3 * 2 * (weights + attention)
