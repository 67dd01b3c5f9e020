"""Errors of traced functions: the message names the line, and says what to write instead."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf
from torch import nn

from attention.masks.element_mask import element_mask
from cute_kernels import functions as F
from cute_kernels.matmul.epilogue.terms import epilogue_program
from cute_kernels.traced.record import TraceError, trace

CPU = torch.device("cpu")


def returns_early(x):
    if x > 0:
        return x
    return x * 0


def loops(x):
    while x > 1:
        x = x / 2
    return x


def asserts(x):
    assert x > 0
    return x


def matches(x):
    match x:
        case 0:
            return x + 1
    return x


VALUES = {
    "a conditional expression": lambda x: x if x > 0 else 0.0,
    "an if": returns_early,
    "a while": loops,
    "an assertion": asserts,
    "a match": matches,
    "a chained comparison": lambda x: F.where(0.0 < x < 6.0, x, 0.0),
    "and": lambda x: F.where((x > 0.0) and (x < 6.0), x, 0.0),
    "or": lambda x: F.where((x > 0.0) or (x < 6.0), x, 0.0),
    "not": lambda x: F.where(not (x > 0.0), x, 0.0),
    "max": lambda x: max(x, 0.0),
    "in": lambda x: x * (x in (1, 2)),
    "range": lambda x: sum(x for _ in range(x.int())),
    "a list": lambda x: x * [1.0, 2.0][x.int()],
    "item": lambda x: x * x.item(),
    "tolist": lambda x: x.tolist(),
    "float": lambda x: x * float(x),
    "int": lambda x: x * int(x),
    "math": lambda x: math.exp(x),
    "numpy's functions": lambda x: np.exp(x),
    "numpy": lambda x: x.numpy(),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    function = VALUES[name]
    with pytest.raises(TypeError) as raised:
        epilogue_program("gemm", function)
    text = str(raised.value)
    found = re.match(
        r"gemm: the epilogue function, (.*test_traced_errors.py):(\d+), (['\"])(.*)\3: it asks for the", text
    )
    assert found, text
    code = function.__code__
    assert code.co_firstlineno <= int(found[2]) <= code.co_firstlineno + 3
    assert "Write torch.where(condition, x, y) for a branch" in text
    assert "&, | and ~ (with parentheses) for and, or and not, and (a < x) & (x < b) for a < x < b" in text


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.shape[0], lambda x: x * x.size(0), lambda x: x * x.ndim, lambda x: x / len(x),
        lambda x: x / x.numel(), lambda x: [v for v in x][0], lambda x: x * x.stride(0),
    ],
)  # fmt: skip
def test_shapes(function):
    with pytest.raises(TypeError, match=r"errors.py:\d+, .*asks for the shape of its argument, which is one element"):
        epilogue_program("gemm", function)


def adds_in_place(x):
    x += 1
    return x


COUNTER = torch.zeros(())


@pytest.mark.parametrize(
    "function, text",
    [
        (adds_in_place, "'x \\+= 1': torch.add_ writes to its argument; write x = f\\(x\\)"),
        (lambda x: x.relu_(), "torch.relu_ writes to its argument"),
        (lambda x: nnf.relu(x, inplace=True), "torch.relu_ writes to its argument"),
        (lambda x: torch.exp(x, out=x), "torch.exp writes to its argument"),
        (lambda x: x * COUNTER.add_(1), "torch.add_ writes to a captured tensor, which happens once, while"),
        (lambda x: x + torch.rand(()), "torch.rand draws random numbers, which would be the same ones"),
        (lambda x: nnf.dropout(x), "draws random numbers"),
        (lambda x: torch.randn_like(x), "torch.randn_like has no form in a kernel; there are abs, "),
        (lambda x: x.sum(), "torch.sum has no form in a kernel; there are abs, .* where, "),
        (lambda x: torch.softmax(x, -1), "softmax has no form in a kernel"),
        (lambda x: torch.sort(x), "torch.sort has no form in a kernel"),
        (lambda x: torch.lgamma(x), "torch.lgamma has no form in a kernel"),
        (lambda x: torch.copysign(x, -x), "torch.copysign has no form in a kernel"),
        (lambda x: torch.round(x, decimals=2), "torch.round has no form in a kernel"),
        (lambda x: torch.cat([x, x]), "torch.cat has no form in a kernel"),
        (lambda x: x @ x.mT, "torch.transpose has no form in a kernel"),
        (lambda x: x[None], "torch.unsqueeze has no form in a kernel"),
        (lambda x: x.reshape(-1), "torch.view: its result has another shape; the function is called on one element"),
        (lambda x: x[x > 0], "an index must be an integer, not torch.bool; write torch.where"),
        (lambda x: x[0], "torch.select: only captured tensors can be indexed"),
        (lambda x: x.double(), "its result is torch.float64; kernels have float32, bfloat16, float16, int32, int64, b"),
        (lambda x: x.short(), "its result is torch.int16; kernels have float32"),
        (lambda x: 1 - (x > 0), "bool tensors are not subtracted; write ~ for not, or convert with .int"),
        (lambda x: (x.int() + 2**40).float(), "torch.add: 1099511627776 does not fit into int32"),
        (lambda x: x.int() ** -1, "negative integer powers are not allowed"),
        (lambda x: 3 ** x.int() * 1.0, "torch.pow: an integer to a power that is no Python number"),
        (lambda x: x * torch.ones(3), r"captured tensor of shape \(3,\): an epilogue sees one element at a time. Pass"),
        (lambda x: x * TABLE[0], r"captured tensor of shape \(3, 4\): an epilogue sees one element"),
        (nn.PReLU(), "one element at a time. Pass a bias or a residual to the op, or capture a number"),
        (lambda x: x.no_such_method(), "failed while torch traced it, .*'lambda x: x.no_such.*no attribute 'no_such"),
        (lambda x: {}[x], "failed while torch traced it"),
        (lambda: 1, "failed while torch traced it.*takes 0 positional arguments but 1 was given"),
        (lambda x, y: x, "missing 1 required positional argument: 'y'"),
        (lambda x: (x, x), "it must return one tensor, computed element by element from its arguments, not tuple"),
        (lambda x: 1.0, "it must return one tensor, .* not float"),
        (lambda x: None, "it must return one tensor, .* not NoneType"),
        (lambda x: torch.ones(2, 3), r"it must return one tensor, .* not a tensor of shape \(2, 3\)"),
        (lambda x: x > 0, r"returns a tensor of torch.bool; it must be of a floating-point dtype \(use .float"),
        (lambda x: x.int(), "returns a tensor of torch.int32; it must be of a floating-point dtype"),
    ],
)  # fmt: skip
def test_epilogues(function, text):
    with pytest.raises(TypeError, match=text) as raised:
        epilogue_program("gemm", function)
    assert str(raised.value).startswith("gemm: the epilogue function")
    assert COUNTER == 0


TABLE, ELSEWHERE = torch.arange(24).view(2, 3, 4), torch.zeros(3, device="meta")


@pytest.mark.parametrize(
    "mask_mod, text",
    [
        (lambda b, h, q, kv: q >= kv and kv < 3, "mask_mod, .*errors.py.*asks for the value of a tensor"),
        (lambda b, h, q, kv: kv <= q < 3, "asks for the value of a tensor"),
        (lambda b, h, q, kv: True, "must return one tensor, computed element by element from its arguments, not bool"),
        (lambda b, h, q, kv: q - kv, "mask_mod must return a bool tensor, got a tensor of torch.int32"),
        (lambda b, h, q, kv: TABLE[b] == q, "torch.eq: a captured tensor that is not fully indexed; index it by b"),
        (lambda b, h, q, kv: TABLE[b, h], r"it must return one tensor, .* not a tensor of shape"),
        (lambda b, h, q, kv: TABLE == q, r"captured tensor of shape \(2, 3, 4\) as a whole; index it by b, h, q or kv"),
        (lambda b, h, q, kv: TABLE[:, h][b] > q, r"an index is slice\(None, None, None\); index with numbers and int"),
        (lambda b, h, q, kv: TABLE[None, b], "an index is None; index with numbers"),
        (lambda b, h, q, kv: TABLE[b, h, q > kv] > 0, "an index must be an integer, not torch.bool"),
        (lambda b, h, q, kv: TABLE[b, h, q / 2] > 0, "an index must be an integer, not torch.float32"),
        (lambda b, h, q, kv: TABLE[b, h, q, kv] > 0, "too many indices"),
        (lambda b, h, q, kv: TABLE[b].sum() > q, "torch.sum has no form in a kernel"),
        (lambda b, h, q, kv: TABLE.double()[b, h, q] > 0, "a captured tensor is torch.float64; kernels read float32"),
        (lambda b, h, q, kv: TABLE.to(torch.uint8)[b, h, q] > 0, "a captured tensor is torch.uint8; kernels read"),
        (lambda b, h, q, kv: ELSEWHERE[q] > kv, "a captured tensor is on meta, but the call's are on cpu; move it"),
    ],
)  # fmt: skip
def test_masks(mask_mod, text):
    with pytest.raises(TypeError, match=text):
        element_mask(mask_mod, CPU)


def test_the_user_s_line_and_the_cause_are_kept():
    """After a failure torch's own calls are what they were. No line of cute_kernels.functions is named."""

    def broken(x):
        raise KeyError("mine")

    with pytest.raises(TraceError, match=r"f, .*test_traced_errors.py:\d+, .*torch.where: a captured tensor of shape"):
        trace(lambda x: F.where(x > 0, x, torch.ones(3)), "f", ("float32",), (2, 3), CPU)
    with pytest.raises(TraceError, match="failed while torch traced it, .*'raise KeyError.*: 'mine'") as raised:
        trace(broken, "f", ("float32",), (2, 3), CPU)
    assert isinstance(raised.value.__cause__, KeyError)
    x = torch.ones(3)
    assert bool((x > 0).all()) and x.shape == (3,) and x[x > 0].sum().item() == 3
