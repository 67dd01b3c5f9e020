"""The truth in fp64, what torch makes of the same inputs, and the bound between the two.

A kernel's result is compared with the exact product of the rounded inputs. It may err as much as torch does when it
multiplies in fp32 and rounds once to the same dtype, times a small factor, plus a few ulp of the fp32 accumulator.
Nothing here uses a kernel, and activations are torch's own.
"""

import contextlib
import math
import zlib

import torch
import torch.nn.functional as nnf
from torch import Tensor

from .diagnose import diagnose

ACTIVATIONS = {
    None: lambda x: x,
    "relu": nnf.relu,
    "gelu": nnf.gelu,
    "gelu_tanh": lambda x: nnf.gelu(x, approximate="tanh"),
    "silu": nnf.silu,
}
ULP32 = 2.0**-24


def seed(start: str | int) -> None:
    """Start torch's generators, so that a test draws the same numbers whatever runs before it.

    Without a GPU torch.manual_seed keeps a stack trace for each call, for when there will be one: half a millisecond.
    """
    number = zlib.crc32(start.encode()) if isinstance(start, str) else start
    if torch.cuda.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def normal(*shape: int, dtype=torch.bfloat16, device="cpu", k: int = 1) -> Tensor:
    """Normal random numbers over sqrt(k)."""
    return (torch.randn(*shape, device=device) / math.sqrt(max(k, 1))).to(dtype)


def operand(rows: int, cols: int, layout: str = "n", *, batch=(), dtype=torch.bfloat16, device="cpu", k=1):
    """(*batch, rows, cols): row-major ("n"), or the transposed view of a row-major matrix ("t")."""
    if layout == "n":
        return normal(*batch, rows, cols, dtype=dtype, device=device, k=k)
    return normal(*batch, cols, rows, dtype=dtype, device=device, k=k).mT


def poisoned(*shape: int, dtype=torch.bfloat16, device="cpu") -> Tensor:
    """An output in which every element that a kernel forgets is NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@contextlib.contextmanager
def poisoned_empty():
    """Inside, torch.empty gives NaN: for outputs that an op allocates itself."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextlib.contextmanager
def _full_fp32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def truth(a, b, bias=None, activation=None, residual=None, alpha=1.0, beta=1.0, *, epilogue=None, dtype=torch.float64):
    """epilogue(activation(alpha * a @ b + bias + beta * residual)), all of it in `dtype`."""
    with _full_fp32():
        x = alpha * torch.matmul(a.to(dtype), b.to(dtype))
    if bias is not None:
        x = x + bias.to(dtype)
    if residual is not None:
        x = x + beta * residual.to(dtype)
    x = ACTIVATIONS[activation](x)
    return x if epilogue is None else epilogue(x)


def exact_and_torch(a, b, out_dtype, **terms) -> tuple[Tensor, Tensor]:
    """The exact result, and torch's: multiplied in fp32, rounded once."""
    return truth(a, b, **terms), truth(a, b, dtype=torch.float32, **terms).to(out_dtype)


def assert_as_good_as_torch(out: Tensor, exact: Tensor, torch_out: Tensor, *, k: int = 1, plan=None) -> None:
    """`out` errs at most twice as much as torch (fp32 outputs: four times), in maximum and in Frobenius norm.

    `k` is how many products an element sums: a tensor core truncates its fp32 sum after every 16 of them, which the
    floor allows for. Inputs are taken to be scaled so that sums are of magnitude 1. With `plan`, the message names
    the tiles and warps at fault.
    """
    assert out.shape == exact.shape, f"shape {tuple(out.shape)}, expected {tuple(exact.shape)}"
    assert out.dtype == torch_out.dtype, f"dtype {out.dtype}, expected {torch_out.dtype}"
    if out.numel() == 0:
        return
    assert exact.isfinite().all(), "the expected result must be finite; compare the rest by itself"
    factor = 4.0 if out.dtype is torch.float32 else 2.0
    floor = (8 + k / 16) * ULP32 * max(1.0, exact.abs().max().item())
    ours, theirs = (t.double() - exact for t in (out, torch_out))
    checks = {
        "largest error": (ours.abs().max(), theirs.abs().max(), floor),
        "Frobenius error": (ours.norm(), theirs.norm(), floor * math.sqrt(out.numel())),
    }
    norm = exact.norm().item() or 1.0
    wrong = []
    for name, (mine, other, allowed) in checks.items():
        mine, bound = mine.item(), factor * other.item() + allowed
        if not mine <= bound:  # NaN is never <=
            scale = norm if name.startswith("Frobenius") else 1.0
            wrong.append(f"{name} {mine / scale:.3g}, torch's {other.item() / scale:.3g}, allowed {bound / scale:.3g}")
    if wrong:
        raise AssertionError("\n".join([*wrong, diagnose(out, exact, plan, floor=floor)]))


def dense_of(W) -> Tensor:
    """The dense matrix, or the batch of them, that a BsrMatrix or a torch.sparse_bsr tensor is."""
    if isinstance(W, Tensor):
        return W.to_dense()
    if W.base is not None:  # a view's own index is what is to be checked
        return dense_of(W.base).mT
    counts = W.crow_indices.diff().flatten()  # of the blocks of each row, or of each row of each item
    rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    blocks = W.values.new_zeros(*W.values.shape[:-3], len(counts), W.shape[-1] // W.blocksize[1], *W.blocksize)
    blocks[..., rows, W.col_indices.long(), :, :] = W.values
    return blocks.transpose(-3, -2).reshape(W.shape)


def band_mask(rows: int, cols: int, left: int | None, right: int | None, device="cpu", offsets=None) -> Tensor:
    """(rows, cols) bool: row i sees columns i + cols - rows - left to i + cols - rows + right; None: without bound.

    With offsets = (q_offset, k_offset) row i is at column i + q_offset - k_offset."""
    offset = cols - rows if offsets is None else offsets[0] - offsets[1]
    away = torch.arange(cols, device=device) - torch.arange(rows, device=device)[:, None] - offset
    seen = torch.ones_like(away, dtype=torch.bool)
    if left is not None:
        seen &= away >= -left
    if right is not None:
        seen &= away <= right
    return seen


def attention_plainly(q, k, v, seen, *, softcap=None, scale=None, sinks=None, bias=None) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention from the whole matrix of scores, every step rounded to the operands' dtype.

    Sinks (H,) are one more column, whose value is 0; a bias is added to the scores."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    return scores.softmax(-1).nan_to_num(0.0)[..., : v.shape[2]] @ v, scores.logsumexp(-1)
