"""The fuzz of torch's mechanisms, small: a few cases of each, on the CPU's references and on the host side of a GPU's
calls; and that it finds what is wrong."""

import random

import pytest
import torch

from attention import attention
from cute_kernels import gemm
from cute_kernels.testing.reference import seed

from ..guard_zones import Wrong
from . import mechanism_calls, mechanism_cases
from . import run as fuzz
from .mechanism_calls import ATTENTION, PRODUCTS, Subject
from .mechanism_checks import MECHANISMS

NAMES = [name for name in MECHANISMS if name not in mechanism_cases.ON_GPU_ONLY]
COMPILED = [name for name in NAMES if name.startswith("compile")]


def run_some(name: str, ops, first: int) -> None:
    """Two cases of each of these ops; the simplest, which hypothesis draws first, is one of them."""
    wrong = []
    for i, op in enumerate(ops):

        def each(case, run):
            found = fuzz.outcome(case, run, "cpu")
            if found:
                wrong.append(f'{found[0]}: {found[1]}\n  python -m tests.fuzz --device cpu --replay "{case}"')

        fuzz.draw_and_run(mechanism_cases.Mechanism(name, op), "cpu", 2, first + i, each)
    assert not wrong, f"{len(wrong)} failed; the first: {wrong[0]}"


@pytest.mark.parametrize("name", NAMES)
def test_references(name):
    ops = (*PRODUCTS, *ATTENTION)
    run_some(name, ops if name not in COMPILED else random.Random(name).sample(ops, 3), 100)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in COMPILED])
def test_host_side(emulated, monkeypatch, name):
    monkeypatch.setattr(mechanism_calls, "SCORE_MODS", False)
    run_some(name, (*PRODUCTS, *ATTENTION), 200)


def subject(run, plain, *tensors) -> Subject:
    return Subject("op", lambda *t: (run(*t),), lambda *t: (plain(*t),), ["a", "b", "c"][: len(tensors)], list(tensors))


def wrong_of(name: str, made: Subject) -> str | None:
    """The kind of what a mechanism finds; each has several forms, of which it draws one."""
    kinds = set()
    for number in range(8):
        seed(number)
        try:
            MECHANISMS[name](made, random.Random(number), "cpu")
        except Wrong as found:
            kinds.add(found.kind)
    return ", ".join(sorted(kinds)) or None


class Sloppy(torch.autograd.Function):
    """a @ b whose gradient is of what a and b are in backward, and differentiable without a trace of that."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.tensors = a, b
        return a @ b

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.tensors
        return dy @ b.detach().mT, a.detach().mT @ dy


def test_it_finds_what_is_wrong():
    a, b = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(16, 8, dtype=torch.bfloat16)
    q = torch.randn(1, 2, 8, 64, dtype=torch.bfloat16)
    right = subject(lambda a, b: gemm(a, b), torch.matmul, a, b)
    sloppy = subject(Sloppy.apply, torch.matmul, a, b)
    dropped = subject(lambda a, b: gemm(a, b.detach()) + 0 * b.sum(), torch.matmul, a, b)
    hidden = subject(lambda a, b: gemm(a, b).detach() + 0 * (a @ b), torch.matmul, a, b)
    other = subject(lambda q: attention(q, q, q, causal=True), lambda q: 2 * q, q)
    for name in ("autograd", "write", "second_derivative", "saved_tensors_hooks", "func_grad"):
        assert wrong_of(name, right) is None
    assert wrong_of("write", sloppy) == "result"
    assert wrong_of("second_derivative", sloppy) == "no error"
    for made in (dropped, hidden, other):
        assert wrong_of("autograd", made) == "result"
    assert wrong_of("forward_mode", subject(torch.matmul, torch.matmul, a, b)) == "no error"
    assert wrong_of("subclass", subject(torch.matmul, torch.matmul, a, b)) == "not seen"


def test_a_case_runs_again(capsys):
    texts = []
    for op in ("bsr_linear", "block_sparse_attention"):
        family = mechanism_cases.Mechanism("autograd", op)
        fuzz.draw_and_run(family, "cpu", 2, 1, lambda case, run: texts.append(repr(case)))
    assert [fuzz.replay(text, "cpu") for text in texts] == [0] * 4
    assert len(fuzz.tasks_of(1, 0, "mechanism vmap")) == 9
