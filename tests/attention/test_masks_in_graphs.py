"""Block masks that are made inside of a compiled function, whose tensors are intermediates of its graph."""

import pytest
import torch

from attention import BlockMask, block_sparse_attention, create_block_mask, patterns
from cute_kernels.testing.reference import normal

from .parts import qkv

S = 300
LENGTHS = (S, S)
CUDA = pytest.param("cuda", "inductor", marks=pytest.mark.gpu)
ON = pytest.mark.parametrize(("device", "backend"), [("cpu", "aot_eager"), CUDA])


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def near(b, h, q, kv):
    return (q - kv).abs() < 40 * (h + 1)


# Each of a tensor x (S,), from which what depends on data is computed.
MAKERS = {
    "create_block_mask": lambda x: create_block_mask(near, None, 4, *LENGTHS, device=x.device),
    "from_blocks": lambda x: BlockMask.from_blocks(x[:9].view(3, 3) > 0, lengths=LENGTHS, causal=True),
    "from_indices": lambda x: BlockMask.from_indices(x[:6].view(1, 1, 3, 2).argsort(-1).int() + 1, lengths=LENGTHS),
    "from_elements": lambda x: BlockMask.from_elements(x[:, None] > x),
    "with_causal": lambda x: patterns.documents((x > 1).int().cumsum(0)).with_causal(),
    "to_dense": lambda x: BlockMask.from_elements(patterns.documents((x > 0).int()).to_dense()),
    "slices": lambda x: create_block_mask(near, 2, 4, 384 * 2, S, device=x.device)[1, 1:2, 3:].crop(LENGTHS),
    "slices by a tensor": lambda x: create_block_mask(near, None, 4, 512, S, device=x.device)[
        :, :, x[:3].abs().clamp(max=3).int()
    ].crop(LENGTHS),
    "intersection": lambda x: patterns.causal(LENGTHS, device=x.device) & patterns.documents((x > 1).int().cumsum(0)),
    "causal": lambda x: patterns.causal(LENGTHS, device=x.device),
    "sliding_window": lambda x: patterns.sliding_window(
        LENGTHS, (30, 4), global_columns=3, global_rows=2, causal=True, device=x.device
    ),
    "packed_documents": lambda x: patterns.packed_documents(
        torch.cat([x.new_zeros(1), (x > 1).cumsum(0)[[100, 200, -1]]]).int() * 5, lengths=LENGTHS, causal=True
    ),
    "documents": lambda x: patterns.documents((x > 1).int().cumsum(0), causal=True),
    "documents, batched": lambda x: patterns.documents(torch.stack([x > 0, x > 1]).int(), (x > 0).int().expand(2, -1)),
    "dilated": lambda x: patterns.dilated(LENGTHS, 3, window_size=(90, 0), device=x.device),
    "dilated_blocks": lambda x: patterns.dilated_blocks(LENGTHS, 2, causal=True, device=x.device),
    "top_k": lambda x: patterns.top_k(x[:9].view(3, 3), 1, lengths=LENGTHS),
    "vertical_slash": lambda x: patterns.vertical_slash((x[:2] * 99).int(), (x[:3] * 99).int(), lengths=LENGTHS),
}


@ON
@pytest.mark.parametrize("name", MAKERS)
def test_made_inside(name, device, backend):
    make, call = MAKERS[name], qkv(S, S, heads=4, device=device)

    def run(q, k, v, x):
        return block_sparse_attention(q, k, v, make(x)) * 1

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    for _ in range(2):
        x = normal(S, device=device)
        assert torch.equal(compiled(*call, x), run(*call, x))


def test_a_function_made_inside_captures_intermediates_and_numbers():
    call = qkv(S, S, heads=4)

    def run(q, k, v, x, reach):
        ids = (x > 1).int().cumsum(0)
        mask = create_block_mask(lambda b, h, q, kv: (ids[q] == ids[kv]) & (q - kv < reach), None, None, *LENGTHS)
        return block_sparse_attention(q, k, v, mask) * 1

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for reach in (50, 60, 70):
        x = normal(S)
        assert torch.equal(compiled(*call, x, reach), run(*call, x, reach))


def test_every_pattern_is_among_them():
    assert {name.partition(",")[0] for name in MAKERS} >= set(patterns.__all__)


@ON
def test_gradients(device, backend):
    call = [t.requires_grad_() for t in qkv(S, S, heads=4, device=device)]

    def run(q, k, v, x):
        return block_sparse_attention(q, k, v, patterns.documents((x > 1).int().cumsum(0), causal=True)) * 1

    compiled, x = torch.compile(run, fullgraph=True, backend=backend), normal(S, device=device)
    dout = normal(2, 4, S, call[2].shape[-1], device=device).to(call[0].dtype)
    found, expected = (torch.autograd.grad(f(*call, x), call, dout) for f in (compiled, run))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)  # dQ is accumulated in any order on a GPU


def test_lists_that_cannot_be_checked():
    mask = patterns.causal(LENGTHS)
    make = torch.compile(lambda *lists: BlockMask(*lists, lengths=LENGTHS).lists(), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="create the mask outside the compiled function, or pass check=False"):
        make(*mask.lists())


def two_masks(q, k, v, x):
    """The second mask is computed of the first result, so that inductor may put it into the memory of the first."""
    first = block_sparse_attention(q, k, v, x > 0)
    return block_sparse_attention(first, k, v, (x + first.float().mean() * 1e-20) > 0.5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_inductor_reuses_no_memory_of_masks(device):
    call = qkv(S, S, heads=2, device=device)
    compiled = torch.compile(two_masks, fullgraph=True, options={"fx_graph_cache": False})
    for _ in range(2):
        x = normal(4, 3, 3, device=device)
        assert torch.equal(compiled(*call, x), two_masks(*call, x))
