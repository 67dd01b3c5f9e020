"""torch's scaled_dot_product_attention with these kernels (attention.integrations.torch).

On the CPU the kernels are registered for the CPU's dispatch key and torch's operators are called, through torch's own
autograd formulas and schemas. On a GPU torch.nn.functional.scaled_dot_product_attention and varlen_attn call them.
"""

import types

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attention import attention, operands, plan
from attention.integrations import torch as integration
from cute_kernels.testing.reference import assert_as_good_as_torch, attention_plainly, band_mask, normal

from .parts import BF16, FP16, of_one_projection, qkv, rows_first, starts

aten = torch.ops.aten
# On a GPU these kernels replace torch's, as is meant.
pytestmark = pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel")


@pytest.fixture(name="op")
def op_fixture(place, monkeypatch):
    """op(q, k, v, is_causal=, scale=) of (B, H, S, D) tensors, by these kernels."""
    monkeypatch.setattr(operands, "has_kernel", plan.has_kernel)  # which the emulation has replaced
    calls = []
    monkeypatch.setattr(integration, "attention", lambda *args, **terms: calls.append(1) or attention(*args, **terms))
    if place == "cuda":

        def op(q, k, v, **options):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return sdpa(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options)

        integration.activate()
        yield op
        torch.nn.attention.restore_flash_attention_impl()
    else:
        registration = integration.Registration("CPU")
        yield lambda *args, **options: aten._scaled_dot_product_flash_attention(*args, **options)[0]
        registration.remove()
    assert calls


def with_gradients(op, tensors, dout, **options) -> tuple:
    """(out, dq, dk, dv)"""
    inputs = [t.detach().requires_grad_() for t in tensors]  # with the strides of t
    out = op(*inputs, **options)
    return out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))


def plain(q, k, v, *, is_causal=False, scale=None, left=None, right=None):
    """The result in torch, every step rounded to q's dtype."""
    seen = band_mask(q.shape[2], k.shape[2], left, 0 if is_causal else right, q.device)
    return attention_plainly(q, k, v, seen, scale=scale)[0]


def agree(op, tensors, **options) -> tuple:
    """Results and gradients err no more than twice as much as torch's do; return them."""
    dout = normal(*tensors[0].shape, device=tensors[0].device)
    found = with_gradients(op, tensors, dout, **options)
    torchs = with_gradients(plain, tensors, dout, **options)
    exact = with_gradients(plain, [t.double() for t in tensors], dout, **options)
    for ours, theirs, truth in zip(found, torchs, exact, strict=True):
        assert_as_good_as_torch(ours, truth, theirs)
    return found


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("D", [64, 128, 40])
def test_results_and_gradients(op, place, D, options, dtype):
    """Also with fewer heads of k and v, and for a head dimension that is padded."""
    agree(op, qkv(130, 130, D, dtype=dtype, device=place), **options)


@pytest.mark.parametrize("layout", ["contiguous", "rows first", "of one projection"])
def test_strides_are_those_that_torch_compile_expects(op, place, layout):
    tensors = qkv(70, 70, heads=4, device=place)
    if layout == "rows first":
        tensors = tuple(map(rows_first, tensors))
    elif layout == "of one projection":
        tensors = of_one_projection(*tensors)
    out, *gradients = agree(op, tensors)
    assert out.stride() == torch.empty_like(tensors[0]).stride()
    assert [g.stride() for g in gradients] == [torch.empty_like(t).stride() for t in tensors]


def test_different_lengths_and_an_expanded_gradient(op, place):
    q, k, v = (t.requires_grad_() for t in qkv(70, 200, heads=4, device=place))
    op(q, k, v).sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    plain(*exact).sum().backward()
    for ours, truth in zip((q, k, v), exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), truth.grad, atol=2e-2, rtol=2e-2)


def test_inference_saves_nothing(op, place):
    q, k, v = qkv(70, 70, device=place)
    with torch.inference_mode():
        assert not op(q, k, v).requires_grad


PACKED = (
    {"is_causal": False},
    {"is_causal": True},
    {"is_causal": True, "window_size_left": 40, "window_size_right": 0},
    {"is_causal": False, "window_size_left": -1, "window_size_right": 9, "scale": 0.3},
)


def flash(q, k, v, cu, longest, is_causal, **options):
    return aten._flash_attention_forward(q, k, v, cu, cu, longest, longest, 0.0, is_causal, False, **options)[0]


@pytest.mark.parametrize("options", PACKED, ids=str)
def test_packed_sequences(op, place, options):
    """aten::_flash_attention_forward, which nested tensors and varlen_attn call."""
    lengths = [70, 1, 130]
    cu = starts(lengths, place)
    tensors = [normal(sum(lengths), heads, 64, dtype=BF16, device=place) for heads in (4, 2, 2)]

    def packed(q, k, v):
        return flash(q, k, v, cu, max(lengths), **options)

    def one_by_one(q, k, v):
        bounds = (options.get(f"window_size_{side}", -1) for side in ("left", "right"))
        left, right = (None if n < 0 else n for n in bounds)
        split = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
        parts = (tuple(t.transpose(0, 1)[None] for t in part) for part in split)
        terms = {"left": left, "right": right, "is_causal": options["is_causal"], "scale": options.get("scale")}
        return torch.cat([plain(*part, **terms)[0].transpose(0, 1) for part in parts])

    dout = normal(*tensors[0].shape, device=place)
    found, torchs = (with_gradients(op, tensors, dout) for op in (packed, one_by_one))
    exact = with_gradients(one_by_one, [t.double() for t in tensors], dout)
    for ours, theirs, truth in zip(found, torchs, exact, strict=True):
        assert_as_good_as_torch(ours, truth, theirs)


def test_dense_rows_and_a_given_output(op, place):
    """aten::_flash_attention_forward of (B, S, H, D) tensors, and its variant that writes `out`."""
    q, k, v = (t.transpose(1, 2) for t in qkv(70, 70, heads=4, device=place))
    tensors = [t.transpose(1, 2) for t in (q, k, v)]
    found, *gradients = with_gradients(lambda *args: flash(*args, None, 70, True), (q, k, v), torch.ones_like(q))
    expected = with_gradients(op, tensors, torch.ones_like(tensors[0]), is_causal=True)
    for ours, by_sdpa in zip((found, *gradients), expected, strict=True):
        torch.testing.assert_close(ours, by_sdpa.transpose(1, 2))
    inplace = getattr(aten, "_flash_attention_forward_no_dropout_inplace", None)
    if inplace is None:
        pytest.skip("torch has no _flash_attention_forward_no_dropout_inplace")
    out = torch.full_like(q, float("nan"))
    lse = inplace(out, q, k, v, None, None, 70, 70, 0.0, True, False)
    assert torch.equal(out, found) and lse.shape == (2, 4, 70) and lse.dtype == torch.float32


KNOWN = {argument.name for argument in aten._flash_attention_forward.default._schema.arguments}
UNSUPPORTED = {
    "dropout_p": (0.1, "got 0.1; pass dropout_p=0.0"),
    "return_debug_mask": (True, "no attention weights are stored"),
    "seqused_k": (torch.ones(1, dtype=torch.int32), "got a tensor; call attention.attention"),
    "alibi_slopes": (torch.ones(4), "score_mods.ALiBi"),
    "num_splits": (4, "pass num_splits=None"),
}


@pytest.mark.parametrize("name", [name for name in UNSUPPORTED if name in KNOWN])  # old versions of torch lack some
def test_unsupported_arguments(op, place, name):
    value, message = UNSUPPORTED[name]
    value = value.to(place) if isinstance(value, torch.Tensor) else value
    options = {"dropout_p": 0.0, "is_causal": False, "return_debug_mask": False}
    options[name] = value
    q, k, v = (t.transpose(1, 2) for t in qkv(70, 70, device=place))
    with pytest.raises(NotImplementedError, match=f"does not support {name}, .*{message}"):
        aten._flash_attention_forward(q, k, v, None, None, 70, 70, **options)
    op(*(t.transpose(1, 2) for t in (q, k, v)))


def test_registration_can_be_activated_and_restored():
    cudnn, before = torch.backends.cuda.cudnn_sdp_enabled(), has_kernels()
    integration.activate()
    assert torch.nn.attention.current_flash_attention_impl() == "cute_kernels"
    assert all(has_kernels()) and not torch.backends.cuda.cudnn_sdp_enabled()
    integration.activate()  # once more
    torch.nn.attention.restore_flash_attention_impl()
    assert torch.nn.attention.current_flash_attention_impl() is None
    assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn and has_kernels() == before
    assert "cute_kernels" in torch.nn.attention.list_flash_attention_impls()


def test_a_setting_that_the_program_changed_stays(monkeypatch):
    """As sdpa_kernel does, which restores its settings while the kernels are active."""
    monkeypatch.setattr(integration, "KERNELS", {})
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            integration.activate()
        torch.nn.attention.restore_flash_attention_impl()
        assert torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def has_kernels() -> list[bool]:
    names = (name for name in integration.KERNELS if hasattr(aten, name))
    return [torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA") for name in names]


def test_a_torch_without_the_registry(monkeypatch):
    """It raises, and names the function that works."""
    monkeypatch.setitem(torch.nn.attention.__dict__, "register_flash_attention_impl", None)
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(RuntimeError, match="call attention.scaled_dot_product_attention instead"):
        integration.activate()


@pytest.mark.gpu
def test_compiled_and_profiled():
    """torch.compile calls the same kernels, as the profiler shows."""
    integration.activate()
    try:
        q, k, v = (t.requires_grad_() for t in qkv(200, 200, 128, device="cuda"))

        def loss(q, k, v):
            return sdpa(q, k, v, is_causal=True, enable_gqa=True).float().square().sum()

        expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            found = torch.autograd.grad(torch.compile(loss, fullgraph=True)(q, k, v), (q, k, v))
        names = [event.name for event in profile.events()]
        assert not any(other in name for name in names for other in ("flash_fwd", "flash_bwd", "cudnn", "fmha")), names
        for ours, eager in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, eager, atol=2e-2, rtol=2e-2)
    finally:
        torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.gpu
def test_varlen_attn_and_nested_tensors():
    from torch.nn.attention.varlen import varlen_attn

    integration.activate()
    try:
        lengths = [70, 1, 130]
        cu = starts(lengths, "cuda")
        q, k, v = (normal(sum(lengths), 4, 64, dtype=BF16, device="cuda") for _ in range(3))
        found = varlen_attn(q, k, v, cu, cu, max(lengths), max(lengths))
        assert torch.equal(found, flash(q, k, v, cu, max(lengths), False))
        offsets = cu.long()
        nested = (torch.nested.nested_tensor_from_jagged(t, offsets).transpose(1, 2) for t in (q, k, v))
        torch.testing.assert_close(sdpa(*nested).transpose(1, 2).values(), found)
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def test_kernels_have_the_arguments_of_torchs_schemas():
    for name, kernel in integration.KERNELS.items():
        if not hasattr(aten, name):
            continue
        code: types.CodeType = kernel.__code__
        known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if name == "_flash_attention_forward":  # passes its keywords to the variant that writes `out`
            inplace = integration.KERNELS["_flash_attention_forward_no_dropout_inplace"].__code__
            known = inplace.co_varnames[: inplace.co_argcount + inplace.co_kwonlyargcount]
        arguments = getattr(aten, name).default._schema.arguments
        assert {argument.name for argument in arguments} <= {*known}, name
