"""Errors of attention, its reference, BlockMask and the patterns."""

import math

import pytest
import torch

from attention import BlockMask, attention, block_sparse_attention, create_block_mask, patterns, reference
from attention.checks import tma_ready
from cute_kernels import explain
from cute_kernels.runtime.device import assume

from .mask_parts import by_head
from .parts import BF16, cache, packed, qkv, run, starts

BLOCKS = torch.tensor([[True, False, True], [False, True, False]])  # of 128 x 128


def bf16(*shape):
    return torch.zeros(*shape, dtype=BF16)


def int32(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


def mask_of(batch=1, heads=1, lengths=(200, 300)):
    return BlockMask.from_blocks(BLOCKS.expand(batch, heads, 2, 3), lengths=lengths)


def call_of(form) -> dict:
    """A right call."""
    if form in ("dense", "blocks"):
        call = dict(zip("qkv", qkv(33, 47) if form == "dense" else qkv(200, 300), strict=True))
        return call if form == "dense" else call | {"block_mask": mask_of()}
    if form == "packed":
        return packed([5, 6], [7, 8])
    return cache([64, 5], 64, page_size=16 if form == "pages" else None)


# (form of the call, what is changed in it, error, its words)
WRONG = [
    ("dense", {"q": bf16(3, 4)}, ValueError, "must be .batch, heads, length, head_dim"),
    ("dense", {"q": [1]}, TypeError, "q must be a torch.Tensor"),
    ("dense", {"k": torch.zeros(2, 2, 47, 64)}, TypeError, "k is torch.float32 but q is torch.bfloat16"),
    ("dense", dict(zip("qkv", (t.int() for t in qkv()), strict=True)), TypeError, "q is torch.int32"),
    ("dense", {"k": bf16(1, 2, 47, 64)}, ValueError, "q, k and v must have the same batch size, got 2, 1 and 2"),
    ("dense", {"v": bf16(2, 2, 46, 64)}, ValueError, "differ in heads or length"),
    ("dense", {"k": bf16(2, 2, 47, 32)}, ValueError, "q has head_dim 64 and k 32"),
    ("dense", {"q": bf16(2, 3, 33, 64)}, ValueError, "must be a multiple"),
    ("dense", {"q": bf16(2, 4, 64, 33).mT}, ValueError, "not contiguous; call .contiguous"),
    ("dense", {"q": bf16(1).expand(2, 4, 2**29 + 1, 64)}, ValueError, "at most 536870912"),
    ("dense", {"scale": 0.0}, ValueError, "scale is 0.0; it must be above 0"),
    ("dense", {"scale": math.nan}, ValueError, "must be above 0 and finite"),
    ("dense", {"scale": "x"}, TypeError, "scale must be a Python number"),
    ("dense", {"softcap": -1.0}, ValueError, "softcap is -1.0"),
    ("dense", {"causal": 1}, TypeError, "causal must be True or False"),
    ("dense", {"window_size": 5}, TypeError, "window_size must be .left, right."),
    ("dense", {"window_size": (1.5, 0)}, TypeError, "window_size must be .left, right."),
    ("dense", {"window_size": (-2, 0)}, ValueError, "left bound must be at least 0, .*, got -2"),
    ("dense", {"return_lse": 1}, TypeError, "return_lse must be True or False"),
    ("dense", {"out": bf16(2, 4, 33, 32)}, ValueError, "out has shape"),
    ("dense", {"out": torch.zeros(2, 4, 33, 64, dtype=torch.float16)}, TypeError, "out is torch.float16"),
    ("dense", {"out": bf16(2, 4, 33, 65)[..., :64]}, ValueError, "out's address and strides"),
    ("cache", {"seqused_k": [1, 2]}, TypeError, "seqused_k must be a torch.Tensor"),
    ("cache", {"seqused_k": torch.zeros(2)}, TypeError, "seqused_k must be torch.int32, got torch.float32"),
    ("cache", {"seqused_k": int32(3)}, ValueError, "must have shape .2,. or .2, 2., with q's batch"),
    ("cache", {"seqused_k": int32(6).view(2, 3)}, ValueError, "must have shape .2,. or .2, 2., with q's batch"),
    ("cache", {"seqused_k": int32(4)[::2]}, ValueError, "must be contiguous in its last dimension"),
    ("cache", {"k": bf16(2, 2, 63, 64)}, ValueError, "differ in heads or length"),
    ("pages", {"seqused_k": None}, ValueError, "page_table requires seqused_k"),
    ("pages", {"page_table": torch.zeros(2, 4)}, TypeError, "page_table must be torch.int32, got torch.float32"),
    ("pages", {"page_table": int32(2)}, ValueError, "must have shape .2, pages per sequence."),
    ("pages", {"v": bf16(1, 2, 16, 64)}, ValueError, "number of pages, got 11 and 1"),
    ("pages", {"k": bf16(0, 2, 16, 64), "v": bf16(0, 2, 16, 64)}, ValueError, "k and v must have at least one page"),
    ("pages", {"k": bf16(4, 2, 8, 64), "v": bf16(4, 2, 8, 64)}, ValueError, "must be a power of two, at least 16, got"),
    (
        "pages",
        {"k": bf16(4, 2, 24, 64), "v": bf16(4, 2, 24, 64)},
        ValueError,
        "must be a power of two, at least 16, got",
    ),
    ("packed", {"cu_seqlens_k": None}, ValueError, "must both be given"),
    ("packed", {"cu_seqlens_q": None}, ValueError, "must both be given"),
    ("packed", {"q": bf16(2, 4, 33, 64)}, ValueError, "with cu_seqlens it must be .total, heads"),
    ("packed", {"cu_seqlens_q": [0, 5, 11]}, TypeError, "cu_seqlens_q must be a torch.Tensor"),
    ("packed", {"cu_seqlens_q": torch.tensor([0, 5, 11])}, TypeError, "cu_seqlens_q is torch.int64; it must be"),
    ("packed", {"cu_seqlens_q": int32(3).to("meta")}, ValueError, "cu_seqlens_q is on meta"),
    ("packed", {"cu_seqlens_k": int32(0)}, ValueError, "must have shape .sequences . 1,., got .0,"),
    ("packed", {"cu_seqlens_k": int32(3, 1)}, ValueError, "must have shape .sequences . 1,."),
    ("packed", {"cu_seqlens_k": int32(6)[::2]}, ValueError, "stride 2; call .contiguous"),
    ("packed", {"cu_seqlens_k": starts([7, 4, 4])}, ValueError, "is of 2 sequences and cu_seqlens_k of 3"),
    ("packed", {"cu_seqlens_k": starts([7, 9])}, ValueError, "must begin at 0, never decrease and end at 15"),
    ("packed", {"cu_seqlens_q": starts([12, -1])}, ValueError, "never decrease"),
    ("packed", {"v": bf16(14, 2, 64)}, ValueError, "differ in heads or length"),
    ("packed", {"k": bf16(15, 3, 64), "v": bf16(15, 3, 64)}, ValueError, "a multiple"),
    ("packed", {"scale": -1.0}, ValueError, "scale is -1.0"),
    ("packed", {"return_lse": 1}, TypeError, "return_lse must be True or False"),
    ("packed", {"out": bf16(11, 2, 64)}, ValueError, "out has shape"),
    ("blocks", {"block_mask": [1]}, TypeError, "block_mask must be a BlockMask"),
    ("blocks", {"block_mask": mask_of(lengths=(256, 300))}, ValueError, "lengths .256, 300., q and k of .200, 300."),
    ("blocks", {"block_mask": mask_of(3, 1)}, ValueError, "3 batch items and 1 heads; it must have 2 or 1 and 4 or 1"),
    ("blocks", {"block_mask": mask_of(1, 3)}, ValueError, "1 batch items and 3 heads; it must have 2 or 1 and 4 or 1"),
    ("blocks", {"causal": 1}, TypeError, "causal must be True or False"),
]


@pytest.mark.parametrize(("form", "change", "error", "text"), WRONG)
def test_refused_before_a_launch(form, change, error, text):
    with pytest.raises(error, match=text):
        run(**call_of(form) | change)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q": bf16(2, 4, 64, 80), "k": bf16(2, 2, 47, 80)}, "q has head_dim 80; kernels exist for 64, 96"),
        ({"v": bf16(2, 2, 47, 32)}, "v has head_dim 32; kernels exist for 64, 96"),
    ],
)
def test_refused_by_kernels(device, change, text):
    with pytest.raises(ValueError, match=text):
        attention(**{name: x.to(device) for name, x in (call_of("dense") | change).items()})


def test_wider_dtypes_are_the_cpus():
    call = dict(zip("qkv", qkv(33, 47, dtype=torch.float32), strict=True))
    assert attention(**call).dtype is torch.float32
    with assume("sm_90"), pytest.raises(TypeError, match="q is torch.float32; the kernels support"):
        explain(attention, **call)


def test_strides_that_tma_takes():
    q = bf16(2, 4, 33, 64)
    assert tma_ready(q) and tma_ready(q.transpose(1, 2)) and tma_ready(q[:, :1])
    assert not tma_ready(q[:1].expand(2, -1, -1, -1)), "a stride of 0"
    assert not tma_ready(bf16(2, 4, 33, 65)[..., :64]), "rows of 130 bytes"
    assert not tma_ready(bf16(2 * 4 * 33 * 64 + 1)[1:].view(2, 4, 33, 64)), "an odd address"


def test_explained():
    for form in ("dense", "packed", "cache", "pages", "blocks"):
        op = block_sparse_attention if form == "blocks" else attention
        assert "CPU tensors run the reference" in str(explain(op, **call_of(form)))
    assert "nothing to compute" in str(explain(attention, *qkv(33, 0)))


# The reference, masks and patterns

Q, K, V = (torch.zeros(2, n, 8, 16) for n in (4, 2, 2))
P = torch.zeros(8, 4, 16)
full, full_packed = reference.attention, reference.attention_packed
COUNT, INDEX = int32(1, 2, 3), int32(1, 2, 3, 4)
IDS = INDEX[0, 0, 0]
LISTS = {"lengths": (384, 512)}
of_blocks, of_mod, lines = BlockMask.from_blocks, create_block_mask, patterns.vertical_slash
window = patterns.sliding_window
small = {"lengths": (8, 8)}
# fmt: off
REFUSED = {
    "type": (lambda: full([], K, V), TypeError, "q must be a tensor, got list"),
    "dtype": (lambda: full(Q.int(), K, V), TypeError, "one floating-point dtype, got q of torch.int32"),
    "dtypes": (lambda: full(Q, K.half(), V), TypeError, "got k of torch.float16, q of torch.float32"),
    "dims": (lambda: full(Q[0], K, V), ValueError, r"q must be \(B, heads, S, D\), got shape \(4, 8, 16\)"),
    "device": (lambda: full(Q, K.to("meta"), V), ValueError, "k is on meta, q on cpu"),
    "head dim": (lambda: full(Q, K[..., :8], V), ValueError, "one D"),
    "length": (lambda: full(Q, K[:, :, :3], V), ValueError, "one length"),
    "batch": (lambda: full(Q[:1], K, V), ValueError, "one batch size"),
    "heads": (lambda: full(Q[:, :3], K, V), ValueError, "q's 3 heads are no multiple of k's 2"),
    "softcap": (lambda: full(Q, K, V, softcap=0.0), ValueError, "softcap must be a finite positive number, got 0.0"),
    "scale": (lambda: full(Q, K, V, scale=math.inf), ValueError, "scale must be a finite number, got inf"),
    "window": (lambda: full(Q, K, V, window_size=4), TypeError, "window_size must be .left, right.* .w - 1, 0."),
    "mask": (lambda: full(Q, K, V, block_mask=3), TypeError, "must be a BlockMask, got int"),
    "mask lengths": (lambda: full(Q, K, V, block_mask=patterns.causal((8, 9))), ValueError,
                     r"lengths \(8, 8\) on cpu, got \(8, 9\) on cpu"),
    "mask heads": (lambda: full(Q, K, V, block_mask=of_blocks(torch.ones(2, 1, 1) > 0, **small)), ValueError,
                   "2 or 1 items and 4 or 1 heads, got 1 and 2"),
    "cu dtype": (lambda: full_packed(P, P, P, torch.tensor([0, 8])), TypeError, "cu_seqlens_q must be an int32"),
    "cu end": (lambda: full_packed(P, P, P, starts([7])), ValueError, "begin at 0, never decrease and end at 8"),
    "cu lengths": (lambda: full_packed(P, P, P, starts([8]), starts([3, 5])), ValueError,
                   "of as many sequences, got 2 and 3"),
    "packed dims": (lambda: full_packed(Q, P, P, None), ValueError, r"q must be \(total, heads, D\)"),

    "no list": (lambda: BlockMask([1], INDEX, **LISTS), TypeError, "kv_num_blocks must be .* got list"),
    "list dtype": (lambda: BlockMask(COUNT, INDEX.long(), **LISTS), TypeError, "kv_indices must be .*int32.*int64"),
    "half": (lambda: BlockMask(COUNT, INDEX, COUNT, **LISTS), ValueError,
             "full_kv_num_blocks and full_kv_indices must both be"),
    "list dims": (lambda: BlockMask(COUNT[0], INDEX, **LISTS), ValueError, r"kv_num_blocks must be \(B, H, Mq\)"),
    "list device": (lambda: BlockMask(COUNT, INDEX.to("meta"), **LISTS), ValueError,
                    "kv_indices must be on the device of kv_num_blocks, cpu, got meta"),
    "stride": (lambda: BlockMask(COUNT, INDEX.mT.contiguous().mT, **LISTS), ValueError, "kv_indices.contiguous"),
    "rows": (lambda: BlockMask(COUNT, INDEX, lengths=(385, 512)), ValueError,
             "must have shape .* for 385 rows in blocks of"),
    "list heads": (lambda: BlockMask(COUNT, INDEX[:, :1], **LISTS), ValueError, "kv_indices must have shape"),
    "width": (lambda: BlockMask(COUNT, INDEX, lengths=(384, 384)), ValueError,
              "last dimension must be at most 3, .* got 4"),
    "empty": (lambda: BlockMask(COUNT[:0], INDEX[:0], **LISTS), ValueError, "B and H must be at least 1"),
    "block": (lambda: BlockMask(COUNT, INDEX, blocksize=(96, 128), **LISTS), ValueError,
              "block_q must be 64 or 128, got 96"),
    "mask_mod": (lambda: BlockMask(COUNT, INDEX, mask_mod=3, **LISTS), TypeError, "function of .* got int"),
    "mod's type": (lambda: of_mod(lambda b, h, q, kv: q - kv, None, None, 64, 64), TypeError,
                   "must return a bool tensor, got a tensor of torch.int32"),
    "blocks dtype": (lambda: of_blocks(INDEX), TypeError, "blocks must be a strided bool tensor"),
    "blocks dims": (lambda: of_blocks(IDS > 0), ValueError, "blocks must be .Mq, Mk"),
    "blocks shape": (lambda: of_blocks(INDEX > 0, lengths=(384, 513)), ValueError,
                     r"shape \(..., 3, 5\) for lengths \(384, 513\)"),
    "partial alone": (lambda: of_blocks(INDEX > 0, partial=INDEX > 0), ValueError, "partial requires mask_mod"),
    "partial shape": (lambda: of_blocks(INDEX[0] > 0, partial=INDEX > 0, mask_mod=by_head), ValueError,
                      "partial must broadcast to the shape of blocks"),

    "blocksize": (lambda: patterns.causal((64, 64), 128), TypeError, "blocksize must be two integers"),
    "negative": (lambda: patterns.causal((64, -1)), ValueError, "Sk must be in .*, got -1"),
    "long": (lambda: patterns.causal((2**30, 64)), ValueError, "Sq must be in .*, got 1073741824"),
    "no window": (lambda: window((64, 64), 3), TypeError, "window_size must be .left, right"),
    "window bound": (lambda: window((64, 64), (-2, 0)), ValueError, "left bound must be at least 0, .*, got -2"),
    "window float": (lambda: window((64, 64), (1.5, 0)), TypeError, "window_size must be"),
    "globals": (lambda: window((64, 64), (1, 0), global_rows=-1), ValueError, "global_rows must be at least 0, got -1"),
    "ids": (lambda: patterns.documents(torch.zeros(4)), TypeError, "q_ids must be .* int32 or int64"),
    "ids batch": (lambda: patterns.documents(INDEX[0, 0], IDS), ValueError, "kv_ids must be"),
    "cu": (lambda: patterns.packed_documents(torch.zeros(4), **small), TypeError, "cu_seqlens_q must be"),
    "cu shape": (lambda: patterns.packed_documents(IDS, IDS[:2], **small), ValueError, "cu_seqlens_k must have"),
    "step": (lambda: patterns.dilated((64, 64), 0), ValueError, "step must be at least 1, got 0"),
    "block step": (lambda: patterns.dilated_blocks((64, 64), 0), ValueError, "step must be at least 1, got 0"),
    "reach": (lambda: patterns.dilated_blocks((64, 64), 1, reach=-1), ValueError, "reach must be at least 0, got -1"),
    "scores": (lambda: patterns.top_k(INDEX, 1), TypeError, "scores must be .*floating"),
    "k": (lambda: patterns.top_k(INDEX.float(), -1), ValueError, "k must be at least 0, got -1"),
    "lines": (lambda: lines(INDEX[0, 0], IDS, lengths=(64, 64)), ValueError, "vertical and slash must be"),
}
# fmt: on


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
