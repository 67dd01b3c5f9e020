"""FP8 attention without a GPU: kernel selection and errors."""

import contextlib
import re

import cutlass
import cutlass.cute as cute
import pytest
import torch

import cute_kernels
from attention import attention, block_sparse_attention, scaled_dot_product_attention
from attention.forward import heuristics
from attention.forward.fp8.transposed_values import place_of
from cute_kernels import explain
from cute_kernels.runtime.compile import compile_for
from cute_kernels.runtime.device import assume
from cute_kernels.tile.hopper import smem_layout

from .fp8_parts import E4M3, E5M2, FAST, SCALES, case, converting
from .parts import BF16, FP32, FP64, packed, qkv

# Plans


@pytest.mark.parametrize("tile", [32, 64, 96, 128, 160, 192])
def test_values_lie_as_in_shared_memory(tile):
    """16 keys are in one piece, and no two at one place."""
    found = {}

    @cute.jit
    def trace():
        layouts = {dim: smem_layout(cutlass.Float8E4M3FN, dim, tile, 1, True) for dim in dims}
        found["swizzles"] = {dim: str(layout.inner) for dim, layout in layouts.items()}
        found["places"] = [cute.crd2idx((d, column, 0), layouts[dim].outer) for dim, d, column in elements]

    dims = 64, 96
    elements = [(dim, d, column) for dim in dims for d in range(dim) for column in range(0, tile, 16)]
    compile_for("sm_90a", trace)
    for (dim, d, column), at in zip(elements, found["places"], strict=True):
        bits, base, shift = map(int, re.findall(r"\d+", found["swizzles"][dim]))
        assert base == 4 and at ^ (at >> shift & (1 << bits) - 1 << base) == place_of(column, d, dim, tile)
    for dim in heuristics.HEAD_DIMS:
        places = {place_of(column, d, dim, tile) for d in range(dim) for column in range(0, tile, 16)}
        assert places == set(range(0, dim * tile, 16))


# Errors

SCALE = torch.ones(1)
WRONG = [
    ({"q": BF16}, TypeError, "require the decode kernel, .*got 2000 queries"),
    ({"k": BF16}, TypeError, "k is torch.bfloat16; with an FP8 q, q and k must be torch.float8_e4m3fn"),
    ({"v": FP32}, TypeError, "v is torch.float32; with an FP8 q, .* or 16-bit"),
    ({"v": BF16} | FAST, TypeError, "use_fast_accum requires q, k and v in torch.float8_e4m3fn, got "),
    ({"use_fast_accum": 1}, TypeError, "use_fast_accum must be True or False, got 1"),
    (
        {"q": E5M2, "k": E5M2, "v": E5M2},
        TypeError,
        "q is torch.float8_e5m2; .* Decoding takes a BF16 q with FP8 caches",
    ),
    ({"q": BF16, "k": BF16, "v": BF16, "q_descale": SCALE}, TypeError, "q is torch.bfloat16 and has a q_descale"),
    ({"q_descale": 2.0}, TypeError, "q_descale must be a torch.Tensor"),
    ({"k_descale": SCALE.double()}, TypeError, "k_descale is torch.float64; it must be torch.float32"),
    ({"q_descale": torch.ones(3)}, ValueError, "q_descale has shape .3,.; it must be .1,., .4,. or .2, 4.,"),
    ({"k_descale": torch.ones(2, 4)}, ValueError, "k_descale has shape .2, 4.; it must be .1,., .2,. or .2, 2."),
    ({"v_descale": torch.ones(2, 2, 3)}, ValueError, "or .2, 2, 2. of blocks of 128 tokens"),
    ({"v_descale": torch.ones(1, device="meta")}, ValueError, "v_descale is on meta"),
    ({"out": torch.empty(2, 4, 200, 64, dtype=FP64)}, TypeError, "out is torch.float64; for an FP8 q it must be"),
    ({"out": torch.empty(2, 4, 200, 64, dtype=E4M3)}, TypeError, "out is torch.float8_e4m3fn; for an FP8 q it must be"),
    (
        {"seqused_k": torch.ones(2, dtype=torch.int32)},
        TypeError,
        "q must be torch.bfloat16 or torch.float16 with an FP8 cache",
    ),
    (
        {"q": BF16, "seqused_k": torch.ones(2, dtype=torch.int32), "q_descale": SCALE},
        TypeError,
        "q_descale requires FP8 q",
    ),
]


@pytest.mark.parametrize(("change", "error", "words"), [pytest.param(*each, id=each[2]) for each in WRONG])
@pytest.mark.parametrize("on", [None, "sm_90"])
def test_errors(change, error, words, on):
    call = case(scales=None)
    for name, value in change.items():
        call[name] = call[name].to(value) if isinstance(value, torch.dtype) else value
    if call["q"].dtype is BF16 and call["k"].dtype is E4M3:
        call |= {n: torch.zeros(2, 64, 2000, 64).to(call[n].dtype) for n in "qkv"}  # many queries
        if on is None:
            return  # the CPU's reference decodes any number
    with assume(on, 132) if on else contextlib.nullcontext():
        with pytest.raises(error, match=words):
            explain(attention, **call)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
def test_other_architectures(arch):
    with assume(arch, 100), pytest.raises(TypeError, match=rf"the sm_90 path \(WGMMA\), got {arch}, .*bfloat16"):
        explain(attention, **case(scales=None))
    with assume("sm_90", 132), cute_kernels.path("sm_80"), pytest.raises(TypeError, match="path sm_80"):
        explain(attention, **case(scales=None))


def test_what_has_no_kernel():
    with assume("sm_90", 132):
        wide_head = torch.zeros(1, 1, 70, 512).to(E4M3)
        with pytest.raises(TypeError, match="head_dim_v of FP8 attention must be 64, .*, got 512 and 512"):
            explain(attention, wide_head, wide_head, wide_head)
    call = case(scales=None)
    with pytest.raises(TypeError, match="with an FP8 q, q and k must be torch.float8_e4m3fn"):
        block_sparse_attention(**call | {"k": call["k"].to(BF16)}, block_mask=torch.ones(2, 2, dtype=torch.bool))
    call = packed([5, 6], [5, 6])
    with pytest.raises(TypeError, match="with packed sequences k and v are of q's dtype"):
        attention(**call | {n: call[n].to(E4M3) for n in "kv"})
    with pytest.raises((TypeError, ValueError)):
        scaled_dot_product_attention(*(t.to(E5M2) for t in qkv()))


def test_more_items_than_a_grid_counts():
    q = torch.empty(70_000, 1, 16, 64, dtype=E4M3, device="meta")
    with pytest.raises(ValueError, match="FP8 v has 70000 matrices.*pass a 16-bit v"):
        explain(attention, q, q, q, arch="sm_90", **FAST)
    with converting(False):  # the other kernel would be faster, if it could
        assert explain(attention, q, q, q, arch="sm_90").facts.converts
    assert explain(attention, q, q, q.to(BF16), arch="sm_90").facts.given_v == "bfloat16"


def test_gradients_raise():
    call = case(scales=None) | {"sinks": torch.zeros(4, requires_grad=True)}
    mask = torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="gradients are not supported with seqused_k, page_table or FP8 k and v"):
        attention(**call)
    with pytest.raises(RuntimeError, match="gradients are not supported with seqused_k, page_table or FP8 k and v"):
        block_sparse_attention(**call, block_mask=mask)
    scaled = case(scales=(1,))
    scaled["v_descale"].requires_grad_()
    with pytest.raises(RuntimeError, match="does not compute gradients"):
        attention(**scaled)
    with torch.no_grad():
        attention(**scaled)


@pytest.mark.parametrize("name", SCALES)
def test_scales_of_16_bits_raise(name):
    """Also where gradients are asked for: nothing would read the scales."""
    q, k, v = qkv()
    mask = torch.ones(2, 2, dtype=torch.bool)
    for differentiable in (False, True):
        q.requires_grad_(differentiable)
        with pytest.raises(TypeError, match="scale"):
            attention(q, k, v, **{name: SCALE})
        with pytest.raises(TypeError, match="scale"):
            block_sparse_attention(q, k, v, mask, **{name: SCALE})
