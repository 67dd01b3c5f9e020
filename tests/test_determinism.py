"""Bitwise identical and correct results in a thousand runs of products and of each schedule of attention.

Runs could differ where CTAs fetch their tiles from a counter, where parts of a result are combined, and where a barrier
is missing.
"""

from dataclasses import replace
from functools import partial, wraps

import pytest
import torch

from cute_kernels import gemm

from . import planted
from .calls import Case, attend, bits, dense, on_paths, repeated_attention, repeated_products
from .repeats import differing, faults, on_gpu

SMS = 132  # repeated_attention's sizes are for so many
FULL = partial(attend, "dense", 3, 4, 2, 1000, 1100, 64)


@pytest.mark.gpu
@pytest.mark.determinism
@pytest.mark.slow
def test_same_bits_in_turns(path):
    """Each call finds caches, memory and clocks as another kernel left them."""
    cases = on_paths([*repeated_products(4), *repeated_attention(4), FULL], [path])
    assert faults(on_gpu(cases), 1000) == []


@pytest.mark.gpu
@pytest.mark.determinism
def test_same_bits_beside_another_stream(path):
    """A CTA finds its neighbors' tiles taken in another order when another stream takes some of the SMs."""
    other, x = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    for call in on_gpu(on_paths([*repeated_attention(4), FULL][:4], [path])):
        first, wrong = bits(call.run()), torch.zeros((), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        for turn in range(200):
            with torch.cuda.stream(other):
                torch.mm(x[: 64 + 64 * (turn % 7)], x)
            wrong += (bits(call.run()) != first).any()
        torch.cuda.synchronize()
        assert int(wrong) == 0, call.name


def test_tiles_are_drawn_and_parts_combined(emulated):
    """With 132 SMs each sm_90 kernel has more tiles than CTAs at once, or is split."""
    for case in on_paths(repeated_attention(4), ["sm_90"]):
        call = case()
        facts, (*_, ctas) = call.plan().facts, call.plan().scalars
        if call.splits:
            assert facts.split
            continue
        assert facts.config.dynamic and ctas == SMS * facts.config.ctas
        q, cu_seqlens = call.args[0], call.terms.get("cu_seqlens_q")
        lengths = [q.shape[-2]] * q.shape[0] if cu_seqlens is None else cu_seqlens.diff().tolist()
        tiles = sum(-(-rows // facts.config.tile_m) for rows in lengths) * q.shape[1]
        assert tiles > ctas, f"{case.name}: {tiles} tiles, {ctas} CTAs"


@pytest.mark.parametrize("every", [2, 5])
def test_rare_faults_are_counted(emulated, every):
    """In the output and in the LSE, among calls that are steady."""
    packed = partial(attend, "packed", 5, 4, 2, 200, 333, 64, window_size=(70, 30))
    steady = Case(partial(dense, 200, 136, 72, dtype=torch.float16), "sm_90")()
    for where in (0, 1):
        call, runs = Case(packed, "sm_90")(), []

        @wraps(call.op)
        def rare(*args, where=where, runs=runs, op=call.op, **terms):
            found = op(*args, **terms)
            runs.append(found)
            if len(runs) % every == 0:
                found[where][(0,) * found[where].dim()] += 1e-2
            return found

        assert differing([steady, replace(call, op=rare)], 14) == [0, 14 // every]
    (problem,) = faults([steady, replace(steady, op=planted.wrong(gemm))], 3)
    assert "err" in problem
