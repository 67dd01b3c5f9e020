"""gemm(..., source=KTileSource(...)): its K-tiles on every path, and its errors."""

import pickle

import pytest
import torch

from cute_kernels import KTileSource, explain, gemm, inspect
from cute_kernels.arch import arch_named
from cute_kernels.matmul.candidates import sm90
from cute_kernels.runtime.families import family_of
from cute_kernels.testing.forced import forced_config
from cute_kernels.testing.reference import normal, poisoned
from cute_kernels.tile.element import BITS_16

from ..emulator.ops import needs_compiler, on_emulator

PATHS = pytest.mark.parametrize("path", ["sm_80", "sm_90"])
EVERY_SECOND = {
    "at": lambda m, i, k_tiles: 2 * i + m % 2,
    "count": lambda m, k_tiles: (k_tiles + 1 - m % 2) // 2,
}
SOURCES = {  # functions of plain integers, which state the expected K-tiles, too
    "every second": EVERY_SECOND,
    "none for some rows": {"at": lambda m, i, k_tiles: i, "count": lambda m, k_tiles: (m % 2) * k_tiles},
    "rotated": {"at": lambda m, i, k_tiles: (i - m + 7) % k_tiles, "count": lambda m, k_tiles: (k_tiles + 1) // 2},
    "repeated": {"at": lambda m, i, k_tiles: i // 2 * 2},
    "the same for all rows": {"at": lambda m, i, k_tiles: k_tiles - 1 - i, "count": lambda m, k_tiles: k_tiles - 1},
}


def exact(a, b, at, count=lambda m, k_tiles: k_tiles, tile_m=128, tile_k=64):
    """The GEMM of the K-tiles, in FP64."""
    (M, K), result = a.shape[-2:], torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float64)
    k_tiles = -(-K // tile_k)
    for m in range(-(-M // tile_m)):
        rows = slice(m * tile_m, (m + 1) * tile_m)
        for i in range(count(m, k_tiles)):
            columns = slice(at(m, i, k_tiles) * tile_k, (at(m, i, k_tiles) + 1) * tile_k)
            result[..., rows, :] += a[..., rows, columns].double() @ b[..., columns, :].double()
    return result


def close(result, expected) -> None:
    torch.testing.assert_close(result.double(), expected, rtol=2**-7, atol=2**-7 * expected.abs().max().item() / 8)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("tile", [(128, 64), (64, 192)])
def test_on_the_cpu(name, tile):
    a, b = normal(300, 456, dtype=torch.float32), normal(456, 40, dtype=torch.float32)
    expected = exact(a, b, **SOURCES[name], tile_m=tile[0], tile_k=tile[1])
    result = gemm(a, b, source=KTileSource(**SOURCES[name], tile_m=tile[0], tile_k=tile[1]))
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-4)


@needs_compiler
@PATHS
@pytest.mark.parametrize("name", SOURCES)
def test_on_the_emulator(name, path):
    """K-tiles of 192 are three or six of the kernel's; beyond the last column, whole ones of these."""
    a, b, out = normal(300, 400), normal(400, 72), poisoned(300, 72)
    with on_emulator("sm_90", sms=3, path=path):
        result = gemm(a, b, out=out, source=KTileSource(**SOURCES[name], tile_k=192))
    close(result, exact(a, b, **SOURCES[name], tile_k=192))


@needs_compiler
@PATHS
def test_batches_and_epilogues(path):
    a, b, bias, residual = normal(3, 200, 320), normal(320, 72), normal(72), normal(3, 200, 72)
    with on_emulator("sm_90", sms=3, path=path):
        result = gemm(
            a, b, bias=bias, residual=residual, activation="relu", alpha=0.5, source=KTileSource(**EVERY_SECOND)
        )
    close(result, torch.relu(0.5 * exact(a, b, **EVERY_SECOND) + bias.double() + residual.double()))


@needs_compiler
@pytest.mark.parametrize(("dtype", "tile_k"), [(torch.float8_e4m3fn, 128), (torch.float32, 64)])
def test_other_dtypes(dtype, tile_k):
    a, b = normal(260, 432).to(dtype), normal(72, 432).to(dtype).t()
    terms = {"scale_a": torch.tensor(0.5)} if dtype.itemsize == 1 else {"precision": "tf32"}
    with on_emulator("sm_90", sms=3):
        result = gemm(a, b, source=KTileSource(**EVERY_SECOND, tile_k=tile_k), **terms)
    factor = 0.5 if dtype.itemsize == 1 else 1
    close(result, factor * exact(a.float(), b.float(), **EVERY_SECOND, tile_k=tile_k))


@needs_compiler
@pytest.mark.parametrize(
    ("config", "name", "tile_m"),
    [
        ({"split": 2}, "every second", 128),
        ({"cluster_m": 2}, "every second", 256),
        ({"cluster_m": 2}, "the same for all rows", 128),
        ({"cluster_n": 2}, "every second", 128),
    ],
)
def test_clusters(config, name, tile_m):
    """Split-K and multicast, where row tiles of the kernel have the same K-tiles."""
    a, b = normal(520, 456), normal(456, 264)
    chosen = sm90(128, 128, 64, 2, 1, ring=1, **config, spec=arch_named("sm_90"), element=BITS_16)
    with on_emulator("sm_90", sms=4), forced_config(chosen):
        result = gemm(a, b, source=KTileSource(**SOURCES[name], tile_m=tile_m))
    close(result, exact(a, b, **SOURCES[name], tile_m=tile_m))


def test_clusters_need_equal_k_tiles():
    source = KTileSource(**EVERY_SECOND)
    a = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    config = sm90(128, 128, 64, 2, 1, 2, 1, spec=arch_named("sm_90"), element=BITS_16)
    with forced_config(config), pytest.raises(ValueError, match="row tiles have different K-tiles of B"):
        explain(gemm, a, a, source=source, arch="sm_90")
    assert source.shared_rows(128) == 1 and KTileSource(at=lambda m, i, k_tiles: i).shared_rows(128) == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
def test_every_candidate_compiles_without_spills(arch):
    a = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
    report = inspect(gemm, a, a, source=KTileSource(**EVERY_SECOND), arch=arch)
    assert report.spills == report.stack == 0 and not report.problems
    assert ("HGMMA" if arch == "sm_90" else "HMMA") in report.sass
    assert "source 128x64" in str(report)


def test_equal_sources_share_a_kernel():
    """Equality is that of the traced programs, not of functions; another captured number is another kernel."""

    def source(step):
        return KTileSource(at=lambda m, i, k_tiles: step * i, count=lambda m, k_tiles: k_tiles // step)

    a = torch.empty(512, 512, dtype=torch.bfloat16, device="meta")
    one, again, other = (explain(gemm, a, a, source=source(n), arch="sm_90").facts for n in (2, 2, 4))
    assert one == again and repr(one) == repr(again) and repr(one) != repr(other)
    copied = pickle.loads(pickle.dumps(one))
    assert copied == one and copied.source.k_tiles(128, 512) == [[0, 2, 4, 6]] and hash(copied) == hash(one)
    assert not family_of(copied).unsupported(copied)


def test_explain_names_the_source():
    a = torch.empty(512, 512, dtype=torch.bfloat16, device="meta")
    plan = explain(gemm, a, a, source=KTileSource(**EVERY_SECOND), arch="sm_90")
    assert "source: tiles of 128x64" in str(plan)
    assert "source" not in str(explain(gemm, a, a, arch="sm_90"))


# Errors


@pytest.mark.parametrize(
    ("terms", "error", "text"),
    [
        ({"at": 3}, TypeError, "must be a function, got int"),
        ({"at": lambda m, i: i}, TypeError, "at.m, i, k_tiles. failed while torch traced it"),
        ({"at": lambda m, i, k_tiles: i if m > 0 else 0}, TypeError, "torch.where"),
        ({"at": lambda m, i, k_tiles: i / 2}, TypeError, "must return an integer, got torch.float32"),
        ({"at": lambda m, i, k_tiles: i > 2}, TypeError, "must return an integer, got torch.bool"),
        ({"at": lambda m, i, k_tiles: torch.arange(9)[i]}, TypeError, "captured tensor, which is not supported"),
        ({"at": lambda m, i, k_tiles: i, "tile_m": 96}, ValueError, "tile_m must be a positive multiple of 64, got 96"),
        ({"at": lambda m, i, k_tiles: i, "tile_k": 64.0}, ValueError, "tile_k must be a positive multiple of 64"),
    ],
)
def test_wrong_sources(terms, error, text):
    with pytest.raises(error, match=text):
        KTileSource(**terms)


@pytest.mark.parametrize(
    ("at", "count", "text"),
    [
        (lambda m, i, k_tiles: i + m, None, r"at\(1, 3, 4\) is 4; K-tiles of K = 256 are 0 to 3"),
        (lambda m, i, k_tiles: i - 1, None, r"at\(0, 0, 4\) is -1"),
        (lambda m, i, k_tiles: i, lambda m, k_tiles: k_tiles + m, r"count\(1, 4\) is 5; it must be from 0 to 4"),
    ],
)
def test_k_tiles_out_of_range(at, count, text):
    a = normal(256, 256)
    with pytest.raises(ValueError, match=text):
        gemm(a, a, source=KTileSource(at, count))


def test_arguments_that_are_not_supported():
    source, a = KTileSource(**EVERY_SECOND), normal(256, 256)
    with pytest.raises(TypeError, match="source must be a KTileSource, got function"):
        gemm(a, a, source=lambda m: m)
    with pytest.raises(ValueError, match="3xtf32"):
        gemm(a.float(), a.float(), precision="3xtf32", source=source)
    values, blocks = a.to(torch.float8_e4m3fn), torch.ones(256, 2)
    with pytest.raises(ValueError, match="block scales are not supported with a source"):
        gemm(values, values.t(), scale_a=blocks, source=source)
    with pytest.raises(RuntimeError, match="gemm with a source does not compute gradients"):
        gemm(a.requires_grad_(), a, source=source)
    with pytest.raises(Exception, match="source is not supported under torch.compile"):
        torch.compile(lambda a, b: gemm(a, b, source=source), fullgraph=True, backend="eager")(a.detach(), a.detach())


def test_empty_results_and_an_empty_k():
    source = KTileSource(**EVERY_SECOND)
    assert gemm(normal(0, 64), normal(64, 8), source=source).shape == (0, 8)
    assert not gemm(normal(40, 0), normal(0, 8), source=source).any()
