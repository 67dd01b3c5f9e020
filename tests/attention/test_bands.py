"""Masks whose kernels prefetch scores in backward: bands, of rows and columns or of shards' positions."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from attention import create_block_mask, patterns
from attention.backward.config import AheadConfig, BackwardFacts
from attention.backward.heuristics import pick
from attention.distributed.plan import plans
from attention.forward.config import BlockKind
from attention.masks.bands import bounds_of
from attention.masks.element_mask import for_kernel, trace_mask

from .test_distributed import documents

CPU = torch.device("cpu")


def program_of(mask):
    return trace_mask(mask.mask_mod, CPU).program


@pytest.mark.parametrize("length", [1000, 1024])
def test_bands(length):
    lengths = length, length
    causal = patterns.causal(lengths)
    flex = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, *lengths)
    for mask in (causal, patterns.causal((length, length + 77)), flex):
        assert bounds_of(program_of(mask)) == 1
    windows = [patterns.sliding_window(lengths, sides) for sides in ((200, 0), (None, 30), (128, 128))]
    expected = 1, 1, 2, 1, 2, 1
    for mask, bounds in zip((causal, flex, *windows, patterns.causal(lengths, (64, 64))), expected, strict=True):
        for plan in plans(mask, 3):
            assert bounds_of(program_of(plan.mask)) == bounds
    with_global = patterns.sliding_window(lengths, (200, 0), global_columns=10)
    others = [
        *windows[::2],
        with_global,
        documents(length),
        *(plans(m, 3)[0].mask for m in (with_global, documents(length))),
    ]
    others.append(create_block_mask(lambda b, h, q, kv: q > kv, None, None, *lengths))
    assert all(bounds_of(program_of(mask)) is None for mask in others)


def test_numbers_stay_constants():
    """Numbers of the masks that programs are compared with are not remembered."""
    code = (
        "import torch; from attention import patterns; from attention.masks import bands; "
        "from attention.masks.element_mask import trace_mask; bands._bands(); "
        "print(trace_mask(patterns.causal((256, 256)).mask_mod, torch.device('cpu')).program)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "const 0" in done.stdout and "argument" not in done.stdout


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_kernels_prefetch_scores(dim):
    causal = patterns.causal((1000, 1000))
    for mask in (causal, plans(causal, 3)[0].mask):
        blocks = BlockKind(128, 128, for_kernel(trace_mask(mask.mask_mod, CPU))[0])
        facts = BackwardFacts("sm_90a", "sm_90", None, "bfloat16", dim, dim, blocks=blocks)
        for other in (facts, replace(facts, split_heads=True), replace(facts, deterministic=True)):
            assert isinstance(pick(other).config, AheadConfig)
        assert not isinstance(pick(replace(facts, softcap=True)).config, AheadConfig)
