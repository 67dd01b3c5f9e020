"""Calls under a mode, a transform or a default device fill the caches that plain calls use later."""

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from attention import BlockMask, attention, block_sparse_attention, create_block_mask
from attention.integrations.transformers.block_masks import BlockMasks
from attention.masks.score_mods import Alibi, Bias
from cute_kernels import gemm
from cute_kernels.testing.reference import normal, seed
from sparse_collective import BsrMatrix, bsr_gated_linear, bsr_grouped_linear, bsr_linear, bsr_matmul, random_bsr

LENGTH = 128


def calls(place: str, score_mods: bool) -> dict:
    """name -> (a function of one tensor, that tensor), the same numbers each time."""
    seed(7)
    kind = {"device": place}

    def pattern(shape, block):
        return random_bsr(shape, block, density=0.7, generator=torch.Generator().manual_seed(7)).to(place)

    x, q, a = normal(128, 64, **kind), normal(1, 2, LENGTH, 64, **kind), normal(16, 32, **kind)
    W, square, whole = pattern((128, 64), (64, 32)), pattern((128, 128), (64, 32)), pattern((LENGTH,) * 2, (128, 128))
    unchecked = BsrMatrix(square.crow_indices.clone(), square.col_indices.clone(), square.values, square.shape)
    experts = BsrMatrix.stack([pattern((64, 64), (32, 32)) for _ in range(2)])
    groups = torch.tensor([1, 0], dtype=torch.int32, **kind)
    slope, reach, blocks = torch.rand(2, **kind), torch.arange(LENGTH, **kind), torch.ones(1, 1, **kind) > 0
    near = create_block_mask(lambda b, h, q, kv: (q - kv).abs() < reach[q], None, None, LENGTH, LENGTH, device=place)

    def masked(mask, **more):
        return lambda q: block_sparse_attention(q, q, q, mask, **more), q

    found = {
        "gemm": (lambda a: gemm(a, a.mT, epilogue=lambda z: z * torch.sigmoid(z)), a),
        "bsr_linear": (lambda x: bsr_linear(x, W, activation="gelu"), x),
        "bsr_linear, values": (lambda v: bsr_linear(x, W.with_values(v)), W.values.detach()),
        "bsr_matmul, transposed": (lambda x: bsr_matmul(square.t(), x), x),
        "bsr_matmul, unchecked": (lambda x: bsr_matmul(unchecked.t(), x), x),
        "bsr_gated_linear": (lambda x: bsr_gated_linear(x, W), x),
        "bsr_grouped_linear": (lambda x: bsr_grouped_linear(x, experts, expert_ids=groups), x),
        "a function's mask": masked(near, causal=True),
        "bool": masked(blocks, causal=True),
        "flex": masked(near.to_flex()),
        "bsr": masked(whole, causal=True),
        "torch.sparse_bsr": masked(pattern((LENGTH,) * 2, (128, 128)).to_torch()),
    }
    if score_mods:
        steeper = {"score_mod": lambda score, b, h, q, kv: score + slope[h] * (kv - q)}
        found |= {
            "score_mod": (lambda q: attention(q, q, q, **steeper), q),
            "score_mod, mask": masked(near, **steeper),
            "Alibi": (lambda q: attention(q, q, q, score_mod=Alibi(slope)), q),
            "Bias": (lambda q: attention(q, q, q, score_mod=Bias(torch.ones_like(q[..., :1].mT))), q),
        }
    return found


def train(f, x) -> tuple:
    x = x.detach().clone().requires_grad_()
    y = f(x)
    return y.detach(), *torch.autograd.grad(y.float().square().sum(), x)


def fake(f, x) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        train(f, mode.from_tensor(x))


def compiled(f, x) -> None:
    torch._dynamo.reset()
    train(torch.compile(f, backend="aot_eager"), x)


def inside(context, run=train):
    def call(f, x) -> None:
        with context():
            run(f, x)

    return call


CONTEXTS = {
    "inference_mode": inside(torch.inference_mode, lambda f, x: f(x)),
    "FakeTensorMode": fake,
    "FlopCounterMode": inside(lambda: FlopCounterMode(display=False)),
    "a default device": inside(lambda: torch.device("meta")),
    "make_fx": lambda f, x: make_fx(f)(x),
    "make_fx, fake": lambda f, x: make_fx(f, tracing_mode="fake", _allow_non_fake_inputs=True)(x),
    "grad, vmap": lambda f, x: vmap(grad(lambda x: f(x).float().sum()))(torch.stack([x, x])),
    "torch.compile": compiled,
}


def unusual() -> dict[int, torch.Tensor]:
    """Tensors that training cannot use, among those that are alive."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return {id(t): t for t in tensors if t.is_inference() or t.is_meta or type(t).__name__ == "FakeTensor"}


@pytest.mark.parametrize("context", CONTEXTS)
def test_calls_after_others(place, request, context):
    emulated = "emulated" in request.node.name
    if emulated and context == "a default device":
        pytest.skip("what stands for the kernels makes tensors on the default device")
    expected = {name: train(*call) for name, call in calls(place, not emulated).items()}
    before = unusual()
    cases = calls(place, not emulated)
    for name, (f, x) in cases.items():
        if name == "torch.sparse_bsr" and context in ("FakeTensorMode", "make_fx, fake"):
            continue  # torch makes no fake tensor of one
        CONTEXTS[context](f, x)
    left = [t for number, t in unusual().items() if number not in before]
    if "inference" in context or "default" in context:  # torch itself keeps fake tensors
        assert not left, [(t.shape, t.dtype) for t in left]
    for name, call in cases.items():
        for found, wanted in zip(train(*call), expected[name], strict=True):
            assert type(found) is torch.Tensor, name
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2, msg=lambda text, n=name: f"{n}: {text}")


def test_block_masks_of_a_model():
    """The mask that transformers' layers share is made once, of plain tensors, whichever call comes first."""
    masks = BlockMasks(lambda lengths, device: BlockMask.from_blocks(torch.ones(1, 1, device=device) > 0))
    lengths, device = (128, 128), torch.device("cpu")
    with FakeTensorMode():
        assert type(masks.of(lengths, device).kv_num_blocks) is not torch.Tensor
    with torch.inference_mode():
        found = masks.of(lengths, device)
    assert type(found.kv_num_blocks) is torch.Tensor and not found.kv_num_blocks.is_inference()
    assert masks.of(lengths, device) is found
    with FakeTensorMode():
        assert masks.of(lengths, device) is not found
