"""The layer under study: the feed-forward part of one encoder layer of all-MiniLM-L6-v2, with real inputs."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

DATA = Path(__file__).parent / "data" / "minilm_ffn.safetensors"
NAMES = {"w1": "intermediate.weight", "b1": "intermediate.bias", "w2": "output.weight", "b2": "output.bias"}


@dataclass(frozen=True)
class FeedForward:
    """y = gelu(x W1^T + b1) W2^T + b2 with exact GELU; fp16."""

    w1: Tensor  # (1536, 384)
    b1: Tensor  # (1536,)
    w2: Tensor  # (384, 1536)
    b2: Tensor  # (384,)
    x: Tensor  # (tokens, 384) what the layer receives inside the model
    expected: Tensor  # (tokens, 384) what it gives unpruned, computed in fp32


def load_layer(device: torch.device | str, path: Path = DATA) -> FeedForward:
    """The layer in `path`, on `device`."""
    tensors = load_file(path, device=str(device))
    weights = {field: tensors[name] for field, name in NAMES.items()}
    return FeedForward(**weights, x=tensors["activations"], expected=tensors["expected"])


def dense_forward(layer: FeedForward, w1: Tensor, w2: Tensor, dtype: torch.dtype) -> Tensor:
    """The layer by torch's dense products in `dtype`, with these weights in place of its own."""
    hidden = F.gelu(F.linear(layer.x.to(dtype), w1.to(dtype), layer.b1.to(dtype)))  # (tokens, 1536)
    return F.linear(hidden, w2.to(dtype), layer.b2.to(dtype))  # (tokens, 384)
