"""The sm_80 attention kernel's copies and reads without a GPU: its own functions on Python numbers."""

import itertools

import pytest

from attention.decode import heuristics
from attention.forward.config import DecodeFacts, FlashFacts
from attention.forward.heuristics import HEAD_DIMS, candidates_sm80
from attention.forward.mainloop_sm80 import first_vector, lines_at_once, operand_tiles, vectors
from cute_kernels.arch import ARCHS

DIMS = list(itertools.product(HEAD_DIMS, HEAD_DIMS))
FORWARD = {(*dims, config) for spec in ARCHS.values() for dims in DIMS for config in candidates_sm80(spec, *dims)}
DECODING = {  # of every architecture, with and without pages
    (d, dv, heuristics.pick(DecodeFacts(spec.target, "sm_80", None, head_dim=d, head_dim_v=dv, page_size=size)).config)
    for spec, (d, dv), size in itertools.product(ARCHS.values(), DIMS, (0, 16))
}
CASES = sorted(FORWARD | DECODING, key=str)
every_config = pytest.mark.parametrize(
    "case", [case for case in CASES if case[0] == case[1] and case in FORWARD], ids=str
)


def tiles(case) -> tuple:
    d, dv, config = case
    return operand_tiles(FlashFacts("sm_80", "sm_80", config, head_dim=d, head_dim_v=dv))


def copied(op) -> dict:
    """Byte of the tile -> (line, element) of the vector that is copied there."""
    places = {}
    for thread in range(op.threads):
        line, element = first_vector(op, thread)
        if lines_at_once(op) > op.lines and line >= op.lines:
            continue
        to = op.offset(line, element * op.element.width)
        for lines, byte in vectors(op):
            x, add = op.split(lines, byte)
            at = (to ^ x) + add
            assert at % 16 == 0 and 0 <= at < op.bytes and at not in places, "out of the tile, or copied twice"
            places[at] = (line + lines, element + byte // 2)
    return places


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_element_is_copied_once(case):
    for op in tiles(case):
        elements = range(0, op.line_bytes // op.element.width, op.vector)
        expected = {(line, e) for line in range(op.lines) for e in elements}
        places = copied(op)
        assert set(places.values()) == expected and len(places) == len(expected)


@every_config
def test_fragments_are_read_from_where_they_were_copied(case):
    """All of ldmatrix's rows, of all lanes, MMA steps and 16 rows; and without bank conflicts."""
    q, k, v = tiles(case)
    for op, warps in ((q, q.warps), (k, 1), (v, 1)):
        places, read = copied(op), set()
        for warp in range(warps):
            base = warp * op.span * op.line_bytes if op is q else 0
            for step in range(op.tile_k // 16):
                for i in range(op.span // 16):
                    x, add = op.step(i, step)
                    at = [base + (op.lane_offset(lane, 0) ^ x) + add for lane in range(32)]
                    for lane, address in enumerate(at):
                        matrix, r = divmod(lane, 8)
                        # Of A the second matrix is 8 rows down, of B 8 columns of k on.
                        row_half, k_half = (matrix >> 1, matrix & 1) if op.is_b else (matrix & 1, matrix >> 1)
                        row, col = warp * op.span + 16 * i + 8 * row_half, 16 * step + 8 * k_half
                        assert places[address] == ((row + r, col) if op.k_major else (col + r, row))
                        read.add(places[address])
                    for matrix in range(4):
                        assert len({a // 16 % 8 for a in at[8 * matrix : 8 * matrix + 8]}) == 8, "bank conflict"
        assert read == set(places.values())


@every_config
def test_copies_hit_all_banks(case):
    """Eight neighboring threads write at once."""
    for op in tiles(case):
        for first in range(0, op.threads, 8):
            at = [
                op.offset(line, element * op.element.width)
                for line, element in (first_vector(op, first + t) for t in range(8))
            ]
            assert len({a // 16 % 8 for a in at}) == 8
