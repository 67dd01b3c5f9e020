"""The ring of buffers through which a warpgroup of the sm_90 store passes its chunks."""

import shutil

import pytest

from cute_kernels.matmul.config import EpilogueSpec
from cute_kernels.matmul.epilogue.store_sm90 import StoreSm90
from cute_kernels.matmul.family import DENSE
from cute_kernels.testing.reference import normal, poisoned

from ..emulator.emulate import COMPILER, emulate_entry, emulator


@pytest.mark.parametrize("buffers", [1, 2, 3, 4])
@pytest.mark.parametrize("total", range(1, 9))
def test_no_buffer_is_written_while_a_store_reads_it(buffers, total):
    """As if every store took as long as it may: it is done only when a wait asks for it."""
    store = StoreSm90.__new__(StoreSm90)
    store.buffers, reading = buffers, []  # buffers of the stores that are not done, the oldest first
    for _ in range(4):  # tiles
        for number in range(total):
            allowed = store.pending(number, total)
            reading = reading[len(reading) - allowed :] if allowed < len(reading) else reading
            assert number % buffers not in reading
            reading.append(number % buffers)


@pytest.mark.sm_90
@pytest.mark.parametrize("waits", [True, False])
def test_a_tile_of_one_chunk_on_the_emulator(waits, monkeypatch):
    """Tiles one after the other, each with one chunk and a ring of two: without the wait their numbers are mixed up."""
    if shutil.which(COMPILER) is None:
        pytest.skip("the emulator needs a C++ compiler")
    facts = next(f for f in DENSE.catalogue("sm_90") if of_one_chunk(f))
    if not waits:
        monkeypatch.setattr(StoreSm90, "pending", lambda store, number, total: store.buffers - 1)
    run = emulate_entry(facts.arch, DENSE.entry(facts), DENSE.arguments(facts))
    a, b, d = normal(256, 64), normal(256, 64).t(), poisoned(256, 256)
    with emulator(sms=2, seed=7):  # one cluster
        run(a, b, d, 1.0, 1.0, 2, 2)
    error = (d.double() - a.double() @ b.double()).abs().max()
    assert error < 0.2 if waits else not error < 5


def of_one_chunk(facts) -> bool:
    """For tiles (64, 64), of which two warpgroups store 32 columns each, without terms."""
    plain = facts.epilogue == EpilogueSpec() and facts.out_dtype == facts.dtype
    config = facts.config
    tile = config.tile_m, config.tile_n, config.warps_n, config.ring
    return plain and facts.path == "sm_90" and tile == (64, 64, 2, 2)
