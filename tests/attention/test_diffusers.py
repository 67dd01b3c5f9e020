"""The backend of diffusers' attention dispatcher (attention.integrations.diffusers).

With diffusers installed the tests run on its dispatcher and on a small Flux transformer; last run with 0.42.1. It is no
dependency of the tests: a stand-in with the same interface always runs.
"""

import enum
import importlib.util
import inspect
import sys
import types

import pytest
import torch

from attention import patterns, scaled_dot_product_attention
from attention.integrations import diffusers as integration
from cute_kernels.testing.reference import normal

INSTALLED = importlib.util.find_spec("diffusers") is not None


def stand_in() -> types.ModuleType:
    """diffusers.models.attention_dispatch, with the parts that a backend meets."""

    class AttentionBackendName(str, enum.Enum):  # noqa: UP042 (as diffusers has it)
        NATIVE = "native"

    class _AttentionBackendRegistry:
        _backends: dict = {}
        _supported_arg_names: dict = {}

        @classmethod
        def register(cls, backend, constraints=None, supports_context_parallel=False):
            def decorate(function):
                cls._backends[backend] = function
                cls._supported_arg_names[backend] = {*inspect.signature(function).parameters}
                return function

            return decorate

    @_AttentionBackendRegistry.register(AttentionBackendName.NATIVE)
    def native(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa).transpose(1, 2)

    def dispatch_attention_fn(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
        attention_kwargs=None, *, backend=None, parallel_config=None,
    ):  # fmt: skip
        name = AttentionBackendName(backend)
        arguments = {
            "query": query, "key": key, "value": value, "attn_mask": attn_mask, "dropout_p": dropout_p,
            "is_causal": is_causal, "scale": scale, **(attention_kwargs or {}), "_parallel_config": parallel_config,
            "enable_gqa": enable_gqa,
        }  # fmt: skip
        supported = _AttentionBackendRegistry._supported_arg_names[name]
        return _AttentionBackendRegistry._backends[name](**{k: v for k, v in arguments.items() if k in supported})

    module = types.ModuleType("diffusers.models.attention_dispatch")
    module.__dict__.update(
        AttentionBackendName=AttentionBackendName,
        _AttentionBackendRegistry=_AttentionBackendRegistry,
        dispatch_attention_fn=dispatch_attention_fn,
    )
    return module


REAL = pytest.param("diffusers", marks=pytest.mark.skipif(not INSTALLED, reason="diffusers is not installed"))


@pytest.fixture(name="dispatcher", params=["stand-in", REAL])
def dispatcher_fixture(request, monkeypatch):
    if request.param == "stand-in":
        for name in ("diffusers", "diffusers.models"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, "diffusers.models.attention_dispatch", stand_in())
    integration.register()
    from diffusers.models import attention_dispatch

    return attention_dispatch


def operands(heads=4, rows=40, cols=50, dtype=torch.float64):
    shapes = (2, rows, 4, 64), (2, cols, heads, 64), (2, cols, heads, 64)
    return [normal(*shape, dtype=dtype).requires_grad_() for shape in shapes]


def padding(cols=50):
    return torch.arange(cols) < torch.tensor([[50], [33]])


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "keys": {"attn_mask": padding()},
    "a mask of rows and columns": {"attn_mask": (torch.arange(40 * 50) % 7 < 5).view(1, 1, 40, 50)},
    "an additive mask": {"attn_mask": torch.linspace(-2, 2, 100, dtype=torch.float64).view(2, 1, 1, 50)},
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS.keys())
def test_calls_agree_with_the_native_backend(dispatcher, options):
    found, inputs = [], operands()
    for backend in ("cute_kernels", "native"):
        out = dispatcher.dispatch_attention_fn(*inputs, **options, backend=backend)
        found.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_shared_heads_of_keys(dispatcher):
    q, k, v = operands(heads=2)
    ours, theirs = (
        dispatcher.dispatch_attention_fn(q, k, v, enable_gqa=True, backend=name) for name in ("cute_kernels", "native")
    )
    torch.testing.assert_close(ours, theirs)


def test_block_masks(dispatcher):
    """Passed as attn_mask, they select which blocks are computed."""
    q, k, v = operands(rows=300, cols=300)
    mask = patterns.sliding_window((300, 300), (100, 0))
    found = dispatcher.dispatch_attention_fn(q, k, v, attn_mask=mask, backend="cute_kernels")
    dense = dispatcher.dispatch_attention_fn(q, k, v, attn_mask=mask.to_dense(1, 1), backend="native")
    torch.testing.assert_close(found, dense)
    with pytest.raises(ValueError, match="attn_mask and is_causal exclude each other"):
        dispatcher.dispatch_attention_fn(q, k, v, attn_mask=mask, is_causal=True, backend="cute_kernels")


REFUSED = [
    ({"dropout_p": 0.1}, "dropout_p is 0.1; the kernels do not drop"),
    ({"attention_kwargs": {"return_lse": True}}, "return_lse=True is not supported; use set_attention_backend"),
    ({"parallel_config": object()}, "context parallelism is not supported"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda x: str(x)[:20])
def test_unsupported_arguments(dispatcher, options, message):
    with pytest.raises(NotImplementedError, match=message):
        dispatcher.dispatch_attention_fn(*operands(), **options, backend="cute_kernels")


def test_names(dispatcher):
    integration.register()  # once more
    assert dispatcher.AttentionBackendName("cute_kernels").value == "cute_kernels"
    assert dispatcher.AttentionBackendName.CUTE_KERNELS is dispatcher.AttentionBackendName("cute_kernels")
    assert "CUTE_KERNELS" in dispatcher.AttentionBackendName.__members__
    integration.register("cute_kernels_too")
    for name, message in (("native", "one of diffusers' backends"), ("", "not empty"), ("Cute", "must be lowercase")):
        with pytest.raises(ValueError, match=message):
            integration.register(name)


@pytest.mark.skipif(not INSTALLED, reason="diffusers is not installed")
def test_a_transformer(monkeypatch):
    """Flux with set_attention_backend, and with the context manager attention_backend."""
    from diffusers import FluxTransformer2DModel
    from diffusers.models.attention_dispatch import attention_backend

    integration.register()
    model = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    ).eval()  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([0.5]), "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }  # fmt: skip
    with torch.no_grad():
        expected = model(**inputs).sample
    calls = []

    def counted(*args, **options):
        calls.append(options)
        return scaled_dot_product_attention(*args, **options)

    monkeypatch.setattr(integration, "scaled_dot_product_attention", counted)
    model.set_attention_backend("cute_kernels")
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).sample, expected)
        assert len(calls) == 2
        model.reset_attention_backend()
        with attention_backend("cute_kernels"):
            torch.testing.assert_close(model(**inputs).sample, expected)
    assert len(calls) == 4
