"""Layers with block-sparse weights, and the dense ones that they are compared with."""

import copy

import torch
from torch import nn

from sparse_collective.nn import BsrLinear

BF16 = torch.bfloat16
ACTIVATIONS = {None: lambda z: z, "silu": nn.functional.silu, "gelu": nn.functional.gelu, "relu": torch.relu}


def layer_of(device="cpu", *, density=0.6, block=(32, 32), grid=(3, 4), bias=True, dtype=BF16, **more) -> BsrLinear:
    features = grid[1] * block[1], grid[0] * block[0]
    return BsrLinear(*features, bias, block, density=density, device=device, dtype=dtype, **more)


def masked(layer: BsrLinear) -> tuple[nn.Linear, torch.Tensor]:
    """The dense layer in fp64, without an activation or gate, and a mask (M, K) of what is stored."""
    linear = copy.deepcopy(layer)
    linear.activation = None
    bm, bk = layer.blocksize
    mask = layer.pattern.mask().repeat_interleave(bm, 0).repeat_interleave(bk, 1)
    return BsrLinear.to_linear(linear).double(), mask


def near(found, exact, slack=1.0):
    """Within what bf16 rounds, relative to the tensor's size."""
    assert found is not None and found.shape == exact.shape
    error, scale = (found.double() - exact).abs().max().item(), exact.abs().max().item()
    assert error <= slack * 0.02 * scale + 1e-6, f"{error:.3g} of {scale:.3g}"


def blocks_of(layer: BsrLinear, dense: torch.Tensor) -> torch.Tensor:
    (rows, cols), (bm, bk) = layer.grid, layer.blocksize
    blocks = dense.view(rows, bm, cols, bk).transpose(1, 2)
    return blocks[layer.pattern.rows(), layer.col_indices.long()]
