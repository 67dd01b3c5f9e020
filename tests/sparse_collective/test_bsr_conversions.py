"""BsrMatrix, and batches of them, from and to other tensors, devices, dtypes and storage; and random_bsr."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.testing.patterns import PATTERNS
from sparse_collective import BsrMatrix, random_bsr
from sparse_collective.small_blocks.tables import tables_of

from .bsr_parts import BLOCKSIZES, DEVICES, DTYPES, FORMS, INDEX_DTYPES, Operations, assert_same, parts, pointers, some


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_patterns_round_trip(pattern, blocksize, device):
    a = some(pattern=pattern, block=blocksize, device=device)
    dense, mask = a.to_dense(), PATTERNS[pattern](4, 6).to(device)
    assert dense.shape == a.shape and dense.is_contiguous() and torch.equal(dense, a.to_torch().to_dense())
    for options in ({"mask": mask}, {}, {"density": a.density}):
        assert_same(BsrMatrix.from_dense(dense, blocksize, **options), a)
    rows = a.row_of_block()
    assert torch.equal(rows.long(), mask.nonzero()[:, 0]) and rows.dtype == a.crow_indices.dtype


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
    dense = torch.randn(grid[0] * blocksize[0], grid[1] * blocksize[1], generator=generator).to(dtype)
    dense *= keep.repeat_interleave(blocksize[0], 0).repeat_interleave(blocksize[1], 1)
    dense = dense.T.contiguous().T if transposed else dense
    theirs = dense.to_sparse_bsr(blocksize)
    a = BsrMatrix.from_dense(dense, blocksize, index_dtype=index_dtype)
    b = BsrMatrix(**parts(a.transpose()))
    for made, right in ((a, dense), (b, dense.T)):
        made.check_indices()
        assert made.crow_indices.dtype == made.col_indices.dtype == index_dtype and torch.equal(made.to_dense(), right)
    assert a.crow_indices.tolist() == theirs.crow_indices().tolist()
    assert a.col_indices.tolist() == theirs.col_indices().tolist()
    assert torch.equal(a.values, theirs.values()) and torch.equal(a.to_torch().to_dense(), dense)
    assert b.blocksize == blocksize[::-1]
    assert_same(BsrMatrix.from_torch(a.to_torch()), a)
    assert_same(b.transpose(), a)


# Batches


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_items(form, index_dtype, device):
    a, items = some(form, device=device, index_dtype=index_dtype, items=True)
    a.check_indices()
    dense, transposed = torch.stack([item.to_dense() for item in items]), a.transpose()
    assert torch.equal(a.to_dense(), dense)
    assert torch.equal(transposed.to_dense(), dense.mT) and transposed.batch == form
    transposed.check_indices()
    BsrMatrix(**parts(transposed)).check_indices()
    for mine, item in zip(a.unbind(), items, strict=True):
        if form == "patterns":
            assert_same(mine, item)
        else:
            assert mine.crow_indices is a.crow_indices and mine.col_indices is a.col_indices
        assert mine.checked and (mine.nnz == 0 or a.values.data_ptr() <= mine.values.data_ptr())
        assert torch.equal(mine.to_dense(), item.to_dense())
    assert a.density == pytest.approx(sum(item.nnz for item in items) / (4 * 24))


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_batches_from_and_to_torch(index_dtype):
    dense = torch.zeros(3, 64, 128)
    for l in range(3):  # torch wants equally many blocks in each item
        for r, c in ((0, l), (2, 1), (2, 3)):
            dense[l, 16 * r : 16 * r + 16, 32 * c : 32 * c + 32] = torch.randn(16, 32)
    t = dense.to_sparse_bsr((16, 32))
    indices = (x.to(index_dtype) for x in (t.crow_indices(), t.col_indices()))
    t = torch.sparse_bsr_tensor(*indices, t.values(), t.shape, check_invariants=True)
    a = BsrMatrix.from_torch(t)
    assert a.batch == "patterns" and a.crow_indices.dtype is index_dtype
    assert pointers(a.col_indices, a.values) == pointers(t.col_indices(), t.values())
    a.check_indices()
    back = a.to_torch()
    assert torch.equal(a.to_dense(), dense) and torch.equal(back.to_dense(), dense)
    assert back.values().data_ptr() == a.values.data_ptr() and torch.equal(back.crow_indices(), t.crow_indices())
    a = some("values")
    assert torch.equal(a.to_torch().to_dense(), a.to_dense()) and pointers(a.to_torch().values()) == pointers(a.values)
    for names in (("power_law", "no_blocks"), ("one_full_row", "no_blocks", "all_blocks")):
        with pytest.raises(ValueError, match="equally many blocks in each item, and this one does not; .*unbind"):
            some("patterns", names=names).to_torch()


# torch.sparse_bsr


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_torch_conversions_share_memory(index_dtype):
    crow, col, values, shape = parts(some(index_dtype=index_dtype)).values()
    t = torch.sparse_bsr_tensor(crow, col, values, shape, check_invariants=True)
    a = BsrMatrix.from_torch(t)
    back = a.to_torch()
    assert pointers(a.crow_indices, a.col_indices, a.values) == pointers(crow, col, values)
    assert pointers(back.crow_indices(), back.col_indices(), back.values()) == pointers(crow, col, values)
    assert back.layout is torch.sparse_bsr and back.shape == t.shape and back.crow_indices().dtype == index_dtype
    assert not BsrMatrix.from_torch(t, check=False).check
    wrong = torch.sparse_bsr_tensor(crow, col.flip(0), values, shape, check_invariants=False)
    with pytest.raises(ValueError, match="col_indices"):
        BsrMatrix.from_torch(wrong).check_indices()


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
    dense = torch.zeros(32, 32)
    dense[:16, 16:] = 1
    a = BsrMatrix.from_dense(dense, (16, 16), mask=torch.eye(2, dtype=torch.bool))
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


# Gradients, devices and dtypes, storage


def test_gradients_flow_through_every_conversion():
    for form in FORMS:
        a = some(form)
        a.values.requires_grad_()
        (a.to_dense() ** 2).sum().backward()
        assert torch.allclose(a.values.grad, 2 * a.values)
        assert a.transpose().requires_grad and all(item.requires_grad for item in a.unbind())
    a, weight = some(), torch.randn(64, 192, generator=torch.Generator().manual_seed(2))
    values, mask = a.values.requires_grad_(), PATTERNS["bernoulli"](4, 6)
    expected = BsrMatrix.from_dense(weight, (16, 32), mask=mask).values
    for dense in (a.to_dense(), a.transpose().to_dense().T, BsrMatrix.from_torch(a.to_torch()).to_dense()):
        (grad,) = torch.autograd.grad((dense * weight).sum(), values)
        assert torch.equal(grad, expected)
    (grad,) = torch.autograd.grad((a.to(torch.bfloat16).to_dense() * weight.bfloat16()).sum(), values)
    assert torch.equal(grad, expected.bfloat16().float())
    dense = torch.ones(a.shape, requires_grad=True)
    for options in ({"density": 0.5}, {"mask": mask}, {}):
        b = BsrMatrix.from_dense(dense, (16, 32), **options)
        (grad,) = torch.autograd.grad(b.values.sum(), dense)
        assert b.requires_grad and torch.equal(grad, b.to_dense().detach())


@pytest.mark.parametrize("form", [None, *FORMS])
def test_to(form):
    a = BsrMatrix(**parts(some(form)), check=False)
    assert a.to(torch.float32) is a and a.to("cpu") is a and a.to(torch.device("cpu")) is a
    half, meta = a.to(torch.float16), a.to("meta")
    assert half.dtype is torch.float16 and torch.equal(half.values, a.values.half()) and not half.check
    assert half.crow_indices is a.crow_indices and half.col_indices is a.col_indices
    assert torch.equal(half.to_dense(), a.to_dense().half())
    assert meta.device.type == "meta" and meta.col_indices.device.type == "meta" and meta.shape == a.shape
    assert form or meta.row_of_block().shape == (a.nnz,)
    with pytest.raises(TypeError, match="values cannot be torch.int64"):
        a.to(torch.int64)


@pytest.mark.gpu
def test_to_moves_all_tensors():
    a = some()
    b = a.to("cuda")
    assert b.device.type == b.crow_indices.device.type == b.col_indices.device.type == "cuda"
    assert b.to("cuda") is b
    assert_same(b.to("cpu"), a)


@pytest.mark.parametrize("form", [None, *FORMS])
def test_pickle_and_torch_save(form):
    a = BsrMatrix(**parts(some(form)), check=False)
    a.check_indices()
    stream = io.BytesIO()
    torch.save(a, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    for b in (pickle.loads(pickle.dumps(a)), loaded, copy.deepcopy(a)):
        assert_same(a, b)
        assert b.batch == form and b.values.data_ptr() != a.values.data_ptr()
    assert copy.copy(a).values is a.values


@pytest.mark.parametrize("form", [None, *FORMS])
def test_no_operation_asks_the_device(form):
    a = BsrMatrix(**parts(some(form, pattern="power_law")), check=False)
    with Operations() as ran:
        a.to_dense(), a.transpose(), a.row_of_block()
    assert not ran.asked()


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
    BsrMatrix(**parts(a)).check_indices()
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
    BsrMatrix(**parts(a)).check_indices()
    assert abs(a.density - 0.3) < 0.02 and a.crow_indices.diff().unique().numel() > 5
    assert abs(a.values.std().item() - 3.0) < 0.02 and abs(a.values.mean().item()) < 0.02
    assert_same(a, make())
    assert [random_bsr((64, 64), (16, 16), density=density).nnz for density in (0, 1)] == [0, 16]


def test_random_columns_are_uniform():
    a = random_bsr((16 * 4000, 160), (16, 16), per_row=3, generator=torch.Generator().manual_seed(0))
    assert ((a.col_indices.bincount(minlength=10) - 1200).abs() < 150).all()


@pytest.mark.parametrize("device", DEVICES)
def test_other_values_of_one_pattern(device):
    """A training step makes values anew: what is known of the pattern, and what was made of it, stays."""
    a = some(block=(16, 16), device=device)
    a.check_indices()
    plan, values = tables_of(a.pattern, 1, False), a.values
    b = a.with_values(2 * values)
    assert torch.equal(b.to_dense(), 2 * a.to_dense()) and pointers(b.crow_indices) == pointers(a.crow_indices)
    assert (b.checked, b.even, b.stats, b.form) == (True, a.even, a.stats, a.form)
    assert tables_of(b.pattern, 1, False) is plan and tables_of(a.to(torch.bfloat16).pattern, 1, False) is plan
    with pytest.raises(ValueError, match="must be of shape"):
        a.with_values(values[1:])
    with pytest.raises(TypeError, match="values cannot be"):
        a.with_values(values.int())
    unchecked = BsrMatrix(**parts(a, col_indices=a.col_indices.clone())).with_values(values.clone())
    assert not unchecked.checked and unchecked.pattern.tables is not None
