"""Arguments that are declared once: what derives from GemmArgs and BsrArgs agrees with the public functions."""

import inspect

import pytest
import torch

from cute_kernels import gemm, ops
from cute_kernels.arguments import TERMS, GemmArgs, split
from cute_kernels.runtime.arguments import schema_types, with_keywords
from sparse_collective import bsr_linear, bsr_matmul, random_bsr
from sparse_collective import ops as sparse_ops
from sparse_collective.arguments import BsrArgs

A, B = torch.zeros(4, 16), torch.zeros(16, 8)


@pytest.fixture
def passed(monkeypatch) -> list:
    """Arguments that the public functions pass on."""
    found = []
    monkeypatch.setattr(ops.dispatch, "gemm", lambda values: found.append(GemmArgs._make(values)))
    monkeypatch.setattr(sparse_ops.dispatch, "call", lambda values: found.append(BsrArgs._make(values)))
    return found


TENSORS = {name: torch.zeros(1) for name in ("bias", "residual", "out", "scale_out")}
VALUES = {"activation": "relu", "out_dtype": torch.int8, "accumulation_dtype": torch.int16, "precision": "tf32"}
VALUES |= {"use_fast_accum": True, **TENSORS}


@pytest.mark.parametrize("function", [gemm, bsr_matmul, bsr_linear])
def test_each_argument_is_passed_under_its_name(function, passed):
    """No value is checked before the plan is looked up."""
    W = random_bsr((16, 16), (16, 16), density=1.0)
    W.check_indices()
    operands = {gemm: (A, B), bsr_matmul: (W, B), bsr_linear: (A, W)}[function]
    names = inspect.signature(function).parameters
    given = {name: value for name, value in VALUES.items() if name in names}
    given |= {name: torch.zeros(1) for name in ("scale_a", "scale_b", "scale_x") if name in names}
    given |= {name: value for name, value in (("alpha", 2.0), ("beta", 3.0)) if name in names}
    with torch.no_grad():
        function(*operands, **given, return_amax=True)
    (args,) = passed
    for name, value in given.items():
        assert getattr(args, {"scale_x": "scale_b"}.get(name, name)) is value
    assert args.amax.shape == (1,) and args.epilogue is None
    assert set(names) - {*args._fields, "return_amax", "scale_x", "x"} == set(), "every argument is declared"


def test_schema():
    assert schema_types(GemmArgs)["bias"] == "Tensor?" and schema_types(BsrArgs)["W"] == ""
    terms = TERMS.split(", ")
    assert terms[0] == "Tensor? bias=None" and "float alpha=1.0" in terms and "str? epilogue=None" in terms
    assert not any(name in TERMS for name in ("Tensor? out", "amax")), "ops have a variant for out, and for amax"
    from cute_kernels import torch_op  # noqa: F401 (registers the ops)

    arguments = torch.ops.cute_kernels.gemm.default._schema.arguments
    assert [a.name for a in arguments] == ["a", "b", *(term.split()[1].split("=")[0] for term in terms)]


def test_keys_and_tensors():
    args = GemmArgs(A, B, bias=A[0])
    key, tensors, terms, *_ = split(args)
    assert all(x is y for x, y in zip(tensors, (A, B, args.bias), strict=True)) and terms[0] is args.bias
    others = [
        {"bias": None},
        {"alpha": 2.0},
        {"alpha": 1},
        {"beta": 0.0},
        {"use_fast_accum": 0},
        {"activation": "relu"},
    ]
    assert key == split(args._replace(bias=A[1], beta=3.0))[0], "values of tensors and scalars are not in a key"
    assert all(split(args._replace(**other))[0] != key for other in others)
    assert split(args._replace(a=None))[0] is None, "no tensor, which planning reports"


def test_functions_with_keywords():
    call = with_keywords(GemmArgs, lambda values: GemmArgs._make(values), "first, b", str.upper, a="first * 2")
    args = call(3, 4, bias=5, epilogue="name")
    assert args == GemmArgs(6, 4, bias=5, epilogue="NAME")
