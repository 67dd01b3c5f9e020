"""quantize by kernels: what they make is what torch's operations make on the CPU, bit for bit."""

import math
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels import quantize, quantize_gated
from cute_kernels.fp8 import dispatch
from cute_kernels.fp8.config import facts_for
from cute_kernels.fp8.family import QUANTIZING
from sparse_collective import random_bsr

from ..emulator.ops import needs_compiler, on_emulator

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODULE = sys.modules["cute_kernels.fp8.quantize"]  # the package has the function of this name
PAIRS = [(BF16, E4M3), (FP16, E5M2), (FP32, E4M3)]
WHERE = pytest.mark.parametrize(
    "where",
    [
        pytest.param("emulator", marks=[needs_compiler, pytest.mark.slow]),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
SHAPES = [
    ("row", (37, 264)),
    ("row", (2, 3, 1600)),
    ("row", (1, 33000)),
    ("1x128", (33, 512)),
    ("1x128", (3, 5, 200)),
    ("128x128", (200, 264)),
    ("128x128", (2, 128, 128)),
    ("tensor", (130, 1000)),
    ("tokens", (2, 128, 128)),
    ("tokens", (200, 64)),
]


def numbers(shape, dtype=BF16) -> torch.Tensor:
    """For many magnitudes, with both zeros."""
    x = torch.randn(shape) * torch.randn(*shape[:-1], 1).exp() * 2.0 ** torch.randint(-9, 1, shape)
    x.view(-1)[:3] = torch.tensor([0.0, -0.0, 1.0])
    return x.to(dtype)


def by_kernel(where: str, call, x):
    """call(x) on the emulator or a GPU; and whether a kernel served it."""
    used, quantized = [], dispatch.quantized

    def watched(*given):
        used.append(found := quantized(*given))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "quantized", watched)
        if where == "cuda":
            found = call(x.cuda())
        else:
            with on_emulator("sm_90", sms=2):
                found = call(x)
    return found, bool(used) and all(each is not None for each in used)


def check(where: str, x, dtype, per, *, view=lambda x: x, served=True):
    """view: of x where it is quantised, since a copy to a GPU closes gaps in memory."""
    (values, scale), used = by_kernel(where, lambda t: quantize(view(t), dtype=dtype, per=per), x)
    x = view(x)
    wanted = quantize(x, dtype=dtype, per=per)
    assert used == served
    assert values.dtype == dtype and values.shape == x.shape
    assert not served or values.is_contiguous() == x.is_contiguous()
    assert scale.shape == wanted[1].shape and torch.equal(scale.cpu(), wanted[1])
    found, right = values.cpu().view(torch.uint8), wanted[0].view(torch.uint8)
    assert torch.equal(found, right), f"{int((found != right).sum())} of {found.numel()}"


@WHERE
@pytest.mark.parametrize(("dtype", "out_dtype"), PAIRS, ids=["bf16", "fp16", "fp32"])
def test_same_bits(where, dtype, out_dtype):
    for per, shape in SHAPES if where == "cuda" else SHAPES[1 :: 2 if dtype is BF16 else 3]:
        check(where, numbers(shape, dtype), out_dtype, per)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("per", ["row", "1x128", "128x128", "tensor"])
@pytest.mark.parametrize("shape", [(4096, 4096), (333, 14336), (5, 65536), (8192, 128)], ids=str)
def test_same_bits_of_large_ones(dtype, per, shape):
    check("cuda", numbers(shape, dtype), E4M3, per)


@WHERE
def test_scales_at_the_ends_of_fp32(where):
    """Rows of numbers so small that a scale would not be normal, and of the largest ones."""
    largest = [0.0, 1e-44, 3e-38, 5.3e-36, 6e-36, 1e-30, 2.0**-80, 1.0, 2.0**80, 1e30, 1e38, 3.4e38]
    x = torch.randn(len(largest), 256).clamp(-3, 3) / 3 * torch.tensor(largest)[:, None]
    x[:, 0] = torch.tensor(largest)
    for dtype in (E4M3, E5M2):
        check(where, x, dtype, "row")


@WHERE
def test_infinities_and_nan(where):
    x = torch.randn(4, 256)
    x[1, 5], x[2, 6], x[3, 7] = math.inf, math.nan, -math.inf
    wanted = quantize(x, dtype=E4M3, per="row")
    (values, scale), used = by_kernel(where, lambda t: quantize(t, dtype=E4M3, per="row"), x)
    assert used and torch.equal(scale.cpu().nan_to_num(7.0), wanted[1].nan_to_num(7.0))
    assert torch.equal(values.cpu().to(FP32).nan_to_num(7.0), wanted[0].to(FP32).nan_to_num(7.0))
    assert quantize(x.cuda() if where == "cuda" else x)[1].isnan().all()


@WHERE
def test_every_bfloat16(where):
    """Over scales of several magnitudes, the quotients of all numbers that a row with such a scale may hold."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    every = every[every.abs() <= 2.0**60]  # without NaN
    for largest in (2.0**60, 447.0, 3.7):
        row = every[every.abs() <= largest]
        row = torch.cat([row, torch.tensor([largest]).to(BF16), row.new_zeros(-(len(row) + 1) % 8)])
        check(where, row[None], E4M3, "row")


@WHERE
def test_what_torch_serves(where):
    """The same results, of tensors that the kernels do not read."""
    x = numbers((16, 264))
    check(where, x.t(), E4M3, "tensor")
    check(where, x.t(), E4M3, "128x128")
    check(where, x.t(), E4M3, "row", served=False)
    for columns in (slice(1, 257), slice(0, 256)):  # rows 528 bytes apart
        check(where, x, E4M3, "row", view=lambda t, at=columns: t[:, at], served=False)
    check(where, x.view(-1), E4M3, "tensor", view=lambda t: t[1:4097], served=False)  # memory that begins at byte 2
    check(where, x.view(-1), E4M3, "row", view=lambda t: t[8:4104].view(16, 256))  # at byte 16
    check(where, numbers((16, 33)), E4M3, "1x128", served=False)
    check(where, numbers((2, 100, 256)), E4M3, "128x128", served=False)
    check(where, numbers((2, 100, 64)), E4M3, "tokens", served=False)
    check(where, numbers((128, 96)), E4M3, "tokens", served=False)
    check(where, x.t(), E4M3, "tokens", served=False)
    for per in ("head", "column"):
        check(where, numbers((2, 3, 16, 264)), E4M3, per, served=False)


@WHERE
def test_tokens_that_are_zeros(where):
    """Their scale is a small one, where others' is 1: it must not be the largest of its head."""
    x = numbers((2, 256, 64))
    x[0, 128:] = 0.0
    check(where, x, E4M3, "tokens")
    (values, scale), _ = by_kernel(where, lambda t: quantize(t, per="tokens"), x)
    assert scale[0, 1] == 2.0**-24 and not values[0, 128:].float().count_nonzero()


@WHERE
@pytest.mark.parametrize("per", ["block", "tensor"])
def test_stored_blocks(where, per):
    W = random_bsr((128, 192), (64, 64), density=0.5)
    wanted = W.quantize(per=per)
    if where == "cuda":
        W = W.to("cuda")
    (found, used) = by_kernel(where, lambda _: W.quantize(per=per), torch.zeros(1))
    assert used and torch.equal(found.scales.cpu(), wanted.scales)
    assert torch.equal(found.values.cpu().view(torch.uint8), wanted.values.view(torch.uint8))


@WHERE
def test_tensors_without_memory_of_their_own(where):
    """Inside of torch.func, and fake ones: torch serves them."""
    x = numbers((3, 8, 256))
    wanted = quantize(x, per="row")[1]
    mapped, used = by_kernel(where, torch.vmap(lambda t: quantize(t, per="row")[1]), x)
    assert not used and torch.equal(mapped.cpu(), wanted)
    mapped, used = by_kernel(where, torch.vmap(lambda t: quantize_gated(t)[1]), x)
    assert not used and torch.equal(mapped.cpu(), quantize_gated(x)[1])

    def shapes(t):
        with FakeTensorMode() as mode:
            return [each.shape for each in quantize(mode.from_tensor(t), per="row")]

    found, used = by_kernel(where, shapes, x)
    assert not used and found == [x.shape, wanted.shape]


@pytest.mark.gpu
def test_in_a_graph():
    x = torch.randn(256, 4096, device="cuda").to(BF16)
    for per in ("row", "tensor"):
        quantize(x, per=per)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            values, scale = quantize(x, per=per)
        x.mul_(3.0)
        graph.replay()
        wanted = quantize(x.cpu(), per=per)
        assert torch.equal(scale.cpu(), wanted[1])
        assert torch.equal(values.cpu().view(torch.uint8), wanted[0].view(torch.uint8))


def test_kernels_for_rows():
    """Few of them; a row that registers do not hold is read twice."""
    found = [facts_for("sm_90a", "bfloat16", "float8_e4m3fn", "row", 8 * n) for n in range(1, 8192)]
    assert len(set(found)) == 8 and found[0].lanes == 32 and not found[-1].held
    for facts, n in zip(found, range(1, 8192), strict=True):
        assert not facts.held or facts.lanes * facts.vectors >= n
    facts = facts_for("sm_86", "bfloat16", "float8_e4m3fn", "row", 8)
    assert "sm_86 has no FP8 conversion instruction" in QUANTIZING.unsupported(facts)
