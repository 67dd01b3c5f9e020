"""Kernels composed of parts that heuristics never select together: no spills, and the selected kernel's results."""

import shutil
from dataclasses import replace

import pytest
import torch

from cute_kernels import gemm, quantize
from cute_kernels.arch import arch_named
from cute_kernels.matmul import catalogue
from cute_kernels.matmul.candidates import sm90
from cute_kernels.matmul.config import OVERLAP_STORE, BlockFacts, EpilogueSpec, GemmFacts
from cute_kernels.matmul.kernels import kernel_for
from cute_kernels.matmul.mainloops.promoted_sm90 import DoubleBufferedSm90
from cute_kernels.matmul.schedules.overlap_store import OverlapStore
from cute_kernels.matmul.schedules.ping_pong import PingPong
from cute_kernels.runtime.compile import cubin_of
from cute_kernels.runtime.families import compile_kernel, unsupported
from cute_kernels.runtime.parallel import report_of
from cute_kernels.testing.forced import forced_config
from cute_kernels.testing.reference import poisoned
from cute_kernels.tile.element import element_of
from sparse_collective import BsrMatrix, bsr_gated_linear, bsr_linear

from ..emulator import emulate
from ..emulator.ops import on_emulator

BF16, E4M3 = torch.bfloat16, "float8_e4m3fn"
SPEC = arch_named("sm_90a")
OF = {"spec": SPEC, "element": element_of(E4M3)}
PING_PONG = sm90(64, 256, 128, 1, 1, 2, 1, consumer_groups=2, ring=1, **OF)
OVERLAP = replace(sm90(128, 256, 128, 2, 1, 1, 2, **OF), schedule=OVERLAP_STORE)
needs_compiler = pytest.mark.skipif(shutil.which(emulate.COMPILER) is None, reason="the emulator needs a C++ compiler")


def dense(config, epilogue: EpilogueSpec, **terms) -> GemmFacts:
    terms = {"majors": ("k", "k", "n"), "aligns": (16, 16, 8), "dtype": E4M3} | terms
    return catalogue.dense(SPEC, "sm_90", config, epilogue=epilogue, **terms)


def bsr(config, epilogue: EpilogueSpec, **terms) -> GemmFacts:
    block = BlockFacts(128, 128, "int32", scaled=True)
    return dense(config, epilogue, majors=("k", "k", "m"), block=block, transposed=True, **terms)


COLUMN = EpilogueSpec(scale_n="column")
GATED = EpilogueSpec(scale_n="column", activation="silu", gated=True)
KERNELS = {
    "promoted x ping-pong": dense(PING_PONG, EpilogueSpec(scale_m="row", scale_n="column")),
    "block scales x ping-pong": dense(PING_PONG, EpilogueSpec(scale_m="1x128", scale_n="128x128")),
    "stored blocks x ping-pong": bsr(PING_PONG, COLUMN),
    "overlapped store x gate": bsr(OVERLAP, GATED),
    "overlapped store x gate, ordered": bsr(OVERLAP, GATED, ordered=True),
}


@pytest.mark.parametrize("name", KERNELS)
def test_machine_code(name):
    facts = KERNELS[name]
    assert not unsupported(facts)
    kernel = kernel_for(facts)
    assert type(kernel.schedule) is (OverlapStore if "overlapped" in name else PingPong)
    assert isinstance(kernel.mainloop, DoubleBufferedSm90)
    built = compile_kernel(facts, keep_cubin=True)
    assert not report_of(facts, cubin_of(built.compiled), int(built.metadata["smem"])).problems


def test_limits():
    assert "promoted accumulation in a ping-pong kernel" in unsupported(
        dense(sm90(128, 128, 128, 1, 1, consumer_groups=2, **OF), EpilogueSpec())
    )
    assert "schedule='overlap_store'" in unsupported(dense(OVERLAP, EpilogueSpec()))
    assert "schedule='other'" in unsupported(bsr(replace(OVERLAP, schedule="other"), COLUMN))


def uneven(rows: int, columns: int) -> BsrMatrix:
    """Block rows of three blocks, none, one, all and two."""
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    for row in range(rows):
        mask[row, torch.randperm(columns)[: (3, 0, 1, columns, 2)[row % 5]]] = True
    dense = torch.randn(rows * 128, columns * 128).to(BF16)
    return BsrMatrix.from_dense(dense, (128, 128), mask=mask).quantize()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemm", "blocks", "gate"])
def test_results_of_the_selected_kernel(name):
    """Partial sums are added in the same order; several tiles per CTA, and tokens past the last tile."""
    W = uneven(5, 4)
    x, scale = quantize(torch.randn(300, 512).to(BF16), per="row")

    def call() -> torch.Tensor:
        if name == "gemm":
            w, scale_w = quantize(torch.randn(300, 512, generator=torch.Generator().manual_seed(1)).to(BF16), per="row")
            return gemm(x, w.t(), out=poisoned(300, 300), scale_a=scale, scale_b=scale_w.t())
        if name == "blocks":
            return bsr_linear(x, W, out=poisoned(300, 640), scale_x=scale)
        return bsr_gated_linear(x, W, activation="silu", out=poisoned(300, 320), scale_x=scale)

    with on_emulator("sm_90", sms=2):
        wanted = call()
        with forced_config(OVERLAP if name == "gate" else PING_PONG):
            found = call()
    assert torch.equal(found, wanted)
