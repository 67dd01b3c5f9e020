"""Registered ops that compute a mask_mod's elements, for block masks that are created under torch.compile.

A mask_mod is encoded in their schema by mask_text.py, as in that of block_sparse_attention.
"""

import torch
from torch import Tensor

from cute_kernels.runtime.library import define

from . import block_lists, mask_text
from .element_mask import call
from .mask_mods import MaskMod

TEXT = "str mask_mod, SymInt[] numbers, Tensor[] tensors"


def _run_elements(text, numbers, tensors, b, h, q, kv) -> Tensor:
    shape = torch.broadcast_shapes(b.shape, h.shape, q.shape, kv.shape)
    return call(mask_text.read_mask(text, numbers, tensors, q.device), b, h, q, kv).expand(shape).contiguous()


def _fake_elements(text, numbers, tensors, b, h, q, kv) -> Tensor:
    return q.new_empty(torch.broadcast_shapes(b.shape, h.shape, q.shape, kv.shape), dtype=torch.bool)


def _run_tables(text, numbers, tensors, batch, heads, lengths, blocksize, device) -> Tensor:
    mask_mod = mask_text.read_mask(text, numbers, tensors, device)
    return torch.stack(
        block_lists.tables_of_mask_mod(mask_mod, (batch, heads), tuple(lengths), tuple(blocksize), device)
    )


def _fake_tables(text, numbers, tensors, batch, heads, lengths, blocksize, device) -> Tensor:
    rows, cols = (-(-n // side) for n, side in zip(lengths, blocksize, strict=True))
    return torch.empty(2, batch, heads, rows, cols, dtype=torch.bool, device=device)


define("attention::mask_elements", f"({TEXT}, Tensor b, Tensor h, Tensor q, Tensor kv) -> Tensor", _run_elements,
       _fake_elements)  # fmt: skip
define(
    "attention::mask_tables",
    f"({TEXT}, SymInt batch, SymInt heads, SymInt[] lengths, SymInt[] blocksize, Device device) -> Tensor",
    _run_tables, _fake_tables,
)  # fmt: skip


def elements(mask_mod: MaskMod, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """element_mask.call in a torch.compile trace: bool, with the shape that all inputs broadcast to."""
    return torch.ops.attention.mask_elements(*mask_text.written_mask(mask_mod), b, h, q, kv)


def tables(mask_mod: MaskMod, heads: tuple[int, int], lengths, blocksize, device) -> tuple[Tensor, Tensor]:
    """block_lists.tables_of_mask_mod in a torch.compile trace."""
    text = mask_text.written_mask(mask_mod)
    some, every = torch.ops.attention.mask_tables(*text, *heads, list(lengths), list(blocksize), torch.device(device))
    return some, every
