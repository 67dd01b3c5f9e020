"""BsrMatrix: what it accepts, how it refuses the rest, and what it asks of a GPU."""

import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_collective.bsr import BsrMatrix, random_bsr
from tests.bsr_parts import BLOCKSIZES, DEVICES, DTYPES, INDEX_DTYPES, NEEDS_GPU, Operations, assert_same, parts
from tests.cases import PATTERNS, mask_to_indices

# Construction


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_construct_shares_tensors_and_reports_them(blocksize, dtype, index_dtype):
    crow, col, values, shape = parts(blocksize=blocksize, dtype=dtype, index_dtype=index_dtype)
    a = BsrMatrix(crow, col, values, torch.Size(shape))
    assert a.crow_indices is crow and a.col_indices is col and a.values is values
    assert type(a.shape) is tuple and a.shape == shape
    assert type(a.blocksize) is tuple and a.blocksize == blocksize
    assert (a.n_block_rows, a.n_block_cols, a.nnz) == (4, 6, len(col))
    assert a.density == len(col) / 24
    assert (a.dtype, a.device, a.requires_grad, a.check) == (dtype, torch.device("cpu"), False, True)
    a.check_indices()


def test_constructor_runs_no_operation():
    arguments = parts()
    with Operations() as ran:
        a = BsrMatrix(*arguments)
        repr(a), a.density, a.nnz, a.requires_grad
    assert ran.names == []


def test_values_may_change_in_place():
    a = BsrMatrix(*parts())
    before = a.to_dense()
    a.values.mul_(2)
    assert torch.equal(a.to_dense(), before * 2)


def test_attributes_are_read_only():
    a = BsrMatrix(*parts())
    for name in ("values", "crow_indices", "shape", "nnz", "check", "_checked", "density", "anything"):
        with pytest.raises(AttributeError, match=f"{name} is read-only"):
            setattr(a, name, None)
    with pytest.raises(AttributeError, match="values is read-only"):
        del a.values


def test_can_be_a_weak_key():
    a = BsrMatrix(*parts())
    cache = weakref.WeakKeyDictionary({a: "plan"})
    assert cache[a] == "plan"
    del a
    assert not cache


def test_requires_grad_follows_values():
    crow, col, values, shape = parts()
    assert BsrMatrix(crow, col, values.requires_grad_(), shape).requires_grad


def test_repr_is_short_and_informative():
    text = repr(BsrMatrix(*parts(pattern="all_blocks", dtype=torch.bfloat16)))
    assert text == (
        "BsrMatrix(shape=(64, 192), blocksize=(16, 32), nnz=24, density=1, "
        "dtype=torch.bfloat16, device='cpu', index_dtype=torch.int32)"
    )


@pytest.mark.parametrize("shape", [(0, 192), (64, 0), (0, 0)])
def test_a_matrix_without_elements(shape):
    dense = torch.zeros(shape)
    for options in ({}, {"density": 1.0}, {"mask": torch.zeros(shape[0] // 16, shape[1] // 32, dtype=torch.bool)}):
        a = BsrMatrix.from_dense(dense, (16, 32), **options)
        a = BsrMatrix(a.crow_indices, a.col_indices, a.values, shape)
        a.check_indices()
        assert (a.nnz, a.density, a.shape) == (0, 0.0, shape)
        assert a.to_dense().shape == shape and a.transpose().shape == shape[::-1]
        assert a.row_of_block().shape == (0,)


def replace(name, change):
    """A changed argument: parts() with parts()[name] -> change(parts()[name])."""
    arguments = dict(zip(("crow_indices", "col_indices", "values", "shape"), parts(), strict=True))
    arguments[name] = change(arguments[name])
    return arguments


REFUSED = {
    "crow no tensor": ("crow_indices", lambda t: t.tolist(), TypeError, "crow_indices must be a strided .* got list"),
    "values no tensor": ("values", lambda t: t.numpy(), TypeError, "values must be a strided tensor, got ndarray"),
    "values sparse": ("values", lambda t: t.to_sparse(), TypeError, "values .* got a torch.sparse_coo"),
    "values dtype": ("values", lambda t: t.int(), TypeError, "cannot be torch.int32; use .*bfloat16"),
    "crow dtype": ("crow_indices", lambda t: t.short(), TypeError, "cannot be torch.int16; use .*int32"),
    "mixed indices": ("col_indices", lambda t: t.long(), TypeError, "same dtype, got torch.int32 and torch.int64"),
    "crow 2-D": (
        "crow_indices",
        lambda t: t[None],
        ValueError,
        "shape must be .L, M, K. .* because crow_indices has a dimension for the items",
    ),
    "col 2-D": ("col_indices", lambda t: t[None], ValueError, "col_indices must have 1 dimension"),
    "values 2-D": ("values", lambda t: t.flatten(1), ValueError, "values must have 3 dimension"),
    "device": ("col_indices", lambda t: t.to("meta"), ValueError, "col_indices is on meta, values on cpu; move"),
    "strided crow": ("crow_indices", lambda t: t.repeat_interleave(2)[::2], ValueError, "crow_indices.contiguous"),
    "strided col": ("col_indices", lambda t: t.repeat_interleave(2)[::2], ValueError, "col_indices.contiguous"),
    "strided values": ("values", lambda t: t.mT.contiguous().mT, ValueError, "got strides .*values.contiguous"),
    "short crow": ("crow_indices", lambda t: t[:-1], ValueError, "crow_indices has 4 entries; 4 rows need 5"),
    "short col": ("col_indices", lambda t: t[:-1], ValueError, "col_indices has \\d+ entries; the \\d+ blocks"),
    "M": ("shape", lambda s: (s[0] + 1, s[1]), ValueError, "M is 65, no multiple of 16; pad it to 80"),
    "K": ("shape", lambda s: (s[0], s[1] - 1), ValueError, "K is 191, no multiple of 32; pad it to 192"),
    "negative": ("shape", lambda s: (-16, s[1]), ValueError, "M is -16"),
    "shape length": ("shape", lambda s: (*s, 1), ValueError, "shape must be two integers"),
    "shape type": ("shape", lambda s: (64.0, 192), TypeError, "shape must be two integers"),
    "shape int": ("shape", lambda s: 64, TypeError, "shape must be two integers"),
    "more than all": ("shape", lambda s: (64, 32), ValueError, "blocks, but shape \\(64, 32\\) has only 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name):
    argument, change, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        BsrMatrix(**replace(argument, change))


@pytest.mark.parametrize("blocksize", [(8, 16), (16, 24), (0, 16), (1, 1), (16, 100)])
def test_refused_block_sides(blocksize):
    crow, col = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    message = r"block side b[mk] is \d+; use a positive multiple of 16"
    with pytest.raises(ValueError, match=message):
        BsrMatrix(crow, col, torch.zeros(1, *blocksize), blocksize)
    with pytest.raises(ValueError, match=message):
        BsrMatrix.from_dense(torch.zeros(64, 64), blocksize)
    with pytest.raises(ValueError, match=message):
        random_bsr((64, 64), blocksize, per_row=1)


def test_refused_more_blocks_than_int32_counts():
    values = torch.empty(2**31, 16, 16, dtype=torch.bfloat16, device="meta")
    col = torch.empty(2**31, dtype=torch.int64, device="meta")
    crow = torch.empty(2**16 + 1, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match="2147483648 blocks do not fit in int32"):
        BsrMatrix(crow, col, values, (2**20, 2**20))


# The contents of the indices


def indexed(crow, col, cols=8, *, index_dtype=torch.int32, device="cpu", **options):
    """A matrix of 16 x 16 blocks with these indices, whether they are right or not."""
    crow, col = (torch.tensor(x, dtype=index_dtype, device=device) for x in (crow, col))
    shape = (16 * (len(crow) - 1), 16 * cols)
    return BsrMatrix(crow, col, torch.ones(len(col), 16, 16, device=device), shape, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_right_indices_pass(pattern, index_dtype, device):
    for rows, cols in ((1, 1), (4, 6), (33, 17), (1, 40), (40, 1)):
        crow, col = mask_to_indices(PATTERNS[pattern](rows, cols).to(device), index_dtype)
        BsrMatrix(crow, col, torch.ones(len(col), 16, 16, device=device), (16 * rows, 16 * cols)).check_indices()


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
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("name", WRONG_INDICES)
def test_wrong_indices_are_named(name, index_dtype, device):
    crow, col, message = WRONG_INDICES[name]
    a = indexed(crow, col, index_dtype=index_dtype, device=device)
    for operation in (a.check_indices, a.check_indices, a.to_dense, a.transpose):
        with pytest.raises(ValueError, match=message):
            operation()


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
    if right:
        for begin, end in zip(crow, crow[1:], strict=False):
            row = col[begin:end]
            right &= row == sorted(set(row)) and all(0 <= c < cols for c in row)
    a = indexed(crow, col, cols)
    if right:
        a.check_indices()
    else:
        with pytest.raises(ValueError, match=r"(crow|col)_indices\["):
            a.check_indices()


def test_check_reads_the_device_once_and_remembers(monkeypatch):
    reads = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append(t.shape) or original(t))
    a = BsrMatrix(*parts())
    with Operations() as first:
        a.check_indices()
    with Operations() as second:
        a.check_indices()
        a.check_indices()
    assert reads == [(9,)]
    assert not {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select"} & set(first.names)
    assert second.names == []


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
    assert not a.check and not a.checked
    assert "stack" not in ran.names
    unsorted = indexed([0, 2], [3, 1], check=False)
    unsorted.to_dense()
    with pytest.raises(ValueError, match="after 3"):
        unsorted.check_indices()


def test_conversions_carry_what_is_known():
    made = BsrMatrix.from_dense(torch.ones(64, 64), (16, 16))
    for a in (made, made.to(torch.float16), made.transpose(), random_bsr((64, 64), (16, 16), per_row=2)):
        with Operations() as ran:
            a.check_indices()
        assert ran.names == []
    given_by_user = BsrMatrix(*parts(), check=False)
    for a in (given_by_user.to(torch.float16), given_by_user.transpose()):
        assert not a.check and not a.checked


class OnCuda(BsrMatrix):
    """Says that it is on a GPU."""

    __slots__ = ()
    device = property(lambda self: torch.device("cuda", 0))


def test_unchecked_indices_cannot_be_captured(monkeypatch):
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    a = OnCuda(*parts())
    with pytest.raises(RuntimeError, match=r"call check_indices\(\) before the capture"):
        a.check_indices()
    capturing = False
    a.check_indices()
    capturing = True
    a.check_indices()
    BsrMatrix(*parts()).check_indices()


def test_check_from_many_threads():
    right, wrong = BsrMatrix(*parts(200, 200)), indexed([0, 2], [3, 1])
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
    assert passed == [True] * 320
    assert len(failed) == 16 and len(set(failed)) == 1


# On a GPU


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
            a = BsrMatrix(a.crow_indices, a.col_indices, a.values, a.shape, check=False)
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
        a = BsrMatrix(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in parts()))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="before the capture"):
            a.check_indices()
        a.check_indices()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            a.check_indices()
            dense = a.to_dense()
        graph.replay()
        assert torch.equal(dense, a.to_torch().to_dense())

    def test_to_moves_all_tensors(self):
        a = BsrMatrix(*parts())
        b = a.to("cuda")
        assert b.device.type == b.crow_indices.device.type == b.col_indices.device.type == "cuda"
        assert b.to("cuda") is b
        assert_same(b.to("cpu"), a)
