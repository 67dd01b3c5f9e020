"""What sums of 8-bit floats err by, beside their speed: of results in fp32, against fp64."""

import torch

from cute_kernels import gemm

from . import peers_float8 as peers
from .cases import randn
from .peers_float8 import Scaled
from .rows import Row, reason
from .table import grid, make_console

ROWS, COLUMNS = 256, 512


def errors_of_sums() -> dict[str, dict[str, str]]:
    """name of the operands -> name of the sums -> their error, of both kinds of sums, ours and torch's."""
    found = {}
    for K in (1024, 4096, 16384):
        for name, make in (("normal", randn), ("positive", lambda *shape: randn(*shape).abs())):
            x = Scaled(make(ROWS, K), make(COLUMNS, K), "tensor")
            line = found[f"{name} numbers, K {K}"] = {}
            for fast in (False, True):
                kind = "fast" if fast else "promoted"
                out = torch.empty(ROWS, COLUMNS, dtype=torch.float32, device=x.a.device)
                terms = {"scale_a": x.scale_a, "scale_b": x.scale_b, "out": out}
                line[f"ours, {kind}"] = error_of(lambda: gemm(x.a, x.b, use_fast_accum=fast, **terms), x)
                line[f"torch, {'fast' if fast else 'accurate'}"] = error_of(peers.scaled_mm_call(x, fast, out), x)
    return found


def error_of(call, x: Scaled) -> str:
    """The error of the call's result, or why there is none."""
    try:
        rows, exact = x.sample
        return peers.shown(peers.errors(call()[rows], exact))
    except Exception as error:
        return reason(error)


def measure(rows: list[Row], host: dict, only: str) -> dict:
    """The notes of the rows, and errors_of_sums; {} unless all rows, or those called "errors", are asked for."""
    console = make_console()
    if rows:
        table = grid(("row", "ours", "torch"), title="errors of bfloat16 results, of the norm (and of the largest)")
        for row in rows:
            table.add_row(row.name, row.ours.note, *(peer.note or peer.error for peer in row.peers[:1]))
        console.print(table)
    if only not in ("", "errors"):
        return {}
    found = errors_of_sums()
    table = grid(("operands", *next(iter(found.values()))), title="errors of fp32 results")
    for name, line in found.items():
        table.add_row(name, *line.values())
    console.print(table)
    return {"errors": found}
