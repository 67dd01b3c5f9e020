"""BlockMask.from_indices with block_sizes: tiles of a video that end in padding, forward and backward."""

import pytest
import torch

from attention import BlockMask, block_sparse_attention, torch_op
from attention.masks import element_mask
from cute_kernels.testing.reference import normal

from .parts import captured, check, nothing_waits, qkv
from .parts import where_fixture as where_fixture
from .test_gradients import check as check_gradients
from .test_gradients import machine_fixture as machine_fixture

LENGTHS = 384, 450  # the last block of columns is cut


def sized(side: int, device="cpu", mask_mod=None, columns=LENGTHS[1], sizes=None) -> BlockMask:
    """Three blocks of each row in any order, for each of 4 heads, and blocks of any number of valid keys."""
    cols = -(-columns // side)
    indices = torch.rand(1, 4, -(-LENGTHS[0] // side), cols).argsort(-1)[..., :3].int()
    if sizes is None:
        sizes = torch.randint(1, side + 1, (cols,), dtype=torch.int32)
        sizes[0], sizes[1] = 0, side
    terms = {"lengths": (LENGTHS[0], columns), "mask_mod": mask_mod, "block_sizes": sizes.to(device)}
    return BlockMask.from_indices(indices.to(device), (side, side), **terms)


def earlier(b, h, q, kv):
    return kv <= q


def test_elements():
    sizes = torch.tensor([3, 64, 0, 1, 64, 64, 64, 2], dtype=torch.int32)
    seen = (torch.arange(450) % 64 < sizes.repeat_interleave(64)[:450])[None, None, None]
    for mask_mod in (None, earlier):
        mask = sized(64, mask_mod=mask_mod, sizes=sizes)
        listed = mask.tables()[0].repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :384, :450]
        expected = listed & seen
        if mask_mod is not None:
            expected = expected & (torch.arange(450) <= torch.arange(384)[:, None])
        assert torch.equal(mask.to_dense(), expected)


@pytest.mark.parametrize("side", [64, 128])
@pytest.mark.parametrize("mask_mod", [None, earlier])
def test_calls(where, side, mask_mod):
    mask = sized(side, where, mask_mod)
    check(*qkv(*LENGTHS, B=1, device=where), block_mask=mask)


def test_gradients(machine):
    device, kernels, _ = machine
    mask = sized(64, device)
    q, k, v = (t.requires_grad_() for t in qkv(*LENGTHS, B=1, heads=2, H=4, device=device))
    out = block_sparse_attention(q, k, v, mask)
    dout = normal(*out.shape, device=device)
    with kernels():
        got = torch.autograd.grad(out, (q, k, v), dout)
    check_gradients(got, q, k, v, mask.to_dense(1, 4), dout, None)


def test_the_mask_is_traced_once(monkeypatch):
    monkeypatch.setattr(element_mask, "_PROGRAMS", {})
    sized(64).to_dense()
    monkeypatch.setattr(element_mask, "trace", lambda *_: pytest.fail("traced again"))
    sized(64, columns=200).to_dense()


def test_the_registered_op():
    mask = sized(64)
    q, k, v = qkv(*LENGTHS, B=1)
    expected = block_sparse_attention(q, k, v, mask)
    rebuilt = torch_op.block_mask_of(*torch_op.crossing(mask))
    assert rebuilt.equal_rows and torch.equal(block_sparse_attention(q, k, v, rebuilt), expected)
    indices, sizes = mask.kv_indices, mask.mask_mod.sizes

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q, k, v, indices, sizes):
        mask = BlockMask.from_indices(indices + 0, (64, 64), lengths=LENGTHS, block_sizes=sizes + 0)
        return block_sparse_attention(q, k, v, mask) * 1

    assert torch.equal(compiled(q, k, v, indices, sizes), expected)


@pytest.mark.parametrize(
    ("sizes", "error", "text"),
    [
        (torch.ones(8), TypeError, "block_sizes must be a strided int32 tensor"),
        (torch.ones(7, dtype=torch.int32), ValueError, r"block_sizes must have shape \(8,\).*got \(7,\)"),
        (torch.ones(8, dtype=torch.int32, device="meta"), ValueError, "on the device of indices, cpu, got meta"),
    ],
)
def test_errors(sizes, error, text):
    with pytest.raises(error, match=text):
        BlockMask.from_indices(torch.zeros(1, 1, 6, 2, dtype=torch.int32), (64, 64), lengths=LENGTHS, block_sizes=sizes)


@pytest.mark.gpu
def test_a_graph_reads_the_sizes_at_each_replay():
    sizes = torch.full((8,), 50, dtype=torch.int32, device="cuda")
    q, k, v = qkv(*LENGTHS, B=1, device="cuda")
    indices = sized(64, "cuda").kv_indices

    def call():
        mask = BlockMask.from_indices(indices, (64, 64), lengths=LENGTHS, block_sizes=sizes)
        return block_sparse_attention(q, k, v, mask)

    call()
    with nothing_waits():
        call()
    graph, out = captured(call)
    for size in (3, 64):
        sizes.fill_(size)
        graph.replay()
        assert torch.equal(out, call())
