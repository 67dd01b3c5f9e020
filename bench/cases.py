"""What is measured against what: each case is one product, its peer, and the ratio that is promised."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from cute_kernels import explain, gemm, path
from sparse_collective import bsr_linear, bsr_matmul, random_bsr

from .timing import interleaved, median

DTYPE = torch.bfloat16
N = 8192


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


@dataclass
class Row:
    """One measured case. `ratio` is the peer's time over ours, or our useful rate over the peer's."""

    name: str
    ours_us: list[float]
    peer: str
    peer_us: list[float]
    ratio: float
    floor: float | None
    tflops: float
    plan: str

    def cells(self) -> list[str]:
        times = f"{median(self.ours_us):.1f}", self.peer, f"{median(self.peer_us):.1f}"
        floor = "" if self.floor is None else f"{self.floor:.2f}{'' if self.ratio >= self.floor else ' MISSED'}"
        return [self.name, *times, f"{self.ratio:.3f}", floor, f"{self.tflops:.0f}", self.plan]

    def line(self) -> str:
        return " | ".join(self.cells())


@dataclass
class Case:
    """`setup` makes (our call, the peer's call, our plan); flops are the useful ones of each."""

    name: str
    setup: Callable
    flops: float
    peer: str
    peer_flops: float
    floor: float | None = None

    def measure(self, rounds: int) -> Row:
        ours, peer, plan = self.setup()
        rounds = max(10, rounds // 4) if self.peer_flops > 5e11 else rounds
        times = interleaved({"peer": peer, "ours": ours}, rounds=rounds)
        us, peer_us = median(times["ours"]), median(times["peer"])
        ratio = (self.flops / us) / (self.peer_flops / peer_us)
        shown = f"{plan.facts.path} {plan.facts.config}" if plan else ""
        return Row(self.name, times["ours"], self.peer, times["peer"], ratio, self.floor, self.flops / us / 1e6, shown)


def dense(M: int, n: int, K: int, layout: str, floor: float | None, forced: str | None = None) -> Case:
    def setup():
        a = randn(M, K)
        b = randn(K, n) if layout == "NN" else randn(n, K).t()
        out, peer_out = (torch.empty(M, n, device="cuda", dtype=DTYPE) for _ in range(2))
        ours = on_path(forced, lambda: gemm(a, b, out=out))
        plan = on_path(forced, lambda: explain(gemm, a, b, out=out))()
        return ours, lambda: torch.mm(a, b, out=peer_out), plan

    flops = 2.0 * M * n * K
    name = f"dense {M}x{n}x{K} {layout}" + (f", {forced} path" if forced else "")
    return Case(name, setup, flops, "cuBLAS", flops, floor)


def on_path(forced: str | None, call: Callable) -> Callable:
    """The call under cute_kernels.path(forced)."""
    if forced is None:
        return call

    def wrapped():
        with path(forced):
            return call()

    return wrapped


def sparse(
    bm: int, bk: int, K: int, per_row: int, floor: float | None, op: str = "bsr_matmul", peer: str = "equal",
    forced: str | None = None,
) -> Case:  # fmt: skip
    """M = N = 8192. Peer "equal": cuBLAS's dense product of the same useful work; "dense": the whole 8192 cube."""
    M, work = 8192, per_row * bk
    depth = work if peer == "equal" else 8192

    def setup():
        W = random_bsr((M, K), (bm, bk), per_row=per_row, device="cuda", dtype=DTYPE)
        a, b, peer_out = randn(M, depth), randn(depth, N), torch.empty(M, N, device="cuda", dtype=DTYPE)
        out = torch.empty(M, N, device="cuda", dtype=DTYPE)
        other = randn(K, N)
        fn, args = (bsr_matmul, (W, other)) if op == "bsr_matmul" else (bsr_linear, (other.t().contiguous(), W))
        ours = on_path(forced, lambda: fn(*args, out=out))
        return ours, lambda: torch.mm(a, b, out=peer_out), on_path(forced, lambda: explain(fn, *args, out=out))()

    density = per_row * bk / K
    name = f"{op} {bm}x{bk}, {density:.1%}" + (f", {forced} path" if forced else "")
    return Case(name, setup, 2.0 * M * N * work, f"cuBLAS K={depth}", 2.0 * M * N * depth, floor)


def all_cases() -> Iterator[Case]:
    """The numbers of the README, with the floors they are held to."""
    for layout in ("NN", "NT"):
        yield dense(4096, 4096, 4096, layout, 0.95)
        yield dense(8192, 8192, 8192, layout, 0.95)
        yield dense(8192, 8192, 1024, layout, 1.05)
    for op in ("bsr_matmul", "bsr_linear"):
        yield sparse(128, 128, 8192, 8, 1.0, op)
        yield sparse(128, 64, 8192, 16, 1.0, op)
        yield sparse(256, 64, 8192, 16, 1.0, op)
        yield sparse(64, 64, 8192, 16, 0.7, op)
        yield sparse(512, 112, 8288, 16, 0.8, op, peer="dense")
    yield sparse(32, 32, 8192, 32, None)
    yield sparse(16, 16, 8192, 64, None)
    yield dense(4096, 4096, 4096, "NN", 0.55, "sm_80")
    yield dense(4096, 4096, 4096, "NT", 0.55, "sm_80")
    yield sparse(512, 112, 8288, 16, 0.55, peer="dense", forced="sm_80")
    yield sparse(128, 128, 8192, 8, None, forced="sm_80")
