"""selected_attention by gathered KV tiles: kernels on the emulator and on GPUs, against FP64, and their selection."""

import pytest
import torch

from attention import selected_attention
from attention.forward.family import FLASH_FORWARD
from attention.selected import reference
from cute_kernels import explain
from cute_kernels.runtime.cache import KernelCache
from cute_kernels.runtime.device import path as path_forced
from cute_kernels.testing.reference import normal, poisoned_empty
from cute_kernels.testing.selected_blocks import similar_lists

from ..emulator.emulate import EmulatorError, emulate_entry
from ..emulator.ops import needs_compiler, on_emulator
from .parts import FP16, captured, nothing_waits, qkv, rows_first
from .selected_parts import call_of, check, lists

EMULATED = pytest.param("emulated", marks=[needs_compiler, pytest.mark.sm_90])
WHERE = pytest.mark.parametrize("where", [EMULATED, pytest.param("cuda", marks=pytest.mark.gpu)])
GATHERED = "KV tiles: gathered"

ONE = {"B": 1, "groups": 1, "heads": 1}  # one batch index, one list

# name -> (arguments of call_of, its options, options of the call)
CALLS = {
    "12 rows a token": ((60, 300, 4, 20), ONE | {"H": 12, "D": 256}, {"causal": True}),
    "two batches, not causal": ((70, 250, 4, 12), {"groups": 2, "H": 8, "heads": 2, "D": 64}, {}),
    "16 rows a token": ((24, 700, 64, 4), {"groups": 2, "H": 32, "heads": 2, "B": 1, "D": 128}, {"causal": True}),
    "blocks of 16": ((130, 333, 16, 7), {"groups": 1, "H": 6, "heads": 2, "B": 1, "D": 128}, {"causal": True}),
    "blocks of 16, D 256": ((40, 300, 16, 5), ONE | {"H": 7, "D": 256}, {"causal": True}),
    "blocks of 64, D 256": ((40, 500, 64, 3), ONE | {"H": 4, "D": 256}, {"causal": True}),
    "blocks of 128": ((24, 700, 128, 3), {"groups": 2, "H": 32, "heads": 2, "B": 1, "D": 128}, {"causal": True}),
    "blocks of 64, 12 rows": ((70, 250, 64, 3), {"groups": 2, "H": 24, "heads": 2, "D": 128}, {}),
    "blocks of 128, 12 rows": ((24, 450, 128, 2), {"groups": 2, "H": 24, "heads": 2, "D": 64}, {"causal": True}),
    "blocks of 64, sinks": ((24, 400, 64, 3), ONE | {"H": 16, "D": 64}, {"sinks": torch.linspace(-2, 2, 16)}),
    "blocks of 64, D 192": ((40, 500, 64, 3), ONE | {"H": 4, "D": 192}, {"causal": True}),
    "blocks of 64, cap": ((40, 500, 64, 3), ONE | {"H": 4, "D": 128, "dtype": FP16}, {"causal": True, "softcap": 3.0}),
    "sinks": ((60, 300, 4, 20), ONE | {"H": 12, "D": 128}, {"causal": True, "sinks": torch.linspace(-2, 2, 12)}),
    "tokens": ((40, 300, 1, 40), ONE | {"H": 4, "D": 64}, {"causal": True}),
    "tokens, D 256": ((40, 300, 1, 40), ONE | {"H": 4, "D": 256}, {"causal": True}),
    "D 192, FP16, cap": ((40, 300, 4, 12), ONE | {"H": 4, "D": 192, "dtype": FP16}, {"causal": True, "softcap": 3.0}),
    "more rows than columns": ((200, 90, 4, 9), ONE | {"H": 2, "D": 64}, {"causal": True}),
    "one row per token": ((300, 400, 64, 2), {"B": 1, "groups": 2, "H": 2, "heads": 2, "D": 64}, {"causal": True}),
}
ON_EMULATOR = ("12 rows a token", "two batches, not causal", "16 rows a token", "blocks of 16", "blocks of 128")
ON_EMULATOR += ("sinks", "tokens", "blocks of 64, 12 rows", "blocks of 128, 12 rows", "blocks of 64, sinks")
ON_EMULATOR += ("blocks of 64, D 256",)


def checked(where: str, call: tuple, seed: int = 1, **terms) -> None:
    """One call that the kernel with gathered KV tiles serves, into poisoned memory against FP64."""
    if where == "cuda":
        with path_forced("sm_90"):
            assert GATHERED in str(explain(selected_attention, *call, **terms))
            check(*call, **terms)
        return
    with on_emulator("sm_90", sms=3, seed=seed):
        assert GATHERED in str(explain(selected_attention, *call, **terms))
        check(*call, **terms)


@pytest.mark.parametrize("name", CALLS)
@WHERE
def test_calls(where, name):
    if where == "emulated" and name not in ON_EMULATOR:
        pytest.skip("only on GPUs")
    sizes, options, terms = CALLS[name]
    device = "cuda" if where == "cuda" else "cpu"
    terms = {key: t.to(device) if isinstance(t, torch.Tensor) else t for key, t in terms.items()}
    checked(where, call_of(*sizes, **options, device=device), **terms)


@WHERE
def test_entries_that_are_no_block(where):
    """They are ignored, a block that is listed twice counts once, and a list may be empty."""
    q, k, v, indices, size = call_of(60, 300, 4, 20, **ONE, H=12, D=256)
    others = indices.new_tensor([75, -2, 2**31 - 1, -(2**31)]).expand(1, 60, 1, 4)
    indices = torch.cat([indices, others, indices[..., :5]], -1)
    indices[:, 5:9] = -1
    checked(where, tuple(t.cuda() if where == "cuda" else t for t in (q, k, v, indices)) + (size,), causal=True)


@WHERE
def test_blocks_in_the_future(where):
    """Lists may name blocks that no token sees: all steps, more than 32 of them, are then masked by position."""
    q, k, v, _, size = call_of(40, 9000, 4, 1, **ONE, H=12, D=64)
    indices = torch.arange(50, 2250, dtype=torch.int32).expand(1, 40, 1, 2200)  # positions are the last 40 of 9,000
    checked(where, tuple(t.cuda() if where == "cuda" else t for t in (q, k, v, indices)) + (size,), causal=True)


@WHERE
def test_rows_past_the_end_are_not_read(where):
    """NaN behind K and V, in memory that belongs to another sequence, does not enter the last block."""
    call = call_of(40, 301, 64, 3, **ONE, H=4, D=128)
    device = "cuda" if where == "cuda" else "cpu"
    q, k, v, indices, size = (t.to(device) if isinstance(t, torch.Tensor) else t for t in call)
    padded = []
    for t in (k, v):
        longer = torch.full((1, 1, 400, 128), torch.nan, dtype=t.dtype, device=device)
        longer[:, :, :301] = t
        padded.append(longer[:, :, :301])
    checked(where, (q, *padded, indices, size), causal=True)


@WHERE
def test_strides(where):
    q, k, v, indices, size = call_of(40, 300, 16, 5, groups=2, H=8, heads=2, B=2, D=128)
    call = *map(rows_first, (q, k, v)), indices.transpose(1, 2).contiguous().transpose(1, 2)
    checked(where, tuple(t.cuda() if where == "cuda" else t for t in call) + (size,), causal=True)


@pytest.mark.parametrize("size", [64, 128])
@WHERE
def test_scores_that_outgrow_the_first_steps(where, size):
    """Steps without row maxima are computed again, with their mask, if a row's scores are much larger than before."""
    q, k, v, indices, size = call_of(24, 700, size, 4, **ONE, H=16, D=64)
    q[:, :, ::3, 0] = 8  # in every third token scores are larger by 6 every 64 keys, from the last to the first
    k[..., 0] = (700 - torch.arange(700)) // 64 * 6
    checked(where, tuple(t.cuda() if where == "cuda" else t for t in (q, k, v, indices)) + (size,), causal=True)


@needs_compiler
@pytest.mark.sm_90
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize(
    ("removed", "said"),
    [("fence.proxy.async", "which a cp.async wrote"), ("cp.async.mbarrier.arrive.noinc", "no warp can go on")],
)
def test_a_planted_fault(size, removed, said):
    """The emulator knows what the kernel needs: a proxy fence after the wait for cp.async, and their arrivals. Blocks
    of 64 are loaded by TMA, only Q by cp.async."""

    def without(text: str) -> str:
        return "\n".join("" if removed in line else line for line in text.splitlines())

    def get(cache, facts, build):
        if facts.family != FLASH_FORWARD.name:
            return known(cache, facts, build)
        return emulate_entry("sm_90a", FLASH_FORWARD.entry(facts), FLASH_FORWARD.arguments(facts), without)

    call = call_of(20, 100, size, 2, **ONE, H=4, D=64)
    with on_emulator("sm_90", sms=1), pytest.MonkeyPatch.context() as patch:
        known = KernelCache.get
        patch.setattr(KernelCache, "get", get)
        with pytest.raises(EmulatorError, match=said):
            selected_attention(*call, causal=True)


# Calls that other kernels serve


OTHERS = {
    "a list per query head": lambda: (call_of(60, 200, 64, 2, groups=4), {}),
    "blocks of 128, D 256": lambda: (call_of(60, 200, 128, 2, groups=2, D=256), {}),
    "head dimension 96": lambda: (call_of(60, 200, 64, 2, groups=2, D=96), {}),
    "values of another head dimension": lambda: (call_of(60, 200, 64, 2, groups=2, D=128, Dv=64), {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels(name):
    call, terms = OTHERS[name]()
    with on_emulator("sm_90"):
        assert GATHERED not in str(explain(selected_attention, *call, **terms))


def test_the_sm_80_path():
    call = call_of(60, 200, 64, 2, groups=2)
    for arch, path in (("sm_90", "sm_80"), ("sm_80", None)):
        with on_emulator(arch, path=path):
            assert GATHERED not in str(explain(selected_attention, *call))


# On GPUs: lists as in trained models, CUDA graphs, torch.compile and gradients

MODELS = {
    "QSA": ((24, 2), 256, 4, 512, 1),
    "NSA": ((64, 4), 128, 64, 16, 4),
}


@pytest.mark.gpu
@pytest.mark.parametrize("similarity", [0.9, 0.0])
@pytest.mark.parametrize("name", MODELS)
def test_models(name, similarity):
    """Some rows of 8,192 tokens, against FP32."""
    S, ((H, kv_heads), D, size, top, groups) = 8192, MODELS[name]
    indices = similar_lists(S, S // size, top, groups=groups, similarity=similarity, device="cuda")[None]
    q, k, v = qkv(S, S, D, B=1, H=H, heads=kv_heads, device="cuda")
    with poisoned_empty():
        out, lse = selected_attention(q, k, v, indices, size, causal=True, return_lse=True)
    assert GATHERED in str(explain(selected_attention, q, k, v, indices, size, causal=True))
    assert not out.isnan().any() and not lse.isnan().any()
    for end in (64, 2048, S):
        rows = slice(end - 64, end)
        wide = q[:, :, rows].float(), k[:, :, :end].float(), v[:, :, :end].float()
        right, right_lse = reference.selected_attention(*wide, indices[:, rows], size, causal=True)
        error = (out[:, :, rows].float() - right).norm() / right.norm()
        assert error < 5e-3, f"rows up to {end}: relative error {error:.2g}"
        torch.testing.assert_close(lse[:, :, rows], right_lse, rtol=1e-4, atol=1e-4)
    assert torch.equal(out, selected_attention(q, k, v, indices, size, causal=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_a_graph_reads_the_lists_at_each_replay(name):
    S, ((H, kv_heads), D, size, _, groups) = 1000, MODELS[name]
    q, k, v = qkv(S, S, D, B=1, H=H, heads=kv_heads, device="cuda")
    new = lambda: lists(1, S, groups, top=9, blocks=-(-S // size), device="cuda")  # noqa: E731
    indices = new()
    call = lambda: selected_attention(q, k, v, indices, size, causal=True, return_lse=True)  # noqa: E731
    call()
    with nothing_waits():
        call()
    graph, result = captured(call)
    for _ in range(3):
        indices.copy_(new())
        graph.replay()
        for mine, again in zip(result, call(), strict=True):
            assert torch.equal(mine, again)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_compiled(name):
    S, ((H, kv_heads), D, size, _, groups) = 500, MODELS[name]
    q, k, v = qkv(S, S, D, B=1, H=H, heads=kv_heads, device="cuda")
    indices = lists(1, S, groups, top=9, blocks=-(-S // size), device="cuda")
    attend = lambda i: selected_attention(q, k, v, i + 0, size, causal=True) * 1  # noqa: E731
    torch._dynamo.reset()
    assert torch.equal(torch.compile(attend, fullgraph=True)(indices), attend(indices))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_gradients(name):
    """Forward with autograd is the same as without, and backward is near FP32."""
    S, ((H, kv_heads), D, size, top, groups) = 1024, MODELS[name]
    indices = similar_lists(S, S // size, top // 8, groups=groups, device="cuda")[None]
    operands = qkv(S, S, D, B=1, H=H, heads=kv_heads, device="cuda")
    q, k, v = (t.detach().requires_grad_() for t in operands)
    out, lse = selected_attention(q, k, v, indices, size, causal=True, return_lse=True)
    with torch.no_grad():
        again, again_lse = selected_attention(*operands, indices, size, causal=True, return_lse=True)
    assert torch.equal(out, again) and torch.equal(lse, again_lse)
    dout = normal(*out.shape, device="cuda")
    got = torch.autograd.grad(out, (q, k, v), dout)
    wide = [t.float().requires_grad_() for t in operands]
    right, _ = reference.selected_attention(*wide, indices, size, causal=True)
    for mine, true in zip(got, torch.autograd.grad(right, wide, dout.float()), strict=True):
        assert (mine.float() - true).norm() / true.norm() < 1e-2
