"""The converted form of a user's mask is cached with it, made again when it changes, and dies with it."""

import copy
import gc
import math
import pickle
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.testing
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.nn.attention.flex_attention import create_block_mask

from attention import BlockMask, block_sparse, block_sparse_attention
from attention.masks import cache as kept
from cute_kernels.runtime import derived
from cute_kernels.runtime.derived import Derived, state_of
from sparse_collective.bsr import BsrMatrix

from . import emulate_attention
from .mask_parts import (  # noqa: F401 (fixtures are used by name)
    FIRST,
    FORMS,
    LISTS,
    SECOND,
    N,
    by_head,
    conversions_fixture,
    count,
    held,
    operands,
    parts,
    right,
    write,
)
from .parts import captured, nothing_waits

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
every_form = pytest.mark.parametrize("form", FORMS)
BACKENDS = [None, "eager", "aot_eager"]  # of torch.compile, which takes no sparse tensors
STEPS = [("cpu", backend) for backend in BACKENDS]
STEPS_AND_FORMS = [(step, form) for step in STEPS for form in FORMS if form != "torch bsr" or step == ("cpu", None)]
ON_GPU = [pytest.param(("cuda", "inductor"), form, marks=pytest.mark.gpu) for form in FORMS if form != "torch bsr"]
every_step = pytest.mark.parametrize("step", STEPS, indirect=True, ids=str)
every_step_and_form = pytest.mark.parametrize(("step", "form"), STEPS_AND_FORMS, indirect=["step"], ids=str)


@pytest.fixture
def step(request):
    """block_sparse_attention on a device, compiled with a backend or as it is; how many graphs that took."""
    torch._dynamo.reset()
    device, backend = request.param
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)

    def sparse(*args):
        return block_sparse_attention(*args) * 1

    run = torch.compile(sparse, fullgraph=True, backend=graphs) if backend else sparse
    yield SimpleNamespace(run=run, device=device, backend=backend, graphs=graphs)
    torch._dynamo.reset()


def converted(mask):
    return block_sparse.as_block_mask(*operands()[:2], mask)


def flex_mask():
    return create_block_mask(by_head, 2, 4, N, N, device="cpu")


# Kept


@pytest.mark.parametrize(("step", "form"), STEPS_AND_FORMS + ON_GPU, indirect=["step"], ids=str)
def test_converted_once(step, form, conversions):
    """And again when it is changed in place."""
    call, mask = operands(step.device), held(form, device=step.device)
    assert count(conversions, step.run, *call, mask) == 1
    assert count(conversions, step.run, *call, mask) == 0
    assert count(conversions, step.run, *operands(step.device), mask) == 0
    assert right(call, mask, FIRST, step.run)
    for blocks in (SECOND, FIRST):
        write(form, mask, blocks)
        assert count(conversions, step.run, *call, mask) == 1 and right(call, mask, blocks, step.run)
    assert count(conversions, step.run, *call, held(form, device=step.device)) == 1, "another of equal contents"
    other = held(form, SECOND, step.device)
    assert right(call, other, SECOND, step.run) and right(call, mask, FIRST, step.run)
    assert step.graphs.frame_count == (step.backend is not None), "another mask is the same graph"


@every_form
def test_kept_whatever_the_terms(form, conversions):
    call, mask = operands(), held(form)
    assert converted(mask) is converted(mask)
    for terms in ({}, {"return_lse": True}, {"softcap": 3.0}):
        assert count(conversions, block_sparse_attention, *call, mask, **terms) == 0


@every_form
def test_what_kernels_must_know_is_kept_too(form, conversions, monkeypatch):
    """On the host side of the GPU path: the order of the tiles and the mask with causal."""
    emulate_attention.install(monkeypatch)
    orders, real = [], block_sparse.tile_order
    monkeypatch.setattr(block_sparse, "tile_order", lambda *args: orders.append(1) or real(*args))
    call, mask = operands(), held(form)
    first = [block_sparse_attention(*call, mask, causal=causal) for causal in (False, True)]
    made = len(conversions)
    assert len(orders) == 2
    again = [block_sparse_attention(*call, mask, causal=causal) for causal in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len(orders) == 2 and len(conversions) == made
    assert torch.equal(first[1], block_sparse_attention(*call, BlockMask.from_blocks(FIRST), causal=True))
    write(form, mask)
    orders.clear()
    assert right(call, mask, SECOND) and len(orders) == 2, "once for the mask, once for what it is compared with"


def test_with_values_shares_it(conversions):
    mask = held("bsr")
    assert converted(mask.with_values(mask.values * 2)) is converted(mask) and len(conversions) == 1


def test_a_bool_tensor_for_several_lengths(conversions):
    blocks = held("bool")
    for _ in range(2):
        for lengths in ((N, N), (300, N), (N, 300)):
            call = operands("cpu", *lengths)
            expected = BlockMask(*BlockMask.from_blocks(blocks, lengths=lengths).lists(), lengths=lengths)
            assert torch.equal(block_sparse_attention(*call, blocks), block_sparse_attention(*call, expected))
    assert len(conversions) - 6 == 3
    for i in range(3 * kept.MOST_LENGTHS):
        kept.of_blocks(blocks, (N - i, N))
    assert len(derived.of_tensor(blocks).kept) == kept.MOST_LENGTHS
    with pytest.raises(ValueError, match="blocks must have shape .*, 4, 3. for lengths .400, 384., got .3, 3."):
        block_sparse_attention(*operands("cpu", 400, N), blocks)


# Made again


@pytest.mark.parametrize("name", LISTS)
def test_each_list_counts(name):
    mask = held("flex")
    found = [converted(mask)]
    getattr(mask, name).add_(0)
    found.append(converted(mask))
    setattr(mask, name, getattr(mask, name).clone())
    found.append(converted(mask))
    getattr(mask, name).data = getattr(mask, name).clone()
    found.append(converted(mask))
    assert len({id(m) for m in found}) == 4


def test_attributes_replaced():
    call, mask = operands(), held("flex")
    assert right(call, mask, FIRST)
    other = held("flex", SECOND)
    for name in LISTS:
        setattr(mask, name, getattr(other, name))
    assert right(call, mask, SECOND)
    mask.full_kv_num_blocks = mask.full_kv_indices = None
    assert not block_sparse_attention(*call, mask).count_nonzero(), "there were full blocks only"
    mask = flex_mask()
    block_sparse_attention(*call, mask)
    mask.mask_mod = lambda b, h, q, kv: q - kv >= 5
    expected = block_sparse_attention(*call, BlockMask.from_flex(mask))
    assert torch.equal(block_sparse_attention(*call, mask), expected)
    mask.seq_lengths = (300, N)
    with pytest.raises(ValueError, match="is of lengths .300, 384., q and k of .384, 384."):
        block_sparse_attention(*call, mask)
    mask.BLOCK_SIZE = (256, 256)
    with pytest.raises(ValueError, match="64 or 128"):
        block_sparse_attention(*call, mask)


def test_memory_that_is_used_again():
    """Data that goes away and comes back to the same address is not the same data."""
    call, mask = operands(), held("bool")
    assert right(call, mask, FIRST)
    for blocks in (SECOND, FIRST, SECOND):
        for _ in range(2):
            mask.data = blocks.clone()
        assert right(call, mask, blocks)
    mask.data = torch.ones(4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="blocks must have shape"):
        block_sparse_attention(*call, mask)


def test_through_which_tensors_writes_are_seen():
    """Aliases that share the version counter. The indices that a torch.sparse_bsr tensor was built from do not."""
    call, mask = operands(), held("torch bsr")
    for alias in (mask.col_indices(), mask.crow_indices(), mask.detach(), mask.detach().col_indices()):
        first = converted(mask)
        (alias.mul_(1) if alias.layout is torch.strided else alias.copy_(alias.clone()))
        assert converted(mask) is not first
    view = held("bool")
    assert right(call, view, FIRST)
    view.view(-1)[:] = SECOND.flatten()
    assert right(call, view, SECOND)
    view.detach().copy_(FIRST)
    assert right(call, view, FIRST)
    crow, col = (t.clone() for t in (mask.crow_indices(), mask.col_indices()))
    built = torch.sparse_bsr_tensor(crow, col, mask.values(), mask.shape)
    before = state_of(built.crow_indices(), built.col_indices())
    col.add_(0)
    assert built.col_indices().data_ptr() == col.data_ptr()
    after = state_of(built.crow_indices(), built.col_indices())
    assert after == before, "torch tells nothing: kept.of_torch_bsr says so"


@every_step_and_form
def test_tensors_of_inference_mode(step, form, conversions):
    """torch does not count what is written to them, so they are converted at each call."""
    with torch.inference_mode():
        call, mask = operands(), held(form)
        assert parts(form, mask)[-1].is_inference()
        for blocks in (FIRST, SECOND):
            write(form, mask, blocks)
            assert right(call, mask, blocks, step.run)
        assert count(conversions, step.run, *call, mask) == 1
    if step.backend is None:
        assert right(call, mask, SECOND)
        assert count(conversions, step.run, *call, mask) == 1
        mask = held(form)
        with torch.inference_mode():
            step.run(*call, mask)
            assert count(conversions, step.run, *call, mask) == 0, "made outside"
            write(form, mask)
            assert right(call, mask, SECOND)


@every_step
def test_a_mask_mod_that_captures_a_tensor(step, conversions):
    """The tensor's contents at the time of the call count, and lists are not converted again for it."""
    call, distance = operands(), torch.tensor(50, dtype=torch.int32)
    mask = create_block_mask(lambda b, h, q, kv: (q - kv).abs() < 200, None, None, N, N, device="cpu")
    mask.mask_mod = lambda b, h, q, kv: (q - kv).abs() < distance
    step.run(*call, mask)
    for value in (5, 100):
        distance.fill_(value)
        expected = block_sparse_attention(*call, BlockMask.from_flex(mask))
        found = len(conversions)
        assert torch.equal(step.run(*call, mask), expected) and len(conversions) == found


@every_step
def test_flex_masks(step, conversions):
    """Partial blocks and mask_mods, lists without a batch, and parts that are replaced."""
    call, mask = operands("cpu", 300, 333), create_block_mask(by_head, 2, 4, 300, 333, device="cpu")

    def is_right(mask) -> bool:
        expected = block_sparse_attention(*call, BlockMask.from_flex(mask))
        return all(torch.equal(step.run(*call, mask), expected) for _ in range(2))

    assert is_right(mask) and count(conversions, step.run, *call, mask) == 0
    mask.kv_indices = mask.kv_indices.clone()
    assert count(conversions, step.run, *call, mask) == 1 and step.graphs.frame_count <= 1
    mask.mask_mod = lambda b, h, q, kv: q - kv >= 5
    assert is_right(mask)
    lists = mask.kv_num_blocks[0, 0], mask.kv_indices[0, 0]
    assert is_right(FlexBlockMask.from_kv_blocks(*lists, seq_lengths=(300, 333)))


@every_step
def test_batches_of_patterns(step):
    """A pattern for each head, and one pattern with values for each item."""
    call, items = operands(), [held("bsr", blocks) for blocks in (FIRST, SECOND, SECOND, FIRST)]
    values = torch.stack([items[0].values] * 2)
    for mask in (BsrMatrix.stack(items), BsrMatrix(items[0].crow_indices, items[0].col_indices, values, (2, N, N))):
        assert torch.equal(step.run(*call, mask), block_sparse_attention(*call, BlockMask.from_bsr(mask)))


# Dies with the object


@every_step_and_form
def test_nothing_outlives_the_object(step, form):
    before, mask = len(derived.of_tensor.found), held(form)
    step.run(*operands(), mask)
    if step.backend:
        first = mask.crow_indices if form == "bsr" else parts(form, mask)[0]
        made = [
            weakref.ref(value[0][0])
            for ref, memo in derived.of_tensor.found.values()
            if ref() is first
            for value in memo.kept.values()
        ]
        assert len(made) == 1
        del first
    else:
        tensors = {"flex": 0, "bool": 1, "bsr": 0, "torch bsr": 1}  # with a cache of their own
        assert len(derived.of_tensor.found) == before + tensors[form]
        made = [weakref.ref(converted(mask)), weakref.ref(converted(mask).full_kv_indices)]
    references = [weakref.ref(mask), *made]
    assert all(ref() is not None for ref in references)
    del mask
    if step.backend:
        torch._dynamo.reset()
        gc.collect()
    assert all(ref() is None for ref in references) and len(derived.of_tensor.found) == before


def test_a_mask_mod_that_refers_to_the_mask():
    """As of a module whose method makes its mask."""

    def references() -> list:
        holder = SimpleNamespace(window=100)

        def near(b, h, q, kv):
            return (q - kv).abs() < holder.window

        holder.mask = create_block_mask(near, None, None, N, N, device="cpu")
        made = converted(holder.mask)
        made._set(derived=SimpleNamespace(element=near))  # as the facts of a GPU's mask
        return [weakref.ref(near), weakref.ref(holder.mask), weakref.ref(made)]

    found = references()
    gc.collect()
    assert [ref() for ref in found] == [None, None, None]


def test_copies_of_a_mask():
    call, mask = operands(), flex_mask()
    expected = block_sparse_attention(*call, mask)
    for other in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert torch.equal(block_sparse_attention(*call, other), expected)
    other = copy.copy(mask)
    other.mask_mod = lambda b, h, q, kv: q < 0
    assert not torch.equal(block_sparse_attention(*call, other), expected)
    assert torch.equal(block_sparse_attention(*call, mask), expected)


@every_form
def test_threads(form):
    call, mask, found = operands(), held(form), []
    threads = [
        threading.Thread(target=lambda: found.extend(right(call, mask, FIRST) for _ in range(20))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80 and all(found)


def test_the_memo_forgets_the_oldest():
    memo, source = Derived(most=3), torch.zeros(1)
    made = [memo.get(i, source, object, tuple) for i in range(3)]
    assert [memo.get(i, source, object, tuple) for i in range(3)] == made
    assert memo.get(0, source, object, tuple, "another state") is not made[0] and len(memo.kept) == 3
    memo.get(3, source, object, tuple)
    assert list(memo.kept) == [1, 2, 3]
    assert memo.get(1, source, object, tuple, None) is not made[1] and memo.get(1, source, object, tuple) is made[1]


# On a GPU


@pytest.mark.gpu
@every_form
class TestOnGpu:
    def test_nothing_waits(self, form):
        call, masks = operands("cuda"), [held(form, device="cuda") for _ in range(2)]
        block_sparse_attention(*call, masks[0], causal=True)
        with nothing_waits():
            for _ in range(2):
                block_sparse_attention(*call, masks[1], causal=True)

    def test_another_stream_waits(self, form):
        """Converted on one stream behind other work, used on another at once."""
        call, mask = operands("cuda"), held(form, device="cuda")
        expected = block_sparse_attention(*call, BlockMask.from_blocks(FIRST.cuda()))
        block_sparse_attention(*call, held(form, device="cuda"))  # all is compiled
        torch.cuda.synchronize()
        one, other = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(one):
            torch.cuda._sleep(100_000_000)
            block_sparse_attention(*call, mask)
        with torch.cuda.stream(other):
            out = block_sparse_attention(*call, mask)
        other.synchronize()
        assert torch.equal(out, expected)

    @pytest.mark.parametrize("known", [False, True])
    def test_graph(self, path, form, known, conversions):
        """A tensor made in a capture is part of the graph and is not kept. A replay sees what was written to the mask,
        but for a BsrMatrix, whose indices must not be written to."""
        call, mask = operands("cuda"), held(form, device="cuda")
        expected = block_sparse_attention(*call, mask)
        if not known:
            mask = held(form, device="cuda")
        before = len(conversions)
        graph, out = captured(lambda: block_sparse_attention(*call, mask))
        assert len(conversions) - before == (0 if known and form == "bsr" else 1)
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, expected)
        assert count(conversions, block_sparse_attention, *call, mask) == (0 if known else 1)
        assert right(call, mask, FIRST)
        write(form, mask)
        graph.replay()
        if known or form != "bsr":
            blocks = FIRST if form == "bsr" else SECOND
            assert torch.equal(out, block_sparse_attention(*call, BlockMask.from_blocks(blocks.cuda())))
        assert right(call, mask, SECOND)
