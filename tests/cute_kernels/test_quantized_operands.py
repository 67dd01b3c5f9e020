"""The result of quantize as an operand: the same call as one with its values and its scale."""

import pytest
import torch

from attention import BlockMask, attention, block_sparse_attention
from cute_kernels import Quantized, explain, gemm, quantize
from cute_kernels.testing.reference import normal
from sparse_collective import (
    BsrMatrix,
    bsr_gated_linear,
    bsr_grouped_linear,
    bsr_linear,
    bsr_matmul,
    interleaved,
    random_bsr,
)

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=PLACES)
def place(request):
    if request.param == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("attention of FP8 q needs sm_90")
    return request.param


def calls(place) -> dict:
    """By name (op, quantized operands, other arguments)."""
    x, w = normal(128, 256, device=place), normal(96, 256, device=place)
    W = random_bsr((256, 256), (128, 128), density=0.6, device=place)
    gated = BsrMatrix.from_dense(interleaved(W.to_dense(), W.to_dense()), (128, 128)).quantize()
    experts = BsrMatrix.stack([W.quantize(), W.quantize()])
    W = W.quantize()
    rows = quantize(x, per="row")
    q, k, v = (quantize(normal(2, 2, 130, 64, device=place), per=per) for per in ("head", "tensor", "tokens"))
    mask = BlockMask.from_blocks(torch.ones(2, 2, dtype=torch.bool, device=place), lengths=(130, 130))
    heads = {"q": q, "k": k, "v": v}
    offs = torch.tensor([40, 128], device=place)
    return {
        "gemm": (gemm, {"a": rows, "b": quantize(w, per="row").mT}, {}),
        "gemm, one of them": (gemm, {"a": rows, "b": rows.values.mT}, {"activation": "gelu"}),
        "gemm, blocks": (gemm, {"a": quantize(x, per="1x128"), "b": quantize(w, per="128x128").mT}, {}),
        "gemm, one scale": (gemm, {"a": quantize(x), "b": quantize(w).mT}, {}),
        "bsr_linear": (bsr_linear, {"x": rows}, {"W": W}),
        "bsr_matmul": (bsr_matmul, {"b": quantize(x, per="row").mT}, {"W": W}),
        "bsr_gated_linear": (bsr_gated_linear, {"x": rows}, {"W": gated}),
        "bsr_grouped_linear": (bsr_grouped_linear, {"x": rows}, {"W": experts, "offs": offs}),
        "attention": (attention, heads, {"causal": True}),
        "block_sparse_attention": (block_sparse_attention, heads, {"block_mask": mask}),
    }


SCALES = {"a": "scale_a", "b": "scale_b", "x": "scale_x", "q": "q_descale", "k": "k_descale", "v": "v_descale"}
NAMES = [*calls("cpu")]


def apart(operands: dict) -> dict:
    """The same operands as values and scales."""
    found = {name: t.values if isinstance(t, Quantized) else t for name, t in operands.items()}
    return found | {SCALES[name]: t.scale for name, t in operands.items() if isinstance(t, Quantized)}


@pytest.mark.parametrize("name", NAMES)
def test_as_with_values_and_scales(place, name):
    op, operands, more = calls(place)[name]
    assert torch.equal(op(**operands, **more), op(**apart(operands), **more))


@pytest.mark.parametrize("name", NAMES)
def test_plans(name):
    op, operands, more = calls("cpu")[name]
    one, other = (explain(op, **each, **more, arch="sm_90") for each in (operands, apart(operands)))
    assert one.facts is not None and one.facts == other.facts


@pytest.mark.parametrize("name", NAMES)
def test_a_second_scale_is_refused(name):
    op, operands, more = calls("cpu")[name]
    scales = {n: t for n, t in apart(operands).items() if n not in operands}
    name, scale = next(iter(scales.items()))
    for call in (op, lambda **terms: explain(op, **terms)):
        with pytest.raises(
            ValueError, match=f"{name} must be None for a Quantized ., which has its own scale; leave {name}"
        ):
            call(**operands, **more, **{name: scale})


def test_the_pair():
    values, scale = pair = quantize(torch.randn(4, 16), per="row")
    assert type(pair) is Quantized and pair.values is values and pair.scale is scale
    assert pair.mT.values.shape == (16, 4) and pair.mT.scale.shape == (1, 4)
    compiled = torch.compile(lambda x: quantize(x, per="row").mT.scale, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(4, 16)), quantize(torch.ones(4, 16), per="row").mT.scale)
