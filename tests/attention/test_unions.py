"""Union tiles of lists of KV blocks: the kernel on the emulator and on GPUs, against sets of Python integers."""

import pytest
import torch

from attention.selected.unions.config import SIDE, facts_for, tokens_of
from attention.selected.unions.dispatch import union_tiles
from attention.selected.unions.family import UNIONS
from cute_kernels.testing.reference import poisoned_empty
from cute_kernels.testing.selected_blocks import similar_lists

from ..emulator.ops import needs_compiler, on_emulator
from .parts import captured, nothing_waits
from .selected_parts import lists

EMULATED = [pytest.param(arch, marks=[needs_compiler, getattr(pytest.mark, arch)]) for arch in ("sm_80", "sm_90")]
WHERE = pytest.mark.parametrize("where", [*EMULATED, pytest.param("cuda", marks=pytest.mark.gpu)])


def made(where: str, indices, *terms):
    """union_tiles of CPU lists on the emulator or a GPU, into memory that is -1."""
    if where == "cuda":
        with poisoned_empty():
            return [t.cpu() for t in union_tiles(indices.cuda(), *terms)]
    with on_emulator(where), poisoned_empty():
        return union_tiles(indices, *terms)


def check(where: str, indices, block_size: int, kv_blocks: int, packed: int) -> None:
    blocks, count, bits = made(where, indices, block_size, kv_blocks, packed)
    batch, length, groups, top = indices.shape
    tiles, tokens, per_step = -(-length * packed // SIDE), tokens_of(packed), SIDE // block_size
    per_word = min(per_step, 32)
    steps = -(-min(kv_blocks, tokens * top) // per_step)
    assert blocks.shape == (batch, groups, tiles, steps * per_step) and count.shape == (batch, groups, tiles)
    assert bits.shape == (batch, groups, tiles, steps * per_step // per_word, tokens)
    for b in range(batch):
        for g in range(groups):
            selected = [{n for n in row if 0 <= n < kv_blocks} for row in indices[b, :, g].tolist()]
            for m in range(tiles):
                first, last = m * SIDE // packed, min((m * SIDE + SIDE - 1) // packed, length - 1)
                own = selected[first : last + 1]
                union = sorted(set().union(*own))
                used = -(-len(union) // per_step) * per_step
                assert count[b, g, m] == len(union)
                padded = union + union[-1:] * (used - len(union))
                assert blocks[b, g, m, :used].tolist() == padded
                shifts = torch.arange(per_word, dtype=torch.int32)
                found = (bits[b, g, m, : used // per_word, :, None] >> shifts & 1).transpose(1, 2).flatten(0, 1)
                expected = torch.zeros(used, tokens, dtype=torch.int32)
                for t, mine in enumerate(own):
                    expected[: len(union), t] = torch.tensor([n in mine for n in union], dtype=torch.int32)
                assert torch.equal(found, expected)


# name -> (shape of the lists less top, top, block_size, kv_blocks, packed)
CASES = {
    "QSA": ((1, 50, 1), 40, 4, 700, 12),
    "MSA": ((2, 17, 2), 16, 128, 40, 16),
    "NSA": ((1, 33, 2), 5, 64, 45, 16),
    "blocks of 16": ((1, 60, 1), 33, 16, 300, 7),
    "blocks of 1": ((1, 20, 1), 70, 1, 5000, 16),
    "one row per token": ((1, 200, 1), 20, 4, 600, 1),
    "128 rows per token": ((1, 3, 2), 3, 64, 9, 128),
    "one entry": ((1, 9, 1), 1, 64, 2, 32),
    "long lists": ((1, 4, 1), 600, 4, 900, 64),
    "one block": ((1, 40, 1), 2, 128, 1, 4),
}


@pytest.mark.parametrize("name", CASES)
@WHERE
def test_lists(where, name):
    lead, top, *terms = CASES[name]
    check(where, lists(*lead, top=top, blocks=terms[1]), *terms)


@WHERE
def test_similar_lists(where):
    """Ascending, most of their entries are in one word of bits."""
    check(where, similar_lists(40, 512, 64)[None], 4, 512, 12)


@WHERE
def test_more_bits_than_shared_memory_holds(where):
    """128 tokens with disjoint lists need 32 words of each token; 16 are made at once."""
    check(where, torch.arange(1024, dtype=torch.int32).view(1, 128, 1, 8), 4, 1024, 1)


@WHERE
def test_entries_that_are_no_block(where):
    indices = lists(1, 30, 1, top=9, blocks=60)
    others = torch.tensor([60, -2, 2**31 - 1, -(2**31)], dtype=torch.int32).expand(1, 30, 1, 4)
    check(where, torch.cat([indices, others, indices[..., :3]], -1), 16, 60, 12)
    check(where, torch.full((1, 30, 1, 4), -1, dtype=torch.int32), 16, 60, 12)


@WHERE
def test_strided_lists(where):
    indices = lists(1, 2, 30, top=9, blocks=60)
    check(where, indices.transpose(1, 2), 64, 60, 16)
    check(where, indices.transpose(1, 3), 64, 60, 16)
    check(where, indices[..., ::2].transpose(1, 2), 64, 60, 16)


@pytest.mark.parametrize("shape", [(0, 9, 1, 4), (1, 0, 1, 4), (1, 9, 1, 0)])
def test_no_lists(shape):
    with on_emulator("sm_90"):
        blocks, count, bits = union_tiles(torch.zeros(shape, dtype=torch.int32), 64, 7, 16)
    assert count.shape == (shape[0], 1, -(-shape[1] * 16 // SIDE)) and not count.any()
    assert blocks.shape[:3] == bits.shape[:3] == count.shape


def test_tokens_of():
    for packed in (1, 2, 3, 7, 8, 12, 16, 48, 100, 128):
        tiles = range(2 * packed)
        most = max((m * SIDE + SIDE - 1) // packed - m * SIDE // packed + 1 for m in tiles)
        assert tokens_of(packed) == most


def test_too_many_blocks():
    facts = facts_for("sm_86", 1, 2**20, 2048)
    assert UNIONS.unsupported(facts) == (
        "1048576 KV blocks need 270368 bytes of shared memory, sm_86 has 101376; use at most 360448 blocks, or a "
        "larger block_size"
    )
    with on_emulator("sm_86"), pytest.raises(ValueError, match="selected_attention: 1048576 KV blocks need"):
        union_tiles(torch.zeros(1, 9, 1, 4, dtype=torch.int32), 1, 2**20, 16)
    assert not UNIONS.unsupported(facts_for("sm_86", 1, 360448, 2048))


@pytest.mark.gpu
def test_a_graph_reads_the_lists_at_each_replay():
    indices = lists(1, 300, 2, top=16, blocks=100, device="cuda")
    call = lambda: union_tiles(indices, 64, 100, 16)  # noqa: E731
    call()
    with nothing_waits():
        call()
    graph, out = captured(call)
    for _ in range(2):
        indices.copy_(lists(1, 300, 2, top=16, blocks=100, device="cuda"))
        graph.replay()
        again = call()
        assert torch.equal(out.counts, again.counts)
        assert torch.equal(out.blocks[0, 0, 0, : out.counts[0, 0, 0]], again.blocks[0, 0, 0, : out.counts[0, 0, 0]])


@pytest.mark.gpu
@pytest.mark.parametrize(("top", "block_size", "packed"), [(512, 4, 12), (16, 128, 16)])
def test_long_sequences(top, block_size, packed):
    """2,048 tokens of 131,072 keys, in the bitmaps and with the lists of QSA and MSA."""
    check("cuda", lists(1, 2048, 1, top=top, blocks=131072 // block_size), block_size, 131072 // block_size, packed)
