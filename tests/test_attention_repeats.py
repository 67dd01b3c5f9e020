"""A thousand runs of each schedule of attention, into memory that is full of NaN: the same bits, and the right ones.

What could differ between runs is where CTAs fetch their tiles from a counter, and where parts of a result are combined.
"""

from functools import partial

import pytest
import torch

from bench.gates.determinism import repeats

from .calls import Case, attend, bits, on_paths, repeated_attention

SMS = 132  # of which repeated_attention knows


def repeated(device):
    scale = 1 if device == "cpu" else 4
    full = partial(attend, "dense", 3, 4, 2, 250 * scale, 275 * scale, 64)
    return on_paths([*repeated_attention(scale), full], [None])


@pytest.mark.parametrize("number", range(len(repeated("cuda"))), ids=[case.name for case in repeated("cuda")])
def test_same_bits(device, path, number):
    call = repeated(device)[number](device)
    assert call.complaint() == ""
    assert repeats([call], 2 if device == "cpu" else 1000) == [0], call.plan()


@pytest.mark.gpu
def test_same_bits_beside_another_stream(path):
    """A CTA finds its neighbours' tiles taken in another order when another stream takes some of the SMs."""
    other, x = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    for case in repeated("cuda")[:4]:
        call = case("cuda")
        first, wrong = bits(call.run()), torch.zeros((), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        for turn in range(200):
            with torch.cuda.stream(other):
                torch.mm(x[: 64 + 64 * (turn % 7)], x)
            wrong += (bits(call.run()) != first).any()
        torch.cuda.synchronize()
        assert int(wrong) == 0, case.name


def test_tiles_are_drawn_and_parts_combined(emulated):
    """With 132 SMs each sm_90 kernel has more tiles than CTAs at once, or is split."""
    for case in repeated("cuda")[:-1]:
        call = Case(case.make, "sm_90")()
        facts, (*_, ctas) = call.plan().facts, call.plan().scalars
        if call.splits:
            assert facts.split
            continue
        assert facts.config.dynamic and ctas == SMS * facts.config.ctas
        q, cu_seqlens = call.args[0], call.terms.get("cu_seqlens_q")
        lengths = [q.shape[-2]] * q.shape[0] if cu_seqlens is None else cu_seqlens.diff().tolist()
        tiles = sum(-(-rows // facts.config.tile_m) for rows in lengths) * q.shape[1]
        assert tiles > ctas, f"{case.name}: {tiles} tiles, {ctas} CTAs"
