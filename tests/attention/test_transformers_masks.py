"""Arguments that the integration reads from transformers' mask functions, beside transformers' own boolean masks."""

import copy
import itertools
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from transformers import masking_utils as hf  # noqa: E402

from attention import attention, block_sparse_attention, patterns  # noqa: E402
from attention.integrations.transformers import attention_function  # noqa: E402
from attention.integrations.transformers.attention_function import attend  # noqa: E402
from attention.integrations.transformers.kinds import Kind, kind_of  # noqa: E402
from attention.integrations.transformers.masks import make_mask  # noqa: E402
from cute_kernels import explain  # noqa: E402
from cute_kernels.runtime.device import assume  # noqa: E402

from .mask_parts import packed_function  # noqa: E402

BATCH, TOTAL = 2, 300
POSITIONS = torch.cat([torch.arange(n) for n in (70, 1, 130, TOTAL - 201)])[None].expand(BATCH, -1)
SEQUENCES = hf.find_packed_sequence_indices(POSITIONS)
MODULE = SimpleNamespace(is_causal=True, training=False)

KINDS = {
    "causal": (hf.causal_mask_function, Kind(right=0)),
    "all": (hf.bidirectional_mask_function, Kind()),
    "sliding": (hf.sliding_window_causal_mask_function(40), Kind(39, 0)),
    "sliding both ways": (hf.sliding_window_bidirectional_mask_function(40), Kind(40, 40)),
    "sliding twice": (
        hf.and_masks(hf.sliding_window_causal_mask_function(40), hf.sliding_window_overlay(9)),
        Kind(8, 0),
    ),
}
PACKED = {
    f"packed {name}": (packed_function(function, POSITIONS, SEQUENCES), kind)
    for name, (function, kind) in KINDS.items()
}
OTHERS = {
    "chunked": hf.chunked_causal_mask_function(64, torch.tensor([5, 0])),
    "blocks see each other": hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(SEQUENCES % 2 - 1)),
    "a user's": hf.and_masks(hf.causal_mask_function, lambda b, h, q, kv: (q - kv) % 3 == b),
    "everything, by a tensor": hf.or_masks(hf.causal_mask_function, lambda *_: torch.tensor(True)),
}
FUNCTIONS = {name: function for name, (function, _) in (KINDS | PACKED).items()} | OTHERS


@pytest.mark.parametrize("name", KINDS)
def test_kinds_that_are_known(name):
    function, kind = KINDS[name]
    assert kind_of(function) == kind


@pytest.mark.parametrize("name", PACKED)
def test_packed_kinds_that_are_known(name):
    function, kind = PACKED[name]
    found = kind_of(function)
    assert (found.left, found.right) == (kind.left, kind.right) and found.sequences is SEQUENCES


@pytest.mark.parametrize("name", OTHERS)
def test_functions_that_only_torch_can_trace(name):
    assert kind_of(OTHERS[name]) is None


@pytest.mark.skipif(not hasattr(hf, "remap_positions_for_packed_sequence"), reason="transformers has none")
def test_positions_that_restart_need_the_sequences():
    restarted = hf.remap_positions_for_packed_sequence(hf.causal_mask_function, POSITIONS)
    assert kind_of(restarted) is None and kind_of(hf.and_masks(restarted, hf.causal_mask_function)) is None


def padding_of(side, total):
    mask = torch.ones(BATCH, total, dtype=torch.bool)
    if side == "left":
        mask[0, : total // 3] = False
    elif side == "right":
        mask[0, total - total // 3 :] = False
    elif side == "holes":
        mask = torch.rand(BATCH, total, generator=torch.Generator().manual_seed(0)) < 0.7
    return mask


# (rows, columns, offset of rows, offset of columns): prefill, a second part, decoding, a sliding and a static cache
CASES = [(300, 300, 0, 0), (100, 300, 200, 0), (1, 300, 299, 0), (70, 150, 200, 120), (30, 256, 40, 0), (1, 256, 5, 0)]
CASES += [(1, 256, 200, 0), (3, 256, 200, 0)]


SIDES = (None, "all", "left", "right", "holes")
ALL_CASES = [
    *itertools.product(KINDS | OTHERS, CASES, SIDES),
    *((name, CASES[0], None) for name in PACKED),  # transformers detects these without a cache and padding alone
]


@pytest.mark.parametrize(
    ("name", "case", "side"), ALL_CASES, ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else None
)
def test_masks(name, case, side):
    """As a block mask, and through the function that layers call, whichever op it takes."""
    rows, columns, q_offset, kv_offset = case
    function = FUNCTIONS[name]
    padding = None if side is None else padding_of(side, q_offset + rows)
    terms = {"mask_function": function, "attention_mask": padding, "kv_offset": kv_offset}
    lengths = BATCH, rows, columns
    expected = hf.sdpa_mask(
        *lengths, q_offset, **terms, allow_is_causal_skip=False, use_vmap=name == "everything, by a tensor"
    )
    expected = expected.expand(BATCH, 1, -1, -1)
    q, k, v = (
        torch.randn(BATCH, 2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (rows, columns, columns)
    )
    wanted, _ = attend(MODULE, q, k, v, expected)
    for offset in (q_offset, torch.tensor(q_offset)):
        mask = make_mask(*lengths, offset, **terms)
        assert mask.shape == (BATCH, 1, rows, columns) and (
            mask.padding is None or side not in (None, "all") or rows < 100
        )
        if mask.padding is not None or (side or "all") == "all":
            assert torch.equal(mask.block_mask().to_dense(BATCH), expected)
        found, weights = attend(MODULE, q, k, v, mask)
        torch.testing.assert_close(found, wanted)
        assert weights is None and found.is_contiguous()


def operands(rows, columns, head_dim=64):
    return (torch.randn(BATCH, 2, n, head_dim).bfloat16() for n in (rows, columns, columns))


@pytest.fixture
def planned(monkeypatch):
    """[(op's name, its kernel's facts)] of the calls that layers make, which run on no device."""
    found = []

    def record(op):
        def plan(q, k, v, *mask, out=None, **options):
            found.append((op.__name__, explain(op, q, k, v, *mask, **options, arch="sm_90").facts))
            return q.new_zeros(*q.shape[:3], v.shape[-1])

        return plan

    for op in (attention, block_sparse_attention):
        monkeypatch.setattr(attention_function, op.__name__, record(op))
    with assume("sm_90"):
        yield found


@pytest.mark.parametrize(
    ("name", "side"),
    [*itertools.product(["causal", "sliding"], [None, "all", "left", "right"]), ("chunked", None), ("chunked", "left")],
)
def test_decoding_takes_one_kernel(planned, name, side):
    """Nothing that changes with every token is a constant of a kernel. Tokens behind padding are split among CTAs."""
    for length in (200, 201, 270):
        padding = None if side is None else padding_of(side, length)
        for columns in (length, 400):  # of a dynamic and of a static cache
            mask = make_mask(BATCH, 1, columns, length - 1, mask_function=FUNCTIONS[name], attention_mask=padding)
            attend(MODULE, *operands(1, columns), mask)
    assert {op for op, _ in planned} == {
        "block_sparse_attention" if side == "right" or name == "chunked" else "attention",
    }
    assert len({facts.blocks for _, facts in planned}) == 1
    if name != "chunked" and side != "right":
        assert {getattr(facts, "spans", False) for _, facts in planned} == {side == "left"}


def test_head_dims_are_padded(planned):
    out, _ = attend(MODULE, *operands(256, 256, 32), make_mask(BATCH, 256, 256))
    _, facts = planned.pop()
    assert out.shape == (BATCH, 256, 2, 32) and (facts.head_dim, facts.head_dim_v) == (64, 64)
    with pytest.raises(ValueError, match="q has head_dim 600; kernels exist for 64, 96, 128, 192, 256"):
        attend(MODULE, *operands(256, 256, 600), make_mask(BATCH, 256, 256))


def test_a_mask_is_made_once_for_all_layers(monkeypatch):
    mask = make_mask(BATCH, 300, 300, attention_mask=padding_of("left", 300))
    assert mask.block_mask() is mask.block_mask() and mask.contiguous() is mask and mask.to("cpu") is mask
    blocks = patterns.sliding_window((300, 300), (30, 0))
    assert mask.within(blocks) is mask.within(blocks)
    assert "Kind" in repr(mask) and str(mask) == repr(mask)
    moved = mask.to("meta")
    assert moved is mask.to("meta") and moved.device.type == "meta" and moved.padding.device.type == "meta"


def test_masks_and_tensors_must_agree():
    mask = make_mask(BATCH, 5, 7, 2)
    with pytest.raises(ValueError, match=r"batch size 2 and lengths \(5, 8\) of the layer, got 2 and \(5, 7\)"):
        attend(MODULE, *operands(5, 8), mask)


def test_without_a_mask():
    """Models that make none: `is_causal` of the call, then of the layer."""
    full, causal = ((torch.ones(6, 6) > 0)[None, None], (torch.ones(6, 6) > 0).tril()[None, None])
    bidirectional = SimpleNamespace(is_causal=False, training=False)
    q, k, v = operands(6, 6)
    for module, option, mask in itertools.product((MODULE, bidirectional), (None, True, False), (causal, full)):
        wanted = module.is_causal if option is None else option
        if wanted == (mask is causal):
            found, _ = attend(module, q, k, v, None, is_causal=option)
            torch.testing.assert_close(found, attend(module, q, k, v, mask)[0])
    with pytest.raises(ValueError, match="requires a mask if queries and keys differ in length, got 6 and 9"):
        attend(MODULE, *operands(6, 9), None)
    with pytest.raises(ValueError, match="requires a mask for its sliding_window of 4, got None"):
        attend(MODULE, q, k, v, None, sliding_window=4)
    with pytest.raises(TypeError, match="must be a 4-D tensor or a BlockMask here"):
        attend(MODULE, q, k, v, torch.ones(2, 6, dtype=torch.bool))


def test_lengths_of_packed_sequences_come_in_pairs():
    with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k must both be given or both be None"):
        attend(MODULE, *operands(6, 6), None, cu_seq_lens_q=torch.tensor([0, 12]))


@pytest.mark.parametrize("name", [*attention_function.REFUSED, "new_keyword"])
def test_keywords_that_are_refused(name):
    why = attention_function.REFUSED.get(name, f"the attention keyword '{name}' is unknown and may change the result")
    assert "attn_implementation" in why or name == "new_keyword"
    for value in (torch.ones(2), 0, True):
        with pytest.raises(ValueError, match=f"^SimpleNamespace: {re.escape(why)}"):
            attend(MODULE, *operands(6, 6), None, **{name: value})
    attend(MODULE, *operands(6, 6), None, **{name: None})


def test_keywords_that_change_nothing():
    q, k, v = operands(6, 6)
    expected, _ = attend(MODULE, q, k, v, None)
    keywords = {name: torch.ones(2) for name in attention_function.HARMLESS} | {"deterministic": True}
    assert torch.equal(attend(MODULE, q, k, v, None, **keywords, output_attentions=False)[0], expected)


@pytest.mark.parametrize("side", [None, "left"])
def test_models_may_read_the_mask_as_a_tensor(side):
    """As the indexers of DeepSeek-V3.2 and Qwen4 do: it is the bool tensor of "sdpa"."""
    padding = None if side is None else padding_of(side, 12)
    terms = {"mask_function": hf.sliding_window_causal_mask_function(5), "attention_mask": padding}
    mask = make_mask(BATCH, 9, 12, 3, **terms)
    expected = hf.sdpa_mask(BATCH, 9, 12, 3, **terms, allow_is_causal_skip=False).expand(BATCH, 1, -1, -1)
    other = torch.rand(BATCH, 1, 9, 12) < 0.5
    assert mask.dtype == torch.bool and mask.size(-1) == 12 and mask.shape == expected.shape
    pairs = [
        (mask[:, 0, 2:], expected[:, 0, 2:]),
        (mask & other, expected & other),
        (other & mask, expected & other),
        (~mask | other, ~expected | other),
        (mask.logical_not(), ~expected),
        (torch.where(mask, 0.0, 1.0), torch.where(expected, 0.0, 1.0)),
        (torch.cat([other, mask], -1), torch.cat([other, expected], -1)),
        (mask.masked_fill(other, False), expected & ~other),
    ]
    for found, wanted in pairs:
        assert torch.equal(found, wanted)
    q, k, v = operands(9, 12)
    torch.testing.assert_close(attend(MODULE, q, k, v, mask & other)[0], attend(MODULE, q, k, v, expected & other)[0])


def test_masks_are_no_block_masks_of_flex_attention():
    mask = make_mask(BATCH, 5, 7, 2)
    for name in ("kv_indices", "dq_kv_order", "seq_lengths"):
        assert not hasattr(mask, name)
        with pytest.raises(AttributeError, match=f"no attribute '{name}'.*use attn_implementation="):
            getattr(mask, name)
    for call in (mask.sparsity, mask.to_string, mask.as_tuple):
        with pytest.raises(AttributeError, match="it is not a FlexAttention BlockMask"):
            call()
    for copied in (copy.copy(mask), copy.deepcopy(mask)):
        assert copied.lengths == mask.lengths


def test_masks_that_are_added():
    """Float masks, as of models that make their own, alone and with a position bias."""
    q, k, v = operands(9, 12)
    seen = (torch.rand(BATCH, 1, 9, 12) < 0.5) | torch.eye(9, 12, dtype=torch.bool)
    bias = torch.randn(1, 2, 9, 12)
    expected, _ = attend(MODULE, q, k, v, seen)
    biased, _ = attend(MODULE, q, k, v, seen, position_bias=bias)
    for lowest in (torch.finfo(torch.float32).min, float("-inf")):
        added = torch.where(seen, 0.0, lowest)
        torch.testing.assert_close(attend(MODULE, q, k, v, added, sliding_window=3)[0], expected)
        torch.testing.assert_close(attend(MODULE, q, k, v, added, position_bias=bias)[0], biased)
        longer = torch.nn.functional.pad(added, (0, 5))  # of a static cache
        torch.testing.assert_close(attend(MODULE, q, k, v, longer)[0], expected)
    learned = bias.clone().requires_grad_()
    attend(MODULE, *(t.float() for t in (q, k, v)), learned)[0].sum().backward()
    assert learned.grad.abs().max() > 0
    with pytest.raises(ValueError, match=r"must broadcast to .* = \(2, 2, 9, 12\), got shape \(2, 1, 9, 11\)"):
        attend(MODULE, q, k, v, added[..., :11])
    with pytest.raises(ValueError, match="a position_bias or float attention_mask is not supported with score_mod"):
        attend(MODULE, q, k, v, added, score_mod=lambda score, b, h, q, kv: score)
    with pytest.raises(ValueError, match="a float attention_mask is not supported with cu_seq_lens"):
        cu = torch.tensor([0, 18])
        attend(MODULE, q, k[:, :, :9], v[:, :, :9], added[..., :9], cu_seq_lens_q=cu, cu_seq_lens_k=cu)


def test_operands_of_any_stride():
    q, k, v = operands(9, 12)
    expected, _ = attend(MODULE, q, k, v, make_mask(BATCH, 9, 12, 3))
    q, k, v = (t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (q, k, v))
    torch.testing.assert_close(attend(MODULE, q, k, v, make_mask(BATCH, 9, 12, 3))[0], expected)
