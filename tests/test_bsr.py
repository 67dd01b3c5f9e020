"""BsrMatrix: what it accepts, how it refuses the rest, and that it agrees with torch.sparse_bsr."""

import copy
import io
import pickle
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_collective.bsr import BsrMatrix, random_bsr
from tests.cases import PATTERNS, mask_to_indices

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")

BLOCKSIZES = [(16, 16), (32, 64), (128, 64), (64, 256), (48, 112), (512, 112)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
INDEX_DTYPES = [torch.int32, torch.int64]
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


def parts(rows=4, cols=6, pattern="bernoulli", blocksize=(16, 32), dtype=torch.float32, index_dtype=torch.int32):
    """The constructor's arguments for one pattern, on the CPU; shape (rows * bm, cols * bk)."""
    crow, col = mask_to_indices(PATTERNS[pattern](rows, cols), index_dtype)
    values = torch.randn(len(col), *blocksize, generator=torch.Generator().manual_seed(1)).to(dtype)
    return crow, col, values, (rows * blocksize[0], cols * blocksize[1])


def assert_same(a: BsrMatrix, b: BsrMatrix):
    assert (a.shape, a.blocksize, a.check) == (b.shape, b.blocksize, b.check)
    for x, y in ((a.crow_indices, b.crow_indices), (a.col_indices, b.col_indices), (a.values, b.values)):
        assert x.dtype == y.dtype and torch.equal(x, y)


def pointers(*tensors):
    return [t.data_ptr() for t in tensors]


class Operations(TorchDispatchMode):
    """The names of the torch operations that ran, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


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
    for options in (
        {},
        {"density": 1.0},
        {"mask": torch.zeros(shape[0] // 16, shape[1] // 32, dtype=torch.bool)},
    ):
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


def misaligned(values):
    return torch.empty(values.numel() + 1)[1:].view_as(values)


REFUSED = {
    "crow no tensor": (
        "crow_indices",
        lambda t: t.tolist(),
        TypeError,
        "crow_indices must be a strided .* got list",
    ),
    "values no tensor": (
        "values",
        lambda t: t.numpy(),
        TypeError,
        "values must be a strided tensor, got ndarray",
    ),
    "values sparse": ("values", lambda t: t.to_sparse(), TypeError, "values .* got a torch.sparse_coo"),
    "values dtype": ("values", lambda t: t.double(), TypeError, "cannot be torch.float64; use .*bfloat16"),
    "crow dtype": ("crow_indices", lambda t: t.short(), TypeError, "cannot be torch.int16; use .*int32"),
    "mixed indices": (
        "col_indices",
        lambda t: t.long(),
        TypeError,
        "same dtype, got torch.int32 and torch.int64",
    ),
    "crow 2-D": (
        "crow_indices",
        lambda t: t[None],
        ValueError,
        "crow_indices must have 1 .* got shape \\(1, 5\\)",
    ),
    "col 2-D": ("col_indices", lambda t: t[None], ValueError, "col_indices must have 1 dimension"),
    "values 2-D": ("values", lambda t: t.flatten(1), ValueError, "values must have 3 dimension"),
    "device": (
        "col_indices",
        lambda t: t.to("meta"),
        ValueError,
        "col_indices is on meta, values on cpu; move",
    ),
    "strided crow": (
        "crow_indices",
        lambda t: t.repeat_interleave(2)[::2],
        ValueError,
        "crow_indices.contiguous",
    ),
    "strided col": (
        "col_indices",
        lambda t: t.repeat_interleave(2)[::2],
        ValueError,
        "col_indices.contiguous",
    ),
    "strided values": (
        "values",
        lambda t: t.mT.contiguous().mT,
        ValueError,
        "got strides .*values.contiguous",
    ),
    "misaligned": ("values", misaligned, ValueError, "4 bytes off 16-byte alignment; pass values.clone"),
    "short crow": ("crow_indices", lambda t: t[:-1], ValueError, "crow_indices has 4 entries; 4 rows need 5"),
    "short col": (
        "col_indices",
        lambda t: t[:-1],
        ValueError,
        "col_indices has \\d+ entries; the \\d+ blocks",
    ),
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
    "huge in the middle": (
        [0, 2**31 - 1, 2],
        [0, 1],
        r"crow_indices\[2\] is 2, less than crow_indices\[1\] = 21",
    ),
    "negative in the middle": ([0, -(2**31), 2], [0, 1], r"crow_indices\[1\] is -2147483648, less than"),
    "negative column": (
        [0, 1, 3],
        [0, -1, 2],
        r"col_indices\[1\] is -1, in block-row 1; it must be in \[0, 8\)",
    ),
    "column too large": (
        [0, 1, 3],
        [0, 1, 8],
        r"col_indices\[2\] is 8, in block-row 1; it must be in \[0, 8\)",
    ),
    "unsorted": (
        [0, 0, 1, 4],
        [7, 1, 5, 3],
        r"col_indices\[3\] is 3 after 5, both in block-row 2; .* sorted",
    ),
    "duplicate": (
        [0, 1, 4],
        [7, 1, 5, 5],
        r"col_indices\[3\] is 5 after 5, both in block-row 1; .* duplicates",
    ),
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
    assert reads == [(5,)]
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


# Conversions


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_patterns_round_trip(pattern, blocksize, device):
    crow, col, values, shape = parts(pattern=pattern, blocksize=blocksize)
    a = BsrMatrix(crow.to(device), col.to(device), values.to(device), shape)
    dense = a.to_dense()
    assert dense.shape == shape and dense.is_contiguous()
    assert torch.equal(dense, a.to_torch().to_dense())
    mask = PATTERNS[pattern](4, 6).to(device)
    assert_same(BsrMatrix.from_dense(dense, blocksize, mask=mask), a)
    assert_same(BsrMatrix.from_dense(dense, blocksize), a)
    assert_same(BsrMatrix.from_dense(dense, blocksize, density=a.density), a)
    assert torch.equal(a.row_of_block().long(), mask.nonzero()[:, 0])
    assert a.row_of_block().dtype == a.crow_indices.dtype


@settings(deadline=None, max_examples=100)
@given(
    grid=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    blocksize=st.tuples(st.sampled_from([16, 32, 48]), st.sampled_from([16, 64, 112])),
    dtype=st.sampled_from(DTYPES),
    index_dtype=st.sampled_from(INDEX_DTYPES),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    transposed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_dense_round_trip_agrees_with_torch(grid, blocksize, dtype, index_dtype, density, transposed, seed):
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(grid, generator=generator) < density
    shape = (grid[0] * blocksize[0], grid[1] * blocksize[1])
    dense = torch.randn(shape, generator=generator).to(dtype)
    dense *= keep.repeat_interleave(blocksize[0], 0).repeat_interleave(blocksize[1], 1)
    if transposed:
        dense = dense.T.contiguous().T
    theirs = dense.to_sparse_bsr(blocksize)
    a = BsrMatrix.from_dense(dense, blocksize, index_dtype=index_dtype)
    a.check_indices()
    assert a.crow_indices.dtype == a.col_indices.dtype == index_dtype
    assert a.crow_indices.tolist() == theirs.crow_indices().tolist()
    assert a.col_indices.tolist() == theirs.col_indices().tolist()
    assert torch.equal(a.values, theirs.values())
    assert torch.equal(a.to_dense(), dense)
    assert torch.equal(a.to_torch().to_dense(), dense)
    assert_same(BsrMatrix.from_torch(a.to_torch()), a)
    b = a.transpose()
    b = BsrMatrix(b.crow_indices, b.col_indices, b.values, b.shape)
    b.check_indices()
    assert b.blocksize == blocksize[::-1] and torch.equal(b.to_dense(), dense.T)
    assert b.crow_indices.dtype == b.col_indices.dtype == index_dtype
    assert_same(b.transpose(), a)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_torch_conversions_share_memory(index_dtype):
    crow, col, values, shape = parts(index_dtype=index_dtype)
    t = torch.sparse_bsr_tensor(crow, col, values, shape, check_invariants=True)
    a = BsrMatrix.from_torch(t)
    back = a.to_torch()
    expected = pointers(crow, col, values)
    assert pointers(a.crow_indices, a.col_indices, a.values) == expected
    assert pointers(back.crow_indices(), back.col_indices(), back.values()) == expected
    assert back.layout is torch.sparse_bsr and back.shape == t.shape and back.crow_indices().dtype == index_dtype
    assert not BsrMatrix.from_torch(t, check=False).check


def test_from_torch_does_not_trust_the_tensor():
    crow, col, values, shape = parts(pattern="all_blocks")
    t = torch.sparse_bsr_tensor(crow, col.flip(0), values, shape, check_invariants=False)
    a = BsrMatrix.from_torch(t)
    with pytest.raises(ValueError, match="col_indices"):
        a.check_indices()


def test_from_torch_refuses_other_tensors():
    dense = torch.ones(32, 64)
    with pytest.raises(TypeError, match="not torch.strided; .*to_sparse_bsr.*from_dense"):
        BsrMatrix.from_torch(dense)
    for layout in (torch.sparse_csr, torch.sparse_coo, torch.sparse_csc):
        with pytest.raises(TypeError, match=rf"not {layout}; pass t.to_sparse_bsr\(\(bm, bk\)\)$"):
            BsrMatrix.from_torch(dense.to_sparse(layout=layout))
    with pytest.raises(TypeError, match="got ndarray"):
        BsrMatrix.from_torch(dense.numpy())
    batch = torch.ones(2, 32, 64).to_sparse_bsr((16, 16))
    with pytest.raises(ValueError, match=r"batch of shape \(2, 32, 64\); pass t\[i\]"):
        BsrMatrix.from_torch(batch)
    assert torch.equal(BsrMatrix.from_torch(batch[1]).to_dense(), torch.ones(32, 64))
    with pytest.raises(ValueError, match=r"no dense dimensions, got 1 in \(32, 64, 3\)"):
        BsrMatrix.from_torch(torch.ones(32, 64, 3).to_sparse_bsr((16, 16), dense_dim=1))
    with pytest.raises(ValueError, match="block side bm is 8"):
        BsrMatrix.from_torch(dense.to_sparse_bsr((8, 16)))
    with pytest.raises(TypeError, match="torch.float64"):
        BsrMatrix.from_torch(dense.double().to_sparse_bsr((16, 16)))


# from_dense


def test_from_dense_counts_nan_but_not_negative_zero():
    dense = torch.zeros(32, 64)
    dense[:16, :16] = -0.0
    dense[20, 40] = float("nan")
    a = BsrMatrix.from_dense(dense, (16, 16))
    assert a.crow_indices.tolist() == [0, 0, 1] and a.col_indices.tolist() == [2]
    torch.testing.assert_close(a.to_dense(), dense, equal_nan=True, rtol=0, atol=0)
    assert BsrMatrix.from_dense(dense, (16, 16), density=1 / 8).col_indices.tolist() == [2]


def test_from_dense_mask_keeps_zero_blocks_and_drops_others():
    mask = torch.tensor([[True, False], [False, True]])
    dense = torch.zeros(32, 32)
    dense[:16, 16:] = 1
    a = BsrMatrix.from_dense(dense, (16, 16), mask=mask)
    assert a.nnz == 2 and not a.values.any()


def norm_matrix(norms):
    """Blocks of 16 x 32 whose Frobenius norms are the given ones."""
    norms = torch.as_tensor(norms, dtype=torch.float32)
    blocks = torch.zeros(*norms.shape, 16, 32)
    blocks[..., 3, 5] = norms
    return blocks.transpose(1, 2).reshape(norms.shape[0] * 16, norms.shape[1] * 32)


@pytest.mark.parametrize(
    ("density", "kept"),
    [
        (0.0, []),
        (1 / 6, [(1, 1)]),
        (2 / 6, [(0, 1), (1, 1)]),
        (3 / 6, [(0, 1), (0, 2), (1, 1)]),
        (0.7, [(0, 1), (0, 2), (1, 0), (1, 1)]),
        (1.0, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]),
    ],
)
def test_from_dense_density_keeps_the_largest(density, kept):
    a = BsrMatrix.from_dense(norm_matrix([[1, 2, 2], [2, 9, 0]]), (16, 32), density=density)
    assert list(zip(a.row_of_block().tolist(), a.col_indices.tolist(), strict=True)) == kept


def test_from_dense_density_survives_overflow_of_the_dtype():
    dense = norm_matrix([[3e38, 1e38], [2e38, 1e-38]]).bfloat16()
    assert BsrMatrix.from_dense(dense, (16, 32), density=0.5).col_indices.tolist() == [0, 0]
    dense = norm_matrix([[6e4, 1e-7], [0, 2e4]]).half()
    assert BsrMatrix.from_dense(dense, (16, 32), density=0.75).crow_indices.tolist() == [0, 2, 3]


def test_from_dense_refuses():
    dense, mask = torch.ones(32, 64), torch.ones(2, 4, dtype=torch.bool)
    for options, error, message in (
        ({"mask": mask, "density": 0.5}, ValueError, "both given; pass at most one"),
        ({"mask": mask.T}, ValueError, r"mask must have shape \(2, 4\) on cpu, got \(4, 2\)"),
        ({"mask": mask.to("meta")}, ValueError, "on cpu, got .* on meta"),
        ({"mask": mask.int()}, TypeError, "strided bool tensor, got .* torch.int32"),
        ({"mask": mask.tolist()}, TypeError, "strided bool tensor, got list"),
        ({"density": -0.1}, ValueError, r"density is -0.1; it must be in \[0, 1\]"),
        ({"density": 1.5}, ValueError, "density is 1.5"),
        ({"density": float("nan")}, ValueError, "density is nan"),
        ({"index_dtype": torch.int16}, TypeError, "indices cannot be torch.int16"),
    ):
        with pytest.raises(error, match=message):
            BsrMatrix.from_dense(dense, (16, 16), **options)
    with pytest.raises(ValueError, match="K is 64, no multiple of 48; pad it to 96"):
        BsrMatrix.from_dense(dense, (16, 48))
    with pytest.raises(ValueError, match="blocksize must be two integers"):
        BsrMatrix.from_dense(dense, (16,))
    with pytest.raises(TypeError, match="blocksize must be two integers, got 16"):
        BsrMatrix.from_dense(dense, 16)
    with pytest.raises(ValueError, match=r"2 dimensions \(M, K\), got shape \(1, 32, 64\)"):
        BsrMatrix.from_dense(dense[None], (16, 16))
    with pytest.raises(TypeError, match="values cannot be torch.int64"):
        BsrMatrix.from_dense(dense.long(), (16, 16))
    with pytest.raises(TypeError, match="dense must be a strided tensor, got a torch.sparse_coo"):
        BsrMatrix.from_dense(dense.to_sparse(), (16, 16))


# Gradients, devices and dtypes, storage


def test_gradients_flow_through_every_conversion():
    crow, col, values, shape = parts(pattern="bernoulli")
    values.requires_grad_()
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    expected = BsrMatrix.from_dense(weight, (16, 32), mask=PATTERNS["bernoulli"](4, 6)).values
    a = BsrMatrix(crow, col, values, shape)
    for dense in (
        a.to_dense(),
        a.transpose().to_dense().T,
        BsrMatrix.from_torch(a.to_torch()).to_dense(),
    ):
        (grad,) = torch.autograd.grad((dense * weight).sum(), values)
        assert torch.equal(grad, expected)
    (grad,) = torch.autograd.grad((a.to(torch.bfloat16).to_dense() * weight.bfloat16()).sum(), values)
    assert torch.equal(grad, expected.bfloat16().float())
    dense = torch.ones(shape, requires_grad=True)
    for options in ({"density": 0.5}, {"mask": PATTERNS["bernoulli"](4, 6)}, {}):
        b = BsrMatrix.from_dense(dense, (16, 32), **options)
        assert b.requires_grad
        (grad,) = torch.autograd.grad(b.values.sum(), dense)
        assert torch.equal(grad, b.to_dense().detach())


def test_to():
    a = BsrMatrix(*parts(), check=False)
    assert a.to(torch.float32) is a and a.to("cpu") is a and a.to(torch.device("cpu")) is a
    half = a.to(torch.float16)
    assert half.dtype is torch.float16 and torch.equal(half.values, a.values.half()) and not half.check
    assert half.crow_indices is a.crow_indices and half.col_indices is a.col_indices
    meta = a.to("meta")
    assert meta.device.type == "meta" and meta.col_indices.device.type == "meta" and meta.shape == a.shape
    assert meta.row_of_block().shape == (a.nnz,)
    with pytest.raises(TypeError, match="values cannot be torch.float64"):
        a.to(torch.float64)


def test_pickle_and_torch_save():
    a = BsrMatrix(*parts(), check=False)
    a.check_indices()
    stream = io.BytesIO()
    torch.save(a, stream)
    stream.seek(0)
    with torch.serialization.safe_globals([BsrMatrix]):
        loaded = torch.load(stream, weights_only=True)
    for b in (pickle.loads(pickle.dumps(a)), loaded, copy.deepcopy(a)):
        assert_same(a, b)
        assert not b.checked and b.values.data_ptr() != a.values.data_ptr()
    assert copy.copy(a).values is a.values


def test_row_of_block_does_not_ask_the_device():
    a = BsrMatrix(*parts(pattern="power_law"))
    with Operations() as ran:
        rows = a.row_of_block()
    assert not {"_local_scalar_dense", "nonzero"} & set(ran.names)
    assert rows.tolist() == [r for r in range(4) for _ in range(a.crow_indices[r], a.crow_indices[r + 1])]


# random_bsr


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("per_row", [0, 1, 5, 12])
def test_random_per_row(per_row, index_dtype, device):
    def make(seed):
        generator = torch.Generator(device).manual_seed(seed)
        options = {"device": device, "generator": generator, "index_dtype": index_dtype}
        return random_bsr((10 * 32, 12 * 16), (32, 16), per_row=per_row, **options)

    a = make(3)
    BsrMatrix(a.crow_indices, a.col_indices, a.values, a.shape).check_indices()
    assert a.crow_indices.diff().tolist() == [per_row] * 10
    assert a.crow_indices.dtype == a.col_indices.dtype == index_dtype
    assert a.dtype is torch.bfloat16 and a.device.type == device
    assert_same(a, make(3))
    assert per_row == 0 or not torch.equal(a.values, make(4).values)


def test_random_density_and_scale():
    def make():
        generator = torch.Generator().manual_seed(0)
        return random_bsr((1600, 1600), (16, 16), density=0.3, dtype=torch.float32, generator=generator, scale=3.0)

    a = make()
    BsrMatrix(a.crow_indices, a.col_indices, a.values, a.shape).check_indices()
    assert abs(a.density - 0.3) < 0.02
    assert abs(a.values.std().item() - 3.0) < 0.02 and abs(a.values.mean().item()) < 0.02
    assert a.crow_indices.diff().unique().numel() > 5
    assert_same(a, make())
    assert random_bsr((64, 64), (16, 16), density=0).nnz == 0
    assert random_bsr((64, 64), (16, 16), density=1).nnz == 16


def test_random_columns_are_uniform():
    a = random_bsr((16 * 4000, 160), (16, 16), per_row=3, generator=torch.Generator().manual_seed(0))
    counts = a.col_indices.bincount(minlength=10)
    assert ((counts - 1200).abs() < 150).all()


def test_random_refuses():
    for options, error, message in (
        ({}, ValueError, "either per_row or density, got per_row=None and density=None"),
        ({"per_row": 1, "density": 0.5}, ValueError, "either per_row or density"),
        ({"per_row": 5}, ValueError, r"per_row is 5; it must be in \[0, 4\]"),
        ({"per_row": -1}, ValueError, "per_row is -1"),
        ({"per_row": 1.5}, TypeError, "integer"),
        ({"density": 2}, ValueError, "density is 2"),
        ({"per_row": 1, "dtype": torch.float64}, TypeError, "values cannot be torch.float64"),
        ({"per_row": 1, "index_dtype": torch.uint8}, TypeError, "indices cannot be torch.uint8"),
    ):
        with pytest.raises(error, match=message):
            random_bsr((64, 64), (16, 16), **options)


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
