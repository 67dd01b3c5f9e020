"""The masks that users hold under torch.compile: in one graph, converted once inside the registered op."""

import gc
import weakref

import pytest
import torch
import torch._dynamo.testing
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.nn.attention.flex_attention import create_block_mask

from attention import BlockMask, block_sparse_attention, torch_op
from attention.masks import kept
from sparse_collective.bsr import BsrMatrix

from .held_masks import FIRST, SECOND, N, count, held, parts, qkv, right, spied_conversions, write
from .mask_parts import by_head

BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
ON = pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "eager"), ("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)],
)
every_form = pytest.mark.parametrize("form", ["flex", "bool", "bsr"])
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def conversions(monkeypatch) -> list:
    return spied_conversions(monkeypatch)


def compiled(backend, **terms):
    """(block_sparse_attention compiled, what counts its graphs)"""
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    step = torch.compile(lambda *args: block_sparse_attention(*args, **terms) * 1, fullgraph=True, backend=graphs)
    return step, graphs


@ON
@every_form
def test_compiled_once(form, device, backend, conversions):
    step, graphs = compiled(backend)
    call, mask = qkv(device), held(form, device=device)
    step(*call, mask)
    assert count(conversions, step, *call, mask) == 0 and count(conversions, step, *qkv(device), mask) == 0
    assert right(call, mask, FIRST, step)
    write(form, mask)
    assert count(conversions, step, *call, mask) == 1 and right(call, mask, SECOND, step)
    other = held(form, device=device)
    assert right(call, other, FIRST, step) and right(call, mask, SECOND, step)
    assert graphs.frame_count == 1, "another mask is the same graph"


@BACKENDS
@every_form
def test_compiled_with_terms(form, backend):
    call, mask, out = qkv(), held(form), torch.empty(2, 4, N, 64, dtype=torch.bfloat16)
    expected = block_sparse_attention(*call, BlockMask.from_blocks(FIRST), causal=True, return_lse=True)

    def step(q, k, v, mask, out):
        return block_sparse_attention(q, k, v, mask, causal=True, return_lse=True, out=out)[1] + 0

    lse = torch.compile(step, fullgraph=True, backend=backend)(*call, mask, out)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@BACKENDS
def test_compiled_flex_masks(backend, conversions):
    """Partial blocks and mask_mods, lists without a batch, parts that are replaced, and a mask that is captured."""
    step, graphs = compiled(backend)
    call = qkv("cpu", 300, 333)
    mask = create_block_mask(by_head, 2, 4, 300, 333, device="cpu")
    for _ in range(2):
        assert torch.equal(step(*call, mask), block_sparse_attention(*call, BlockMask.from_flex(mask)))
    assert count(conversions, step, *call, mask) == 0
    mask.kv_indices = mask.kv_indices.clone()
    assert count(conversions, step, *call, mask) == 1 and graphs.frame_count == 1
    mask.mask_mod = lambda b, h, q, kv: q - kv >= 5
    for _ in range(2):
        assert torch.equal(step(*call, mask), block_sparse_attention(*call, BlockMask.from_flex(mask)))
    lists = mask.kv_num_blocks[0, 0], mask.kv_indices[0, 0]
    bare = FlexBlockMask.from_kv_blocks(*lists, seq_lengths=(300, 333))
    for _ in range(2):
        assert torch.equal(step(*call, bare), block_sparse_attention(*call, BlockMask.from_flex(bare)))
    captured = torch.compile(lambda *args: block_sparse_attention(*args, mask), fullgraph=True, backend=backend)
    assert torch.equal(captured(*call), step(*call, mask)) and count(conversions, captured, *call) == 0


@BACKENDS
def test_a_mask_mod_that_captures_a_tensor(backend, conversions):
    """What it reads may change, and the lists are not converted again for it."""
    call, step = qkv(), compiled(backend)[0]
    distance = torch.tensor(50, dtype=torch.int32)
    mask = create_block_mask(lambda b, h, q, kv: (q - kv).abs() < 200, None, None, N, N, device="cpu")
    mask.mask_mod = lambda b, h, q, kv: (q - kv).abs() < distance
    step(*call, mask)
    for run in (step, block_sparse_attention):
        for value in (5, 100):
            distance.fill_(value)
            expected = block_sparse_attention(*call, BlockMask.from_flex(mask))
            found = len(conversions)
            assert torch.equal(run(*call, mask), expected)
            assert len(conversions) - found == (run is block_sparse_attention and value == 5)


@BACKENDS
def test_compiled_batches(backend):
    """A pattern for each head, and one pattern with values for each item."""
    call, step = qkv(), compiled(backend)[0]
    items = [held("bsr", blocks) for blocks in (FIRST, SECOND, SECOND, FIRST)]
    values = torch.stack([items[0].values] * 2)
    for mask in (BsrMatrix.stack(items), BsrMatrix(items[0].crow_indices, items[0].col_indices, values, (2, N, N))):
        assert torch.equal(step(*call, mask), block_sparse_attention(*call, BlockMask.from_bsr(mask)))


@every_form
def test_nothing_outlives_the_object_in_an_op(form):
    mask, before = held(form), len(kept._WITH)
    compiled("eager")[0](*qkv(), mask)
    made = [derived for ref, derived in kept._WITH.values() if any(ref() is t for t in first_tensors(form, mask))]
    alive = weakref.ref(mask), *(weakref.ref(value[0][0]) for memo in made for value in memo.kept.values())
    assert len(alive) == 2
    del mask, made
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in alive] == [None, None] and len(kept._WITH) == before


def first_tensors(form, mask) -> list:
    return [mask.crow_indices] if form == "bsr" else parts(form, mask)[:1]


def test_one_list_of_several_masks():
    """Kept with the first list, but made of all four: one that took the address of another is not that one."""
    first = BlockMask.from_blocks(FIRST)
    lists, sizes = first.lists(), (list(first.lengths), list(first.blocksize))
    for _ in range(20):
        other = *lists[:3], BlockMask.from_blocks(SECOND).full_index
        made = torch_op._block_mask(list(other), *sizes, None, [], [])
        assert torch.equal(made.full_index, other[3])
        made = torch_op._block_mask(list(lists), *sizes, None, [], [])
        assert torch.equal(made.full_index, lists[3])
        del other


@every_form
def test_opcheck(form):
    mask, form = torch_op.crossing(held(form))
    torch.library.opcheck(torch.ops.attention.block_sparse_attention.default, (*qkv(), *mask), {"form": form})


def test_what_tracing_refuses():
    step = compiled("eager")[0]
    with pytest.raises(Exception, match="blocks must be a strided bool tensor"):
        step(*qkv(), torch.ones(3, 3))
    with pytest.raises(Exception, match="64 or 128"):
        step(*qkv(), create_block_mask(by_head, 2, 4, N, N, device="cpu", BLOCK_SIZE=256))
    with pytest.raises(Exception, match="torch.compile does not support sparse Tensors"):
        step(*qkv(), held("torch bsr"))
    with pytest.raises(TypeError, match="which torch.compile does not take, make BsrMatrix.from_torch"):
        torch_op.crossing(held("torch bsr"))


@BACKENDS
def test_inference_tensors_in_an_op(backend, conversions):
    step = compiled(backend)[0]
    with torch.inference_mode():
        call = qkv()
        masks = {form: held(form) for form in ("flex", "bool", "bsr")}
        for form, mask in masks.items():
            for blocks in (FIRST, SECOND):
                write(form, mask, blocks)
                assert right(call, mask, blocks, step)
            assert count(conversions, step, *call, mask) == 1
