"""Shards of a sequence: attention with q_offset and k_offset, against the same rows and columns of the whole call."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import cute_kernels
from attention import attention, attention_backward, block_sparse_attention, create_block_mask, merge

from ..emulator import emulate
from ..emulator.ops import on_emulator
from .parts import qkv

PATHS = pytest.mark.parametrize("path", ["sm_80", "sm_90"])
COMPILER = pytest.mark.skipif(shutil.which(emulate.COMPILER) is None, reason="the emulator needs a C++ compiler (CXX)")


def documents(b, h, q, kv):
    return (kv <= q) & (q // 96 == kv // 96)


class Table:
    """A mask function and a score function that read tensors by position."""

    def __init__(self, length, device="cpu"):
        self.ids = (torch.arange(length, device=device) // 150).to(torch.int32)
        self.slopes = torch.linspace(0.5, 0.1, 4, device=device)

    def mask_mod(self, b, h, q, kv):
        return (self.ids[q] == self.ids[kv]) & (kv <= q)

    def score_mod(self, score, b, h, q, kv):
        return score - self.slopes[h] * (q - kv).abs() + self.ids[q] * 0.25 + self.ids[kv] * 0.5


TERMS = {
    "causal": {"causal": True},
    "window": {"window_size": (70, 0)},
    "both sides": {"window_size": (40, 90)},
    "deterministic": {"causal": True, "deterministic": True},
    "deterministic window": {"window_size": (70, 0), "deterministic": True},
    "softcap": {"causal": True, "softcap": 2.0},
    "score_mod": {"score_mod": "score"},
    "causal score_mod": {"causal": True, "score_mod": "score"},
    "blocks": {"block_mask": documents},
    "tables": {"block_mask": "mask", "score_mod": "score"},
}


class Case:
    """A call over a whole sequence of q (B, H, Sq, D), k and v, and its shards."""

    def __init__(self, terms, length=256, Sk=None, D=64, Dv=None, H=4, B=1, dtype=torch.bfloat16, device="cpu"):
        self.tensors = qkv(length, Sk or length, D, Dv, B, H, heads=2, dtype=dtype, device=device)
        table = Table(max(length, Sk or length), device)
        self.terms = {"score_mod": table.score_mod} if terms.get("score_mod") else {}
        self.mask = None
        if mask_mod := terms.get("block_mask"):
            mask_mod = table.mask_mod if mask_mod == "mask" else mask_mod
            lengths = (t.shape[2] for t in self.tensors[:2])
            self.mask = create_block_mask(mask_mod, None, None, *lengths, device=device, BLOCK_SIZE=64)
        self.terms = {n: x for n, x in terms.items() if n not in ("score_mod", "block_mask")} | self.terms

    def call(self, q, k, v, rows=None, columns=None):
        """(out, lse) of rows and columns of the whole; of all without a mention of positions."""
        q, k, v, more = self.shard(q, k, v, rows, columns)
        op = attention if self.mask is None else block_sparse_attention
        return op(q, k, v, **more, return_lse=True)

    def shard(self, q, k, v, rows, columns) -> tuple:
        """q, k, v, and the options of a call with these rows and columns."""
        more = dict(self.terms)
        if rows is not None:
            more |= {"q_offset": rows.start, "k_offset": columns.start}
            q, k, v = q[:, :, rows], k[:, :, columns], v[:, :, columns]
        if self.mask is not None:
            lengths = q.shape[2], k.shape[2]
            more["block_mask"] = self.mask if rows is None else self.mask.shard(lengths, rows.start, columns.start)
        return q, k, v, more

    def gradients(self) -> tuple:
        """(dout, dlse, (dq, dk, dv)) of the whole."""
        tensors = [t.detach().requires_grad_() for t in self.tensors]
        out, lse = self.call(*tensors)
        g = torch.Generator().manual_seed(1)
        dout, dlse = (torch.randn(t.shape, generator=g).to(t) for t in (out, lse))
        dlse = dlse.masked_fill(lse.isneginf(), 0.0)
        return dout, dlse, torch.autograd.grad([out, lse], tensors, [dout, dlse])


def shards(length: int, side: int) -> list[slice]:
    return [slice(begin, min(begin + side, length)) for begin in range(0, length, side)]


def merged(parts):
    """(out, lse) of shards of K and V."""
    return merge(*zip(*parts, strict=True), dtype=torch.float64)


def check_forward(case: Case, side: int, whole: tuple, rtol=0.02, atol=0.02) -> None:
    """Every shard of queries over all shards of keys is the same rows of the whole."""
    out, lse = whole
    q, k, _ = case.tensors
    for rows in shards(q.shape[2], side):
        parts = [case.call(*case.tensors, rows, columns) for columns in shards(k.shape[2], side)]
        part, part_lse = merged([tuple(t.cpu() for t in pair) for pair in parts])
        torch.testing.assert_close(part, out[:, :, rows], rtol=rtol, atol=atol)
        torch.testing.assert_close(part_lse.double(), lse[:, :, rows], rtol=1e-3, atol=1e-3)


def check_gradients(case: Case, side: int, expected: tuple, tolerance: float) -> None:
    """Autograd through the merged shards, and attention_backward of each shard, give the gradients of the whole."""
    dout, dlse, right = expected
    tensors = [t.detach().requires_grad_() for t in case.tensors]
    q, k, v = case.tensors
    wide = torch.promote_types(q.dtype, torch.float32)
    sums = [torch.zeros_like(t, dtype=wide) for t in case.tensors]
    merges = []
    for rows in shards(q.shape[2], side):
        parts = [case.call(*tensors, rows, columns) for columns in shards(k.shape[2], side)]
        merges.append(merge(*zip(*parts, strict=True)))
        out, lse = (t.detach() for t in merges[-1])
        for columns in shards(k.shape[2], side):
            *part, more = case.shard(q, k, v, rows, columns)
            of_part = attention_backward(
                dout[:, :, rows], *part, out, lse, dlse=dlse[:, :, rows], grad_dtype=wide, **more
            )
            for total, term, where in zip(sums, of_part, (rows, columns, columns), strict=True):
                assert term.dtype is wide
                total[:, :, where] += term
    outs, lses = (torch.cat(t, 2) for t in zip(*merges, strict=True))
    found = torch.autograd.grad([outs, lses], tensors, [dout, dlse])
    for name, of_autograd, of_shards, of_whole in zip(("dq", "dk", "dv"), found, sums, right, strict=True):
        size = tolerance * of_whole.double().abs().max()
        for way, mine in (("autograd", of_autograd), ("attention_backward", of_shards)):
            error = (mine.double() - of_whole.double()).abs().max()
            assert error <= size, f"{name} by {way}: {error:.2e}, at most {size:.2e}"


@pytest.mark.parametrize("name", TERMS)
def test_reference(name):
    case = Case(TERMS[name], B=2, dtype=torch.float64)
    check_forward(case, 64, case.call(*case.tensors), rtol=1e-9, atol=1e-9)
    check_gradients(case, 128, case.gradients(), 1e-9)


@COMPILER
@PATHS
@pytest.mark.parametrize("name", ["both sides", "causal score_mod", "blocks", "tables"])
def test_kernels(name, path):
    case = Case(TERMS[name], B=1, H=2 if name == "both sides" else 4)
    whole = case.call(*(t.double() for t in case.tensors))
    with on_emulator("sm_90", sms=3, path=path):
        check_forward(case, 128, whole)


@COMPILER
@PATHS
@pytest.mark.parametrize("name", ["both sides", "deterministic", "causal score_mod", "tables"])
def test_gradients_of_kernels(name, path):
    tables = name == "tables"
    case = Case(TERMS[name], 256 if tables else 230, B=1, H=4 if tables or "score_mod" in name else 2)
    expected = case.gradients()
    with on_emulator("sm_90", sms=3, path=path):
        check_gradients(case, 128 if tables else 115, expected, 0.03)


def test_alignment():
    """Without offsets the last query is at the last key; one offset makes the other 0."""
    q, k, v = qkv(100, 160, dtype=torch.float64)
    last = attention(q, k, v, causal=True)
    assert torch.equal(last, attention(q, k, v, causal=True, q_offset=60))
    assert torch.equal(attention(q, k, v, causal=True, q_offset=0), attention(q, k, v, causal=True, k_offset=0))
    out, lse = attention(q, k, v, causal=True, q_offset=50, k_offset=150, return_lse=True)
    assert not out.any() and lse.isneginf().all()
    assert torch.equal(attention(q, k, v, q_offset=3, k_offset=900), attention(q, k, v))


def test_errors():
    q, k, v = qkv(64, 64, dtype=torch.float32)
    for wrong, kind in ((1.0, TypeError), (True, TypeError), (-1, ValueError), (2**30, ValueError)):
        for name in ("q_offset", "k_offset"):
            with pytest.raises(kind, match=name):
                attention(q, k, v, causal=True, **{name: wrong})
    lengths = torch.full((2,), 64, dtype=torch.int32)
    with pytest.raises(TypeError, match="q_offset and k_offset are not supported with seqused_k"):
        attention(q, k, v, seqused_k=lengths, k_offset=0)
    starts = torch.tensor([0, 64], dtype=torch.int32)
    with pytest.raises(TypeError, match="q_offset and k_offset are not supported with cu_seqlens"):
        attention(*(t[0].mT.contiguous().mT for t in (q, k, v)), cu_seqlens_q=starts, cu_seqlens_k=starts, q_offset=0)
    mask = create_block_mask(documents, None, None, 64, 64)
    with pytest.raises(TypeError, match="causal=True with a block mask is not supported"):
        block_sparse_attention(q, k, v, mask, causal=True, q_offset=64)
    table = Table(100)
    with pytest.raises(IndexError, match="goes up to 163"):
        attention(q, k, v, score_mod=table.score_mod, q_offset=100)
    with pytest.raises(ValueError, match="multiple of the block size"):
        mask.shard((32, 64), 32, 0)


@pytest.mark.gpu
@PATHS
@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("D, Dv", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_kernels_on_gpu(name, path, D, Dv):
    case = Case(TERMS[name], 640, D=D, Dv=Dv, B=2, device="cuda")
    with cute_kernels.path(path):
        whole = case.call(*case.tensors)
        check_forward(case, 192, [t.double().cpu() for t in whole])
        check_gradients(case, 192, case.gradients(), 0.03)


def test_merge():
    """Rows without a key in one shard, or in all of them, and float32 outputs of 16-bit ones."""
    out, lse = torch.randn(2, 1, 2, 4, 8).bfloat16(), torch.randn(2, 1, 2, 4)
    lse[0, ..., 0] = lse[:, ..., 1] = -torch.inf
    out[0, :, :, 0] = out[:, :, :, 1] = 0
    out.requires_grad_(), lse.requires_grad_()
    merged_out, merged_lse = merge(out, lse)
    assert merged_out.dtype is torch.bfloat16 and merged_lse.dtype is torch.float32
    assert torch.equal(merged_out[:, :, 0], out[1, :, :, 0]) and torch.equal(merged_lse[..., 0], lse[1, ..., 0])
    assert not merged_out[:, :, 1].any() and merged_lse[..., 1].isneginf().all()
    for gradient in torch.autograd.grad(merged_out.float().sum() + merged_lse[..., 2:].sum(), [out, lse]):
        assert gradient.isfinite().all()
    weights = lse.detach().softmax(0).nan_to_num()[..., None]
    expected = (out.detach() * weights).sum(0)
    torch.testing.assert_close(merge(out, lse, dtype=torch.float32)[0], expected)
    packed = merge([t[0].transpose(0, 1) for t in out], [t[0] for t in lse])
    assert torch.equal(packed[0], merged_out[0].transpose(0, 1)) and torch.equal(packed[1], merged_lse[0])
    for wrong in ((out[:1], lse), (out, lse[..., :3]), ([out[0], out[1, :, :1]], lse), ((), ())):
        with pytest.raises(ValueError, match="merge"):
            merge(*wrong)
    with pytest.raises(TypeError, match="floating-point"):
        merge(out, lse.int())


def test_packed_gradients():
    """attention_backward of packed sequences, with a score function that captures a tensor."""
    q, k, v = (torch.randn(160, heads, 64, dtype=torch.float64) for heads in (4, 2, 2))
    bias = torch.randn(4)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 60, 160], [0, 100, 160]))
    terms = {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "score_mod": lambda score, b, h, q, kv: score * (1 + b) + bias[h],
    }
    tensors = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = attention(*tensors, return_lse=True, **terms)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, tensors, dout)
    found = attention_backward(dout, q, k, v, out.detach(), lse.detach(), **terms)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right)


def test_compiled():
    """Other offsets do not compile again; the registered backward has its fake's dtypes."""
    q, k, v = qkv(128, 128, dtype=torch.float32)
    dout, count = torch.randn_like(q), CompileCounterWithBackend("aot_eager")
    halves = shards(128, 64)

    def step(q, k, v, dout, offset):
        parts = [
            attention(q, k[:, :, s], v[:, :, s], causal=True, q_offset=offset, k_offset=s.start, return_lse=True)
            for s in halves
        ]
        out, lse = merge(*zip(*parts))
        kv, options = (k[:, :, :64], v[:, :, :64]), {"causal": True, "q_offset": offset, "grad_dtype": torch.float32}
        return out, attention_backward(dout, q, *kv, out, lse, **options)

    compiled = torch.compile(step, backend=count, fullgraph=True)
    for offset in (3, 10, 17, 40):
        (out, found), (right, expected) = compiled(q, k, v, dout, offset), step(q, k, v, dout, offset)
        torch.testing.assert_close(out, right)
        torch.testing.assert_close(found, expected)
    assert count.frame_count <= 2  # the second time with a dynamic offset


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_another_dtype_of_dq(where, compiled):
    q, k, v = (t.to(where) for t in qkv(128, 128, dtype=torch.bfloat16))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    dout = torch.randn_like(out)

    def backward(dq_dtype):
        return attention_backward(
            dout, q, k, v, out, lse, causal=True, deterministic=True, grad_dtype=torch.float32, dq_dtype=dq_dtype
        )

    mixed = (torch.compile(backward, backend="aot_eager") if compiled else backward)(torch.bfloat16)
    wide = backward(None)
    assert [t.dtype for t in mixed] == [torch.bfloat16, torch.float32, torch.float32]
    assert torch.equal(mixed[0], wide[0].bfloat16()) and torch.equal(mixed[1], wide[1])
    assert torch.equal(mixed[2], wide[2])


@pytest.mark.parametrize(
    "change, kind, match",
    [
        ({"lse": "half"}, TypeError, "lse must be torch.float32"),
        ({"out": "row"}, ValueError, "out must have shape"),
        ({"dout": None}, TypeError, "dout must be a torch.Tensor"),
        ({"grad_dtype": torch.int8}, TypeError, "grad_dtype must be"),
        ({"dq_dtype": torch.int8}, TypeError, "dq_dtype must be"),
        ({"window_size": (1, 2), "block_mask": True}, TypeError, "sliding_window"),
        ({"causal": True, "q_offset": 1, "block_mask": True}, TypeError, "causal=True with a block mask"),
        ({"q": "grad"}, RuntimeError, "requires one"),
    ],
)
def test_errors_of_backward(change, kind, match):
    q, k, v = qkv(64, 64, dtype=torch.float32)
    out, lse = attention(q, k, v, return_lse=True)
    call = {"dout": out, "q": q, "k": k, "v": v, "out": out, "lse": lse} | change
    if "block_mask" in change:
        call["block_mask"] = create_block_mask(documents, None, None, 64, 64)
    for name, x in change.items():
        if isinstance(x, str):
            t = locals()[name]
            call[name] = {"half": t.half(), "row": t[:, :, :1], "grad": t.detach().requires_grad_()}[x]
    with pytest.raises(kind, match=match):
        attention_backward(**call)
