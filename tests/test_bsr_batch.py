"""Batches of block-sparse matrices: both forms, their conversions, and what is said of wrong ones."""

import pickle

import pytest
import torch

from cute_kernels.matmul.problem import NOT_KNOWN
from sparse_collective.bsr import BsrMatrix, random_bsr
from tests.bsr_parts import DEVICES, INDEX_DTYPES, Operations, assert_same, pointers
from tests.cases import PATTERNS, mask_to_indices

FORMS = ("values", "patterns")
NAMES = ("power_law", "no_blocks", "bernoulli", "empty_rows")  # of the items with patterns of their own


def batch(
    form, grid=(4, 6), block=(16, 32), *, names=NAMES, device="cpu", index_dtype=torch.int32, dtype=torch.float32
):
    """A batch, and its items."""
    (rows, cols), (bm, bk) = grid, block
    generator, items = torch.Generator().manual_seed(1), []
    for name in ("power_law",) * len(names) if form == "values" else names:
        crow, col = mask_to_indices(PATTERNS[name](*grid), index_dtype)
        values = torch.randn(len(col), *block, generator=generator).to(dtype)
        items.append(BsrMatrix(*(t.to(device) for t in (crow, col, values)), (rows * bm, cols * bk)))
    if form == "patterns":
        return BsrMatrix.stack(items), items
    first = items[0]
    values = torch.stack([item.values for item in items])
    return BsrMatrix(first.crow_indices, first.col_indices, values, (len(items), *first.shape)), items


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_items(form, index_dtype, device):
    a, items = batch(form, index_dtype=index_dtype, device=device)
    assert (a.batch, a.shape, a.blocksize) == (form, (4, 64, 192), (16, 32))
    assert (a.n_block_rows, a.n_block_cols, a.nnz) == (4, 6, len(a.col_indices))
    a.check_indices()
    dense = torch.stack([item.to_dense() for item in items])
    assert torch.equal(a.to_dense(), dense)
    assert torch.equal(a.transpose().to_dense(), dense.mT) and a.transpose().batch == form
    a.transpose().check_indices()
    BsrMatrix(*(getattr(a.transpose(), n) for n in ("crow_indices", "col_indices", "values", "shape"))).check_indices()
    for mine, item in zip(a.unbind(), items, strict=True):
        assert_same(mine, item)
        assert mine.checked and (mine.nnz == 0 or a.values.data_ptr() <= mine.values.data_ptr())
    stored = sum(item.nnz for item in items)
    assert a.density == pytest.approx(stored / (4 * 24))
    assert not items[0].even and not a.even and (a.stats == NOT_KNOWN) == (form == "patterns")


def test_one_pattern_counts_its_blocks_once():
    a, items = batch("values")
    assert a.nnz == items[0].nnz and a.values.shape[:2] == (4, a.nnz) and a.density == items[0].density
    assert all(item.crow_indices is a.crow_indices and item.col_indices is a.col_indices for item in a.unbind())


def test_even_items():
    matrices = [random_bsr((64, 64), (16, 16), per_row=2) for _ in range(3)]
    a = BsrMatrix.stack(matrices)
    assert a.even and a.checked
    again = BsrMatrix(a.crow_indices, a.col_indices, a.values, a.shape)
    assert not again.even
    again.check_indices()
    assert again.even


@pytest.mark.parametrize("form", FORMS)
def test_repr_pickle_to(form):
    a, _ = batch(form)
    assert f"shape=(4, 64, 192), blocksize=(16, 32), nnz={a.nnz}" in repr(a) and f"batch of {form}" in repr(a)
    again = pickle.loads(pickle.dumps(a))
    assert_same(again, a)
    assert again.batch == form and not again.checked
    half = a.to(torch.float16)
    assert half.crow_indices is a.crow_indices and torch.equal(half.to_dense(), a.to_dense().half())
    assert a.to("cpu") is a


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form):
    a, items = batch(form)
    a.values.requires_grad_()
    (a.to_dense() ** 2).sum().backward()
    assert torch.allclose(a.values.grad, 2 * a.values)
    assert a.transpose().requires_grad and all(item.requires_grad for item in a.unbind())


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_from_and_to_torch(index_dtype):
    dense = torch.zeros(3, 64, 128)
    for l in range(3):  # torch wants equally many blocks in each item
        for r, c in ((0, l), (2, 1), (2, 3)):
            dense[l, 16 * r : 16 * r + 16, 32 * c : 32 * c + 32] = torch.randn(16, 32)
    t = dense.to_sparse_bsr((16, 32))
    parts = (x.to(index_dtype) for x in (t.crow_indices(), t.col_indices()))
    t = torch.sparse_bsr_tensor(*parts, t.values(), t.shape, check_invariants=True)
    a = BsrMatrix.from_torch(t)
    assert a.batch == "patterns" and a.crow_indices.dtype is index_dtype
    assert pointers(a.col_indices, a.values) == pointers(t.col_indices(), t.values())
    a.check_indices()
    assert torch.equal(a.to_dense(), dense)
    back = a.to_torch()
    assert torch.equal(back.to_dense(), dense) and back.values().data_ptr() == a.values.data_ptr()
    assert torch.equal(back.crow_indices(), t.crow_indices())


def test_to_torch_of_one_pattern():
    a, _ = batch("values")
    t = a.to_torch()
    assert torch.equal(t.to_dense(), a.to_dense()) and t.values().data_ptr() == a.values.data_ptr()


def test_to_torch_refuses_unequal_items():
    for names in (NAMES, ("one_full_row", "no_blocks", "all_blocks")):
        with pytest.raises(ValueError, match="equally many blocks in each item, and this one does not; .*unbind"):
            batch("patterns", names=names)[0].to_torch()


def indexed(crow, col, cols=8, index_dtype=torch.int32, device="cpu"):
    """A batch of 16 x 16 blocks, each item with its own pattern, with these indices."""
    crow, col = (torch.tensor(x, dtype=index_dtype, device=device) for x in (crow, col))
    shape = (len(crow), 16 * (crow.shape[1] - 1), 16 * cols)
    return BsrMatrix(crow, col, torch.ones(len(col), 16, 16, device=device), shape)


WRONG_INDICES = {
    "first not 0": ([[1, 2], [2, 3]], [0, 1, 2], r"crow_indices\[0, 0\] is 1; it must be 0"),
    "gap": ([[0, 1], [2, 3]], [0, 1, 2], r"crow_indices\[1, 0\] is 2; it must be where item 0 ends, 1"),
    "overlap": ([[0, 2], [1, 3]], [0, 1, 2], r"crow_indices\[1, 0\] is 1; it must be where item 0 ends, 2"),
    "relative": ([[0, 1], [0, 1]], [0, 1], r"crow_indices\[1, 0\] is 0; it must be where item 0 ends, 1"),
    "decreasing": ([[0, 1, 1], [1, 3, 2]], [0, 1, 2], r"crow_indices\[1, 2\] is 2, less than crow_indices\[1, 1\] = 3"),
    "last": ([[0, 1, 1], [1, 2, 2]], [0, 1, 2], r"crow_indices\[1, 2\], the last, is 2; it must be nnz = 3"),
    "huge": ([[0, 2**31 - 1], [2**31 - 1, 1]], [0], r"crow_indices\[1, 1\] is 1, less than crow_indices\[1, 0\]"),
    "column": ([[0, 1, 1], [1, 1, 2]], [0, 8], r"col_indices\[1\] is 8, in block-row 1 of item 1; .*\[0, 8\)"),
    "negative": ([[0, 1, 2], [2, 2, 2]], [0, -1], r"col_indices\[1\] is -1, in block-row 1 of item 0"),
    "unsorted": ([[0, 1], [1, 3]], [5, 4, 2], r"col_indices\[2\] is 2 after 4, both in block-row 0 of item 1"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("name", WRONG_INDICES)
def test_wrong_indices_are_named(name, index_dtype, device):
    crow, col, message = WRONG_INDICES[name]
    a = indexed(crow, col, index_dtype=index_dtype, device=device)
    for operation in (a.check_indices, a.to_dense, a.transpose, a.unbind):
        with pytest.raises(ValueError, match=message):
            operation()


def test_wrong_indices_of_one_pattern():
    crow, col = torch.tensor([0, 1, 1]).int(), torch.tensor([0, 1]).int()
    a = BsrMatrix(crow, col, torch.ones(3, 2, 16, 16), (3, 32, 32))
    with pytest.raises(ValueError, match=r"crow_indices\[2\], the last, is 1; it must be nnz = 2"):
        a.check_indices()


def test_the_check_of_a_batch_reads_the_device_once(monkeypatch):
    reads, original = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append(t.shape) or original(t))
    a = BsrMatrix(*(getattr(batch("patterns")[0], n) for n in ("crow_indices", "col_indices", "values", "shape")))
    a.check_indices()
    a.check_indices()
    assert reads == [(9,)]


def changed(form, **change):
    a, _ = batch(form)
    return {n: change.get(n, getattr(a, n)) for n in ("crow_indices", "col_indices", "values", "shape")}


def test_refused():
    a, b = batch("values")[0], batch("patterns")[0]
    for form, change, message in (
        ("values", {"shape": (64, 192)}, r"shape must be \(L, M, K\) .*because values has a dimension for the items"),
        ("patterns", {"shape": (64, 192)}, r"because crow_indices has a dimension for the items of a batch"),
        ("values", {"shape": (3, 64, 192)}, r"values holds 4 items, but shape \(3, 64, 192\) has 3"),
        ("patterns", {"shape": (5, 64, 192)}, "crow_indices holds 4 items, but shape .* has 5"),
        ("values", {"values": a.values[:0], "shape": (0, 64, 192)}, "L at least 1"),
        ("patterns", {"shape": (4, 80, 192)}, "crow_indices has 5 entries; 5 rows need 6"),
        ("values", {"values": a.values[:, :3].contiguous()}, "the 3 blocks need 3"),
        ("patterns", {"values": a.values, "col_indices": a.col_indices}, "two ways to store a batch"),
        ("patterns", {"shape": (4, 64, 32)}, r"blocks, but shape \(4, 64, 32\) has only 16"),
        ("values", {"crow_indices": b.crow_indices[None]}, r"crow_indices must have 1 dimension.*or 2 of a batch"),
    ):
        with pytest.raises(ValueError, match=message):
            BsrMatrix(**changed(form, **change))


def test_refused_more_blocks_than_int32_counts():
    values = torch.empty(2**16, 2**15, 16, 16, dtype=torch.bfloat16, device="meta")
    col, crow = (torch.empty(n, dtype=torch.int64, device="meta") for n in (2**15, 2**10 + 1))
    with pytest.raises(ValueError, match="2147483648 blocks do not fit in int32"):
        BsrMatrix(crow, col, values, (2**16, 2**14, 2**14))


def test_stack_and_unbind_refuse():
    a, items = batch("patterns")
    with pytest.raises(ValueError, match="at least one matrix"):
        BsrMatrix.stack([])
    with pytest.raises(TypeError, match="needs BsrMatrix, got a torch.strided tensor .* at 1"):
        BsrMatrix.stack([items[0], torch.ones(2)])
    with pytest.raises(ValueError, match="needs single matrices, got a batch of shape .* at 0; see unbind"):
        BsrMatrix.stack([a])
    with pytest.raises(ValueError, match="matrices of one blocksize"):
        BsrMatrix.stack([items[0], BsrMatrix.from_dense(torch.ones(64, 192), (16, 16))])
    with pytest.raises(TypeError, match="matrices of one dtype"):
        BsrMatrix.stack([items[0], items[1].to(torch.float16)])
    with pytest.raises(ValueError, match="unbind needs a batch"):
        items[0].unbind()


def test_no_operation_asks_the_device():
    for form in FORMS:
        a, _ = batch(form)
        a = BsrMatrix(a.crow_indices, a.col_indices, a.values, a.shape, check=False)
        with Operations() as ran:
            a.to_dense(), a.transpose(), a.row_of_block()
        assert not {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select"} & set(ran.names)
