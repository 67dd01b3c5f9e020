"""BsrMatrix, and batches of them: what is accepted, how the rest is refused, and what is asked of a GPU."""

import math
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.matmul.problem import NOT_KNOWN
from cute_kernels.testing.patterns import PATTERNS
from sparse_collective import BsrMatrix, pattern, random_bsr
from sparse_collective.pattern import patterns_of

from .bsr_parts import BLOCKSIZES, DEVICES, DTYPES, FORMS, INDEX_DTYPES, NEEDS_GPU, Operations, bsr, parts, some

# Construction


@pytest.mark.parametrize("form", [None, *FORMS])
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_construct_shares_tensors_and_reports_them(blocksize, dtype, index_dtype, form):
    given = parts(some(form, block=blocksize, dtype=dtype, index_dtype=index_dtype))
    with Operations() as ran:
        a = BsrMatrix(**given | {"shape": torch.Size(given["shape"])})
        assert f"nnz={a.nnz}, density=" in repr(a) and not a.requires_grad
    assert all(getattr(a, name) is given[name] for name in ("crow_indices", "col_indices", "values"))
    assert type(a.shape) is tuple and a.shape == given["shape"]
    assert type(a.blocksize) is tuple and a.blocksize == blocksize
    assert (a.n_block_rows, a.n_block_cols, a.nnz) == (4, 6, len(a.col_indices))
    assert a.density == a.nnz / 24 / (4 if form == "patterns" else 1)
    assert (a.batch, a.dtype, a.device, a.check) == (form, dtype, torch.device("cpu"), True)
    assert ran.names == []
    a.check_indices()
    assert not a.even and (a.stats == NOT_KNOWN) == (form == "patterns")
    a.values.requires_grad_()
    assert a.requires_grad


def test_repr_is_short_and_informative():
    assert repr(some(pattern="all_blocks", dtype=torch.bfloat16)) == (
        "BsrMatrix(shape=(64, 192), blocksize=(16, 32), nnz=24, density=1, "
        "dtype=torch.bfloat16, device='cpu', index_dtype=torch.int32)"
    )
    assert all(f"batch of {form}" in repr(some(form)) for form in FORMS)


def test_attributes_are_read_only_but_values_may_change_in_place():
    a = some()
    for name in ("values", "crow_indices", "shape", "nnz", "check", "_checked", "density", "anything"):
        with pytest.raises(AttributeError, match=f"{name} is read-only"):
            setattr(a, name, None)
    with pytest.raises(AttributeError, match="values is read-only"):
        del a.values
    before = a.to_dense()
    a.values.mul_(2)
    assert torch.equal(a.to_dense(), before * 2)


def test_can_be_a_weak_key():
    a = some()
    cache = weakref.WeakKeyDictionary({a: "plan"})
    assert cache[a] == "plan"
    del a
    assert not cache


@pytest.mark.parametrize("shape", [(0, 192), (64, 0), (0, 0)])
def test_a_matrix_without_elements(shape):
    for options in ({}, {"density": 1.0}, {"mask": torch.zeros(shape[0] // 16, shape[1] // 32, dtype=torch.bool)}):
        a = BsrMatrix(**parts(BsrMatrix.from_dense(torch.zeros(shape), (16, 32), **options)))
        a.check_indices()
        assert (a.nnz, a.density, a.shape) == (0, 0.0, shape) and a.row_of_block().shape == (0,)
        assert a.to_dense().shape == shape and a.transpose().shape == shape[::-1]


def thinned(t):
    return t.repeat_interleave(2)[::2]


# (form, argument, its change, error, words of the message)
REFUSED = [
    (None, "crow_indices", lambda t: t.tolist(), TypeError, "crow_indices must be a strided .* got list"),
    (None, "values", lambda t: t.numpy(), TypeError, "values must be a strided tensor, got ndarray"),
    (None, "values", lambda t: t.to_sparse(), TypeError, "values .* got a torch.sparse_coo"),
    (None, "values", lambda t: t.int(), TypeError, "cannot be torch.int32; use .*bfloat16"),
    (None, "crow_indices", lambda t: t.short(), TypeError, "cannot be torch.int16; use .*int32"),
    (None, "col_indices", lambda t: t.long(), TypeError, "same dtype, got torch.int32 and torch.int64"),
    (
        None,
        "crow_indices",
        lambda t: t[None],
        ValueError,
        "shape must be .L, M, K. .* crow_indices has a dimension for",
    ),
    (None, "col_indices", lambda t: t[None], ValueError, "col_indices must have 1 dimension"),
    (None, "values", lambda t: t.flatten(1), ValueError, "values must have 3 dimension"),
    (None, "col_indices", lambda t: t.to("meta"), ValueError, "col_indices is on meta, values on cpu; move"),
    (None, "crow_indices", thinned, ValueError, "crow_indices.contiguous"),
    (None, "col_indices", thinned, ValueError, "col_indices.contiguous"),
    (None, "values", lambda t: t.mT.contiguous().mT, ValueError, "got strides .*values.contiguous"),
    (None, "crow_indices", lambda t: t[:-1], ValueError, "crow_indices has 4 entries; 4 rows need 5"),
    (None, "col_indices", lambda t: t[:-1], ValueError, r"col_indices has \d+ entries; the \d+ blocks"),
    (None, "shape", lambda s: (65, 192), ValueError, "M is 65, no multiple of 16; pad it to 80"),
    (None, "shape", lambda s: (64, 191), ValueError, "K is 191, no multiple of 32; pad it to 192"),
    (None, "shape", lambda s: (-16, 192), ValueError, "M is -16"),
    (None, "shape", lambda s: (64, 192, 1), ValueError, "shape must be two integers"),
    (None, "shape", lambda s: (64.0, 192), TypeError, "shape must be two integers"),
    (None, "shape", lambda s: 64, TypeError, "shape must be two integers"),
    (None, "shape", lambda s: (64, 32), ValueError, r"blocks, but shape \(64, 32\) has only 4"),
    ("values", "shape", lambda s: s[1:], ValueError, r"shape must be \(L, M, K\) .*because values has a dimension for"),
    ("values", "shape", lambda s: (3, *s[1:]), ValueError, r"values holds 4 items, but shape \(3, 64, 192\) has 3"),
    ("values", "shape", lambda s: (0, *s[1:]), ValueError, "L at least 1|values holds 4 items, but shape .* has 0"),
    ("values", "values", lambda t: t[:, :1].contiguous(), ValueError, "the 1 blocks need 1"),
    ("values", "crow_indices", lambda t: t[None, None], ValueError, "crow_indices must have 1 dimension.*or 2 of a"),
    ("values", "crow_indices", lambda t: t.expand(4, 5).contiguous(), ValueError, "two ways to store a batch"),
    ("patterns", "shape", lambda s: s[1:], ValueError, "because crow_indices has a dimension for the items of a batch"),
    ("patterns", "shape", lambda s: (5, *s[1:]), ValueError, "crow_indices holds 4 items, but shape .* has 5"),
    ("patterns", "shape", lambda s: (4, 80, 192), ValueError, "crow_indices has 5 entries; 5 rows need 6"),
    ("patterns", "shape", lambda s: (4, 64, 32), ValueError, r"blocks, but shape \(4, 64, 32\) has only 16"),
]


@pytest.mark.parametrize(("form", "argument", "change", "error", "message"), REFUSED)
def test_refused_with_a_reason(form, argument, change, error, message):
    W = some(form)
    with pytest.raises(error, match=message):
        BsrMatrix(**parts(W, **{argument: change(getattr(W, argument))}))


SIDES = [(8, 16), (16, 24), (0, 16), (1, 1), (16, 100)]
DENSE, SQUARE, MASK = torch.ones(32, 64), (16, 16), torch.ones(2, 4, dtype=torch.bool)
RANDOM = (64, 64), SQUARE


def meta(shape, values) -> BsrMatrix:
    sizes = (shape[-2] // 16 + 1,), values[-1:], (*values, 16, 16)
    crow, col, values = (torch.empty(size, dtype=torch.int64, device="meta") for size in sizes)
    return BsrMatrix(crow, col, values.bfloat16(), shape)


def one_block(*side):
    return BsrMatrix(torch.tensor([0, 1]), torch.tensor([0]), torch.zeros(1, *side), side)


# (function, its arguments, its options, error, words of the message)
REFUSED_CALLS = [
    *((one_block, side, {}, ValueError, r"block side b[mk] is \d+; use a positive multiple of 16") for side in SIDES),
    *((BsrMatrix.from_dense, (DENSE, side), {}, ValueError, r"block side b[mk] is \d+; use a po") for side in SIDES),
    *((random_bsr, ((64, 64), side), {"per_row": 1}, ValueError, r"block side b[mk] is \d+; u") for side in SIDES),
    (meta, ((2**20, 2**20), (2**31,)), {}, ValueError, "2147483648 blocks do not fit in int32"),
    (meta, ((2**16, 2**14, 2**14), (2**16, 2**15)), {}, ValueError, "2147483648 blocks do not fit in int32"),
    (BsrMatrix.from_torch, (DENSE,), {}, TypeError, "not torch.strided; .*to_sparse_bsr.*from_dense"),
    (BsrMatrix.from_torch, (DENSE.to_sparse_csr(),), {}, TypeError, r"not torch.sparse_csr; pass t.to_sparse_bsr\("),
    (BsrMatrix.from_torch, (DENSE.to_sparse_coo(),), {}, TypeError, r"not torch.sparse_coo; pass t.to_sparse_bsr\("),
    (BsrMatrix.from_torch, (DENSE.to_sparse_csc(),), {}, TypeError, r"csc; pass t.to_sparse_bsr\(\(bm, bk\)\)$"),
    (BsrMatrix.from_torch, (DENSE.numpy(),), {}, TypeError, "got ndarray"),
    (
        BsrMatrix.from_torch, (torch.ones(2, 3, 32, 64).to_sparse_bsr(SQUARE),), {}, ValueError,
        r"one batch dimension, got shape \(2, 3, 32, 64\)",
    ),
    (
        BsrMatrix.from_torch, (torch.ones(32, 64, 3).to_sparse_bsr(SQUARE, dense_dim=1),), {}, ValueError,
        r"no dense dimensions, got 1 in \(32, 64, 3\)",
    ),
    (BsrMatrix.from_torch, (DENSE.to_sparse_bsr((8, 16)),), {}, ValueError, "block side bm is 8"),
    (BsrMatrix.from_torch, (DENSE.long().to_sparse_bsr(SQUARE),), {}, TypeError, "torch.int64"),
    (BsrMatrix.from_dense, (DENSE, SQUARE), {"mask": MASK, "density": 0.5}, ValueError, "both given; pass at most one"),
    (BsrMatrix.from_dense, (DENSE, SQUARE), {"mask": MASK.T}, ValueError, r"shape \(2, 4\) on cpu, got \(4, 2\)"),
    (BsrMatrix.from_dense, (DENSE, SQUARE), {"mask": MASK.to("meta")}, ValueError, "on cpu, got .* on meta"),
    (BsrMatrix.from_dense, (DENSE, SQUARE), {"mask": MASK.int()}, TypeError, "strided bool tensor, got .* torch.int32"),
    (BsrMatrix.from_dense, (DENSE, SQUARE), {"mask": MASK.tolist()}, TypeError, "strided bool tensor, got list"),
    (BsrMatrix.from_dense, (DENSE, SQUARE), {"density": -0.1}, ValueError, r"density is -0.1; it must be in \[0, 1\]"),
    (BsrMatrix.from_dense, (DENSE, SQUARE), {"density": 1.5}, ValueError, "density is 1.5"),
    (BsrMatrix.from_dense, (DENSE, SQUARE), {"density": math.nan}, ValueError, "density is nan"),
    (BsrMatrix.from_dense, (DENSE, SQUARE), {"index_dtype": torch.int16}, TypeError, "indices cannot be torch.int16"),
    (BsrMatrix.from_dense, (DENSE, (16, 48)), {}, ValueError, "K is 64, no multiple of 48; pad it to 96"),
    (BsrMatrix.from_dense, (DENSE, (16,)), {}, ValueError, "blocksize must be two integers"),
    (BsrMatrix.from_dense, (DENSE, 16), {}, TypeError, "blocksize must be two integers, got 16"),
    (BsrMatrix.from_dense, (DENSE[None], SQUARE), {}, ValueError, r"2 dimensions \(M, K\), got shape \(1, 32, 64\)"),
    (BsrMatrix.from_dense, (DENSE.long(), SQUARE), {}, TypeError, "values cannot be torch.int64"),
    (BsrMatrix.from_dense, (DENSE.to_sparse(), SQUARE), {}, TypeError, "dense must be a strided tensor, got a torch.s"),
    (random_bsr, RANDOM, {}, ValueError, "either per_row or density, got per_row=None and density=None"),
    (random_bsr, RANDOM, {"per_row": 1, "density": 0.5}, ValueError, "either per_row or density"),
    (random_bsr, RANDOM, {"per_row": 5}, ValueError, r"per_row is 5; it must be in \[0, 4\]"),
    (random_bsr, RANDOM, {"per_row": -1}, ValueError, "per_row is -1"),
    (random_bsr, RANDOM, {"per_row": 1.5}, TypeError, "integer"),
    (random_bsr, RANDOM, {"density": 2}, ValueError, "density is 2"),
    (random_bsr, RANDOM, {"per_row": 1, "dtype": torch.complex64}, TypeError, "values cannot be torch.complex64"),
    (random_bsr, RANDOM, {"per_row": 1, "index_dtype": torch.uint8}, TypeError, "indices cannot be torch.u"),
    (BsrMatrix.stack, ([],), {}, ValueError, "at least one matrix"),
    (BsrMatrix.stack, ([some(), torch.ones(2)],), {}, TypeError, "needs BsrMatrix, got a torch.strided tensor .* at 1"),
    (BsrMatrix.stack, ([some("patterns")],), {}, ValueError, "needs single matrices, got a batch .* at 0; see un"),
    (BsrMatrix.stack, ([some(), some(block=(16, 16))],), {}, ValueError, "matrices of one (blocksize|shape)"),
    (BsrMatrix.stack, ([some(), some(dtype=torch.half)],), {}, TypeError, "matrices of one dtype"),
    (BsrMatrix.unbind, (some(),), {}, ValueError, "unbind needs a batch"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "args", "options", "error", "message"), REFUSED_CALLS)
def test_refused_by_other_functions(function, args, options, error, message):
    with pytest.raises(error, match=message):
        function(*args, **options)


# The contents of the indices


def indexed(crow, col, cols=8, *, index_dtype=torch.int32, device="cpu", **options):
    """A matrix of 16 x 16 blocks, or a batch if `crow` is nested, with these indices, right or not."""
    crow, col = (torch.tensor(x, dtype=index_dtype, device=device) for x in (crow, col))
    shape = *crow.shape[:-1], 16 * (crow.shape[-1] - 1), 16 * cols
    return BsrMatrix(crow, col, torch.ones(len(col), 16, 16, device=device), shape, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_right_indices_pass(pattern, index_dtype, device):
    for grid in ((1, 1), (4, 6), (33, 17), (1, 40), (40, 1)):
        bsr(pattern, (16, 16), device, grid=grid, index_dtype=index_dtype).check_indices()


WRONG_INDICES = {
    "first not 0": ([1, 2, 3], [0, 1, 2], r"crow_indices\[0\] is 1; it must be 0"),
    "last too small": ([0, 1, 2], [0, 1, 2], r"crow_indices\[2\], the last, is 2; it must be nnz = 3"),
    "last too large": ([0, 1, 4], [0, 1, 2], r"crow_indices\[2\], the last, is 4; it must be nnz = 3"),
    "last not 0 without blocks": ([0, 0, 2], [], r"crow_indices\[2\], the last, is 2; it must be nnz = 0"),
    "decreasing": ([0, 2, 1, 3], [0, 1, 2], r"crow_indices\[2\] is 1, less than crow_indices\[1\] = 2"),
    "huge in the middle": ([0, 2**31 - 1, 2], [0, 1], r"crow_indices\[2\] is 2, less than crow_indices\[1\] = 21"),
    "negative in the middle": ([0, -(2**31), 2], [0, 1], r"crow_indices\[1\] is -2147483648, less than"),
    "negative column": ([0, 1, 3], [0, -1, 2], r"col_indices\[1\] is -1, in block-row 1; it must be in \[0, 8\)"),
    "column too large": ([0, 1, 3], [0, 1, 8], r"col_indices\[2\] is 8, in block-row 1; it must be in \[0, 8\)"),
    "unsorted": ([0, 0, 1, 4], [7, 1, 5, 3], r"col_indices\[3\] is 3 after 5, both in block-row 2; .* sorted"),
    "duplicate": ([0, 1, 4], [7, 1, 5, 5], r"col_indices\[3\] is 5 after 5, both in block-row 1; .* duplicates"),
    "first of several": ([0, 3, 6], [0, 9, 1, 5, 4, -3], r"col_indices\[1\] is 9, in block-row 0"),
    "batch, first not 0": ([[1, 2], [2, 3]], [0, 1, 2], r"crow_indices\[0, 0\] is 1; it must be 0"),
    "batch, gap": ([[0, 1], [2, 3]], [0, 1, 2], r"crow_indices\[1, 0\] is 2; it must be where item 0 ends, 1"),
    "batch, overlap": ([[0, 2], [1, 3]], [0, 1, 2], r"crow_indices\[1, 0\] is 1; it must be where item 0 ends, 2"),
    "batch, relative": ([[0, 1], [0, 1]], [0, 1], r"crow_indices\[1, 0\] is 0; it must be where item 0 ends, 1"),
    "batch, decreasing": ([[0, 1, 1], [1, 3, 2]], [0, 1, 2], r"\[1, 2\] is 2, less than crow_indices\[1, 1\] = 3"),
    "batch, last": ([[0, 1, 1], [1, 2, 2]], [0, 1, 2], r"crow_indices\[1, 2\], the last, is 2; it must be nnz = 3"),
    "batch, huge": ([[0, 2**31 - 1], [2**31 - 1, 1]], [0], r"crow_indices\[1, 1\] is 1, less than crow_indices\[1, 0"),
    "batch, column": ([[0, 1, 1], [1, 1, 2]], [0, 8], r"col_indices\[1\] is 8, in block-row 1 of item 1; .*\[0, 8\)"),
    "batch, negative": ([[0, 1, 2], [2, 2, 2]], [0, -1], r"col_indices\[1\] is -1, in block-row 1 of item 0"),
    "batch, unsorted": ([[0, 1], [1, 3]], [5, 4, 2], r"col_indices\[2\] is 2 after 4, both in block-row 0 of item 1"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("name", WRONG_INDICES)
def test_wrong_indices_are_named(name, index_dtype, device):
    crow, col, message = WRONG_INDICES[name]
    a = indexed(crow, col, index_dtype=index_dtype, device=device)
    for operation in (a.check_indices, a.check_indices, a.to_dense, a.transpose, *([a.unbind] if a.batch else [])):
        with pytest.raises(ValueError, match=message):
            operation()


def test_wrong_indices_of_one_pattern():
    crow, col = torch.tensor([0, 1, 1]).int(), torch.tensor([0, 1]).int()
    with pytest.raises(ValueError, match=r"crow_indices\[2\], the last, is 1; it must be nnz = 2"):
        BsrMatrix(crow, col, torch.ones(3, 2, 16, 16), (3, 32, 32)).check_indices()


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_check_agrees_with_a_plain_loop(data):
    rows, cols, nnz = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)), data.draw(st.integers(0, 4))
    nnz = min(nnz, rows * cols)
    crow = data.draw(st.lists(st.integers(-1, nnz + 1), min_size=rows + 1, max_size=rows + 1))
    if data.draw(st.booleans()):
        crow = [0, *sorted(min(max(c, 0), nnz) for c in crow[1:-1]), nnz]
    col = data.draw(st.lists(st.integers(-1, cols), min_size=nnz, max_size=nnz))
    right = crow[0] == 0 and crow[-1] == nnz and crow == sorted(crow)
    for begin, end in zip(crow, crow[1:], strict=False) if right else ():
        row = col[begin:end]
        right &= row == sorted(set(row)) and all(0 <= c < cols for c in row)
    a = indexed(crow, col, cols)
    if right:
        a.check_indices()
    else:
        with pytest.raises(ValueError, match=r"(crow|col)_indices\["):
            a.check_indices()


@pytest.mark.parametrize("form", [None, "patterns"])
def test_check_reads_the_device_once_and_remembers(monkeypatch, form):
    reads, original, a = [], torch.Tensor.tolist, some(form)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append(t.shape) or original(t))
    with Operations() as first:
        a.check_indices()
    with Operations() as second:
        a.check_indices()
        a.check_indices()
    assert reads == [(8,)] and second.names == [] and not first.asked()


def test_failure_is_not_remembered_as_success():
    a = indexed([0, 2], [3, 1])
    with pytest.raises(ValueError, match="after 3"):
        a.check_indices()
    a.col_indices.copy_(torch.tensor([1, 3]))
    a.check_indices()


def test_check_false_leaves_it_to_the_caller():
    a = indexed([0, 1, 2], [5, 5], check=False)
    a.col_indices[0] = 0
    with Operations() as ran:
        a.to_dense(), a.transpose()
    assert not a.check and not a.checked and "stack" not in ran.names
    unsorted = indexed([0, 2], [3, 1], check=False)
    unsorted.to_dense()
    with pytest.raises(ValueError, match="after 3"):
        unsorted.check_indices()


def of_new_indices(W: BsrMatrix) -> dict:
    """`parts` with index tensors of which nothing is known."""
    return parts(W, crow_indices=W.crow_indices.clone(), col_indices=W.col_indices.clone())


def test_matrices_of_the_same_index_tensors_share_a_pattern():
    """A write makes a matrix that is constructed later check again; blocks of another shape are another pattern."""
    a = some()
    b = BsrMatrix(**parts(a))
    assert b.pattern is a.pattern and not b.checked
    b.check_indices()
    with Operations() as ran:
        BsrMatrix(**parts(a)).check_indices()
    assert a.checked and ran.names == []
    a.col_indices.add_(0)
    c = BsrMatrix(**parts(a))
    assert a.checked and not c.checked and c.pattern.tables is a.pattern.tables
    c.check_indices()
    assert BsrMatrix(**parts(a)).pattern is c.pattern
    wider = BsrMatrix(**parts(a, shape=(a.shape[0], 2 * a.shape[1])))
    assert wider.pattern is not c.pattern and BsrMatrix(**parts(a)).pattern is c.pattern


def test_a_pattern_does_not_keep_its_index_tensors_alive():
    W = some()
    W.check_indices()
    crow, col = weakref.ref(W.crow_indices), weakref.ref(W.col_indices)
    assert W.t().t() is W and len(patterns_of(W.crow_indices)) == 1
    number = id(W.crow_indices)
    del W
    assert crow() is None and col() is None and number not in patterns_of.found


def test_conversions_carry_what_is_known():
    made = BsrMatrix.from_dense(torch.ones(64, 64), (16, 16))
    even = BsrMatrix.stack([random_bsr((64, 64), (16, 16), per_row=2) for _ in range(3)])
    for a in (made, made.to(torch.float16), made.transpose(), random_bsr((64, 64), (16, 16), per_row=2), even):
        with Operations() as ran:
            a.check_indices()
        assert ran.names == []
    given_by_user = BsrMatrix(**of_new_indices(made), check=False)
    for a in (given_by_user.to(torch.float16), given_by_user.transpose()):
        assert not a.check and not a.checked
    again = BsrMatrix(**of_new_indices(even))
    assert even.even and not again.even
    again.check_indices()
    assert again.even


def test_unchecked_indices_cannot_be_captured(monkeypatch):
    a = some()
    monkeypatch.setattr(pattern, "captured", lambda tensor: True)
    with pytest.raises(RuntimeError, match=r"call check_indices\(\) before the capture"):
        a.check_indices()
    monkeypatch.undo()
    a.check_indices()
    monkeypatch.setattr(pattern, "captured", lambda tensor: True)
    a.check_indices()


def test_check_from_many_threads():
    right, wrong = some(grid=(200, 200)), indexed([0, 2], [3, 1])
    start, passed, failed = threading.Barrier(16), [], []

    def work():
        start.wait()
        for _ in range(20):
            right.check_indices()
            passed.append(right.checked)
        try:
            wrong.check_indices()
        except ValueError as error:
            failed.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert passed == [True] * 320 and len(failed) == 16 and len(set(failed)) == 1


class TestCuda:
    pytestmark = NEEDS_GPU + [
        pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
        pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    ]

    def test_synchronisations(self):
        generator = torch.Generator("cuda").manual_seed(0)
        dense = torch.randn(256, 512, device="cuda", generator=generator)
        torch.cuda.set_sync_debug_mode("error")
        try:
            a = random_bsr((256, 512), (32, 64), per_row=3, device="cuda", generator=generator)
            a = BsrMatrix(**parts(a), check=False)
            a.row_of_block(), a.transpose(), a.to_dense(), a.to_torch(), repr(a)
            BsrMatrix.from_dense(dense, (32, 64), density=0.4)
            torch.cuda.set_sync_debug_mode("warn")
            with pytest.warns(UserWarning) as caught:
                a.check_indices()
            assert len([w for w in caught if "synchroniz" in str(w.message)]) == 1
            torch.cuda.set_sync_debug_mode("error")
            a.check_indices()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_capture_needs_checked_indices(self):
        a, graph = some(device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="before the capture"):
            a.check_indices()
        a.check_indices()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            a.check_indices()
            dense = a.to_dense()
        graph.replay()
        assert torch.equal(dense, a.to_torch().to_dense())
