"""A thousand runs of each schedule of attention, into memory that is full of NaN: the same bits, and the right ones.

What could differ between runs is where CTAs fetch their tiles from a counter, and where parts of a result are combined.
Without a GPU two runs of each, with torch in the kernels' place.
"""

import pytest
import torch

import cute_kernels
from bench.gates.determinism import attention_products, bits, repeats

from .reference import poisoned_empty

RUNS = {"cpu": 2, "cuda": 1000}
SMS = 132  # of which attention_products knows


def calls(device):
    return attention_products(1 if device == "cpu" else 4)


@pytest.mark.parametrize("number", range(len(calls("cuda"))), ids=[case.name for case in calls("cuda")])
def test_same_bits(device, path, number):
    call = calls(device)[number].call(device)
    with poisoned_empty():
        found = call.run()
    assert call.complaint(found) == "", call.plan()
    assert repeats(call, RUNS[device]) == 0, call.plan()


@pytest.mark.gpu
def test_same_bits_beside_another_stream(path):
    """A CTA finds its neighbours' tiles taken in another order when another stream takes some of the SMs."""
    other, x = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    for case in calls("cuda")[:4]:
        call = case.call("cuda")
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
    with cute_kernels.path("sm_90"):
        for case in calls("cuda"):
            call = case.call()
            facts, (*_, ctas) = call.plan().facts, call.plan().scalars
            if case.splits:
                assert facts.split
                continue
            assert facts.config.dynamic and ctas == SMS * facts.config.ctas
            lengths = [q.shape[-2] for _, q, *_ in call.pieces()]
            items = case.batch if len(lengths) == 1 else 1
            tiles = sum(-(-rows // facts.config.tile_m) for rows in lengths) * items * case.heads
            assert tiles > ctas, f"{case.name}: {tiles} tiles, {ctas} CTAs"
