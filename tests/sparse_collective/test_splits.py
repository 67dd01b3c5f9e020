"""BsrMatrix.split: parts of block rows and block columns, against the dense matrix."""

import pytest
import torch

from sparse_collective import BsrMatrix, bsr_linear, random_bsr

from .bsr_parts import FORMS, batch, bsr


def dense_parts(W, dim, sizes):
    side = W.blocksize[dim]
    return W.to_dense().split([size * side for size in sizes], dim - 2)


@pytest.mark.parametrize("pattern", ["power_law", "empty_rows", "no_blocks", "all_blocks"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("parts", [1, 2, 4, 7, (2, 0, 3)])
def test_parts_of_a_matrix(pattern, dim, parts):
    W = bsr(pattern, (32, 16), grid=(5, 5))
    found = W.split(dim, parts)
    sizes = [part.shape[dim] // W.blocksize[dim] for part in found]
    assert sum(sizes) == 5 and (max(sizes) - min(sizes) <= 1 if isinstance(parts, int) else sizes == list(parts))
    for part, dense in zip(found, dense_parts(W, dim, sizes), strict=True):
        part.check_indices()
        assert torch.equal(part.to_dense(), dense)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dim", [1, 2])
def test_parts_of_a_batch(form, dim):
    W, _ = batch(form, (32, 16), grid=(4, 4))
    for part, dense in zip(W.split(dim, (1, 3)), dense_parts(W, dim - 1, (1, 3)), strict=True):
        part.pattern.checked = False
        part.check_indices()
        assert torch.equal(part.to_dense(), dense)


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_a_transposed_view_and_of_scaled_values(dim):
    W = bsr("power_law", (32, 16), grid=(4, 4))
    assert all(torch.equal(a.to_dense(), b.to_dense().t()) for a, b in zip(W.t().split(dim, 2), W.split(1 - dim, 2)))
    scaled = W.quantize()
    for part, dense in zip(scaled.split(dim, 2), dense_parts(scaled, dim, (2, 2)), strict=True):
        assert torch.equal(part.to_dense(), dense)


def test_parts_with_equally_many_blocks():
    mask = torch.zeros(6, 4, dtype=torch.bool)
    mask[0], mask[1:, 0] = True, True  # 4, 1, 1, 1, 1, 1 blocks
    W = bsr(mask, (16, 16))
    assert [part.shape[0] // 16 for part in W.split(0, 2, balance="blocks")] == [1, 5]
    assert [part.shape[0] // 16 for part in W.split(0, 2)] == [3, 3]
    assert [part.shape[1] // 16 for part in W.split(1, 2, balance="blocks")] == [1, 3]


def test_block_rows_share_memory_and_parts_are_differentiable():
    W = random_bsr((128, 128), (32, 32), density=0.5, dtype=torch.float32).requires_grad_()
    x = torch.randn(6, 128)
    rows, columns = W.split(0, 2), W.split(-1, 2)
    assert rows[1].values.untyped_storage().data_ptr() == W.values.untyped_storage().data_ptr()
    y = torch.cat([bsr_linear(x, part) for part in rows], -1)
    z = sum(bsr_linear(t, part) for t, part in zip(x.chunk(2, -1), columns, strict=True))
    torch.testing.assert_close(y, bsr_linear(x, W))
    torch.testing.assert_close(z, y)
    (y + z).sum().backward()
    found, values = W.grad.clone(), W.values
    values.grad = None
    (2 * bsr_linear(x, W)).sum().backward()
    torch.testing.assert_close(found, values.grad)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((2, 2), IndexError, "dim is 2"),
        ((0, 0), ValueError, "at least one"),
        ((0, (1, 1)), ValueError, r"add up to 4 blocks"),
        ((0, (5, -1)), ValueError, "must not be negative"),
        ((0, 2, "rows"), ValueError, "'extent' or 'blocks'"),
        ((0, (2, 2), "blocks"), ValueError, "has no meaning"),
    ],
)
def test_errors(arguments, error, message):
    W = random_bsr((64, 64), (16, 16), density=0.5)
    dim, parts, *balance = arguments
    with pytest.raises(error, match=message):
        W.split(dim, parts, **({"balance": balance[0]} if balance else {}))
    with pytest.raises(ValueError, match="unbind"):
        BsrMatrix.stack([W, W]).split(0, 2)
