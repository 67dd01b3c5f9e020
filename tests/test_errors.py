"""What the ops refuse: the type of the error, and that its message says what would work, before anything is written."""

import functools
import subprocess
import sys

import pytest
import torch

import cute_kernels
from cute_kernels import explain, gemm
from cute_kernels import functions as F
from cute_kernels import ops as dense_ops
from cute_kernels.arch import ARCHS, arch_named, arch_of
from cute_kernels.checks import epilogue_program
from cute_kernels.runtime.compile import MissingCompiler, import_cutlass
from sparse_collective import BsrMatrix, bsr_linear, bsr_matmul
from sparse_collective import ops as sparse_ops

from . import emulate
from .reference import normal, poisoned

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")


@pytest.fixture(params=["cpu", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request, monkeypatch):
    """CPU tensors, CPU tensors on the host side of a GPU call, and a GPU; with no plan known yet."""
    for ops in (dense_ops, sparse_ops):
        monkeypatch.setattr(ops, "_PLANS", {})
    if request.param == "emulated":
        emulate.install(monkeypatch)
    return "cuda" if request.param == "cuda" else "cpu"


def expanded(out):
    return out[:1].expand(out.shape)


# (name, what to change in gemm(a (32, 64), b (64, 48), out (32, 48)), the error, a part of its message)
GEMM = [
    ("a no tensor", lambda c: c.update(a=[[1.0]]), TypeError, "a must be a torch.Tensor, got list"),
    ("b no tensor", lambda c: c.update(b=None), TypeError, "b must be a torch.Tensor, got NoneType"),
    (
        "a sparse",
        lambda c: c.update(a=c["a"].to_sparse()),
        TypeError,
        r"a must be a dense \(strided\) tensor, got .*coo",
    ),
    (
        "fp32",
        lambda c: c.update(a=c["a"].float(), b=c["b"].float()),
        TypeError,
        r"torch.bfloat16 and torch.float16 \(cast",
    ),
    ("int8", lambda c: c.update(a=c["a"].to(torch.int8)), TypeError, "a is torch.int8; the kernels multiply"),
    ("mixed", lambda c: c.update(b=c["b"].half()), TypeError, "b is torch.float16 but a is torch.bfloat16; cast one"),
    (
        "b elsewhere",
        lambda c: c.update(b=c["b"].to("meta")),
        ValueError,
        r"b is on meta, the others on c.*; move it with .to",
    ),
    ("a elsewhere", lambda c: c.update(a=c["a"].to("meta")), ValueError, "tensors on meta; CUDA and CPU tensors"),
    (
        "a 1-D",
        lambda c: c.update(a=c["a"][0]),
        ValueError,
        r"a has 1 and b 2 dimensions; both need at least 2 \(use unsq",
    ),
    ("b 1-D", lambda c: c.update(b=c["b"][:, 0]), ValueError, "a has 2 and b 1 dimensions; both need at least 2"),
    ("K", lambda c: c.update(b=c["b"][:32]), ValueError, r"a is \(32, 64\) and b \(32, 48\): 64 columns meet 32 rows"),
    (
        "batches",
        lambda c: c.update(a=c["a"].expand(2, 32, 64), b=c["b"].expand(3, 64, 48), out=None),
        ValueError,
        r"the batches of a \(2, 32, 64\) and b \(3, 64, 48\) do not broadcast",
    ),
    ("out no tensor", lambda c: c.update(out=[1.0]), TypeError, "out must be a torch.Tensor, got list"),
    (
        "out shape",
        lambda c: c.update(out=c["out"].t()),
        ValueError,
        r"out has shape \(48, 32\), the result has \(32, 48\)",
    ),
    ("out dtype", lambda c: c.update(out=c["out"].double()), TypeError, "output of torch.float64; torch.bfloat16, "),
    (
        "out_dtype",
        lambda c: c.update(out=None, out_dtype=torch.int32),
        TypeError,
        "output of torch.int32; torch.bfloat16",
    ),
    (
        "both dtypes",
        lambda c: c.update(out_dtype=torch.float32),
        TypeError,
        "out is torch.bfloat16 but out_dtype=.*pass one",
    ),
    (
        "out elsewhere",
        lambda c: c.update(out=c["out"].to("meta")),
        ValueError,
        "out is on meta, the others on c.*; move it",
    ),
    (
        "out expanded",
        lambda c: c.update(out=expanded(c["out"])),
        ValueError,
        "out is expanded or overlaps itself .*share memory",
    ),
    ("bias no tensor", lambda c: c.update(bias=[1.0] * 48), TypeError, "bias must be a torch.Tensor, got list"),
    (
        "bias length",
        lambda c: c.update(bias=normal(32)),
        ValueError,
        r"must be \(48,\) for .* or \(32, 1\) for one value a row",
    ),
    (
        "bias row",
        lambda c: c.update(bias=normal(48, 1)),
        ValueError,
        r"bias has shape \(48, 1\).*\(32, 1\) for one value a row",
    ),
    (
        "bias dtype",
        lambda c: c.update(bias=normal(48).long()),
        TypeError,
        "bias is torch.int64; torch.bfloat16, torch.float16",
    ),
    ("bias elsewhere", lambda c: c.update(bias=normal(48).to("meta")), ValueError, "bias is on meta, the others on c"),
    (
        "residual shape",
        lambda c: c.update(residual=c["out"][:1]),
        ValueError,
        r"residual has shape \(1, 48\), the result has",
    ),
    (
        "residual dtype",
        lambda c: c.update(residual=c["out"].float()),
        TypeError,
        "residual is torch.float32, .*pass out_dtype=",
    ),
    (
        "activation",
        lambda c: c.update(activation="swish"),
        ValueError,
        "unknown activation 'swish'; known are relu, gelu, gelu_t",
    ),
    ("a number", lambda c: c.update(epilogue=2.0), TypeError, "must be a function of one tensor, got float"),
    (
        "capture",
        lambda c: c.update(epilogue=capturing(torch.ones(1, device=c["a"].device))),
        TypeError,
        r"test_errors.py:\d+, 'return lambda x: x \* value': torch.mul: a captured tensor of shape \(1,\): an epilogue "
        "sees one element at a time. Pass a bias",
    ),
    (
        "grad of a",
        lambda c: c.update(a=c["a"].requires_grad_()),
        RuntimeError,
        r"call it under torch.no_grad\(\) or detach\(\)",
    ),
    (
        "grad of bias",
        lambda c: c.update(bias=normal(48).requires_grad_()),
        RuntimeError,
        "gemm does not compute gradients",
    ),
    (
        "grad of residual",
        lambda c: c.update(residual=normal(32, 48).requires_grad_()),
        RuntimeError,
        "does not compute grad",
    ),
    ("alpha text", lambda c: c.update(alpha="2"), TypeError, "alpha"),
    ("alpha tensor", lambda c: c.update(alpha=torch.tensor(2.0)), TypeError, "alpha"),
    ("activation list", lambda c: c.update(activation=["relu"]), (TypeError, ValueError), "activation"),
]


def capturing(value):
    return lambda x: x * value


def base(device):
    return {
        "a": normal(32, 64, device=device),
        "b": normal(64, 48, device=device),
        "out": poisoned(32, 48, device=device),
    }


def moved(call, device):
    """What a case made on the CPU, on the device; a tensor put on "meta" stays there."""
    return {k: v.to(device) if isinstance(v, torch.Tensor) and v.device.type == "cpu" else v for k, v in call.items()}


@pytest.mark.parametrize("name, change, error, message", GEMM, ids=[case[0] for case in GEMM])
def test_gemm(request, place, name, change, error, message):
    call = base(place)
    change(call)
    with pytest.raises(error, match=message):
        gemm(**moved(call, place))
    if isinstance(call["out"], torch.Tensor) and not name.startswith("out"):
        assert call["out"].isnan().all(), "the output was written before the error"


# What a known plan must not let through: the same metadata in another place, or with other strings attached.
SECOND = [
    ("a elsewhere", lambda c: c.update(a=c["a"].to("meta"), b=c["b"].to("meta"), out=None), ValueError, "meta"),
    ("b elsewhere", lambda c: c.update(b=c["b"].to("meta"), out=None), ValueError, "b is on meta"),
    ("out elsewhere", lambda c: c.update(out=c["out"].to("meta")), ValueError, "out is on meta"),
    ("grad", lambda c: c.update(a=c["a"].requires_grad_()), RuntimeError, "does not compute gradients"),
    ("grad of b", lambda c: c.update(b=c["b"].requires_grad_(), out=None), RuntimeError, "does not compute gradients"),
    ("grad of out", lambda c: c.update(out=c["out"].requires_grad_()), RuntimeError, "requires.* grad"),
]


@pytest.mark.parametrize("name, change, error, message", SECOND, ids=[case[0] for case in SECOND])
def test_gemm_with_a_known_plan(request, place, name, change, error, message):
    for out in (True, False):
        call = base(place)
        gemm(call["a"], call["b"], out=call["out"] if out else None)
    call = base(place)
    change(call)
    with pytest.raises(error, match=message):
        gemm(**call)


@pytest.mark.parametrize("op", ["gemm", "bsr_matmul", "bsr_linear"])
def test_out_is_an_operand(request, place, op):
    x, square = normal(64, 64, device=place), normal(64, 64, device=place)
    W = weights(place, (64, 64))
    calls = {
        "gemm": [(gemm, (x, square), x), (gemm, (x, square), square), (gemm, (x, square), x.t())],
        "bsr_matmul": [(bsr_matmul, (W, x), x)],
        "bsr_linear": [(bsr_linear, (x, W), x)],
    }[op]
    for fn, args, out in calls:
        before = out.clone()
        with pytest.raises(ValueError, match="out shares memory with"):
            fn(*args, out=out)
        assert torch.equal(out, before)


def test_out_overlaps_an_operand_in_part(place):
    buffer = normal(96, 64, device=place)
    with pytest.raises(ValueError, match="out shares memory with"):
        gemm(buffer[:64], normal(64, 64, device=place), out=buffer[32:])


def test_out_overlaps_itself(place):
    out = torch.empty(200, device=place, dtype=torch.bfloat16).as_strided((32, 64), (2, 1))
    with pytest.raises(ValueError, match="share memory"):
        gemm(normal(32, 64, device=place), normal(64, 64, device=place), out=out)


def test_planning_refuses_before_anything_runs(place):
    with pytest.raises(ValueError, match="columns meet"):
        explain(gemm, normal(8, 16, device=place), normal(8, 8, device=place))


def test_an_error_leaves_no_plan(place):
    """A refused call is refused again."""
    for _ in range(3):
        with pytest.raises(ValueError, match="unknown activation"):
            gemm(normal(8, 16, device=place), normal(16, 8, device=place), activation="swish")
    assert not dense_ops._PLANS


def program(function):
    return epilogue_program("gemm", function)


def test_epilogues_of_one_code_are_told_apart():
    assert program(lambda x: x * capturing(2.0)(x)) != program(lambda x: x * capturing(3.0)(x))
    assert program(lambda x: F.relu(x)) != program(lambda x: F.silu(x))


@pytest.mark.parametrize(
    "pair",
    [
        (functools.partial(F.maximum, 1.0), functools.partial(F.maximum, 2.0)),
        (type("Scale", (), {"by": 2.0}), type("Scale", (), {"by": 3.0})),
        (torch.nn.Threshold(0.0, 1.0), torch.nn.Threshold(0.0, 2.0)),
    ],
    ids=["partial", "class", "object"],
)
def test_captured_callables_are_told_apart(pair):
    def scaled(by):
        return (lambda x: x * by.by) if isinstance(by, type) else lambda x: by(x)

    first, second = (program(scaled(value)) for value in pair)
    assert first != second
    assert first == program(scaled(pair[0]))


def test_a_captured_variable_that_changes(emulated):
    """The emulated kernel is made once for a plan, as the compiled one is."""
    by = 2.0

    def scaled(x):
        return x * by

    a, b = normal(8, 8), normal(8, 8)
    first = explain(gemm, a, b, epilogue=scaled).facts.key()
    gemm(a, b, epilogue=scaled)
    by = 3.0
    assert explain(gemm, a, b, epilogue=scaled).facts.key() != first
    plans = [plan.facts.key() for plan in dense_ops._PLANS.values()]
    gemm(a, b, epilogue=scaled)
    assert len(dense_ops._PLANS) > len(plans), "the second call ran the plan, and so the kernel, of the old constant"


# Block-sparse


def weights(device, shape=(64, 96), block=(16, 32), **options) -> BsrMatrix:
    return BsrMatrix.from_dense(normal(*shape, device=device, k=shape[1]), block, **options)


# gemm's table again: what to change in bsr_matmul(W (64, 96), b (96, 40), out (64, 40))
MATMUL = [
    (
        "W dense",
        lambda c: c.update(W=normal(64, 96)),
        TypeError,
        "W must be a BsrMatrix or .*got a tensor of layout torch.strided; see Bsr",
    ),
    ("W list", lambda c: c.update(W=[1]), TypeError, "W must be a BsrMatrix or a torch.sparse_bsr tensor, got list"),
    (
        "W csr",
        lambda c: c.update(W=normal(64, 96).float().to_sparse_csr()),
        TypeError,
        "got a tensor of layout torch.sparse_csr",
    ),
    (
        "W fp32",
        lambda c: c.update(W=c["W"].to(torch.float32)),
        TypeError,
        "W is torch.float32; the kernels multiply torch.bf",
    ),
    ("b no tensor", lambda c: c.update(b=[1.0]), TypeError, "b must be a torch.Tensor, got list"),
    ("b dtype", lambda c: c.update(b=c["b"].half()), TypeError, "b is torch.float16 but W is torch.bfloat16; cast one"),
    ("b elsewhere", lambda c: c.update(b=c["b"].to("meta")), ValueError, "b is on meta, the others on c"),
    ("b 1-D", lambda c: c.update(b=c["b"][:, 0]), ValueError, "b has 1 dimensions, too few"),
    ("K", lambda c: c.update(b=c["b"][:90]), ValueError, r"W is 64x96 and b \(90, 40\): 96 columns of W meet 90"),
    (
        "out shape",
        lambda c: c.update(out=c["out"][:32]),
        ValueError,
        r"out has shape \(32, 40\), the result has \(64, 40\)",
    ),
    ("out dtype", lambda c: c.update(out=c["out"].double()), TypeError, "output of torch.float64; torch.bfloat16"),
    ("out expanded", lambda c: c.update(out=expanded(c["out"])), ValueError, "out is expanded or overlaps itself"),
    (
        "bias",
        lambda c: c.update(bias=normal(96)),
        ValueError,
        r"it must be \(40,\) for one value a column or \(64, 1\)",
    ),
    (
        "residual",
        lambda c: c.update(residual=normal(40, 64)),
        ValueError,
        r"residual has shape \(40, 64\), the result has",
    ),
    ("activation", lambda c: c.update(activation="mish"), ValueError, "unknown activation 'mish'; known are relu"),
    (
        "epilogue",
        lambda c: c.update(epilogue=torch.sort),
        TypeError,
        "torch.sort has no form in a kernel; there are abs",
    ),
    ("grad of b", lambda c: c.update(b=c["b"].requires_grad_()), RuntimeError, "bsr_matmul does not compute gradients"),
    ("grad of W", lambda c: c["W"].values.requires_grad_(), RuntimeError, r"no_grad\(\) or detach\(\)"),
]


@pytest.mark.parametrize("name, change, error, message", MATMUL, ids=[case[0] for case in MATMUL])
def test_bsr_matmul(place, name, change, error, message):
    call = {"W": weights(place), "b": normal(96, 40, device=place), "out": poisoned(64, 40, device=place)}
    change(call)
    with pytest.raises(error, match=message):
        bsr_matmul(**moved(call, place))
    if not name.startswith("out"):
        assert call["out"].isnan().all()


LINEAR = [
    (
        "x scalar",
        lambda c: c.update(x=torch.tensor(1.0).bfloat16(), out=None),
        ValueError,
        "x has 0 dimensions, too few",
    ),
    ("K", lambda c: c.update(x=c["x"][:, :64]), ValueError, r"W is 64x96 and x \(40, 64\): 96 columns of W meet 64"),
    ("x no tensor", lambda c: c.update(x=None), TypeError, "x must be a torch.Tensor, got NoneType"),
    ("bias 2-D", lambda c: c.update(bias=normal(64, 1)), ValueError, r"must be \(64,\), one value an output feature"),
    ("bias length", lambda c: c.update(bias=normal(96)), ValueError, r"must be \(64,\), one value an output feature"),
    ("bias no tensor", lambda c: c.update(bias=[1.0]), TypeError, "bias must be a torch.Tensor, got list"),
    (
        "out shape",
        lambda c: c.update(out=c["out"].t()),
        ValueError,
        r"out has shape \(64, 40\), the result has \(40, 64\)",
    ),
]


@pytest.mark.parametrize("name, change, error, message", LINEAR, ids=[case[0] for case in LINEAR])
def test_bsr_linear(request, place, name, change, error, message):
    call = {"x": normal(40, 96, device=place), "W": weights(place), "out": poisoned(40, 64, device=place)}
    change(call)
    with pytest.raises(error, match=message):
        bsr_linear(**moved(call, place))


WRONG_INDICES = {
    "decreasing crow": (
        lambda crow, col: crow.__setitem__(1, 5),
        r"crow_indices\[2\] is \d, less than crow_indices\[1\] = 5",
    ),
    "first not 0": (lambda crow, col: crow.__setitem__(0, 1), r"crow_indices\[0\] is 1; it must be 0"),
    "last not nnz": (lambda crow, col: crow.__setitem__(-1, 5), r"the last, is 5; it must be nnz = 6"),
    "column too large": (
        lambda crow, col: col.__setitem__(1, 3),
        r"col_indices\[1\] is 3, in block-row 0; .*in \[0, 3\)",
    ),
    "negative column": (
        lambda crow, col: col.__setitem__(0, -1),
        r"col_indices\[0\] is -1, in block-row 0; .*in \[0, 3\)",
    ),
    "unsorted": (lambda crow, col: col.copy_(col.flip(0)), "must be sorted and without duplicates"),
    "duplicate": (lambda crow, col: col.__setitem__(1, int(col[0])), "must be sorted and without duplicates"),
}


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", WRONG_INDICES)
def test_wrong_indices(place, name, index_dtype):
    """Found on the first call and on every later one, by both ops, and in a torch.sparse_bsr tensor."""
    change, message = WRONG_INDICES[name]
    crow = torch.tensor([0, 2, 4, 6], dtype=index_dtype, device=place)
    col = torch.tensor([0, 2, 0, 1, 1, 2], dtype=index_dtype, device=place)
    values = normal(6, 16, 32, device=place)
    good = BsrMatrix(crow.clone(), col.clone(), values, (48, 96))
    b, out = normal(96, 16, device=place), poisoned(48, 16, device=place)
    bsr_matmul(good, b)
    change(crow, col)
    W = BsrMatrix(crow, col, values, (48, 96))
    t = torch.sparse_bsr_tensor(crow, col, values, (48, 96), check_invariants=False)
    for _ in range(2):
        for call in (
            lambda: bsr_matmul(W, b, out=out),
            lambda: bsr_linear(b.t(), W, out=out.t()),
            lambda: bsr_matmul(t, b, out=out),
        ):
            with pytest.raises(ValueError, match=message):
                call()
    assert out.isnan().all()


def test_wrong_lengths_and_blocks():
    crow, col = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    with pytest.raises(ValueError, match="crow_indices has 2 entries; 2 rows need 3"):
        BsrMatrix(crow, col, normal(1, 16, 16), (32, 16))
    with pytest.raises(ValueError, match="col_indices has 1 entries; the 2 blocks need 2"):
        BsrMatrix(crow, col, normal(2, 16, 16), (16, 32))
    for block in ((8, 16), (16, 8), (24, 16), (20, 20)):
        with pytest.raises(ValueError, match="block side b[mk] is .*; use a positive multiple of 16"):
            BsrMatrix(crow, col, normal(1, *block), block)


# Paths and architectures


def test_a_path_that_cannot_serve(emulated):
    with cute_kernels.path("sm_90"):
        with pytest.raises(ValueError, match="no kernel serves this call: not on path sm_90: .*multiples of 16 bytes"):
            gemm(normal(8, 7), normal(7, 8))
        with pytest.raises(ValueError, match="not on path sm_90: an operand has no contiguous mode|16 bytes"):
            bsr_matmul(weights("cpu"), normal(96, 80)[:, ::2])


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
def test_sm_90_kernels_on_older_gpus(monkeypatch, arch):
    emulate.install(monkeypatch, arch, 108)
    assert gemm(normal(64, 64), normal(64, 64)).shape == (64, 64)
    assert explain(gemm, normal(64, 64), normal(64, 64)).facts.arch == ARCHS[arch].target
    with cute_kernels.path("sm_90"), pytest.raises(ValueError, match=f"{arch} has neither TMA nor WGMMA"):
        gemm(normal(64, 64), normal(64, 64))


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (6, 1)])
def test_gpus_before_ampere(capability):
    with pytest.raises(
        RuntimeError, match=rf"{capability[0]}\.{capability[1]} is below 8.0: the kernels need cp.async"
    ):
        arch_of(capability)


@pytest.mark.parametrize("capability", [(10, 0), (12, 0), (8, 8)])
def test_gpus_without_a_row(capability):
    with pytest.raises(
        RuntimeError, match="no kernels for compute capability .*; supported are 8.0, 8.6, 8.7, 8.9 and 9.0"
    ):
        arch_of(capability)


def test_unknown_names():
    with pytest.raises(ValueError, match="unknown architecture 'sm_75'; known are sm_80, sm_86, sm_89, sm_90"):
        arch_named("sm_75")


# A missing compiler


@pytest.mark.parametrize("package", ["cutlass", "tvm_ffi"])
def test_missing_package(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingCompiler, match=f"'{package}' was not found.*pip install 'nvidia-cutlass-dsl") as error:
        import_cutlass()
    assert error.value.name == package


def test_another_missing_package_is_not_called_the_compiler(monkeypatch):
    """What the compiler itself lacks is named as it is."""

    def find(*args, **kwargs):
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    found = None
    with monkeypatch.context() as inside:
        inside.setattr("builtins.__import__", find)
        try:
            import_cutlass()
        except ModuleNotFoundError as error:
            found = error
    assert type(found) is ModuleNotFoundError and found.name == "numpy"


WITHOUT_COMPILER = """
import sys
sys.modules["cutlass"] = None
import torch
from cute_kernels import gemm
print(gemm(torch.ones(2, 3).bfloat16(), torch.ones(3, 2).bfloat16()).sum().item())
"""


def test_cpu_tensors_need_no_compiler():
    run = subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stdout.strip() == "12.0", run.stderr[-500:]
