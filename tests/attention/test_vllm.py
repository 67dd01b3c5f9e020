"""The attention backend of vLLM and the plugin of vllm-omni, with stand-ins of their interfaces.

Neither library is installed here. vllm_stand_in.py has the interface of vLLM 0.33.0; vllm-omni calls a function.
"""

import importlib
import importlib.metadata
import sys
import tomllib
from types import SimpleNamespace

import pytest
import torch

from attention import create_block_mask, patterns
from attention.integrations import vllm as integration
from cute_kernels.testing.reference import attention_plainly, band_mask, normal

from ..sources import ROOT
from . import vllm_stand_in
from .parts import BF16, starts

HEADS, KV_HEADS, D, PAGE = 4, 2, 64, 16


@pytest.fixture(name="backend")
def backend_fixture(monkeypatch):
    vllm_stand_in.install(monkeypatch)
    return importlib.import_module("attention.integrations.vllm.backend")


class Engine:
    """The cache and the requests of a layer, as vLLM holds them."""

    def __init__(self, impl, builder, device, dtype="auto"):
        self.impl, self.builder, self.device = impl, builder, device
        narrow = dtype.startswith("fp8")
        shape = 40, PAGE, KV_HEADS, 2 * D  # in memory; vLLM's logical order is (pages, heads, page_size, 2 * D)
        cache = torch.zeros(shape, dtype=torch.uint8 if narrow else BF16, device=device)
        self.cache = cache.fill_(0 if narrow else float("nan")).transpose(1, 2)
        scale = torch.tensor(0.02 if narrow else 1.0, device=device)
        self.layer = SimpleNamespace(_k_scale=scale, _v_scale=scale * 1.5)
        self.table = torch.randperm(40)[:36].view(6, 6).int().to(device)
        self.kept = [([], []) for _ in range(6)]  # k and v of each request

    def step(self, counts, **more):
        """One batch: `counts` is request -> number of new tokens, decodes first. Returns (output, q, metadata)."""
        total = sum(counts.values())
        query = normal(total, HEADS, D, dtype=BF16, device=self.device)
        key, value = (normal(total, KV_HEADS, D, dtype=BF16, device=self.device) for _ in range(2))
        slots, lengths = [], []
        for request, (k, v) in zip(counts, zip(*(t.split([*counts.values()]) for t in (key, value)), strict=True)):
            kept, values = self.kept[request]
            first = sum(map(len, kept))
            kept.append(k), values.append(v)
            positions = torch.arange(first, first + len(k), device=self.device)
            slots.append(self.table[request, positions // PAGE] * PAGE + positions % PAGE)
            lengths.append(first + len(k))
        begin = starts(counts.values(), self.device)
        sizes = torch.tensor(lengths, dtype=torch.int32)
        common = vllm_stand_in.CommonAttentionMetadata(
            begin, begin.cpu(), sizes.to(self.device), len(counts), total, max(counts.values()),
            self.table[[*counts]], torch.cat(slots), **{"seq_lens_cpu_upper_bound": sizes} | more,
        )  # fmt: skip
        metadata = self.builder.build(0, common)
        self.impl.do_kv_cache_update(self.layer, key, value, self.cache, common.slot_mapping)
        output = torch.full_like(query, float("nan"))
        found = self.impl.forward(self.layer, query, key, value, self.cache, metadata, output)
        assert found is output
        return output, query, metadata

    def expected(self, counts, query, left=None, **options):
        parts = []
        for request, q in zip(counts, query.split([*counts.values()]), strict=True):
            k, v = (torch.cat(kept) for kept in self.kept[request])
            seen = band_mask(len(q), len(k), left, 0, self.device)
            wide = (t.transpose(0, 1)[None].double() for t in (q, k, v))
            parts.append(attention_plainly(*wide, seen, **options)[0][0].transpose(0, 1))
        return torch.cat(parts)


def engine(backend, device, dtype="auto", **options):
    impl = backend.CuteKernelsImpl(HEADS, D, D**-0.5, KV_HEADS, kv_cache_dtype=dtype, **options)
    return Engine(impl, backend.Builder(None, [], None, torch.device(device)), device, dtype)


STEPS = (  # request -> tokens: prefills, then decodes with more prefills, then chunks of prefills beside them
    {0: 40, 1: 17},
    {0: 1, 2: 33},
    {0: 1, 1: 1, 2: 20, 3: 30, 4: 2},
    {0: 1, 1: 1, 2: 1, 3: 1},
)
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 20},
    "softcap": {"logits_soft_cap": 5.0},
    "sinks": {"sinks": torch.tensor([0.5, 3.0, -2.0, 1.0])},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_batches(backend, place, name):
    options = dict(OPTIONS[name])
    if "sinks" in options:
        options["sinks"] = options["sinks"].to(place)
    model = engine(backend, place, **options)
    terms = {"left": options.get("sliding_window", 0) - 1 if "sliding_window" in options else None}
    terms |= {"softcap": options.get("logits_soft_cap"), "sinks": options.get("sinks")}
    for counts in STEPS:
        out, query, metadata = model.step(counts)
        torch.testing.assert_close(out.double(), model.expected(counts, query, **terms), atol=3e-2, rtol=2e-2)
    assert (metadata.decodes, metadata.fresh) == (4, 4)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_fp8_caches(backend, place, dtype):
    model = engine(backend, place, dtype)
    tolerance = 0.1 if dtype == "fp8" else 0.25
    for counts in STEPS:
        out, query, _ = model.step(counts)
        expected = model.expected(counts, query)
        assert (out.double() - expected).norm() < tolerance * expected.norm()


def test_parts_of_a_batch(backend):
    """Decodes come first; requests with tokens in the cache are computed one by one, new ones together."""
    model = engine(backend, "cpu")
    found = [model.step(counts)[2] for counts in STEPS]
    assert [(m.decodes, m.fresh) for m in found] == [(0, 0), (1, 1), (2, 3), (4, 4)]


def test_without_lengths_on_the_host(backend):
    model = engine(backend, "cpu")
    for counts in STEPS[:3]:
        out, query, metadata = model.step(counts, seq_lens_cpu_upper_bound=None)
        torch.testing.assert_close(out.double(), model.expected(counts, query), atol=3e-2, rtol=2e-2)
    assert metadata.fresh == 3


def test_a_layer_that_shares_the_cache_of_another(backend):
    """Its k and v are those in the cache."""
    model = engine(backend, "cpu", kv_sharing_target_layer_name="layer 0")
    out, query, _ = model.step({0: 40, 1: 17})
    torch.testing.assert_close(out.double(), model.expected({0: 40, 1: 17}, query), atol=3e-2, rtol=2e-2)


def test_encoders(backend, place):
    lengths = [40, 1, 17]
    impl = backend.CuteKernelsImpl(HEADS, D, D**-0.5, KV_HEADS, sliding_window=9, attn_type="encoder_only")
    q = normal(58, HEADS, D, dtype=BF16, device=place)
    k, v = (normal(58, KV_HEADS, D, dtype=BF16, device=place) for _ in range(2))
    begin, sizes = starts(lengths, place), torch.tensor(lengths, dtype=torch.int32)
    table = torch.zeros(3, 1, dtype=torch.int32, device=place)
    common = vllm_stand_in.CommonAttentionMetadata(
        begin, begin.cpu(), sizes.to(place), 3, 58, 40, table, begin, False, sizes
    )
    metadata = backend.Builder(None, [], None, torch.device(place)).build(0, common)
    impl.do_kv_cache_update(None, k, v, None, None)
    out = impl.forward(None, q, k, v, None, metadata, torch.empty_like(q))
    for part in zip(*(t.split(lengths) for t in (out, q, k, v)), strict=True):
        found, *operands = (t.transpose(0, 1)[None] for t in part)
        seen = band_mask(found.shape[2], found.shape[2], 8, 8, place)
        expected = attention_plainly(*(t.double() for t in operands), seen)[0]
        torch.testing.assert_close(found.double(), expected, atol=3e-2, rtol=2e-2)


def test_declaration_and_errors(backend):
    declared = backend.CuteKernelsBackend
    assert declared.get_name() == "CUSTOM" and declared.get_impl_cls() is backend.CuteKernelsImpl
    assert declared.supports_head_size(128) and not declared.supports_head_size(80)
    assert all(n & (n - 1) == 0 for n in declared.get_supported_kernel_block_sizes())
    capability = SimpleNamespace(major=9, minor=0)
    assert declared.supports_compute_capability(capability)
    assert not declared.supports_compute_capability(SimpleNamespace(major=10, minor=0))
    assert declared.supports_combination(512, BF16, "fp8", 16, False) and not declared.supports_combination(
        128, BF16, "fp8", 16, False
    )
    with pytest.raises(NotImplementedError, match="does not support alibi_slopes; use FLASH_ATTN"):
        backend.CuteKernelsImpl(HEADS, D, 1.0, alibi_slopes=[1.0])
    model = engine(backend, "cpu")
    with pytest.raises(NotImplementedError, match="causal must be the same for all requests"):
        model.step({0: 2}, causal=torch.tensor([True]))
    out = torch.empty(3, HEADS, D)
    with pytest.raises(NotImplementedError, match="does not quantize its output"):
        model.impl.forward(None, None, None, None, None, None, out, output_scale=torch.ones(1))
    assert not model.impl.forward(None, None, None, None, None, None, out).any()  # the profiling run


def test_registration(monkeypatch):
    vllm_stand_in.install(monkeypatch)
    integration.register()
    custom = vllm_stand_in.AttentionBackendEnum.CUSTOM
    module, name = custom.get_path().rsplit(".", 1)
    assert hasattr(importlib.import_module(module), name)
    integration.register()  # once more
    vllm_stand_in.register_backend(custom, "another.Backend")
    with pytest.warns(UserWarning, match="CUSTOM is another.Backend, not that of cute_kernels; set VLLM_PLUGINS"):
        integration.register()
    assert custom.get_path() == "another.Backend"


@pytest.mark.parametrize("lacks", ["module", "member"])
def test_registration_with_another_vllm(monkeypatch, lacks):
    """A warning: vLLM runs plugins at each start, and their errors end it."""
    vllm_stand_in.install(monkeypatch)
    name = "vllm.v1.attention.backends.registry"
    if lacks == "module":
        monkeypatch.setitem(sys.modules, name, None)
    else:
        monkeypatch.setattr(sys.modules[name], "AttentionBackendEnum", SimpleNamespace())
    with pytest.warns(UserWarning, match="no attention backend with this version of vLLM .*it requires"):
        integration.register()


def test_entry_points():
    """They name functions, which vLLM and vllm-omni load."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    found = {
        (group, importlib.metadata.EntryPoint(name, value, group).load())
        for group, points in groups.items()
        for name, value in points.items()
        if group.startswith("vllm")
    }
    assert found == {
        ("vllm.general_plugins", integration.register),
        ("vllm_omni.sparse_attn", integration.sparse_attention),
    }


# ------------------------------------------------------------------ vllm-omni


def video(place, rows=300, heads=4):
    return [normal(2, rows, n, D, dtype=BF16, device=place) for n in (4, heads, heads)]


def dense(q, k, v, seen, scale):
    q, k, v = (t.transpose(1, 2).double() for t in (q, k, v))
    return attention_plainly(q, k, v, seen, scale=scale)[0].transpose(1, 2)


def by_frame(b, h, q, kv):
    return (q // 60 - kv // 60).abs() <= 1


PARAMS = {
    "window": ({"window_size": [50, 20]}, lambda d: band_mask(300, 300, 50, 20, d)),
    "left, with first tokens": (
        {"window_size": (50, None), "global_columns": 8},
        lambda d: band_mask(300, 300, 50, None, d) | (torch.arange(300, device=d) < 8),
    ),
    "frames": (
        {"frame_window": 1, "patches_per_frame": 60, "total_latent_frames": 5},
        lambda d: create_block_mask(by_frame, None, None, 300, 300, device="cpu").to_dense(1, 1).to(d),
    ),
    "a mask": (
        {"block_mask": "causal"},
        lambda d: band_mask(300, 300, None, 0, d),
    ),
}


@pytest.mark.parametrize("masked", [False, True], ids=["", "attn_mask"])
@pytest.mark.parametrize("name", PARAMS)
def test_sparse_attention(place, name, masked):
    params, seen = PARAMS[name]
    if name == "a mask":
        params = {"block_mask": patterns.causal((300, 300), device=place)}
    q, k, v = video(place, heads=2)
    seen = seen(place)
    if masked:
        keys = torch.arange(300, device=place) < torch.tensor([[300], [170]], device=place)
        params, seen = params | {"attn_mask": keys}, seen & keys[:, None, None]
    found = integration.sparse_attention(q, k, v, params, is_causal=False, softmax_scale=0.1)
    assert found.shape == q.shape
    torch.testing.assert_close(found.double(), dense(q, k, v, seen, 0.1), atol=3e-2, rtol=2e-2)


def test_causal_and_a_mask_of_elements(place):
    q, k, v = video(place)
    mask = torch.rand(300, 300, device=place) < 0.7
    params = {"window_size": (100, 100), "attn_mask": mask}
    found = integration.sparse_attention(q, k, v, params, is_causal=True, softmax_scale=0.1)
    seen = band_mask(300, 300, 100, 0, place) & mask
    torch.testing.assert_close(found.double(), dense(q, k, v, seen, 0.1), atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({}, ValueError, "one of window_size, frame_window, block_mask, got none"),
        ({"window_size": (1, 1), "frame_window": 2}, ValueError, "got window_size, frame_window"),
        ({"frame_window": 2}, ValueError, "requires patches_per_frame that divides the length 300, got None"),
        ({"frame_window": 2, "patches_per_frame": 7}, ValueError, "got 7; pass window_size"),
        ({"window_size": (1, 1), "attn_mask": torch.ones(2, 300)}, TypeError, "bool tensor, got torch.float32"),
    ],
)  # fmt: skip
def test_sparse_attention_errors(params, error, message):
    with pytest.raises(error, match=message):
        integration.sparse_attention(*video("cpu"), params, is_causal=False, softmax_scale=0.1)


def test_capabilities():
    assert integration.sparse_attention.capabilities == {"supports_attention_mask": True}
