"""Kernels of every family on the emulator (docs/notes/emulator.md), and planted faults, which it must notice."""

import re
import shutil
from functools import lru_cache

import pytest
import torch

import cute_kernels
from attention import attention, block_sparse_attention, create_block_mask
from attention.decode import heuristics as decode
from cute_kernels.matmul.config import GemmConfig, GemmFacts
from cute_kernels.runtime.compile import compile_for
from cute_kernels.runtime.families import family_of
from cute_kernels.testing.reference import normal, poisoned
from sparse_collective import BsrMatrix, bsr_linear, random_bsr

from .attention.parts import assert_right, cache, packed, qkv
from .conformance import FAMILIES, PLAIN, case_of
from .cute_kernels import tiny_kernels
from .emulator import emulate
from .emulator.emulate import Emulated, EmulatorError, emulate_entry, emulator, run_ptx
from .emulator.ops import on_emulator
from .gemm_cases import run

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(shutil.which(emulate.COMPILER) is None, reason="the emulator needs a C++ compiler (CXX)"),
]
PATHS = pytest.mark.parametrize("path", ["sm_80", "sm_90"])


# -- products ------------------------------------------------------------------------------------------------------

TERMS = PLAIN | {"epilogue": "column bias", "rows": 0, "batch": None, "index": "int32", "view": False}


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.plain])
def test_products(monkeypatch, name):
    """Several tiles and K-tiles with tails, twice: other timing gives the same bits."""
    family = FAMILIES[name]
    family.force(monkeypatch)
    op = "gemm" if "gemm" in family.ops else "sddmm" if family.sampled else "bsr_linear"
    columns = 5 if family.name == "skinny" else 130
    chosen = TERMS | {"size": (200, 264, 200), "columns": columns, "pattern": "empty_rows"}
    if op != "gemm":
        chosen |= {"block": (64, 64) if (64, 64) in family.blocks else family.blocks[0]}
    with on_emulator("sm_90", sms=3):
        run(case_of(family, op, chosen, 1), "cpu", 2)


@PATHS
def test_gradients(path):
    """For a product with an activation: its kernels, and the one of the epilogue's gradient."""

    def gradients(x, w, bias):
        given = [t.detach().clone().requires_grad_() for t in (x, w, bias)]
        cute_kernels.gemm(*given[:2], bias=given[2], activation="gelu").sum().backward()
        return [t.grad for t in given]

    operands = normal(72, 40), normal(40, 136), normal(136)
    with on_emulator("sm_90", path=path):
        found = gradients(*operands)
    for mine, right in zip(found, gradients(*operands), strict=True):
        torch.testing.assert_close(mine, right, rtol=0.02, atol=0.05)


def test_gradient_of_a_sparse_weight():
    W, x = random_bsr((128, 192), (64, 64), density=0.5), normal(72, 192)

    def gradient():
        values = W.values.detach().clone().requires_grad_()
        bsr_linear(x, BsrMatrix(W.crow_indices, W.col_indices, values, W.shape)).sum().backward()
        return values.grad

    with on_emulator("sm_90"):
        found = gradient()
    torch.testing.assert_close(found, gradient(), rtol=0.02, atol=0.05)


# -- attention -----------------------------------------------------------------------------------------------------


def check(path: str, q, k, v, **terms) -> None:
    """One call of attention into poisoned memory against fp64."""
    out = poisoned(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    op = block_sparse_attention if "block_mask" in terms else attention
    with on_emulator("sm_90", sms=3, path=path), decode.splits(3 if "seqused_k" in terms else None):
        result, lse = op(q, k, v, out=out, return_lse=True, **terms)
    assert_right(result, lse, q, k, v, **terms)


@PATHS
def test_attention(path):
    check(path, *qkv(200, 264, B=1), causal=True)


@PATHS
def test_attention_of_blocks(path):
    mask = create_block_mask(lambda b, h, q, k: (q + 70 >= k) & (k % 192 < 128), None, None, 200, 384)
    check(path, *qkv(200, 384, B=1), block_mask=mask)


@PATHS
def test_packed_attention(path):
    check(path, **packed((70, 0, 130), (100, 30, 100)), causal=True)


@PATHS
def test_decoding_behind_padding(path):
    check(path, **cache((230, 200, 250), 256, H=8, before=100))


@PATHS
def test_decoding_from_pages(path):
    check(path, **cache((230, 0), 256, H=8, page_size=64))


# -- planted faults ------------------------------------------------------------------------------------------------

CONFIGS = {
    "sm_80": GemmConfig(64, 64, 32, 3, 2, 2),
    "sm_90": GemmConfig(128, 64, 64, 3, 2, 1, ring=1),
}


@lru_cache
def small_product(path: str):
    facts = GemmFacts("sm_80" if path == "sm_80" else "sm_90a", path, CONFIGS[path])
    family = family_of(facts)
    assert not family.unsupported(facts)
    return compile_for(facts.arch, family.entry(facts), *family.arguments(facts), keep_cubin=True)


def complaint(path: str, change=None) -> str:
    """Problem found in a GEMM whose PTX is changed: the emulator's error, a wrong result, or "" for none.

    On two emulated SMs each of sm_90's CTAs has four tiles or more, and each tile five K-tiles or more.
    """
    kernel = Emulated(small_product(path), change)
    a, b, out = normal(264, 320), normal(200, 320).t(), poisoned(264, 200)
    for seed in range(1, 4):
        try:
            with emulator(sms=2, seed=seed):
                kernel(a, b, out.fill_(torch.nan), 1.0, 0.0, 1, 2 if path == "sm_90" else None)
        except EmulatorError as error:
            return str(error)
        if not torch.allclose(out.double(), a.double() @ b.double(), rtol=2**-7, atol=2**-7):
            return "wrong result"
    return ""


def without(pattern: str, which: int = 0):
    """Takes one instruction out of PTX: the `which`-th that matches, a negative number counts from the end."""

    def change(text: str) -> str:
        found = list(re.finditer(pattern, text))[which]
        return text[: found.start()] + text[found.end() :]

    return change


FAULTS = {
    "a stage is given back before its WGMMAs are done": ("sm_90", r"wgmma\.wait_group\S*\s+1;", 0, "wrong result"),
    "accumulators are read at once": ("sm_90", r"wgmma\.wait_group\S*\s+0;", -1, "no wgmma.wait_group"),
    "no wgmma.fence": ("sm_90", r"wgmma\.fence\S*;", 0, "wgmma.fence"),
    "a full stage is not waited for": ("sm_90", r"bra\.uni\s+LAB_WAIT;", -1, "wrong result"),
    "an empty stage is not waited for": ("sm_90", r"bra\.uni\s+LAB_WAIT;", 0, "more arrivals"),
    "a stage is never given back": ("sm_90", r"\tmbarrier\.arrive\.shared\S* .*;", -1, "no warp can go on"),
    "a store buffer is filled again too early": ("sm_90", r"cp\.async\.bulk\.wait_group\.read\s.*;", 0, "wrong result"),
    "the kernel ends before its stores": ("sm_90", r"cp\.async\.bulk\.wait_group\.read\s.*;", -1, "still read"),
    "no proxy fence before a TMA store": ("sm_90", r"fence\.proxy\.async\S*;", 0, "fence.proxy.async"),
    "cp.async is not waited for": ("sm_80", r"cp\.async\.wait_group.*;", 0, "wrong result"),
    "warps do not wait for each other": ("sm_80", r"\tbar\.sync.*;", 1, "wrong result"),
}


@pytest.mark.parametrize("path", ["sm_80", "sm_90"])
def test_the_product_without_a_fault(path):
    assert complaint(path) == ""


@pytest.mark.parametrize(("path", "pattern", "which", "said"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault(path, pattern, which, said):
    found = complaint(path, without(pattern, which))
    assert said in found or found == "wrong result"


# -- small PTX -----------------------------------------------------------------------------------------------------

KERNEL = """.version 8.0
.target sm_80
.address_size 64
.visible .entry kernel(.param .u64 out)
{{
    .reg .pred %p<4>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
{body}
    ret;
}}
"""


def ptx(body: str, words: int = 32, **launch) -> torch.Tensor:
    """`words` int32 at the address %rd1, of which thread %r1 has its own at %rd3, after the kernel has run."""
    out = torch.full((words,), -1, dtype=torch.int32)
    run_ptx(KERNEL.format(body=body), out, **launch)
    return out


def test_an_entry_that_no_family_knows():
    run = emulate_entry("sm_90a", tiny_kernels.reverse, tiny_kernels.fake_arguments())
    a, b, out = torch.randn(128), torch.randn(128), poisoned(128, dtype=torch.float32)
    run(a, b, out)
    assert torch.equal(out, (a + b).flip(0))


def test_a_kernel_prints(capfd):
    body = """
    .local .align 8 .b8 depot[16];
    mov.b64 %rd4, depot;
    st.local.b32 [%rd4], %r1;
    { .param .b64 param0; .param .b64 param1; .param .b32 retval0;
    mov.b64 %rd5, format; st.param.b64 [param0], %rd5; st.param.b64 [param1], %rd4;
    setp.lt.u32 %p1, %r1, 3;
    @%p1 call.uni (retval0), vprintf, (param0, param1); }"""
    text = ".global .align 1 .b8 format[5] = {37, 100, 37, 37, 10};" + KERNEL.format(body=body)
    run_ptx(text, torch.zeros(1, dtype=torch.int32))
    assert capfd.readouterr().out == "0%\n1%\n2%\n"


def test_a_sum_of_a_product_is_rounded_once():
    """As ptxas makes it, unless the product or the sum says .rn."""
    body = """
    .reg .f32 %f<8>;
    mov.f32 %f1, 0f3F800001;
    mul.f32 %f2, %f1, %f1;
    mul.rn.f32 %f3, %f1, %f1;
    sub.f32 %f4, %f2, %f3;
    sub.f32 %f5, %f3, %f2;
    sub.rn.f32 %f6, %f2, %f3;
    mov.b32 %r4, %f4; st.global.b32 [%rd3], %r4;
    mov.b32 %r4, %f5; st.global.b32 [%rd3+128], %r4;
    mov.b32 %r4, %f6; st.global.b32 [%rd3+256], %r4;"""
    left = 2.0**-46  # of (1 + 2**-23)**2, rounded
    assert ptx(body, 96).view(torch.float32)[::32].tolist() == [left, -left, 0.0]


def test_lanes_part_and_meet_again():
    body = """
    mov.b32 %r2, 0;
    LOOP: add.s32 %r2, %r2, 1;
    setp.lt.s32 %p1, %r2, %r1;
    @%p1 bra LOOP;
    shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;
    st.global.b32 [%rd3], %r3;"""
    lanes = torch.arange(32, dtype=torch.int32)
    assert torch.equal(ptx(body), (lanes ^ 1).clamp(min=1))


def test_bulk_copies_and_reductions():
    """128 bytes to shared memory and back, added to what was there; then a vector reduction of registers."""
    body = """
    mov.b32 %r2, 2048; mov.b32 %r3, 1024; mov.b32 %r4, 128;
    setp.eq.u32 %p1, %r1, 0;
    @!%p1 bra WAIT;
    mbarrier.init.shared::cta.b64 [%r3], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], %r4;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], %r4, [%r3];
    WAIT: bar.warp.sync -1;
    LOOP: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
    @!%p2 bra LOOP;
    @!%p1 bra END;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%rd1], [%r2], %r4;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd1+128];
    red.global.add.v4.f32 [%rd1+128], {%r2, %r3, %r4, %r5};
    END: """
    out = torch.arange(36, dtype=torch.int32)
    out[32:] = torch.tensor([1.0, 2.0, -3.0, 0.5]).view(torch.int32)
    run_ptx(KERNEL.format(body=body), out, shared=2048)
    assert torch.equal(out[:32], 2 * torch.arange(32, dtype=torch.int32))
    assert out[32:].view(torch.float32).tolist() == [2.0, 4.0, -6.0, 1.0]


def test_a_half_that_nobody_reads():
    """_ is no register of another name."""
    body = """
    .reg .b16 %h<3>;
    add.u32 %r3, %r1, 65536; mov.u32 %r4, 7;
    mov.b32 {%h1, _}, %r3;
    mov.b32 {_, %h2}, %r3;
    mov.b32 %r2, {%h2, %h1};
    add.u32 %r2, %r2, %r4;
    st.global.b32 [%rd3], %r2;"""
    assert torch.equal(ptx(body), torch.arange(32, dtype=torch.int32) * 65536 + 8)


def test_a_store_out_of_bounds():
    with pytest.raises(
        EmulatorError, match=r"ends 4 bytes after the end of a tensor of 128[\s\S]*st\.global\.b32 \[%rd3\]"
    ):
        ptx("st.global.b32 [%rd3], %r1;", block=64)


def test_a_misaligned_load():
    with pytest.raises(EmulatorError, match="no multiple of 16"):
        ptx("ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd1+4];")


def test_a_barrier_that_half_of_a_warp_reaches():
    body = "setp.lt.u32 %p1, %r1, 16; @%p1 bra END; bar.sync 0; END: bar.warp.sync -1;"
    with pytest.raises(EmulatorError, match=r"no warp can go on[\s\S]*16 lanes"):
        ptx(body)


def test_an_instruction_that_is_not_there():
    with pytest.raises(NotImplementedError, match="dp4a.u32.u32"):
        ptx("dp4a.u32.u32 %r2, %r1, %r1, %r1;")
