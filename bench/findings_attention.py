"""What the attention suite finds beside its rows: checks over several of them, host costs, errors against fp64."""

import statistics
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as nnf

from . import peers_attention as peers
from .cases_attention import EIGHTH, FORWARD, HELD, OUR_DENSE, OUR_KEPT, dense_problem, named, operands, ours_of
from .checks import Check, show
from .peers_attention import FA4, FLASH
from .rows import OURS, Row, reason
from .table import grid, make_console

HELD_SHARE = 0.97  # asked of a mask that users hold: it was converted by the first call
HOST_US = 8.0  # asked of an eager call into a given output
TINY = (1, 64, 1, 64)  # (B, S, H, D) of it; D64 without a mask is compiled for other rows too
ERRORS = (((1, 4096, 8, 128), False), ((1, 4096, 8, 64), True), ((1, 4096, 4, 256), True))  # (B, S, H, D), causal
# Over theirs. What is compared is mostly one rounding of the output, the same for all; the largest error is that of a
# single element.
RMS, LARGEST = 1.01, 1.1


def checks(rows: Sequence[Row], host: dict[str, float], errors: Sequence[dict]) -> list[Check]:
    """What is asked of the rows together, of the host's cost and of the errors; of what was measured."""
    found = []
    if forward := [row.ratio for row in rows if row.name.startswith(FORWARD)]:
        mean, worst = (None, None) if None in forward else (statistics.geometric_mean(forward), min(forward))
        found += [Check(f"forward, geometric mean of {len(forward)}", mean, 1.0), Check("forward, worst", worst, 0.93)]
    for row in rows:
        for of_row, name, what, asked in (
            (row.name == EIGHTH, OUR_DENSE, "useful rate over our own dense one", 0.92),
            (row.name.endswith(tuple(HELD)), OUR_KEPT, "rate over that of a kept BlockMask", HELD_SHARE),
        ):
            if of_row:
                other = row.peer(name)
                share = None if other is None or row.ours.error else row.ours.tflops / other.tflops
                found.append(Check(f"{row.name}: {what}", share, asked))
    if host:
        found.append(Check("host cost of a call, µs", host.get("attention"), HOST_US, at_most=True))
    for entry in errors:
        ours, *theirs = (entry["errors"].get(name, {}) for name in (OURS, FLASH, FA4))
        theirs = [e for e in theirs if "rms" in e]
        known = "rms" in ours and theirs
        rms = ours["rms"] / min(e["rms"] for e in theirs) if known else None
        largest = ours["max"] / max(e["max"] for e in theirs) if known else None
        found.append(Check(f"rms error over the least of theirs, {entry['shape']}", rms, RMS, at_most=True))
        found.append(Check(f"largest error over the largest of theirs, {entry['shape']}", largest, LARGEST, True))
    return found


def host_calls() -> dict[str, Callable]:
    """Of which the host's cost is measured."""
    from attention import attention

    x = operands(dense_problem(TINY))
    q, k, v = x.heads_first
    out, one = x.out().transpose(1, 2), q.new_zeros(64, 64)
    sum_ = torch.empty_like(one)
    return {
        "attention": lambda: attention(q, k, v, out=out),
        "attention, output allocated": lambda: attention(q, k, v),
        "torch SDPA": lambda: nnf.scaled_dot_product_attention(q, k, v),
        "torch.add": lambda: torch.add(one, one, out=sum_),
    }


def errors(cases: Sequence, device: str = "cuda") -> list[dict]:
    """Largest and root mean square error against fp64 of ours, FlashAttention 2 and 4, of the same tensors.

    Ours of all cases comes first, since FA4's import changes CuTe DSL, with which ours may have to be compiled.
    """
    of_case = [operands(dense_problem(shape, causal), device=device) for shape, causal in cases]
    found = [{"shape": named(*case), "rms": None, "errors": {}} for case in cases]
    makes = {
        OURS: lambda x: ours_of(x)[0],
        FLASH: lambda x: peers.sdpa_flash(x, 1.0).setup(),
        FA4: lambda x: peers.fa4(x, 1.0).setup(),
    }
    for name, make in makes.items():
        for x, entry in zip(of_case, found, strict=True):
            exact = x.exact()
            entry["rms"] = exact.square().mean().sqrt().item()
            try:
                wrong = make(x)().double() - exact
                entry["errors"][name] = {"max": wrong.abs().max().item(), "rms": wrong.square().mean().sqrt().item()}
            except Exception as error:
                entry["errors"][name] = {"error": reason(error)}
    return found


def measure(rows: Sequence[Row], host: dict[str, float], only: str = "") -> dict:
    """The errors, and the checks of what was measured, both printed; as the result file has them."""
    wrong = errors(ERRORS) if only in ("", "errors") else []
    found, console = checks(rows, host, wrong), make_console()
    if wrong:
        table = grid(["shape", *wrong[0]["errors"]], title="Error against fp64: largest, root mean square")
        for entry in wrong:
            cells = (e.get("error") or f"{e['max']:.2e}, {e['rms']:.3e}" for e in entry["errors"].values())
            table.add_row(entry["shape"], *cells)
        console.print(table)
    show(found, console)
    return {"errors": wrong, "checks": [check.as_dict() for check in found]}
