"""What the training suite finds beside its rows: what a layer holds in memory after a step, and its host cost."""

import functools
import gc
from collections.abc import Callable, Sequence

import torch
from torch import nn

from sparse_collective import bsr_linear, sddmm
from sparse_collective.nn import BsrLinear

from .cases import CUBE, DTYPE, randn
from .checks import Check, show
from .rows import OURS, Row, reason
from .table import make_console

EIGHTH = 1 / 8
DENSE = "nn.Linear"
HELD = 1.05  # at most, over what nn.Linear holds times the density
HOST_US = 3.0  # at most, more than nn.Linear


def held_by(make: Callable[[], nn.Module], tokens: int, device: str, allocated: Callable[[], int]) -> int:
    """Bytes of a layer after a training step: values, gradients, Adam's moments, and what kernels know of the pattern.

    `allocated()` is how many bytes there are in all.
    """
    gc.collect()
    before = allocated()
    with torch.device(device):
        layer = make()
        x = torch.randn(tokens, layer.in_features, dtype=DTYPE, requires_grad=True)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
    x = None
    gc.collect()
    return allocated() - before


def memory(
    size: int = CUBE, tokens: int = CUBE, density: float = EIGHTH, block: tuple[int, int] = (128, 128),
    device: str = "cuda", allocated: Callable[[], int] | None = None,
) -> dict:  # fmt: skip
    """{"density", "bytes": those of a layer size -> size after a step, ours and dense}; or {"error"}."""
    makes = {
        OURS: lambda: BsrLinear(size, size, False, block, density=density, dtype=DTYPE),
        DENSE: lambda: nn.Linear(size, size, bias=False, dtype=DTYPE),
    }
    try:
        for _ in range(2):  # workspaces that all layers share are there the second time
            found = {
                name: held_by(make, tokens, device, allocated or torch.cuda.memory_allocated)
                for name, make in makes.items()
            }
    except Exception as error:
        return {"error": reason(error)}
    return {"density": density, "bytes": found}


def checks(host: dict[str, float], found: dict | None) -> list[Check]:
    """What is asked of the host's cost and of the memory; of what was measured."""
    asked = []
    if found is not None:
        held = found.get("bytes")
        share = held and held[OURS] / (held[DENSE] * found["density"])
        asked.append(Check("values, gradients and Adam's state in memory, over dense times density", share, HELD, True))
    if host:
        ours, dense = host.get("BsrLinear"), host.get("nn.Linear")
        more = None if None in (ours, dense) else ours - dense
        asked.append(Check("host cost of BsrLinear above nn.Linear, µs", more, HOST_US, at_most=True))
    return asked


def measure(rows: Sequence[Row], host: dict[str, float], only: str = "") -> dict:
    """The memory, and the checks, which are printed; as the result file has them."""
    found, console = memory() if only in ("", "memory") else None, make_console()
    if found is not None:
        console.print(f"a layer's memory after a step: {found.get('bytes') or found['error']}")
    asked = checks(host, found)
    show(asked, console)
    return {"memory": found, "checks": [check.as_dict() for check in asked]}


def host_calls() -> dict[str, Callable]:
    """Of which the host's cost is measured: layers and products of 64 x 64 operands, all watched by autograd."""
    side, shape = 64, (64, 64)
    layers = {
        "BsrLinear": BsrLinear(side, side, True, shape, density=1.0, device="cuda", dtype=DTYPE),
        DENSE: nn.Linear(side, side, device="cuda", dtype=DTYPE),
    }
    x, dy, weight = randn(side, side).requires_grad_(), randn(side, side), randn(side, side).requires_grad_()
    A = layers["BsrLinear"].weight
    found = {name: functools.partial(layer, x) for name, layer in layers.items()}
    for name, layer in layers.items():
        found[f"{name}, forward and backward"] = lambda layer=layer: layer(x).backward(dy)
    return found | {
        "bsr_linear": lambda: bsr_linear(x, A),
        "nn.functional.linear": lambda: torch.nn.functional.linear(x, weight),
        "sddmm": functools.partial(sddmm, dy, dy, A, out=torch.empty_like(A.values).detach()),
    }
