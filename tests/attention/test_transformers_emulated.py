"""Layers' calls on the emulator (docs/notes/emulator.md): the way that they take on a GPU, head dimensions padded."""

import shutil
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from transformers import masking_utils as hf  # noqa: E402

from attention import scaled_dot_product_attention  # noqa: E402
from attention.integrations.transformers.attention_function import attend  # noqa: E402
from attention.integrations.transformers.masks import make_mask  # noqa: E402

from ..emulator import emulate  # noqa: E402
from ..emulator.ops import on_emulator  # noqa: E402
from .mask_parts import packed_function  # noqa: E402

pytestmark = pytest.mark.skipif(
    shutil.which(emulate.COMPILER) is None, reason="the emulator needs a C++ compiler (CXX)"
)
MODULE = SimpleNamespace(is_causal=True, training=False)
BATCH = 2


def operands(rows, columns, head_dim=32):
    return tuple(torch.randn(BATCH, n, s, head_dim).bfloat16() for n, s in ((4, rows), (2, columns), (2, columns)))


def check(q, k, v, mask, module=MODULE, **options):
    with on_emulator("sm_90", sms=4):
        found, _ = attend(module, q, k, v, mask, **options)
    expected, _ = attend(module, *(t.double() for t in (q, k, v)), mask, **options)
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)


def left(total):
    mask = torch.ones(BATCH, total, dtype=torch.bool)
    mask[0, :9] = False
    return mask


def test_padding():
    """In prefill and in decoding, where it is one kernel."""
    window = hf.sliding_window_causal_mask_function(20)
    check(*operands(70, 70), make_mask(BATCH, 70, 70, mask_function=window, attention_mask=left(70)))
    for columns in (71, 72):
        mask = make_mask(BATCH, 1, columns, columns - 1, mask_function=window, attention_mask=left(columns))
        check(*operands(1, columns), mask)


def test_static_caches():
    """One that is not full, by its length on the device, in decoding and for several rows; what follows is NaN."""
    for rows, offset in ((1, 60), (1, torch.tensor(60)), (5, torch.tensor(60))):
        q, k, v = operands(rows, 150)
        k[:, :, 60 + rows :] = v[:, :, 60 + rows :] = float("nan")
        check(q, k, v, make_mask(BATCH, rows, 150, offset))


def test_packed_sequences():
    """By their lengths, and by positions that restart."""
    cu = torch.tensor([0, 20, 21, 70, 140])
    check(*operands(70, 70), make_mask(BATCH, 70, 70), cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    positions = torch.cat([torch.arange(n) for n in (20, 1, 49)])[None].expand(BATCH, -1)
    sequences = hf.find_packed_sequence_indices(positions)
    function = packed_function(hf.causal_mask_function, positions, sequences)
    check(*operands(70, 70), make_mask(BATCH, 70, 70, mask_function=function))


def test_selected_blocks():
    """In prefill and decoding, with and without padding, and in a static cache; blocks of 32 are two of 16."""
    module = SimpleNamespace(is_causal=True, training=False, indexer=SimpleNamespace(block_size=32))
    for rows, columns, offset in ((70, 70, 0), (2, 72, 70), (3, 150, torch.tensor(69))):
        indices = torch.rand(BATCH, 2, rows, 3).argsort(-1)[..., :2]
        for padding in (None, left(columns)):
            mask = make_mask(BATCH, rows, columns, offset, attention_mask=padding)
            check(*operands(rows, columns), mask, module, block_indices=indices)


@pytest.mark.parametrize("path", ["sm_80", "sm_90"])
def test_masks_of_scaled_dot_product_attention(path):
    q, k, v = operands(20, 140)
    mask = torch.rand(BATCH, 1, 20, 140) < 0.5
    mask[:, :, 3] = False
    with on_emulator("sm_90", sms=4, path=path):
        found = scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    expected = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), mask, enable_gqa=True)
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)


def test_gradients_under_padding():
    mask = make_mask(BATCH, 40, 40, attention_mask=left(40))
    inputs, weight = [t.requires_grad_() for t in operands(40, 40)], torch.randn(BATCH, 40, 4, 32).bfloat16()
    with on_emulator("sm_90", sms=4):
        out, _ = attend(MODULE, *inputs, mask)
        found = torch.autograd.grad(out, inputs, weight)
    precise = [t.detach().double().requires_grad_() for t in inputs]
    expected = torch.autograd.grad(attend(MODULE, *precise, mask)[0], precise, weight.double())
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), other, rtol=0.05, atol=0.05)
