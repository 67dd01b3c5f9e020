"""What calls cost the host, ours beside torch's: `python -m bench host`.

Tensors are tiny, so that the host's time is all there is, and calls are single ones, as users make them: eager and
compiled, through autograd, with the objects that users hold. Ours, torch's and torch.mm, which says how fast the host
is, take turns in bursts.

On a machine without a GPU (`counted`) the ops plan CPU calls as those of a card, launches are replaced by nothing, and
Python's calls are counted in the place of time: a number that is the same on every machine of one torch.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as nnf
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attention import attention, block_sparse_attention
from cute_kernels import gemm
from cute_kernels.arch import ARCHS
from cute_kernels.runtime.call_plan import PlanCache
from sparse_collective import bsr_linear, bsr_matmul, random_bsr
from sparse_collective.nn import BsrLinear, SwiGLU

from .timing import median

BURST = 60  # calls between two synchronisations
ROUNDS = 41
COUNTED = 10  # calls of which Python's are counted
MM = "torch.mm"
PACKAGES = ("cute_kernels", "sparse_collective", "attention")
BLOCK = (64, 64)
DTYPE = torch.bfloat16
LIMITS = {"eager": 1.0, "compiled": 1.15, "reduce-overhead": 1.15, "eager backward": 1.1, "compiled backward": 1.15}


@dataclass(frozen=True)
class HostCase:
    """A call of ours and torch's of the same meaning.

    `ours` and `theirs` are functions of `inputs`, or modules; `form` is a key of LIMITS. Backward is of the sum of the
    results, with respect to the inputs and the parameters, whose gradients are let go before each step.
    """

    name: str
    form: str
    ours: Callable
    theirs: Callable | None
    inputs: tuple

    @property
    def limit(self) -> float:
        """The largest ratio of ours to theirs that is asked for."""
        return LIMITS[self.form]

    def calls(self) -> dict[str, Callable]:
        """Those of "ours" and, if there is one, of "torch", without arguments."""
        made = {"ours": self._call(self.ours)}
        return made if self.theirs is None else made | {"torch": self._call(self.theirs)}

    def _call(self, function: Callable) -> Callable:
        if "compiled" in self.form:
            function = torch.compile(function)
        elif self.form == "reduce-overhead":
            function = torch.compile(function, mode="reduce-overhead")
        if not self.form.endswith("backward"):
            inputs = tuple(t.detach() if isinstance(t, Tensor) else t for t in self.inputs)

            def forward() -> None:
                function(*inputs)

            return forward
        inputs = tuple(t.detach().requires_grad_() if isinstance(t, Tensor) else t for t in self.inputs)
        leaves = [t for t in inputs if isinstance(t, Tensor)]
        leaves += function.parameters() if isinstance(function, nn.Module) else []
        with torch.no_grad():
            dy = torch.ones_like(function(*inputs))

        def step() -> None:
            for leaf in leaves:
                leaf.grad = None
            function(*inputs).backward(dy)

        return step

    def without_gradients(self) -> bool:
        return not self.form.endswith("backward")


class DenseSwiGLU(nn.Module):
    """What SwiGLU is for dense weights."""

    def __init__(self, width: int, hidden: int, **where) -> None:
        super().__init__()
        self.gate, self.up = (
            nn.Linear(width, hidden, bias=False, **where),
            nn.Linear(width, hidden, bias=False, **where),
        )
        self.down = nn.Linear(hidden, width, bias=False, **where)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nnf.silu(self.gate(x)) * self.up(x))


def cases(device: str = "cuda") -> Iterator[HostCase]:
    """All rows, of 128 x 128 matrices and of attention over 128 positions."""
    where = {"device": device, "dtype": DTYPE}
    a, b = torch.randn(128, 128, **where), torch.randn(128, 128, **where)
    W, dense = random_bsr((128, 128), BLOCK, density=0.5, **where), torch.randn(128, 128, **where)
    q, k, v = (torch.randn(1, 2, 128, 64, **where) for _ in range(3))

    def blocks(**more) -> dict:
        return {"blocksize": BLOCK, "density": 0.5, **where, **more}

    products = {
        "gemm": (gemm, torch.mm, (a, b)),
        "bsr_linear": (lambda x: bsr_linear(x, W), lambda x: nnf.linear(x, dense), (a,)),
        "bsr_matmul": (lambda x: bsr_matmul(W, x), lambda x: torch.mm(dense, x), (a,)),
        "BsrLinear": (BsrLinear(128, 128, **blocks()), nn.Linear(128, 128, **where), (a,)),
    }
    gelu = nn.Sequential(nn.Linear(128, 128, **where), nn.GELU())
    gelu = BsrLinear(128, 128, **blocks(activation="gelu")), gelu, (a,)
    swiglu = SwiGLU(128, 256, density=0.5, **where), DenseSwiGLU(128, 256, **where), (a,)

    def ours(q, k, v):
        return attention(q, k, v, causal=True)

    def theirs(q, k, v):
        return nnf.scaled_dot_product_attention(q, k, v, is_causal=True)

    mask = create_block_mask(lambda b, h, i, j: i - j < 64, None, None, 128, 128, device=device)
    flex = torch.compile(flex_attention)

    def ours_of_blocks(q, k, v):
        return block_sparse_attention(q, k, v, mask)

    def theirs_of_blocks(q, k, v):
        return flex(q, k, v, block_mask=mask)

    for form in ("eager", "compiled"):
        for name, each in products.items():
            yield HostCase(name, form, *each)
        yield HostCase("attention, causal", form, ours, theirs, (q, k, v))
    for form in ("eager", "compiled", "reduce-overhead"):
        yield HostCase("SwiGLU", form, *swiglu)
    for form in ("eager backward", "compiled backward"):
        for name in ("gemm", "BsrLinear"):
            yield HostCase(name, form, *products[name])
        yield HostCase("BsrLinear, GELU", form, *gelu)
        yield HostCase("SwiGLU", form, *swiglu)
        yield HostCase("attention, causal", form, ours, theirs, (q, k, v))
    theirs_of_blocks = theirs_of_blocks if device == "cuda" else None  # FlexAttention has no backward on a CPU
    for form in ("eager", "eager backward"):
        yield HostCase(
            "block_sparse_attention of FlexAttention's mask", form, ours_of_blocks, theirs_of_blocks, (q, k, v)
        )


def timed(case: HostCase, rounds: int = ROUNDS) -> dict[str, float]:
    """Microseconds of a call of "ours", "torch" and "torch.mm", medians of bursts in turns."""
    a = torch.randn(128, 128, device="cuda", dtype=DTYPE)
    calls = case.calls() | {MM: lambda: torch.mm(a, a)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad() if case.without_gradients() else contextlib.nullcontext():
        for call in calls.values():
            for _ in range(10):
                call()
        for _ in range(rounds):
            for name, call in calls.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(BURST):
                    call()
                times[name].append((time.perf_counter() - start) / BURST * 1e6)
        torch.cuda.synchronize()
    return {name: round(median(found), 2) for name, found in times.items()}


def counted(case: HostCase) -> dict[str, float]:
    """Python's calls, of its functions and of C's, in a call of "ours" and of "torch"."""
    found = {}
    with torch.no_grad() if case.without_gradients() else contextlib.nullcontext():
        for name, call in case.calls().items():
            for _ in range(4):
                call()
            found[name] = python_calls(call) / COUNTED
    return found


def python_calls(call: Callable) -> int:
    """How many calls COUNTED calls of a function make."""
    count = 0

    def profile(frame, event: str, argument) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        for _ in range(COUNTED):
            call()
    finally:
        sys.setprofile(before)
    return count


@contextlib.contextmanager
def launches_replaced(arch: str = "sm_90", sms: int = 132) -> Iterator[None]:
    """A context in which CPU calls are planned as those of a card, and kernels do nothing: results are whatever memory
    held."""
    import attention.backward.eager  # noqa: F401 (a module that is imported later would keep what it imports)
    import sparse_collective.torch_op  # noqa: F401

    instead = {
        "function_for": lambda facts: lambda *arguments: None,
        "device_arch": lambda index: (ARCHS[arch], sms, ""),
        "plans_kernel": lambda device: True,
        "has_kernel": lambda tensor: True,
    }
    with contextlib.ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in PACKAGES:
                for attribute, value in instead.items():
                    if hasattr(module, attribute):
                        patches.enter_context(mock.patch.object(module, attribute, value))
                if isinstance(getattr(module, "_PLANS", None), PlanCache):
                    patches.enter_context(mock.patch.object(module, "_PLANS", PlanCache(module._PLANS.operands)))
        yield


def shown(found: dict[str, dict[str, float]], what: str) -> Table:
    """The table of all rows, as `measure` returns them."""
    table = Table(
        "call", "form", f"ours, {what}", f"torch's, {what}", "ratio", "asked", *([MM] if what == "us" else [])
    )
    for row in found.values():
        theirs = row.get("torch")
        against = ("", "") if theirs is None else (f"{theirs:.1f}", f"{row['ours'] / theirs:.2f}")
        cells = [row["name"], row["form"], f"{row['ours']:.1f}", *against, f"{row['asked']}"]
        table.add_row(*cells, *([f"{row[MM]:.1f}"] if MM in row else []))
    return table


def measure(only: str = "", rounds: int = ROUNDS) -> dict[str, dict]:
    """All rows whose name or form contains `only`, timed on a GPU, or counted without one."""
    on_gpu = torch.cuda.is_available()
    found = {}
    with contextlib.nullcontext() if on_gpu else launches_replaced():
        for case in cases("cuda" if on_gpu else "cpu"):
            name = f"{case.name}, {case.form}"
            if only in name:
                torch.compiler.reset()
                row = timed(case, rounds) if on_gpu else counted(case)
                found[name] = {"name": case.name, "form": case.form, "asked": case.limit, **row}
    return found
