"""The ring of buffers through which a warpgroup of the sm_90 store passes its chunks."""

import pytest

from cute_kernels.matmul.store_sm90 import StoreSm90


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
