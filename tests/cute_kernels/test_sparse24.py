"""gemm with a Sparse24, beyond the conformance cases: the format, plans, errors, machine code, planted faults."""

import re
import warnings

import pytest
import torch
from torch.sparse import _semi_structured_conversions as conversions
from torch.sparse import semi_structured

import cute_kernels
from cute_kernels import Sparse24, explain, gemm, prune_2_4
from cute_kernels.arch import ARCHS
from cute_kernels.runtime.inspect import disassemble
from cute_kernels.sparse24 import SPARSE24
from cute_kernels.sparse24.format import metadata_shape
from cute_kernels.testing.reference import normal, poisoned

from ..compiled import cubin
from ..emulator import emulate
from ..emulator.ops import needs_compiler, on_emulator

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FLOATS = [BF16, FP16, FP32, FP64]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(64, 64), (1, 4), (130, 68), (300, 136), (256, 128), (0, 8), (5, 0)]


def pruned(M: int, K: int, dtype=BF16, device="cpu") -> torch.Tensor:
    """2:4 sparse, with groups of fewer than two nonzeros."""
    w = prune_2_4(normal(M, K, dtype=dtype, device=device))
    return (w.double() * (torch.rand(M, K, device=device) > 0.2)).to(dtype)


# -- pruning and the format -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, E4M3, E5M2], ids=str)
def test_pruning_keeps_the_largest_two_of_four(dtype):
    w = torch.tensor([[1.0, -4.0, 2.0, 0.5, 3.0, 3.0, -3.0, 3.0], [0.0, 0.0, 0.0, 1.0, -0.5, 0.25, 0.5, 1.5]]).to(dtype)
    kept = [[0.0, -4.0, 2.0, 0.0, 3.0, 3.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0, -0.5, 0.0, 0.0, 1.5]]
    assert prune_2_4(w).dtype == dtype and torch.equal(prune_2_4(w).float(), torch.tensor(kept))
    assert torch.equal(prune_2_4(w[None].mT.contiguous().mT).float(), torch.tensor([kept]))


def test_pruning_keeps_nan_and_passes_gradients():
    w = torch.tensor([1.0, float("nan"), 3.0, 2.0], requires_grad=True)
    out = prune_2_4(w)
    assert out[1].isnan() and out[2] == 3 and out[0] == out[3] == 0
    out[2].backward()
    assert torch.equal(w.grad, torch.tensor([0.0, 0.0, 1.0, 0.0]))


@pytest.mark.parametrize("dtype", [*FLOATS, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_there_and_back(shape, dtype):
    w = pruned(*shape, dtype=dtype)
    for given in (w, w.t().contiguous().t()):
        W = Sparse24.from_dense(given)
        assert torch.equal(W.to_dense().double(), w.double()) and W.shape == w.shape and W.dtype == dtype
        assert W.values.shape == (shape[0], shape[1] // 2) and W.metadata.shape == metadata_shape(*shape)
        assert shape[0] < 2 or shape[1] == 0 or W.values.stride(0) * dtype.itemsize % 16 == 0
    assert W.to(FP32 if dtype != FP32 else FP64).to_dense().double().equal(w.double()) and W.to(dtype) is W


def places_of(W: Sparse24, row: int, group: int) -> tuple[int, int]:
    """Positions of the two stored elements of a group, as in the PTX ISA of m64nNk32: of row r of a warp's 16, lanes
    4 (r % 8) and the next (selector 0; 2 and 3 more of selector 1) have columns 0 to 15 and 16 to 31 of 32, in their
    lower halves where r < 8."""
    step, quarter = divmod(group, 8)  # of 32 columns
    slab, rest = divmod(row, 64)
    warp, r = divmod(rest, 16)
    lane = 4 * (r % 8) + 2 * (step % 2) + quarter // 4
    bits = int(W.metadata[step // 2, slab, 32 * warp + lane]) >> (16 * (r // 8) + 4 * (quarter % 4)) & 15
    return bits & 3, bits >> 2


def test_metadata_are_where_the_isa_says():
    w = pruned(130, 132)
    W = Sparse24.from_dense(w)
    for row in (*range(0, 130, 7), 8, 15, 16, 63, 64, 129):
        for group in range(33):
            first, second = places_of(W, row, group)
            four, stored = w[row, 4 * group : 4 * group + 4], W.values[row, 2 * group : 2 * group + 2]
            assert first < second and torch.equal(four[[first, second]], stored)
            assert four.count_nonzero() == stored.count_nonzero()
    # What fills up is defined, too.
    assert places_of(W, 255, 63) == places_of(W, 129, 40) == (0, 1)


def test_words_are_those_of_torch_s_conversion():
    """For 32 rows and 32 columns torch has the words for mma.sp of the first and the second 16 rows, for lanes 0 and 1
    and lanes 2 and 3 of every four. One word is the same 16 rows and 32 columns here."""
    w = prune_2_4(normal(128, 128))
    W, (_, meta) = Sparse24.from_dense(w), conversions.sparse_semi_structured_from_dense_cutlass(w)
    words = meta.reshape(-1).view(torch.int32).view(4, 128)  # (32 columns, M)
    for step in range(4):
        for row in range(128):
            block, rest = divmod(row, 32)
            g, half, h = rest // 4, rest % 4 // 2, rest % 2
            rows = 32 * block + 16 * half  # the first of 16
            slab, warp = rows // 64, rows % 64 // 16
            ours = W.metadata[step // 2, slab, 32 * warp + 4 * g + 2 * (step % 2) + h]
            assert ours == words[step, row]


def theirs(w: torch.Tensor):
    """torch's CUTLASS tensor of w, made as to_sparse_semi_structured does, which wants a GPU."""
    packed, meta = conversions.sparse_semi_structured_from_dense_cutlass(w)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return semi_structured.SparseSemiStructuredTensorCUTLASS(w.shape, packed, meta, None, None, None)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", [(32, 64), (96, 192), (256, 128), (64, 448)], ids=str)
def test_torch_s_semi_structured_tensors(shape, dtype):
    """From torch's and back, bit by bit; and from ours and back, with what torch makes of it in between."""
    w = pruned(*shape, dtype=dtype)
    t, W = theirs(w), Sparse24.from_dense(w)
    V = Sparse24.from_torch(t)
    assert torch.equal(V.to_dense(), w) and torch.equal(V.values, t.packed) and V.values is not t.packed
    again, ours = V.to_torch(), W.to_torch()
    assert torch.equal(again.packed, t.packed) and torch.equal(again.meta, t.meta) and again.shape == t.shape
    assert again.meta.dtype == t.meta.dtype and again.meta.stride() == t.meta.stride()
    assert torch.equal(ours.to_dense(), w)
    back = Sparse24.from_torch(ours)
    assert torch.equal(back.values, W.values) and torch.equal(
        back.metadata[: shape[1] // 64], W.metadata[: shape[1] // 64]
    )
    b = normal(shape[1], 8, dtype=dtype)
    assert torch.equal(gemm(V, b), gemm(w, b))


def test_torch_s_tensors_of_float32_keep_one_of_two():
    """torch's own to_dense() moves them in halves, some of which are NaN, and change."""
    w = torch.randn(32, 64) * torch.nn.functional.one_hot(torch.randint(2, (32, 32)), 2).flatten(1)
    assert torch.equal(Sparse24.from_torch(theirs(w)).to_dense(), w)
    with pytest.raises(TypeError, match="torch.float32; torch keeps 2 of 4 of bfloat16"):
        Sparse24.from_dense(w).to_torch()


@pytest.mark.gpu
def test_torch_s_tensors_of_either_backend_on_a_gpu():
    w = pruned(256, 512, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for cutlass in (True, False):
            if not cutlass and not torch.backends.cusparselt.is_available():
                continue
            made = semi_structured.SparseSemiStructuredTensorCUTLASS if cutlass else torch.sparse
            t = made.from_dense(w) if cutlass else made.to_sparse_semi_structured(w)
            assert torch.equal(Sparse24.from_torch(t).to_dense(), w)
        t = Sparse24.from_dense(w).to_torch()
        assert torch.equal(Sparse24.from_torch(t).to_dense(), w)
        if torch.cuda.get_device_capability()[0] == 8:  # where torch multiplies by them
            x = normal(512, 64, device="cuda")
            assert torch.allclose((t @ x).float(), (w @ x).float(), rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: Sparse24.from_dense(torch.ones(8, 8)),
            ValueError,
            "16 groups of 4 .*row 0, columns 0 to 3; prune_2_4",
        ),
        (lambda: Sparse24.from_dense(torch.ones(8, 6)), ValueError, r"\(8, 6\).*multiple of 4"),
        (lambda: Sparse24.from_dense(torch.ones(2, 8, 8)), ValueError, "3 dimensions"),
        (lambda: Sparse24.from_dense(torch.ones(8, 8).to(E4M3)), ValueError, "16 groups of 4"),
        (lambda: Sparse24.from_dense(torch.ones(8, 8).int()), TypeError, "torch.int32; use one of"),
        (lambda: Sparse24.from_dense([[1.0]]), TypeError, "torch.Tensor"),
        (lambda: Sparse24.from_torch(pruned(32, 64)), TypeError, "SparseSemiStructuredTensor, got Tensor"),
        (lambda: Sparse24.from_torch(theirs(pruned(32, 64)).t()), ValueError, r"pass t.t\(\)"),
        (lambda: Sparse24.from_dense(pruned(40, 64)).to_torch(), ValueError, "40x64; torch takes rows in multiples"),
        (lambda: prune_2_4(torch.ones(8, 6)), ValueError, "multiple of 4"),
        (lambda: prune_2_4(torch.ones(4).int()), TypeError, "floating-point"),
        (lambda: Sparse24(torch.ones(8, 4), torch.zeros(2, 4, 128), (8, 8)), TypeError, "metadata is .*int32"),
        (lambda: Sparse24(torch.ones(8, 4).int(), torch.zeros(2, 4, 128).int(), (8, 8)), TypeError, "values are .*use"),
        (lambda: Sparse24(torch.ones(8, 3), torch.zeros(2, 4, 128).int(), (8, 6)), ValueError, "8x6; K must be a mul"),
        (
            lambda: Sparse24(torch.ones(8, 4), torch.zeros(1025).int()[1:].view(2, 4, 128), (8, 8)),
            ValueError,
            r"must begin at a multiple of 16 bytes.*metadata.clone\(\)",
        ),
        (lambda: Sparse24(torch.ones(8, 4), torch.zeros(2, 4, 128).int(), (8, 16)), ValueError, r"\(8, 8\)"),
        (lambda: Sparse24(torch.ones(8, 4), torch.zeros(1, 4, 128).int(), (8, 8)), ValueError, r"\(2, 4, 128\)"),
    ],
)
def test_what_is_no_such_matrix(make, error, words):
    with pytest.raises(error, match=words):
        make()


# -- the op -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_on_the_cpu(dtype):
    w, b = pruned(40, 24, dtype), torch.randn(24, 56).to(dtype)
    W, terms = Sparse24.from_dense(w), {"bias": torch.randn(56), "activation": "gelu"}
    assert torch.equal(gemm(W, b, **terms), gemm(w, b, **terms))
    for M, N, K in ((0, 8, 8), (8, 0, 8), (8, 8, 0)):
        W, b = Sparse24.from_dense(pruned(M, K, dtype)), torch.randn(K, N).to(dtype)
        assert torch.equal(gemm(W, b, bias=torch.ones(N)), gemm(W.to_dense(), b, bias=torch.ones(N)))


def meta(M: int, K: int, dtype=BF16) -> Sparse24:
    metadata = torch.empty(metadata_shape(M, K), dtype=torch.int32, device="meta")
    return Sparse24(torch.empty(M, K // 2, dtype=dtype, device="meta"), metadata, (M, K))


def test_plans():
    """explain says what runs."""
    b = torch.empty(8192, 8192, dtype=BF16, device="meta")
    plan = explain(gemm, meta(8192, 8192), b, arch="sm_90")
    assert plan.facts.family == "sparse24" and "2:4" in str(plan)
    assert explain(gemm, b, b, arch="sm_90").facts.family == "dense"
    assert "CPU" in str(explain(gemm, Sparse24.from_dense(pruned(8, 8)), torch.randn(8, 8).to(BF16)))


def refusals() -> list:
    W, b = Sparse24.from_dense(pruned(32, 48)), torch.randn(48, 24).to(BF16)
    one = torch.ones(1)

    def leaf(t):
        return t.clone().requires_grad_()

    return [
        (lambda: gemm(b.t().contiguous(), W), TypeError, r"only a may be a Sparse24.*gemm\(W, a.mT\).mT"),
        (lambda: gemm(W, W), TypeError, "b must be a torch.Tensor"),
        (lambda: gemm(W, b[None]), ValueError, "got 3 dimensions; fold the batch"),
        (lambda: gemm(W, b[:40]), ValueError, "48 columns meet 40 rows"),
        (lambda: gemm(W, b.half()), TypeError, "b is torch.float16 but a is torch.bfloat16"),
        (lambda: gemm(W, b, scale_a=one), TypeError, "scale_a of torch.bfloat16 operands"),
        (
            lambda: gemm(W, b, use_fast_accum=True),
            ValueError,
            "use_fast_accum=True requires .* operands, got torch.bfloat16",
        ),
        (lambda: gemm(W, b, bias=torch.ones(7)), ValueError, "bias has shape"),
        (lambda: gemm(W, b, out=torch.empty(32, 25).to(BF16)), ValueError, "out has shape"),
        (lambda: gemm(W, leaf(b)), RuntimeError, "Sparse24 does not compute gradients"),
        (lambda: gemm(W, b, bias=leaf(torch.ones(24))), RuntimeError, "Sparse24 does not compute gradients"),
        (lambda: gemm(Sparse24(leaf(W.values), W.metadata, W.shape), b), RuntimeError, "does not compute gradients"),
        (lambda: gemm(W, b, out=b[:32]), ValueError, "out shares memory with an input"),
        (lambda: explain(gemm, W.to(FP32), b.float(), arch="sm_90"), TypeError, "torch.float32; the kernels support"),
    ]


@pytest.mark.parametrize("number", range(14))
def test_refusals(number):
    call, error, words = refusals()[number]
    with pytest.raises(error, match=words):
        call()


def test_paths():
    """Ampere and Ada have mma.sp, and Hopper where TMA cannot read b, or where it is asked for."""
    W, b = Sparse24.from_dense(pruned(32, 48)), torch.randn(48, 24).to(BF16)
    unaligned = b.repeat(1, 2)[:, 1:24]
    for arch in ("sm_80", "sm_86", "sm_89"):
        assert explain(gemm, W, unaligned, arch=arch).facts.path == "sm_80"
    assert explain(gemm, W, b, arch="sm_90").facts.path == "sm_90"
    assert "not on path sm_90: B's address" in str(explain(gemm, W, unaligned, arch="sm_90"))
    with cute_kernels.path("sm_80"):
        assert explain(gemm, W, b, arch="sm_90").facts.path == "sm_80"
    with (
        cute_kernels.path("sm_90"),
        pytest.raises(ValueError, match=r"multiples of 16 bytes.*gemm\(a.to_dense\(\), b\)"),
    ):
        explain(gemm, W, unaligned, arch="sm_90")


# -- kernels ----------------------------------------------------------------------------------------------------------

KERNELS = [facts for facts in SPARSE24.catalogue("sm_90") if facts.element.width == 2]
AMPERE = SPARSE24.catalogue("sm_80")


def test_each_architecture_has_kernels():
    assert len(KERNELS) == len({SPARSE24.title(facts) for facts in KERNELS}) > 30
    for name, spec in ARCHS.items():
        kernels = [facts for facts in SPARSE24.catalogue(name) if facts.element.width == 2]
        own = {facts.config for facts in kernels if facts.path == spec.path}
        assert own == set(SPARSE24.candidates(spec.path, None, spec)), name


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_products_are_sparse_ones(arch):
    facts = (AMPERE if arch == "sm_80" else KERNELS)[0]
    sass = disassemble(cubin(facts))
    products = set(re.findall(r"HG?MMA\S*", sass))
    assert products == {"HMMA.SP.16832.F32.BF16" if arch == "sm_80" else "HGMMA.SP.64x256x32.F32.BF16"}


@needs_compiler
def test_faults_are_seen_on_the_emulator():
    """The other selector, and a bulk copy of metadata that is left out, which the barrier then waits for."""
    facts, seen = KERNELS[0], []
    swapped = {"0": "1", "1": "0"}
    changes = (
        lambda ptx: re.sub(r"(db, %r\d+), ([01]), p", lambda m: seen.append(1) or f"{m[1]}, {swapped[m[2]]}, p", ptx),
        lambda ptx: re.sub(
            r"cp\.async\.bulk\.shared::cluster\.global\S* \[[^;]*;", lambda m: seen.append(2) or "", ptx
        ),
    )
    w = prune_2_4(normal(128, 128))
    W, b = Sparse24.from_dense(w), normal(128, 256)
    for number, change in enumerate(changes, 1):
        d = poisoned(128, 256)
        run = emulate.emulate_entry(facts.arch, SPARSE24.entry(facts), SPARSE24.arguments(facts), change)
        with emulate.emulator(sms=2):
            arguments = (W.values, W.metadata, b, d, 1.0, 1.0, 1, 2)
            if number == 2:
                with pytest.raises(emulate.EmulatorError, match="waits|go on"):
                    run(*arguments)
            else:
                run(*arguments)
        assert number in seen and (number == 2 or (d - w.float() @ b.float()).abs().max() > 1)


@needs_compiler
def test_a_wrong_selector_of_mma_sp_is_seen_on_the_emulator():
    facts, swapped, seen = AMPERE[0], {"0": "1", "1": "0"}, []

    def change(ptx: str) -> str:
        pattern = r"(mma\.sp::ordered_metadata[^;]*%r\d+, )([01]);"
        return re.sub(pattern, lambda m: seen.append(1) or f"{m[1]}{swapped[m[2]]};", ptx)

    w, b = prune_2_4(normal(128, 128)), normal(128, 128)
    W, d = Sparse24.from_dense(w), poisoned(128, 128)
    run = emulate.emulate_entry(facts.arch, SPARSE24.entry(facts), SPARSE24.arguments(facts), change)
    with emulate.emulator(sms=2):
        run(W.values, W.metadata, b, d, 1.0, 1.0, *facts.counts(1, 2))
    assert seen and (d - w.float() @ b.float()).abs().max() > 1


@needs_compiler
def test_the_emulator_refuses_equal_places():
    """Two elements of a group at one place are not defined."""
    w = pruned(64, 64)
    W, b = Sparse24.from_dense(w), normal(64, 64)
    W.metadata[0, 0, 5] = 0
    for arch in ("sm_90", "sm_80"):
        with on_emulator(arch, sms=1), pytest.raises(emulate.EmulatorError, match="lane 5: both elements"):
            gemm(W, b)
