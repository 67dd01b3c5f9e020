"""Random calls of every op through torch's mechanisms: autograd, torch.func, torch.compile, CUDA graphs, subclasses.

A `Mechanism` is a mechanism and an op; a `Call` has the case that fuzz_products or fuzz_attention drew for it.
See mechanisms.py and mechanism_modes.py for the mechanisms, and mechanism_calls.py for the calls.
"""

import contextlib
import random
import warnings
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

import cute_kernels
from cute_kernels.testing.reference import seed

from . import attention as fuzz_attention
from . import gemm
from . import mechanism_modes as _modes  # noqa: F401 (registers its mechanisms)
from . import mechanisms as _mechanisms  # noqa: F401
from .mechanism_calls import ATTENTION, PRODUCTS, subject
from .mechanism_checks import MECHANISMS

ON_GPU_ONLY = ("graph",)


@dataclass(frozen=True)
class Mechanism:
    mechanism: str
    op: str

    @property
    def name(self) -> str:
        return f"mechanism {self.mechanism}"


@dataclass(frozen=True)
class Call:
    family: Mechanism
    inner: gemm.Case | fuzz_attention.Case
    number: int  # seeds what the mechanism draws


def families() -> list[Mechanism]:
    """Every op under every mechanism."""
    names = [name for name in MECHANISMS if name not in ON_GPU_ONLY or torch.cuda.is_available()]
    return [Mechanism(name, op) for op in (*PRODUCTS, *ATTENTION) for name in names]


def inner_families(op: str) -> list:
    """The families of the other modules whose cases are calls of this op."""
    if op == "bsr_gated_linear":
        return [f for f in gemm.families() if f.op == "bsr_linear" and not f.batch and f.block[0] <= 256]
    if op in PRODUCTS:
        return [f for f in gemm.families() if f.op == op]
    name = "attention" if op.startswith("scaled") else op
    return [f for f in fuzz_attention.families() if f.op == name]


Family, Case = Mechanism, Call  # the names that the other modules have; these are those of a repr


@st.composite
def cases(draw, family: Mechanism, most: int = 300):
    module = gemm if family.op in PRODUCTS else fuzz_attention
    inner = draw(st.sampled_from(inner_families(family.op)))
    return Call(family, draw(module.cases(inner, most)), draw(st.integers(0, 2**31)))


def run(case: Call, device: str = "cpu") -> None:
    """Make the call through the mechanism; raise Wrong, or what torch or the op raises."""
    made, draw = subject(case.family.op, case.inner, case.number, device), random.Random(case.number)
    seed(case.number)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        if made.path:
            stack.enter_context(cute_kernels.path(made.path))
        try:
            MECHANISMS[case.family.mechanism](made, draw, device)
        except Exception as error:
            error.add_note(f"of {made.op}")
            raise
