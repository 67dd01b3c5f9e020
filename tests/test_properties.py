"""Random products: any shape, pattern, block shape, terms and view, against fp64.

On the CPU for anything; through the host side of a GPU call with torch in the kernel's place; and on a GPU for a few
compiled kernels, which must serve every shape and pattern.
"""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cute_kernels
from cute_kernels import explain, gemm
from sparse_collective import BsrMatrix, bsr_linear, bsr_matmul

from .cases import mask_to_indices
from .reference import assert_as_good_as_torch, dense_of, exact_and_torch, normal, poisoned

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RELAXED = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
}
ON_CPU = settings(max_examples=60, **RELAXED)
ON_GPU = settings(max_examples=25, derandomize=True, **RELAXED)

sizes = st.integers(1, 80)
scalars = st.sampled_from([1.0, 0.0, -0.5, 2.0])
types = st.sampled_from([BF16, FP16])
outputs = st.sampled_from([BF16, FP16, FP32])
activations = st.sampled_from([None, "relu", "gelu", "gelu_tanh", "silu"])
seeds = st.integers(0, 2**31)
block_sides = st.integers(1, 9).map(lambda i: 16 * i)


@st.composite
def masks(draw):
    """Any pattern: each block by itself, so that hypothesis can shrink one."""
    m, n = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    bits = draw(st.lists(st.booleans(), min_size=m * n, max_size=m * n))
    return torch.tensor(bits, dtype=torch.bool).view(m, n)


@st.composite
def batches(draw):
    """A pair of batch shapes that broadcast."""
    shape = draw(st.lists(st.integers(1, 3), max_size=2))
    pair = []
    for _ in range(2):
        mine = [draw(st.sampled_from([n, 1])) for n in shape]
        pair.append(tuple(mine[draw(st.integers(0, len(mine))) :] if draw(st.booleans()) else mine))
    return pair


@st.composite
def views(draw):
    """How a matrix lies in a larger one: (transposed, offsets, margins, column step)."""
    transposed, step = draw(st.booleans()), draw(st.sampled_from([1, 1, 1, 2]))
    return transposed, draw(st.sampled_from([0, 1, 8])), draw(st.sampled_from([0, 0, 3, 8])), step


def laid_out(shape, view, *, dtype, device, k=1, fill=None):
    """A tensor of a shape in memory laid out as `view` says; all NaN around it."""
    transposed, offset, margin, step = view
    *batch, rows, cols = shape
    rows, cols = (cols, rows) if transposed else (rows, cols)
    buffer = poisoned(*batch, rows + margin, offset + cols * step + margin, dtype=dtype, device=device)
    inside = buffer[..., :rows, offset : offset + cols * step : step]
    if fill is None:
        inside.copy_(normal(*inside.shape, device=device, k=k, dtype=dtype))
    return inside.mT if transposed else inside


def check_gemm(data, device):
    torch.manual_seed(data.draw(seeds, "seed"))
    m, n, k = data.draw(sizes, "m"), data.draw(sizes, "n"), data.draw(st.integers(0, 80), "k")
    batch_a, batch_b = data.draw(batches(), "batches")
    dtype, out_dtype = data.draw(types, "dtype"), data.draw(outputs, "out_dtype")
    a = laid_out((*batch_a, m, k), data.draw(views(), "view of a"), dtype=dtype, device=device)
    b = laid_out((*batch_b, k, n), data.draw(views(), "view of b"), dtype=dtype, device=device, k=k)
    shape = (*torch.broadcast_shapes(batch_a, batch_b), m, n)
    terms = {"activation": data.draw(activations, "activation"), "alpha": data.draw(scalars, "alpha")}
    if (bias := data.draw(st.sampled_from([None, (n,), (1, n), (m, 1)]), "bias")) is not None:
        terms["bias"] = normal(*bias, dtype=data.draw(outputs, "bias dtype"), device=device)
    if data.draw(st.booleans(), "residual"):
        terms |= {"residual": normal(*shape, dtype=out_dtype, device=device), "beta": data.draw(scalars, "beta")}
    view = data.draw(views(), "view of out") if len(shape) == 2 else (False, 0, 0, 1)
    out = laid_out(shape, view, dtype=out_dtype, device=device, fill=math.nan)
    exact, by_torch = exact_and_torch(a, b, out_dtype, **terms)
    gemm(a, b, out=out, **terms)
    assert_as_good_as_torch(out, exact, by_torch, k=k, plan=explain(gemm, a, b, out=out, **terms))


def check_bsr(data, device, block=None, plain=False):
    """`plain` varies shapes and patterns only, not what a kernel is compiled from."""
    torch.manual_seed(data.draw(seeds, "seed"))
    mask = data.draw(masks(), "pattern")
    bm, bk = block or (data.draw(block_sides, "bm"), data.draw(block_sides, "bk"))
    n, linear = data.draw(sizes, "n"), data.draw(st.booleans(), "linear")
    if plain:
        n *= 8
    dtype = BF16 if plain else data.draw(types, "dtype")
    out_dtype = BF16 if plain else data.draw(outputs, "out_dtype")
    index_dtype = torch.int32 if plain else data.draw(st.sampled_from([torch.int32, torch.int64]), "index_dtype")
    crow, col = (t.to(device) for t in mask_to_indices(mask, index_dtype))
    rows, k = mask.shape[0], mask.shape[1] * bk
    W = BsrMatrix(crow, col, normal(len(col), bm, bk, dtype=dtype, device=device, k=k), (rows * bm, k))
    view = (linear, 0, 0, 1) if plain else data.draw(views(), "view of b")
    b = laid_out((k, n), view, dtype=dtype, device=device)
    b = b.t() if linear else b
    terms = {} if plain else {"activation": data.draw(activations, "activation")}
    if not plain and data.draw(st.booleans(), "bias"):
        terms["bias"] = normal(*((rows * bm,) if linear else (rows * bm, 1)), device=device)
    args, op = ((b, W), bsr_linear) if linear else ((W, b), bsr_matmul)
    dense = dense_of(crow, col, W.values, W.shape)
    exact, by_torch = exact_and_torch(*((b, dense.t()) if linear else (dense, b)), out_dtype, **terms)
    out = poisoned(*exact.shape, dtype=out_dtype, device=device)
    op(*args, out=out, **terms)
    assert_as_good_as_torch(out, exact, by_torch, k=k, plan=explain(op, *args, out=out, **terms))


@ON_CPU
@given(st.data())
def test_gemm_on_the_cpu(data):
    check_gemm(data, "cpu")


@ON_CPU
@given(st.data())
def test_bsr_on_the_cpu(data):
    check_bsr(data, "cpu")


@ON_CPU
@given(st.data())
def test_gemm_host_side(emulated, data):
    check_gemm(data, "cpu")


@ON_CPU
@given(st.data())
def test_bsr_host_side(emulated, data):
    check_bsr(data, "cpu")


@pytest.mark.gpu
@ON_GPU
@given(st.data())
def test_gemm_shapes_on_the_gpu(path, data):
    """Multiples of 8, row-major: a handful of kernels for all of them."""
    torch.manual_seed(data.draw(seeds, "seed"))
    m, n, k = (8 * data.draw(st.integers(1, 80), name) for name in "mnk")
    a, b = normal(m, k, device="cuda"), normal(k, n, device="cuda", k=k)
    out = poisoned(m, n, device="cuda")
    gemm(a, b, out=out)
    assert_as_good_as_torch(out, *exact_and_torch(a, b, BF16), k=k, plan=explain(gemm, a, b, out=out))


@pytest.mark.gpu
@ON_GPU
@given(st.data())
def test_gemm_odd_shapes_on_the_gpu(data):
    torch.manual_seed(data.draw(seeds, "seed"))
    m, n, k = (2 * data.draw(st.integers(1, 200), name) + 1 for name in "mnk")
    with cute_kernels.path("sm_80"):
        a, b = normal(m, k, device="cuda"), normal(k, n, device="cuda", k=k)
        out = poisoned(m, n, device="cuda")
        gemm(a, b, out=out)
        assert_as_good_as_torch(out, *exact_and_torch(a, b, BF16), k=k, plan=explain(gemm, a, b, out=out))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(64, 64), (48, 112)], ids=str)
@ON_GPU
@given(data=st.data())
def test_bsr_patterns_on_the_gpu(path, block, data):
    check_bsr(data, "cuda", block, plain=True)
