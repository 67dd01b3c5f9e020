"""Kernel selection: explain, path, what is chosen for a problem and from which facts; and calls on the CPU."""

import itertools
import threading

import pytest
import torch

import cute_kernels
from attention import attention
from cute_kernels import explain, gemm, inspect
from cute_kernels.arch import ARCHS, PATHS
from cute_kernels.matmul.config import BlockFacts, EpilogueSpec, GemmFacts
from cute_kernels.matmul.epilogue.terms import epilogue_program
from cute_kernels.matmul.heuristics import candidates_for, choose, facts_for
from cute_kernels.matmul.problem import Extents, Problem
from cute_kernels.operand import Layout, flatten_batch, folds_into_rows, layout_of
from cute_kernels.runtime.device import forced_path
from cute_kernels.runtime.families import unsupported
from cute_kernels.testing.reference import normal, operand, poisoned
from sparse_collective import bsr_linear, bsr_matmul, random_bsr

from .gemm_calls import assert_right
from .sparse_collective.bsr_parts import picked

BF16, FP32 = torch.bfloat16, torch.float32


def test_cpu_tensors_run_torch():
    """More of this is in the fuzz and in test_guard_zones.py."""
    for a, b in (((3, 8, 16), (16, 4)), ((2, 1, 8, 16), (1, 3, 16, 4)), ((8, 0), (0, 4)), ((0, 8), (8, 0))):
        a, b = normal(*a), normal(*b)
        assert_right(gemm(a, b), gemm, a, b)
    a, b, residual = normal(8, 16).requires_grad_(), normal(16, 24), normal(8, 24)
    with torch.no_grad():
        out, terms = gemm(a, b, residual=residual, beta=-2.0), {"residual": residual.clone(), "beta": -2.0}
        assert not out.requires_grad
    assert gemm(a.detach(), b, residual=residual, beta=-2.0, out=residual) is residual
    assert_right(residual, gemm, a.detach(), b, **terms)
    assert torch.equal(residual, out)
    with torch.inference_mode():
        gemm(normal(8, 16), b)


# explain and path


def test_explain_on_the_cpu():
    a, b = normal(3, 8, 16), normal(16, 24)
    plan = explain(gemm, a, b, out_dtype=FP32)
    assert plan.facts is None and plan.function is None
    assert str(plan).splitlines() == [
        "gemm -> (3, 8, 24) torch.float32 on cpu",
        "  kernel: none, CPU tensors run the reference",
    ]
    W = random_bsr((64, 32), (16, 16), density=0.5)
    assert explain(bsr_matmul, W, normal(32, 8)).out_shape == (64, 8)
    assert "bsr_linear -> (5, 64)" in str(explain(bsr_linear, normal(5, 32), W))
    assert "kernel: none, nothing to compute" in str(explain(gemm, normal(0, 8), normal(8, 8)))
    known = "supported ops are .*bsr_grouped_linear, bsr_linear, bsr_matmul, gemm"
    with pytest.raises(ValueError, match=f"cannot explain 'matmul'; {known}"):
        explain(torch.matmul, normal(8, 8), normal(8, 8))
    for op, other in ((gemm, normal(16, 24)), (bsr_linear, W), (attention, normal(8, 16))):  # with the op's own name
        with pytest.raises(TypeError, match=rf"^{op.__name__}\(\): got an unexpected keyword argument 'transposed'"):
            explain(op, a, other, *([other] if op is attention else ()), transposed=True)
    with pytest.raises(TypeError, match=r"^gemm\(\): missing a required argument: 'b'"):
        inspect(gemm, a, arch="sm_90")


def test_inspect_returns_the_code():
    a, b = (torch.empty(256, 256, dtype=torch.bfloat16, device="meta") for _ in range(2))
    report = inspect(gemm, a, b, arch="sm_80")
    assert report.cubin.startswith(b"\x7fELF") and ".target sm_80" in report.ptx and "HMMA" in report.sass
    assert "cubin=" not in repr(report) and report == inspect(gemm, a, b, arch="sm_80")


def test_explain_of_a_kernel(emulated):
    text = str(explain(gemm, normal(200, 136), normal(136, 264)))
    assert "path: sm_90, compiled for sm_90a" in text
    assert "configuration: " in text and "raster panels of" in text
    assert "operands: bfloat16 -> bfloat16, majors ('k', 'n', 'n'), alignments (8, 8, 8) elements" in text
    text = str(explain(gemm, normal(200, 137), normal(137, 264)))
    assert "path: sm_80, compiled for sm_90a" in text
    assert "not on path sm_90: A's address or strides are not multiples of 16 bytes, which TMA requires" in text
    text = str(explain(gemm, normal(200, 136), normal(136, 264), out=poisoned(200, 265)[:, 1:]))
    assert "store: element by element" in text
    W = random_bsr((64, 224), (16, 112), density=0.5)
    assert "blocks: 16x112, MMA steps per K-tile " in str(explain(bsr_matmul, W, normal(224, 24)))
    assert "skinny" in str(explain(bsr_matmul, W, normal(224, 8)))


@pytest.mark.parametrize(("dtype", "granule"), [(torch.bfloat16, 8), (torch.float16, 8), (torch.float32, 4)], ids=str)
def test_tma_stores_whole_granules_alone(emulated, dtype, granule):
    """Out in a wider buffer, either major: by TMA where its contiguous extent is a multiple of 16 bytes too."""
    for n in range(257, 274):
        for transposed in (False, True):
            out = poisoned(136, 288, dtype=dtype)[:, :n]
            args = (normal(136, 64), operand(64, n, "t")) if not transposed else (normal(n, 64), operand(64, 136, "n"))
            plan = explain(gemm, *args, out=out.t() if transposed else out)
            whole = n % granule == 0
            assert plan.facts.path == "sm_90" and plan.facts.tma_store == whole
            assert plan.facts.aligns == (8, 8, granule if whole else 1), "few kernels"
            assert ("contiguous extent" in str(plan)) != whole


def test_path_is_a_context_of_one_thread(emulated):
    seen, call = [], (gemm, normal(64, 64), normal(64, 64))
    assert forced_path() is None and explain(*call).facts.path == "sm_90"
    with cute_kernels.path("sm_80"):
        facts = explain(*call).facts
        assert (facts.path, facts.arch) == ("sm_80", "sm_90a"), "compiled for the device, whichever family it is of"
        with cute_kernels.path("sm_90"):
            assert forced_path() == "sm_90"
        assert forced_path() == "sm_80"
        thread = threading.Thread(target=lambda: seen.append(forced_path()))
        thread.start()
        thread.join()
    with pytest.raises(KeyError), cute_kernels.path("sm_80"):
        raise KeyError
    assert forced_path() is None and seen == [None]
    with pytest.raises(ValueError, match="unknown path 'sm_100'; known are sm_80, sm_90"), cute_kernels.path("sm_100"):
        pass


# The choice of a kernel

DENSE_SHAPES = [(1, 1, 1), (16, 16, 16), (200, 264, 136), (1, 4096, 4096), (4096, 8, 512), (8192,) * 3, (127, 129, 65)]
BLOCK_SHAPES = [(16, 16), (16, 48), (32, 32), (32, 64), (48, 112), (64, 64), (64, 256), (80, 16), (112, 528), (128, 64)]
BLOCK_SHAPES += [(128, 128), (192, 64), (256, 64), (256, 256), (512, 112), (1024, 16), (16, 1024)]
ALIGNED = Layout("row", 8, 8)
DENSE_LAYOUTS = [  # layouts and majors of A, B and D
    ((ALIGNED, ALIGNED, ALIGNED), ("k", "n", "n")),
    ((Layout("col", 8, 8), Layout("col", 8, 4), ALIGNED), ("m", "k", "n")),
    ((ALIGNED, ALIGNED, Layout("col", 8, 2)), ("k", "n", "m")),
    ((ALIGNED, ALIGNED, Layout("any", 1, 1)), ("k", "n", "any")),
    ((Layout("row", 4, 4), ALIGNED, ALIGNED), ("k", "n", "n")),
    ((ALIGNED, Layout("any", 1, 1), Layout("row", 1, 1)), ("k", "any", "n")),
]


def problems():
    for (m, n, k), (layouts, majors), out in itertools.product(DENSE_SHAPES, DENSE_LAYOUTS, ("bfloat16", "float32")):
        yield Problem(Extents(m, n, k), "bfloat16", out, layouts, majors, (2, 2, 2), EpilogueSpec())
    for (bm, bk), n, linear, kept in itertools.product(BLOCK_SHAPES, (8, 264, 8192), (False, True), (0.0, 0.1, 1.0)):
        block, extents = BlockFacts(bm, bk, "int32"), Extents(3 * bm, n, 5 * bk)
        majors = ("k", "k", "m") if linear else ("k", "n", "n")
        ranks, spec = (3, 2, 2), EpilogueSpec(bias="row", bias_dtype="float32") if linear else EpilogueSpec()
        yield Problem(extents, "float16", "float16", (ALIGNED,) * 3, majors, ranks, spec, block, linear, kept)


def tma_reads(problem) -> bool:
    return all(layout.align == 8 for layout in problem.layouts[:2]) and "any" not in problem.majors[:2]


def unsound(facts: GemmFacts) -> str:
    """Further requirements of a configuration: its tile divides among its warps and its atoms."""
    cfg = facts.config
    if facts.family == "skinny":
        whole = facts.block.bm % cfg.tile_m == cfg.tile_m % 16 == cfg.tile_n % 8 == 0
        return "" if whole and cfg.warps <= 32 else "strips of whole MMAs, each in one block"
    warp_m, warp_n = (16, 8) if facts.path == "sm_80" else (64, 8)
    threads = cfg.warps_m * cfg.warps_n * (32 if facts.path == "sm_80" else 128)
    rules = {
        "the tile splits evenly": cfg.tile_m % (warp_m * cfg.warps_m) == 0 and cfg.tile_n % (warp_n * cfg.warps_n) == 0,
        "whole MMA steps": cfg.tile_k % 16 == 0 and cfg.tile_k <= (64 if facts.path == "sm_80" else 128),
        "accumulators fit": cfg.tile_m * cfg.tile_n // threads <= 192,
        "a TMA box": facts.path == "sm_80" or max(cfg.tile_m, cfg.tile_n) <= 256,
        "a pipeline": cfg.stages >= (3 if facts.path == "sm_80" else 2),
        "threads": threads * cfg.consumer_groups + 128 <= 1024,
    }
    return ", ".join(rule for rule, kept in rules.items() if not kept)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_problem_has_a_kernel_on_every_architecture(arch):
    """And whatever `unsupported` lets through of its candidates can be built, not only what the cost model picks."""
    spec = ARCHS[arch]
    for problem in problems():
        chosen = choose(problem, spec, 108, None)
        assert choose(problem, spec, 108, None) == chosen
        facts, group, *rest = chosen
        assert unsupported(facts) == "" and facts.arch == spec.target and group >= 1
        assert facts.block == problem.block and facts.epilogue == problem.epilogue
        assert facts.majors == problem.majors and facts.transposed == problem.transposed
        assert facts.path == ("sm_90" if arch == "sm_90" and tma_reads(problem) else "sm_80")
        if arch == "sm_90" and not tma_reads(problem):
            assert any(note.startswith("not on path sm_90: ") for note in rest[-1])
        for path in ("sm_80", "sm_90") if arch == "sm_90" else ("sm_80",):
            for _, config in candidates_for(path, problem, spec):
                facts = facts_for(problem, path, spec, config)
                assert unsupported(facts) or not unsound(facts), (facts, unsound(facts))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("path", PATHS)
def test_a_forced_path_is_kept_or_refused(arch, path):
    spec = ARCHS[arch]
    for problem in problems():
        if path == "sm_80" or (arch == "sm_90" and tma_reads(problem)):
            facts = choose(problem, spec, 132, path)[0]
            assert facts.path == path and unsupported(facts) == ""
        else:
            reason = "16 bytes|no contiguous mode" if arch == "sm_90" else f"{arch} has neither TMA nor WGMMA"
            with pytest.raises(ValueError, match=f"no kernel supports this call: not on path sm_90: .*({reason})"):
                choose(problem, spec, 132, path)


CUBE = (8192, 8192, 8192)
SHARED_K = {"split": 2, "store_row": 64, "stages": 8}


@pytest.mark.parametrize(
    ("block", "extents", "density", "terms", "family", "config"),
    [
        # Few columns, and one row with all blocks where the others have one in 16: that row's CTA would be the last
        ((128, 128), (8192, 128, 8192), 1 / 16, {"longest": 1.0}, "bsr", {"split": 4}),
        ((128, 128), (8192, 128, 8192), 1 / 16, {"longest": 0.1}, "bsr", {"split": 1}),
        ((128, 128), (8192, 128, 8192), 1 / 16, {}, "bsr", {"split": 1}),
        # 64x64 blocks of a band share slices of columns; at random a block row a tile does as well
        ((64, 64), CUBE, 0.125, {}, "bsr", {}),
        ((64, 64), CUBE, 0.125, {"listed": 0.33}, "bsr", {}),
        ((64, 64), CUBE, 0.125, {"listed": 0.15}, "small blocks", {"chunks": 4}),
        ((16, 16), CUBE, 0.125, {}, "small blocks", {"stages": 5, "cluster": 1}),
        # Few rows and a long K: two CTAs that share K, not a cluster of 64x64 tiles, which waits for its multicasts
        (None, (128, 4096, 4096), 1.0, {"b_k_major": True}, "dense", {**SHARED_K, "tile_m": 128, "tile_n": 64}),
        (None, (128, 4096, 14336), 1.0, {"b_k_major": True}, "dense", {**SHARED_K, "tile_m": 128, "tile_n": 64}),
        ((16, 16), CUBE, 0.125, {"b_k_major": True}, "small blocks", {"cluster": 2}),  # slices are wider then
    ],
)
def test_what_the_cost_model_picks(block, extents, density, terms, family, config):
    facts = picked(block, extents, density, **terms)
    assert facts.family == family and {name: getattr(facts.config, name) for name in config} == config


def test_keys_of_facts_tell_functions_apart_and_nothing_else():
    config = candidates_for("sm_80", next(problems()), ARCHS["sm_90"])[0][1]

    def key(function):
        spec = EpilogueSpec(function=function and epilogue_program("gemm", function))
        return repr(GemmFacts("sm_90a", "sm_80", config, epilogue=spec))

    def scaled(by):
        return lambda x: x * by

    assert key(scaled(2.0)) == key(scaled(2.0)) != key(scaled(3.0))
    assert key(None) != key(scaled(2.0)) and " at 0x" not in key(scaled(2.0))


# How matrices lie in memory


def test_layouts():
    t = torch.empty(64, 128, dtype=BF16)

    def of(v):
        return layout_of(v.shape, v.stride(), v.data_ptr(), v.element_size())

    assert of(t) == Layout("row", 8, 8)
    assert of(t.t()) == Layout("col", 8, 8)
    assert of(t[:, 1:]) == Layout("row", 1, 1)
    assert of(t[:, 4:]) == Layout("row", 4, 4)
    assert of(t[:, :100]) == Layout("row", 8, 4)
    assert of(t[:, ::2]).contiguous == "any"
    assert of(t[:1, 8:72]) == Layout("row", 8, 8)
    assert of(torch.empty(5, 72, dtype=BF16)[:1, :71]).align == 8, "the stride of a single row does not matter"
    assert of(t[:, :1]).contiguous in ("row", "any") and of(torch.empty(64, 1, dtype=BF16)) == Layout("col", 8, 8)
    assert of(torch.empty(64, 128)).align == 4, "4 fp32 elements are 16 bytes"
    assert of(torch.empty(3, 64, 100, dtype=BF16)[:, :, :96]) == Layout("row", 4, 4)


def test_folding():
    t = torch.empty(2, 3, 5, 8)
    assert folds_into_rows(t) and folds_into_rows(t[..., :4]) and folds_into_rows(t[:1, 1:])
    assert not folds_into_rows(t.transpose(0, 1)) and not folds_into_rows(t[:, :2]) and not folds_into_rows(t[:, :, :4])
    for view, rank, copied in ((t, 2, False), (t[:, :2], 3, True), (t[:1, :2], 3, False), (t[0, 0], 2, False)):
        flat, did = flatten_batch(view, rank)
        assert did == copied and torch.equal(flat.flatten().nan_to_num(), view.flatten().nan_to_num())
