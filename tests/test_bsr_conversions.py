"""BsrMatrix from and to dense and torch.sparse_bsr tensors, devices, dtypes and storage, and random_bsr."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_collective.bsr import BsrMatrix, random_bsr
from sparse_collective.small_blocks.tables_family import tables_of
from tests.bsr_parts import BLOCKSIZES, DEVICES, DTYPES, INDEX_DTYPES, Operations, assert_same, parts, pointers
from tests.cases import PATTERNS

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
    batch = torch.ones(2, 3, 32, 64).to_sparse_bsr((16, 16))
    with pytest.raises(ValueError, match=r"one batch dimension, got shape \(2, 3, 32, 64\)"):
        BsrMatrix.from_torch(batch)
    with pytest.raises(ValueError, match=r"no dense dimensions, got 1 in \(32, 64, 3\)"):
        BsrMatrix.from_torch(torch.ones(32, 64, 3).to_sparse_bsr((16, 16), dense_dim=1))
    with pytest.raises(ValueError, match="block side bm is 8"):
        BsrMatrix.from_torch(dense.to_sparse_bsr((8, 16)))
    with pytest.raises(TypeError, match="torch.int64"):
        BsrMatrix.from_torch(dense.long().to_sparse_bsr((16, 16)))


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
    for dense in (a.to_dense(), a.transpose().to_dense().T, BsrMatrix.from_torch(a.to_torch()).to_dense()):
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
    with pytest.raises(TypeError, match="values cannot be torch.int64"):
        a.to(torch.int64)


def test_pickle_and_torch_save():
    a = BsrMatrix(*parts(), check=False)
    a.check_indices()
    stream = io.BytesIO()
    torch.save(a, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    for b in (pickle.loads(pickle.dumps(a)), loaded, copy.deepcopy(a)):
        assert_same(a, b)
        assert b.values.data_ptr() != a.values.data_ptr()
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
        ({"per_row": 1, "dtype": torch.complex64}, TypeError, "values cannot be torch.complex64"),
        ({"per_row": 1, "index_dtype": torch.uint8}, TypeError, "indices cannot be torch.uint8"),
    ):
        with pytest.raises(error, match=message):
            random_bsr((64, 64), (16, 16), **options)


@pytest.mark.parametrize("device", DEVICES)
def test_other_values_of_one_pattern(device):
    """A training step makes values anew: what is known of the pattern, and what was made of it, stays."""
    crow, col, values, shape = (x.to(device) if isinstance(x, torch.Tensor) else x for x in parts(blocksize=(16, 16)))
    a = BsrMatrix(crow, col, values, shape)
    a.check_indices()
    plan = tables_of(a, 1, False)
    b = a.with_values(2 * values)
    assert torch.equal(b.to_dense(), 2 * a.to_dense()) and pointers(b.crow_indices) == pointers(crow)
    assert (b.checked, b.even, b.stats, b.key) == (True, a.even, a.stats, a.key)
    assert tables_of(b, 1, False) is plan and tables_of(a.to(torch.bfloat16), 1, False) is plan
    with pytest.raises(ValueError, match="must be of shape"):
        a.with_values(values[1:])
    with pytest.raises(TypeError, match="values cannot be"):
        a.with_values(values.int())
    unchecked = BsrMatrix(crow, col, values, shape).with_values(values.clone())
    assert not unchecked.checked and unchecked.plans is not None
