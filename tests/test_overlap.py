"""Outputs that share memory with inputs: refused by every op for every input, in eager and in compiled calls."""

import itertools
import random

import pytest
import torch

from attention import BlockMask, attention, block_sparse_attention
from cute_kernels import Sparse24, gemm, prune_2_4
from cute_kernels.overlap import overlap
from cute_kernels.testing.reference import normal
from sparse_collective import BsrMatrix, bsr_gated_linear, bsr_grouped_linear, bsr_linear, bsr_matmul, sddmm

REFUSED = "out shares memory with an input"


def bytes_of(t) -> set:
    """The offsets of a tensor's bytes in its storage."""
    places = (range(n) for n in t.shape)
    firsts = (
        t.storage_offset() + sum(i * s for i, s in zip(at, t.stride(), strict=True))
        for at in itertools.product(*places)
    )
    return {first * t.element_size() + byte for first in firsts for byte in range(t.element_size())}


def test_overlap_of_views():
    """Random strided views of one buffer, against the sets of their bytes."""
    draw, found = random.Random(0), [0, 0]
    for _ in range(2000):
        memory, views = torch.zeros(64, dtype=torch.uint8), []
        for _ in range(2):
            dtype = draw.choice((torch.uint8, torch.int16, torch.int32))
            elements = memory.view(dtype)
            shape = [draw.randint(1, 4) for _ in range(draw.randint(0, 3))]
            stride = [draw.choice((0, 1, 2, 3, 4, 8, 12)) for _ in shape]
            span = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
            if span < elements.numel():
                offset = draw.randint(0, elements.numel() - span - 1)
                views.append(elements.as_strided(shape, stride, offset))
        if len(views) == 2:
            want = not bytes_of(views[0]).isdisjoint(bytes_of(views[1]))
            assert overlap(*views) == want, views
            found[want] += 1
    assert min(found) > 100


def test_overlap_of_large_and_empty_views():
    memory = torch.zeros(4, 8192, 64)
    left, right = memory[..., :32], memory[..., 32:]
    assert not overlap(left, right) and not overlap(left.mT, right) and overlap(memory, right)
    assert overlap(memory[..., :33], right) and not overlap(memory[:2], memory[2:])
    assert not overlap(memory, memory[:, :0]) and not overlap(memory[:0], memory)


def calls(device: str) -> dict:
    """By name: a function of **inputs and out, its inputs, and its output's shape."""
    f = {"device": device}
    W = BsrMatrix.from_dense(normal(128, 128, **f), (64, 64))
    bias, residual = normal(128, **f).float(), normal(128, 128, **f)
    packed = torch.tensor([0, 64, 128], dtype=torch.int32, **f)
    heads = {name: normal(1, 2, 128, 64, **f) for name in "qkv"}
    sequences = {name: normal(128, 2, 64, **f) for name in "qkv"}
    sinks = torch.zeros(2, **f)
    table = normal(128, **f).float()
    wide = (64, 64)
    whole = BlockMask.from_blocks(torch.ones(1, 1, dtype=torch.bool, **f))

    def blocks(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, **more):
        mask = BlockMask(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, lengths=(128, 128))
        return block_sparse_attention(block_mask=mask, **more)

    def matrix(op, crow, col, values, **more):
        return op(W=BsrMatrix(crow, col, values, (128, 128)), **more)

    stored = {"crow": W.crow_indices, "col": W.col_indices, "values": W.values}
    W24 = Sparse24.from_dense(prune_2_4(residual))

    def with_zeros(values, metadata, **more):
        return gemm(Sparse24(values, metadata, (128, 128)), **more)

    items = BsrMatrix.stack([W] * 2)
    groups = torch.tensor([1, 0], dtype=torch.int32, **f)

    def grouped(values, **more):
        return bsr_grouped_linear(W=items.with_values(values), **more)

    def sampled(crow, col, **more):
        return sddmm(pattern=BsrMatrix(crow, col, W.values, (128, 128)), **more)

    dense = {"a": normal(128, 64, **f), "b": normal(64, 128, **f)}
    names = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"
    return {
        "gemm": (gemm, dense | {"bias": bias, "residual": residual}, (128, 128)),
        "gemm of a Sparse24": (
            with_zeros, {"values": W24.values, "metadata": W24.metadata, "b": residual, "bias": bias}, (128, 128)
        ),
        "bsr_matmul": (
            lambda **c: matrix(bsr_matmul, **c),
            stored | {"b": residual, "bias": bias, "residual": normal(128, 128, **f)}, (128, 128),
        ),
        "bsr_linear": (lambda **c: matrix(bsr_linear, **c), stored | {"x": residual, "bias": bias}, (128, 128)),
        "bsr_gated_linear": (lambda **c: matrix(bsr_gated_linear, **c), stored | {"x": residual}, (128, 64)),
        "bsr_grouped_linear": (
            grouped, {"values": items.values, "x": residual, "expert_ids": groups, "bias": normal(2, 128, **f).float()},
            (128, 128),
        ),
        "sddmm": (sampled, {"crow": W.crow_indices, "col": W.col_indices} | dense, (4, *wide)),
        "attention": (attention, heads | {"sinks": sinks}, (1, 2, 128, 64)),
        "attention of a cache": (
            attention, heads | {"seqused_k": torch.tensor([100], dtype=torch.int32, **f)}, (1, 2, 128, 64)
        ),
        "attention of packed sequences": (
            attention, sequences | {"cu_seqlens_q": packed, "cu_seqlens_k": packed.clone()}, (128, 2, 64)
        ),
        "attention with a score_mod": (
            lambda table, **c: attention(**c, score_mod=lambda s, b, h, i, j: s + table[j]), heads | {"table": table},
            (1, 2, 128, 64),
        ),
        "block_sparse_attention": (
            blocks, heads | {"sinks": sinks} | dict(zip(names, whole.lists(), strict=True)), (1, 2, 128, 64)
        ),
    }  # fmt: skip


PAIRS = [(op, name) for op, (_, inputs, _) in calls("cpu").items() for name in inputs]


def inside(memory, offset: int, t):
    """A copy of t in memory (bytes), from an offset on."""
    view = memory[offset : offset + t.nbytes].view(t.dtype).view(t.shape)
    return view.copy_(t)


@pytest.mark.parametrize("op,name", PAIRS)
def test_out_in_an_input(op, name, place, request):
    """Each input overlaps out, or is right beside it; known calls are checked as first ones are."""
    if "score_mod" in op and "emulated" in request.node.name:
        pytest.skip("the decoding kernel with a score_mod has no emulation by torch")
    run, inputs, shape = calls(place)[op]
    size = 2 * torch.Size(shape).numel()  # bytes of out
    t = inputs[name]
    memory = torch.zeros(size + 2 * t.nbytes + 64, dtype=torch.uint8, device=place)
    padded = -(-t.nbytes // 16) * 16
    start = -memory.data_ptr() % 16 + padded

    def call(offset, repeats=2):
        other = inputs | {name: inside(memory, start + offset, t)}
        out = memory[start : start + size].view(torch.bfloat16).view(shape)
        for _ in range(repeats):
            found = run(**other, out=out)
        return found

    want = run(**inputs)
    for offset in (-padded, size):  # right before out, and right after it
        assert torch.equal(call(offset), want)
    for offset in (0, 16, size - 16):
        if (name, offset) != ("residual", 0):  # which is allowed
            for _ in range(2):
                with pytest.raises(ValueError, match=REFUSED):
                    call(offset, 1)
    assert torch.equal(call(size), want)


def test_residual_and_bias(place):
    a, b = normal(256, 64, device=place), normal(64, 128, device=place)
    memory = normal(384, 128, device=place)
    with pytest.raises(
        ValueError, match=f"{REFUSED} of shape .256, 128.*pass a separate tensor.*or the residual itself"
    ):
        gemm(a, b, residual=memory[:256], out=memory[128:])
    with pytest.raises(ValueError, match=f"{REFUSED} of shape .128,"):
        gemm(a, b, bias=memory[5], out=memory[:256])
    transposed = memory[:128].t()
    with pytest.raises(ValueError, match=REFUSED):
        gemm(a[:128], b, residual=memory[:128], out=transposed)


def test_out_is_the_residual(place):
    a, b, residual = normal(64, 64, device=place), normal(64, 64, device=place), normal(64, 64, device=place)
    W = BsrMatrix.from_dense(a, (32, 32))
    for run in (lambda **c: gemm(a, b, **c), lambda **c: bsr_matmul(W, b, **c)):
        want = run(residual=residual)
        for view in (lambda t: t, lambda t: t[:]):
            for _ in range(3):
                out = residual.clone()
                assert torch.equal(run(residual=view(out), out=out), want)


def test_interleaved_views(place):
    """Views whose address ranges overlap, but not their elements: right, at any distance and in known calls."""
    memory = torch.zeros(64, 256, dtype=torch.bfloat16, device=place)
    b, a = normal(64, 64, device=place), normal(64, 64, device=place)
    for left in (0, 64, 128, 192):
        for at in (0, 64, 128, 192, 0, 32, 33, 160):
            x, out = memory[:, left : left + 64], memory[:, at : at + 64]
            x.copy_(a)
            if abs(at - left) < 64:
                for _ in range(2):
                    with pytest.raises(ValueError, match=REFUSED):
                        gemm(x, b, out=out)
            elif at + 64 <= 256:
                for _ in range(2):  # other strides may take another kernel
                    torch.testing.assert_close(gemm(x, b, out=out), gemm(a, b), rtol=0.01, atol=0.01)
