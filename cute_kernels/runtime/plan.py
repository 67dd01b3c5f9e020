"""From an op's tensors to the kernel that will run: made once per metadata, then a dictionary look-up.

A `Plan` depends on shapes, strides, dtypes, devices and 16-byte alignments, never on contents or addresses. It holds
the compiled function and everything that its call needs besides the tensors.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .. import candidates, heuristics, tuned
from ..arch import ARCHS, PATHS, ArchSpec, arch_of
from ..config import BlockFacts, EpilogueSpec, GemmConfig, GemmFacts
from ..legality import unsupported
from ..operand import Layout

_FORCED: contextvars.ContextVar[str | None] = contextvars.ContextVar("cute_kernels_path", default=None)
forced_path = _FORCED.get


@contextlib.contextmanager
def path(name: str):
    """Force a family of kernels inside the block: "sm_80" (mma.sync, cp.async) or "sm_90" (WGMMA, TMA).

    The sm_80 kernels run on newer GPUs too, compiled for them. A call that the named path cannot serve raises.
    """
    if name not in PATHS:
        raise ValueError(f"unknown path {name!r}; there are {', '.join(PATHS)}")
    token = _FORCED.set(name)
    try:
        yield
    finally:
        _FORCED.reset(token)


@dataclass
class Plan:
    """What a call runs. `function` is None where a torch reference serves it: CPU tensors and empty results."""

    op: str
    out_shape: tuple
    out_dtype: torch.dtype
    device: torch.device
    function: Callable | None = None
    group: int = 1
    max_ctas: int = 1
    facts: GemmFacts | None = None
    notes: list[str] = field(default_factory=list)
    views: tuple = ()  # per tensor of the call: None, or a function that re-views it for the kernel
    empty: bool = False
    staged: bool = False  # whether the kernel writes a contiguous result, which is then copied to out
    uneven_ctas: int = 1  # max_ctas of a sparse product whose rows differ in length
    swept: tuple = ()  # for the sweep kernel: arguments of BsrMatrix.sweep_plan
    paired: bool = False  # for the kernel over pairs of block rows
    tiles: tuple = ()  # of a sparse product: balance.Tiles
    ordered: tuple | None = None  # its function with an order of work tiles, tiles and CTAs, once it was needed
    spans: tuple = (0, 0, 0)  # bytes of the two operands and of out, 0 where they have gaps

    def __str__(self) -> str:
        lines = [f"{self.op} -> {tuple(self.out_shape)} {self.out_dtype} on {self.device}"]
        if self.empty:
            lines.append("kernel: none, the result is empty")
        elif self.facts is None:
            lines.append("kernel: none, CPU tensors run the torch reference")
        else:
            f = self.facts
            lines.append(f"path: {f.path}, compiled for {f.arch}")
            lines.append(f"configuration: {f.config}, raster panels of {self.group}")
            lines.append(f"operands: {f.dtype} -> {f.out_dtype}, majors {f.majors}, alignments {f.aligns} elements")
            if f.block:
                steps = "" if f.config.few else f", MMA steps a K-tile {f.k_blocks}"
                lines.append(f"blocks: {f.block.bm}x{f.block.bk}{steps}")
                if f.block.batch:
                    runs = f", grouped in runs of {f.block.run} rows" if f.block.run else ""
                    lines.append(f"batch: {'one pattern' if f.block.batch == 'values' else 'a pattern an item'}{runs}")
        return "\n  ".join(lines + self.notes)


@dataclass(frozen=True)
class Problem:
    """A product as the kernels see it: extents, operand layouts (A, B, D) and what is fused."""

    extents: heuristics.Extents
    dtype: str
    out_dtype: str
    layouts: tuple[Layout, Layout, Layout]
    majors: tuple[str, str, str]
    ranks: tuple[int, int, int]
    epilogue: EpilogueSpec
    block: BlockFacts | None = None
    transposed: bool = False
    kept: float = 1.0
    shares: heuristics.Shares = heuristics.NOT_KNOWN  # of a sparse operand


@functools.cache
def device_arch(index: int) -> tuple[ArchSpec, int, str]:
    """(architecture, multiprocessors, name) of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    return arch_of((properties.major, properties.minor)), properties.multi_processor_count, properties.name


def choose(
    problem: Problem, spec: ArchSpec, sms: int, forced: str | None, card: str = ""
) -> tuple[GemmFacts, int, int, list[str]]:
    """The kernel for a problem: facts, raster group, most CTAs, and notes on why.

    Unforced, an architecture's own path comes first; Hopper falls back on sm_80's kernels, with the reason noted. On
    a path that serves the problem, what was measured on `card` (see tuned) goes before the heuristics; "" is no card.
    """
    notes = []
    order = [forced] if forced else ["sm_90", "sm_80"] if spec.path == "sm_90" else ["sm_80"]
    for name in order:
        reasons, best = [], None
        for config in candidates_for(name, problem, spec):
            facts = facts_for(problem, name, spec, config)
            if reason := unsupported(facts):
                reasons.append(reason)
                continue
            light = problem.epilogue.is_light
            shape = problem.extents, problem.block, problem.kept
            pattern = {"shares": problem.shares, "b_k_major": problem.majors[1] == "k"}
            clocks = heuristics.cost(config, *shape, sms, light, **pattern)
            if best is None or clocks < best[0]:
                best = (clocks, facts)
        if best:
            facts = best[1]
            if facts.warp_specialised and not facts.tma_store:
                notes.append(
                    "store: element by element, since D's address, strides or contiguous extent are not multiples of "
                    "16 bytes"
                )
            if pick := tuned_pick(card, name, problem, spec, sms, notes):
                return facts_for(problem, name, spec, pick.config), pick.group, pick.ctas, notes
            group = heuristics.raster_group(facts.config, problem.extents, problem.block)
            ctas = heuristics.grid_limit(facts.config, problem.extents, problem.block, group, sms)
            return facts, group, ctas, notes
        notes.append(f"not on path {name}: {reasons[0]}")
    raise ValueError("no kernel serves this call: " + "; ".join(notes))


def tuned_pick(
    card: str, name: str, problem: Problem, spec: ArchSpec, sms: int, notes: list[str]
) -> tuned.TunedPick | None:
    """The pick of a tuned table that this device can run; `notes` say what was found, used or not."""

    def refuse(pick: tuned.TunedPick) -> str:
        cluster = pick.config.cluster
        if not cluster <= pick.ctas <= sms:
            return f"{pick.ctas} CTAs, of {sms} multiprocessors and in clusters of {cluster}"
        return unsupported(facts_for(problem, name, spec, pick.config))

    pick = tuned.lookup(card, name, problem, refuse, notes)
    if pick:
        notes.append(f"tuned: {pick.us:.1f} µs against the heuristic's {pick.heuristic_us:.1f} on {card}, {pick.date}")
    return pick


def candidates_for(name: str, problem: Problem, spec: ArchSpec) -> list[GemmConfig]:
    if name == "sm_90":
        return candidates.candidates_sm90(problem.block, ARCHS["sm_90"])
    return candidates.candidates_sm80(problem.block, spec)


def store_align(d: Layout, out_dtype: str) -> int:
    """GemmFacts' alignment of D on the sm_90 path: 16 bytes, in elements, where it may be stored by TMA, else 1.

    TMA writes whole granules of 16 bytes. Where the contiguous extent ends inside of one, what lies behind each row (a
    neighbour's columns, where D is a slice) would be overwritten: so the extent must be a multiple of them too.
    """
    granule = 16 // (4 if out_dtype == "float32" else 2)
    return d.vector if d.vector % granule == 0 else 1


def facts_for(problem: Problem, name: str, spec: ArchSpec, config: GemmConfig) -> GemmFacts:
    a, b, d = problem.layouts
    if name == "sm_90":  # TMA's loads clip a contiguous extent of any length
        aligns = a.align, b.align, store_align(d, problem.out_dtype)
    else:  # cp.async copies whole vectors, so the extent counts too
        aligns = a.vector, b.vector, d.vector
    if problem.block:
        aligns = (8, *aligns[1:])
    return GemmFacts(
        arch=spec.target,
        path=name,
        config=config,
        dtype=problem.dtype,
        out_dtype=problem.out_dtype,
        majors=problem.majors,
        aligns=aligns,
        ranks=problem.ranks,
        transposed=problem.transposed,
        block=problem.block,
        epilogue=problem.epilogue,
    )
