"""Errors of the ops: the type of the error, and that its message says what would work, before anything is written."""

import pytest
import torch

import cute_kernels
from cute_kernels import dispatch as dense_ops
from cute_kernels import explain, gemm
from cute_kernels.arch import ARCHS
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.testing.reference import normal, poisoned
from sparse_collective import BsrMatrix, bsr_grouped_linear, bsr_linear, bsr_matmul
from sparse_collective import dispatch as sparse_ops

from . import host_emulation
from .gemm_calls import OPS


@pytest.fixture(params=["cpu", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request, monkeypatch):
    """CPU tensors, CPU tensors on the host side of a GPU call, and a GPU; with no plan known yet."""
    for ops in (dense_ops, sparse_ops):
        monkeypatch.setattr(ops, "_PLANS", PlanCache())
    if request.param == "emulated":
        host_emulation.install(monkeypatch)
    return "cuda" if request.param == "cuda" else "cpu"


def weights(device="cpu", shape=(64, 96)) -> BsrMatrix:
    return BsrMatrix.from_dense(normal(*shape, device=device, k=shape[1]), (16, 32))


def base(op: str, device="cpu") -> dict:
    """Arguments of a right call."""
    W, ints = weights(device), {"dtype": torch.int32, "device": device}
    return {
        "gemm": lambda: {"a": normal(32, 64, device=device), "b": normal(64, 48, device=device)},
        "bsr_matmul": lambda: {"W": W, "b": normal(96, 40, device=device)},
        "bsr_linear": lambda: {"x": normal(40, 96, device=device), "W": W},
        "bsr_grouped_linear": lambda: {
            "x": normal(192, 96, device=device), "W": BsrMatrix.stack([W] * 4), "expert_ids": torch.arange(3, **ints)
        },
    }[op]() | {"out": poisoned(*SHAPES[op], device=device)}  # fmt: skip


SHAPES = {"gemm": (32, 48), "bsr_matmul": (64, 40), "bsr_linear": (40, 64), "bsr_grouped_linear": (192, 64)}
# The two operands' names in errors; the second is the dense one of all ops
OPERANDS = {"gemm": "ab", "bsr_matmul": "Wb", "bsr_linear": "Wx", "bsr_grouped_linear": "Wx"}


def columns(c):
    return normal(c["out"].shape[1])


def capturing(value):
    return lambda x: x * value


# For all ops: (what to change, given the arguments and the dense operand's name; the error; words of its message, in
# which {w} and {x} are the operands). A tensor that a change makes lies on the CPU and is moved.
ALL = [
    (lambda c, x: {x: [1.0]}, TypeError, "{x} must be a torch.Tensor, got list"),
    (lambda c, x: {x: None}, TypeError, "{x} must be a torch.Tensor, got NoneType"),
    (lambda c, x: {x: c[x].to_sparse()}, TypeError, r"{x} must be a dense \(strided\) tensor, got .*coo"),
    (lambda c, x: {x: c[x].half()}, TypeError, "{x} is torch.float16 but {w} is torch.bfloat16; cast one"),
    (lambda c, x: {x: c[x].to("meta")}, ValueError, "{x} is on meta, the others on c.*; move it with .to"),
    (lambda c, x: {"out": [1.0]}, TypeError, "out must be a torch.Tensor, got list"),
    (lambda c, x: {"out": c["out"].t()}, ValueError, r"out has shape \(\d+, \d+\), the result has \("),
    (lambda c, x: {"out": c["out"].double()}, TypeError, "output of torch.float64; torch.bfloat16, "),
    (lambda c, x: {"out": c["out"].to("meta")}, ValueError, "out is on meta, the others on c.*; move"),
    (lambda c, x: {"out": c["out"][:1].expand(SHAPES[c["op"]])}, ValueError, "out is expanded or .*share memory"),
    (lambda c, x: {"bias": [1.0] * 48}, TypeError, "bias must be a torch.Tensor, got list"),
    (lambda c, x: {"bias": normal(7)}, ValueError, r"bias has shape \(7,\).* must be \("),
    (lambda c, x: {"bias": columns(c).long()}, TypeError, "bias is torch.int64; torch.bfloat16, torch.f"),
    (lambda c, x: {"bias": columns(c).to("meta")}, ValueError, "bias is on meta, the others on c"),
    (lambda c, x: {"activation": "mish"}, ValueError, "unknown activation 'mish'; known are relu, gelu"),
    (lambda c, x: {"activation": ["relu"]}, (TypeError, ValueError), "activation"),
    (lambda c, x: {"epilogue": 2.0}, TypeError, "must be a function of one tensor, got float"),
    (lambda c, x: {"epilogue": torch.sort}, TypeError, "torch.sort has no form in a kernel; there are abs"),
    (
        lambda c, x: {"epilogue": capturing(torch.ones(1, device=c["out"].device))}, TypeError,
        r"test_bad_inputs.py:\d+, 'return lambda x: x \* value': torch.mul: a captured tensor of shape \(1,\): an "
        "epilogue sees one element at a time. Pass a bias",
    ),
    (lambda c, x: {x: c[x].requires_grad_()}, RuntimeError, r"call it under torch.no_grad\(\) or detach\(\)"),
    (lambda c, x: {"bias": columns(c).requires_grad_()}, RuntimeError, "{op} does not compute grad"),
    (lambda c, x: {"out": c["out"].requires_grad_()}, RuntimeError, "requires.* grad"),
]  # fmt: skip


def a_and_b(c, change):
    return {name: change(c[name]) for name in "ab"}


def overlapping(buffer):
    return {"a": buffer[:64], "b": normal(64, 64), "out": buffer[32:]}  # on one device, so that nothing is moved apart


GEMM = [
    (lambda c: {"a": [[1.0]]}, TypeError, "a must be a torch.Tensor, got list"),
    (lambda c: {"a": c["a"].to_sparse()}, TypeError, r"a must be a dense \(strided\) tensor, got .*coo"),
    (lambda c: {"a": c["a"].to(torch.int8)}, TypeError, "a is torch.int8; the kernels support"),
    (lambda c: {"a": c["a"].to("meta")}, ValueError, "tensors on meta; CUDA and CPU tensors"),
    (lambda c: {"a": c["a"][0]}, ValueError, r"a has 1 and b 2 dimensions; both need at least 2 \(use unsq"),
    (lambda c: {"b": c["b"][:, 0]}, ValueError, "a has 2 and b 1 dimensions; both need at least 2"),
    (lambda c: {"b": c["b"][:32]}, ValueError, r"a is \(32, 64\) and b \(32, 48\): 64 columns meet 32 rows"),
    (
        lambda c: {"a": c["a"].expand(2, 32, 64), "b": c["b"].expand(3, 64, 48), "out": None}, ValueError,
        r"the batches of a \(2, 32, 64\) and b \(3, 64, 48\) do not broadcast",
    ),
    (lambda c: {"out": None, "out_dtype": torch.int32}, TypeError, "output of torch.int32; torch.bfloat1"),
    (lambda c: {"out_dtype": torch.float32}, TypeError, "out is torch.bfloat16 but out_dtype=.*pass on"),
    (lambda c: {"bias": normal(32)}, ValueError, r"must be \(48,\) .* or \(32, 1\) for one value per row"),
    (lambda c: {"bias": normal(48, 1)}, ValueError, r"bias has shape \(48, 1\).*\(32, 1\) for one value"),
    (lambda c: {"residual": c["out"][:1]}, ValueError, r"residual has shape \(1, 48\), the result"),
    (lambda c: {"residual": c["out"].float()}, TypeError, "residual is torch.float32, .*out_dtype="),
    (lambda c: {"a": c["a"].requires_grad_()}, RuntimeError, r"torch.no_grad\(\) or detach\(\)"),
    (lambda c: {"residual": normal(32, 48).requires_grad_()}, RuntimeError, "does not compute"),
    (lambda c: {"alpha": "2"}, TypeError, "alpha"),
    (lambda c: {"alpha": torch.tensor(2.0)}, TypeError, "alpha"),
    (lambda c: {"b": normal(64, 64), "out": c["a"]}, ValueError, "out shares memory with"),
    (lambda c: overlapping(c["a"].repeat(3, 1)), ValueError, "out shares memory with"),
    (lambda c: {"out": c["a"].as_strided((32, 48), (2, 1))}, ValueError, "share memory"),
]  # fmt: skip


def batch(c):
    return BsrMatrix.stack([c["W"]] * 4)


def shared(c, x):
    """The operand is out, too."""
    return {"W": weights("cpu", (96, 96)), x: (t := normal(96, 96, device=c[x].device)), "out": t}


def batched(c, **more):
    return {"W": batch(c), "out": None} | more


WEIGHTS = [
    (lambda c: {"W": normal(64, 96)}, TypeError, "W must be a BsrMatrix or .*layout torch.strided; see Bsr"),
    (lambda c: {"W": [1]}, TypeError, "W must be a BsrMatrix or a torch.sparse_bsr tensor, got list"),
    (lambda c: {"W": normal(64, 96).float().to_sparse_csr()}, TypeError, "a tensor of layout torch.sparse_csr"),
    (lambda c: {"W": c["W"].to(torch.float32)}, TypeError, "W is torch.float32; the k|[bx] is torch.bfloat16 but W"),
]
LEARNT = [
    (lambda c: {"W": c["W"].with_values(c["W"].values.requires_grad_())}, RuntimeError, r"no_grad\(\) or detach\(\)")
]
ITEMS = "W is a batch of 4 items, so b needs 2 dimensions, .* or 3 with 4 matrices"
MATMUL = [
    (lambda c: {"b": c["b"][:, 0]}, ValueError, "b has 1 dimensions, too few"),
    (lambda c: {"b": c["b"][:90]}, ValueError, r"W is 64x96 and b \(90, 40\): 96 columns of W meet 90"),
    (lambda c: {"bias": normal(96)}, ValueError, r"it must be \(40,\) for one value per column or \(64, 1\)"),
    (lambda c: {"residual": normal(40, 64)}, ValueError, r"residual has shape \(40, 64\), the result has"),
    (lambda c: shared(c, "b"), ValueError, "out shares memory with"),
    (lambda c: batched(c, b=normal(3, 96, 8)), ValueError, ITEMS),
    (lambda c: batched(c, b=normal(1, 96, 8)), ValueError, "or 3 with 4 matrices; it has shape"),
    (lambda c: batched(c, b=normal(2, 4, 96, 8)), ValueError, "or 3 with 4 matrices"),
    (lambda c: batched(c, b=normal(4, 64, 8)), ValueError, "W is 64x96 and b .*: 96 columns"),
    (lambda c: batched(c, b=normal(4, 96, 8), bias=normal(3, 64, 1)), ValueError, "bias has shape"),
]
LINEAR = [
    (lambda c: {"x": normal(()), "out": None}, ValueError, "x has 0 dimensions, too few"),
    (lambda c: {"x": c["x"][:, :64]}, ValueError, r"W is 64x96 and x \(40, 64\): 96 columns of W meet 64"),
    (lambda c: {"bias": normal(64, 1)}, ValueError, r"must be \(64,\), one value an output feature"),
    (lambda c: shared(c, "x"), ValueError, "out shares memory with"),
    (lambda c: batched(c, x=normal(2, 8, 96)), ValueError, "x needs 2 dimensions, .* or 3 with 4"),
    (lambda c: batched(c, x=normal(96)), ValueError, "x needs 2 dimensions"),
    (
        lambda c: batched(c, x=normal(4, 8, 96), bias=normal(5, 64)),
        ValueError,
        r"must be \(64,\) or \(4, 64\), one val",
    ),
]


def ends(*values):
    return torch.tensor(values or (64, 64, 128, 192), dtype=torch.int32)


def routed(rows, **more):
    return {"expert_ids": None, "offs": ends(), "group_rows": rows} | more


GROUPED = [
    (lambda c: {"W": weights()}, ValueError, r"W is one matrix .*; pass a batch \(E, M, K\), or use"),
    (lambda c: {"x": c["x"][None]}, ValueError, r"x must be \(T, K\), got \(1, 192"),
    (lambda c: {"expert_ids": [0, 1, 2]}, TypeError, "expert_ids must be a torch.Tensor, got list"),
    (lambda c: {"expert_ids": c["expert_ids"].long()}, TypeError, "expert_ids are torch.int64; the kernels read"),
    (lambda c: {"expert_ids": c["expert_ids"][None]}, ValueError, "expert_ids must have one contiguous dimension"),
    (lambda c: {"expert_ids": c["expert_ids"].repeat_interleave(2)[::2]}, ValueError, "one contiguous dimension"),
    (lambda c: {"expert_ids": c["expert_ids"][:2]}, ValueError, "192 rows of x for 2 expert_ids: .* multiple of 64"),
    (lambda c: {"expert_ids": ends(0, 0, 0, 0, 0)}, ValueError, "192 rows of x for 5 expert_ids"),
    (lambda c: {"expert_ids": c["expert_ids"][:0]}, ValueError, "192 rows of x for 0 expert_ids"),
    (lambda c: {"expert_ids": c["expert_ids"].to("meta")}, ValueError, "expert_ids is on meta, the others on"),
    (lambda c: {"expert_ids": None}, ValueError, "give either expert_ids or offs"),
    (lambda c: {"offs": ends()}, ValueError, "give either expert_ids or offs"),
    (lambda c: {"group_rows": 128}, ValueError, "x has 192 rows, but 3 expert_ids with group_rows=128 need 384"),
    (lambda c: routed(96), ValueError, "group_rows must be a positive multiple of 64, got 96; leave it out for 128"),
    (lambda c: routed(True), ValueError, "group_rows must be a positive multiple of 64, got True"),
    (lambda c: routed(64, offs=ends().float()), ValueError, "offs must be .E,. torch.int32 or torch.int64"),
    (lambda c: routed(None, offs=ends()[:3]), ValueError, r"offs \(4,\), one for each .* and \(3,\)"),
    (lambda c: routed(None, offs=ends().to("meta")), ValueError, "offs is on meta, the others on"),
    (lambda c: routed(None, x=c["x"][:, :64]), ValueError, r"x must be \(T, 96\) and .*; got \(192, 64\)"),
    (lambda c: routed(None, x=c["x"][None]), ValueError, r"x must be \(T, K\), got \(1, 192"),
    (lambda c: routed(None, W=weights()), ValueError, r"W is one matrix .*; pass a batch \(E, M, K\), or use"),
    (lambda c: routed(None, out=normal(192, 32)), ValueError, r"out has shape \(192, 32\), the result has"),
    (lambda c: routed(None, out=c["x"][:, :64]), ValueError, "out shares memory with an input of shape .192, 96"),
    (lambda c: routed(64, offs=[64]), TypeError, "offs must be a torch.Tensor"),
    (lambda c: {"bias": normal(3, 64)}, ValueError, r"bias has shape \(3, 64\), must be"),
]
OWN = {
    "gemm": GEMM,
    "bsr_matmul": WEIGHTS + LEARNT + MATMUL,
    "bsr_linear": WEIGHTS + LEARNT + LINEAR,
    "bsr_grouped_linear": WEIGHTS + GROUPED,
}
CASES = [(op, lambda c, change=change, x=OPERANDS[op][1]: change(c, x), *rest) for op in OWN for change, *rest in ALL]
CASES += [(op, *entry) for op in OWN for entry in OWN[op]]


def moved(call, device):
    """The arguments of a case, moved to the device; a tensor put on "meta" stays there."""
    made = {}
    for name, t in call.items():
        here = isinstance(t, torch.Tensor | BsrMatrix) and t.device.type == "cpu"
        made[name] = t.to(device) if here and device != "cpu" else t
    return made


@pytest.mark.parametrize("known", [False, True], ids=["", "known"])
@pytest.mark.parametrize(("op", "change", "error", "message"), CASES)
def test_bad_inputs(place, op, change, error, message, known):
    """On the first call, and where the plan of right calls is known; and again: a refused call leaves no plan."""
    if known:
        for call in (base(op, place), base(op, place) | {"out": None}):
            OPS[op](**call)
    call = base(op, place)
    call = moved(call | change(call | {"op": op}), place)
    before = call["out"].clone() if isinstance(call["out"], torch.Tensor) else None
    w, x = OPERANDS[op]
    for _ in range(2):
        with pytest.raises(error, match=message.replace("{w}", w).replace("{x}", x).replace("{op}", op)):
            OPS[op](**call)
    if before is not None and before.device.type != "meta":
        assert torch.equal(call["out"].isnan(), before.isnan()), "the output was written before the error"


def test_planning_refuses_before_anything_runs(place):
    with pytest.raises(ValueError, match="16 columns meet 8 rows"):
        explain(gemm, normal(8, 16, device=place), normal(8, 8, device=place))
    assert not dense_ops._PLANS.plans


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_wrong_indices(place, index_dtype):
    """Also when the plan is cached, by all ops, in a torch.sparse_bsr tensor and in a batch. test_bsr.py has all."""
    crow = torch.tensor([0, 2, 4, 6], dtype=index_dtype, device=place)
    col = torch.tensor([0, 2, 0, 1, 1, 2], dtype=index_dtype, device=place)
    values, b, out = (normal(*shape, device=place) for shape in ((6, 16, 32), (96, 16), (48, 16)))
    right = BsrMatrix(crow, col, values, (48, 96))
    wrong = BsrMatrix(crow, col.flip(0), values, (48, 96))
    t = torch.sparse_bsr_tensor(crow, col.flip(0), values, (48, 96), check_invariants=False)
    pair = BsrMatrix.stack([right, right])
    relative = BsrMatrix(torch.stack([crow, crow]), pair.col_indices, pair.values, (2, 48, 96))
    x, group = normal(64, 96, device=place), torch.zeros(1, dtype=torch.int32, device=place)
    bsr_matmul(right, b, out=out)
    bsr_matmul(pair, b)
    out.fill_(torch.nan)
    for _ in range(2):
        for call, message in (
            (lambda: bsr_matmul(wrong, b, out=out), "must be sorted and without duplicates"),
            (lambda: bsr_linear(b.t(), wrong, out=out.t()), "must be sorted and without duplicates"),
            (lambda: bsr_matmul(t, b, out=out), "must be sorted and without duplicates"),
            (lambda: bsr_matmul(relative, b), r"crow_indices\[1, 0\] is 0; it must be where item 0 ends"),
            (
                lambda: bsr_grouped_linear(x, relative, expert_ids=group),
                r"crow_indices\[1, 0\] is 0; it must be where item 0 ends",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                call()
    assert out.isnan().all()


# Paths and architectures


def test_a_path_that_cannot_serve(emulated):
    with cute_kernels.path("sm_90"):
        with pytest.raises(
            ValueError, match="no kernel supports this call: not on path sm_90: .*multiples of 16 bytes"
        ):
            gemm(normal(8, 7), normal(7, 8))
        with pytest.raises(ValueError, match="not on path sm_90: an operand has no contiguous mode|16 bytes"):
            bsr_matmul(weights(), normal(96, 80)[:, ::2])


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
def test_sm_90_kernels_on_older_gpus(monkeypatch, arch):
    host_emulation.install(monkeypatch, arch, 108)
    assert gemm(normal(64, 64), normal(64, 64)).shape == (64, 64)
    assert explain(gemm, normal(64, 64), normal(64, 64)).facts.arch == ARCHS[arch].target
    with cute_kernels.path("sm_90"), pytest.raises(ValueError, match=f"{arch} has neither TMA nor WGMMA"):
        gemm(normal(64, 64), normal(64, 64))
