"""A thousand runs of each schedule of attention, into memory that is full of NaN: the same bits, and the right ones.

What could differ between runs is where CTAs fetch their tiles from a counter, and where parts of a result are combined.
Without a GPU two runs of each, with torch in the kernels' place.
"""

import pytest
import torch

from bench.gates.determinism import repeats

from .calls import Case, bits, on_paths, repeated_attention

RUNS = {"cpu": 2, "cuda": 1000}
SMS = 132  # of which repeated_attention knows


def cases(device):
    return on_paths(repeated_attention(1 if device == "cpu" else 4), [None])


@pytest.mark.parametrize("number", range(len(cases("cuda"))), ids=[case.name for case in cases("cuda")])
def test_same_bits(device, path, number):
    call = cases(device)[number](device)
    assert call.complaint() == ""
    assert repeats([call], RUNS[device]) == [0], call.plan()


@pytest.mark.gpu
def test_same_bits_beside_another_stream(path):
    """A CTA finds its neighbours' tiles taken in another order when another stream takes some of the SMs."""
    other, x = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    for case in cases("cuda")[:4]:
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
    for case in cases("cuda"):
        call = Case(case.make, "sm_90")()
        facts, (*_, ctas) = call.plan().facts, call.plan().scalars
        if call.splits:
            assert facts.split
            continue
        assert facts.config.dynamic and ctas == SMS * facts.config.ctas
        q, starts = call.args[0], call.terms.get("cu_seqlens_q")
        lengths = [q.shape[-2]] * q.shape[0] if starts is None else starts.diff().tolist()
        tiles = sum(-(-rows // facts.config.tile_m) for rows in lengths) * q.shape[1]
        assert tiles > ctas, f"{case.name}: {tiles} tiles, {ctas} CTAs"
