"""What is measured against what: each case is one product, its peers, and the ratio that is asked of it."""

import functools
from collections.abc import Callable, Iterator

import torch

from cute_kernels import explain, gemm
from sparse_collective import BsrMatrix, bsr_grouped_linear, bsr_linear, bsr_matmul, random_bsr

from . import patterns, peers
from .peers import CUBLAS, CUBLAS_FP32, CUBLAS_TF32, CUBLASLT, Call, Operands, own_call, verified
from .rows import Candidate, Case, Problem

DTYPE = torch.bfloat16
CUBE = 8192
DENSE_CUBE = f"cuBLAS {CUBE} cubed"
EQUAL = "cuBLAS, equal work"
COPY = "copy of as many bytes"
LOOP = "a loop over the experts"
FP32_SUMS = "ours, fp32 sums"
FP16_SUMS_TOLERANCE = 0.03  # 0.005 in norm and 0.01 at most at K 8192, if a card rounds to nearest
TF32_TOLERANCE = {"tf32": 0.01, "3xtf32": 2e-4}  # tensor cores may cut sums off, at K 8192 by some 1e-5
SQUARES = (512, 1024, 2048, 4096, 8192)
PROJECTIONS = ((4096, 4096), (14336, 4096), (4096, 14336))  # (N, K) of a transformer 4096 wide
TOKENS = (128, 2048, 8192)
DENSITIES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)


def randn(*shape: int, dtype=DTYPE) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def of_rows(M: int, K: int, block: tuple[int, int], per_row: int) -> BsrMatrix:
    """Equally many random blocks in every row."""
    return random_bsr((M, K), block, per_row=per_row, device="cuda", dtype=DTYPE)


def product(x: Operands, op: Callable, **terms) -> tuple:
    """(call, plan) of ours."""
    if op is bsr_linear:
        return own_call(x, op, x.b.t(), x.a, out=x.out().t(), **terms)
    return own_call(x, op, x.a, x.b, out=x.out(), **terms)


# -- dense ---------------------------------------------------------------------------------------------------


def dense(
    M: int, N: int, K: int, layout: str = "NN", asked: float | None = None, *, forced: str | None = None,
    dtype=DTYPE, quack: bool = False,
) -> Case:  # fmt: skip
    """gemm(a, b) beside torch.mm, and quack where asked for."""
    problem = Problem("gemm", M, N, K, layout=layout, dtype=str(dtype).removeprefix("torch."), path=forced)
    b = functools.partial(randn, *((K, N) if layout == "NN" else (N, K)), dtype=dtype)
    x = Operands(lambda: randn(M, K, dtype=dtype), lambda: b() if layout == "NN" else b().t())
    others = [make(x, problem.flops) for make in (peers.cublas, peers.quack_gemm)[: 1 + quack]]
    name = f"gemm {M}x{N}x{K} {layout}" + ("" if dtype is DTYPE else " fp16") + (f", {forced} path" if forced else "")
    return Case("gemm", name, problem, lambda: product(x, gemm, forced=forced), others, CUBLAS, asked, quack)


def fp16_sums(M: int, N: int, K: int, layout: str = "NN", asked: float | None = None) -> Case:
    """gemm(a, b, accumulation_dtype=torch.float16) beside the same with fp32 sums, and cuBLAS's with fp16 ones."""
    half = torch.float16
    problem = Problem("gemm", M, N, K, layout=layout, dtype="float16", epilogue="fp16 sums")
    x = Operands(
        lambda: randn(M, K, dtype=half),
        lambda: randn(K, N, dtype=half) if layout == "NN" else randn(N, K, dtype=half).t(),
    )
    x.tolerance = FP16_SUMS_TOLERANCE
    wide = Candidate(FP32_SUMS, problem.flops, lambda: product(x, gemm)[0])
    name = f"gemm {M}x{N}x{K} {layout} fp16, fp16 sums"

    def ours() -> tuple:
        return product(x, gemm, accumulation_dtype=half)

    return Case("gemm", name, problem, ours, [wide, peers.cublas_fp16_sums(x, problem.flops)], FP32_SUMS, asked)


def tf32(M: int, N: int, K: int, layout: str = "NN", precision: str = "tf32", asked: float | None = None) -> Case:
    """gemm(a, b, precision=) of fp32 operands beside torch.mm: of TF32 with it, of three such products without."""
    problem = Problem("gemm", M, N, K, layout=layout, dtype="float32", epilogue=precision)
    x = Operands(
        lambda: randn(M, K, dtype=torch.float32),
        lambda: randn(K, N, dtype=torch.float32) if layout == "NN" else randn(N, K, dtype=torch.float32).t(),
    )
    x.tolerance = TF32_TOLERANCE[precision]
    peer, against = (peers.cublas_tf32, CUBLAS_TF32) if precision == "tf32" else (peers.cublas_fp32, CUBLAS_FP32)

    def ours() -> tuple:
        return product(x, gemm, precision=precision)

    name = f"gemm {M}x{N}x{K} {layout} fp32, {precision}"
    return Case("gemm", name, problem, ours, [peer(x, problem.flops)], against, asked)


def epilogue(M: int, N: int, K: int, activation: str | None, asked: float | None = None) -> Case:
    """A linear layer's forward: bias and activation, b the transpose of a contiguous weight, beside cuBLASLt's own."""
    problem = Problem("gemm", M, N, K, layout="NT", epilogue="bias" + (f"+{activation}" if activation else ""))
    x = Operands(lambda: randn(M, K), lambda: randn(N, K).t(), lambda: randn(N), activation)
    name, others = f"gemm {M}x{N}x{K} NT, {problem.epilogue}", [peers.cublaslt_epilogue(x, problem.flops)]

    def ours():
        return product(x, gemm, bias=x.bias, activation=activation)

    return Case("gemm", name, problem, ours, others, CUBLASLT, asked)


def gemm_cases(mode: str) -> Iterator[Case]:
    """Dense rows; "quick" has those with a number asked of them."""
    yield dense(4096, 4096, 4096, "NN", 0.95)
    yield dense(4096, 4096, 4096, "NT", 0.95, quack=True)
    yield dense(8192, 8192, 8192, "NN", 0.95)
    yield dense(8192, 8192, 8192, "NT", 0.95)
    yield dense(8192, 8192, 1024, "NN", 1.05)
    yield epilogue(8192, 8192, 1024, "gelu_tanh")
    yield dense(4096, 4096, 4096, "NN", 0.55, forced="sm_80")
    if mode == "quick":
        return
    for size in SQUARES:
        for layout in ("NN", "NT"):
            if size < 4096:
                yield dense(size, size, size, layout, quack=layout == "NT")
    yield dense(4096, 4096, 4096, "NN", dtype=torch.float16)
    yield dense(8192, 8192, 8192, "NN", dtype=torch.float16)
    for size in (4096, 8192):
        for layout in ("NN", "NT"):
            yield fp16_sums(size, size, size, layout)
            for precision in TF32_TOLERANCE:
                yield tf32(size, size, size, layout, precision)
    for tokens in TOKENS:
        for N, K in PROJECTIONS:
            yield dense(tokens, N, K, "NT")
    for activation in (None, "relu", "gelu_tanh"):
        yield epilogue(8192, 14336, 4096, activation)
    yield dense(8192, 8192, 8192, "NN", 0.55, forced="sm_80")
    yield dense(4096, 4096, 4096, "NT", 0.55, forced="sm_80")


# -- block-sparse --------------------------------------------------------------------------------------------


def sparse(
    bm: int, bk: int, density: float, asked: float | None = None, *, K: int = CUBE, op: str = "bsr_matmul",
    against: str = EQUAL, forced: str | None = None, triton: str = "", cube: bool = True, pattern: str = "uniform",
) -> Case:  # fmt: skip
    """W (8192, K) with equally many random blocks in every row, beside dense products, and torch's of the same W.

    `pattern` is another than that, of patterns.PATTERNS; of equal work is then the uniform one's useful work.
    `triton` says how many settings of torch's Triton kernel are tried ("quick", "full", "" for no such row), `cube`
    whether cuBLAS's dense product of the 8192 cube is a peer.
    """
    M = N = CUBE
    per_row = max(1, round(density * K / bk))
    work = per_row * bk
    linear = op == "bsr_linear"
    mask = None if pattern == "uniform" else patterns.PATTERNS[pattern](M // bm, K // bk, density)
    kept = work / K if mask is None else mask.sum().item() / mask.numel()
    problem = Problem(op, M, N, K, (bm, bk), kept, path=forced, pattern=pattern)
    x = Operands(
        lambda: of_rows(M, K, (bm, bk), per_row) if mask is None else patterns.matrix(mask, (bm, bk), DTYPE),
        lambda: randn(N, K).t() if linear else randn(K, N),
        transposed=linear,
    )

    def with_dense(depth: int, name: str) -> Candidate:
        return peers.cublas(Operands(lambda: randn(M, depth), lambda: randn(depth, N)), 2.0 * M * N * depth, name)

    others = [with_dense(work, EQUAL)] + ([with_dense(CUBE, DENSE_CUBE)] if cube else [])
    if triton:
        others.append(peers.triton_bsr(x, problem.flops, quick=triton == "quick"))
    name = f"{op} {bm}x{bk}, {work / K:.3g}" + (f", {forced} path" if forced else "")
    name += "" if mask is None else f", {pattern}"
    ours = functools.partial(product, x, bsr_linear if linear else bsr_matmul, forced=forced)
    return Case("block-sparse", name, problem, ours, others, against, asked)


def skinny(tokens: int, size: int, bm: int, bk: int, density: float, asked: float | None = 0.75) -> Case:
    """bsr_linear of a few tokens, limited by the bytes of the kept blocks, beside a copy that moves as many."""
    per_row = round(density * size / bk)
    problem = Problem("bsr_linear", size, tokens, size, (bm, bk), per_row * bk / size)
    x = Operands(lambda: of_rows(size, size, (bm, bk), per_row), lambda: randn(tokens, size).t(), transposed=True)

    def copy():
        half = x.a.values.flatten()[: x.a.values.numel() // 2]  # each byte is read and written
        to = torch.empty_like(half)
        return Call(lambda: to.copy_(half))

    name = f"bsr_linear {bm}x{bk}, {density:.3g}, {tokens} tokens, {size} squared"
    others = [Candidate(COPY, problem.flops, copy)]
    return Case("block-sparse", name, problem, lambda: product(x, bsr_linear), others, COPY, asked)


def grouped(
    tokens: int, K: int, M: int, block: tuple[int, int], density: float, experts: int = 8, run: int = 128,
    device: str = "cuda",
) -> Case:  # fmt: skip
    """bsr_grouped_linear, tokens shared equally, beside a loop over the experts and torch's dense grouped product."""
    per_row, share = round(density * K / block[1]), tokens // experts
    problem = Problem("bsr_grouped_linear", M, tokens, K, block, per_row * block[1] / K, items=experts)

    @functools.cache
    def operands() -> tuple:
        """(W of each expert, x)"""
        items = [random_bsr((M, K), block, per_row=per_row, device=device, dtype=DTYPE) for _ in range(experts)]
        return items, torch.randn(tokens, K, device=device, dtype=DTYPE)

    @functools.cache
    def sample() -> tuple:
        """(rows of the result to compare, what they must be)"""
        items, x = operands()
        rows = torch.linspace(0, tokens - 1, min(tokens, 8 * experts), dtype=torch.float64).long()
        must = [x[row].float() @ items[row // share].to_dense().float().t() for row in rows.tolist()]
        return rows.to(device), torch.stack(must)

    def ours():
        items, x = operands()
        W, out = BsrMatrix.stack(items), x.new_empty(tokens, M)
        groups = torch.arange(experts, dtype=torch.int32, device=device).repeat_interleave(share // run)
        call = Call(lambda: bsr_grouped_linear(x, W, expert_ids=groups, out=out))
        return verified(call, sample), explain(bsr_grouped_linear, x, W, expert_ids=groups, out=out)

    def loop():
        items, x = operands()
        out = x.new_empty(tokens, M)
        parts = list(zip(x.split(share), items, out.split(share), strict=True))

        def call():
            for of_expert, W, to in parts:
                bsr_linear(of_expert, W, out=to)
            return out

        return verified(Call(call), sample)

    def dense():
        items, x = operands()
        weights = torch.stack([W.to_dense() for W in items])
        ends = torch.arange(share, tokens + 1, share, dtype=torch.int32, device=device)
        return verified(Call(lambda: torch._grouped_mm(x, weights.mT, offs=ends)), sample)

    others = [Candidate(LOOP, problem.flops, loop), Candidate("torch grouped_mm, dense", 2.0 * tokens * K * M, dense)]
    name = f"bsr_grouped_linear {block[0]}x{block[1]}, {problem.density:.3g}, {experts} experts, runs of {run}"
    return Case("block-sparse", name, problem, ours, others, LOOP)


def sparse_cases(mode: str) -> Iterator[Case]:
    """Block-sparse rows: M = N = 8192."""
    full = mode == "full"
    eighth = 1 / 8
    yield sparse(128, 128, eighth, 1.0, triton=mode)
    yield sparse(128, 64, eighth, 1.0)
    yield sparse(256, 64, eighth, 1.0)
    yield sparse(64, 64, eighth, 0.7, triton=mode)
    yield sparse(32, 32, eighth, triton=mode)
    yield sparse(16, 16, eighth, triton=mode)
    yield sparse(512, 112, 16 / 74, 0.8, K=8288, against=DENSE_CUBE)
    yield sparse(128, 128, eighth, 1.0, op="bsr_linear")
    yield sparse(512, 112, 16 / 74, 0.55, K=8288, against=DENSE_CUBE, forced="sm_80")
    if not full:
        return
    for block in ((128, 64), (256, 64), (64, 64)):
        yield sparse(*block, eighth, 0.7 if block == (64, 64) else 1.0, op="bsr_linear")
    yield sparse(512, 112, 16 / 74, 0.8, K=8288, op="bsr_linear", against=DENSE_CUBE)
    yield sparse(64, 128, eighth, triton=mode)
    yield sparse(256, 128, eighth)
    yield sparse(32, 64, eighth, triton=mode)
    yield sparse(128, 128, eighth, forced="sm_80")
    for block in ((128, 128), (64, 64), (16, 16)):
        for pattern in patterns.PATTERNS:
            yield sparse(*block, eighth, against=DENSE_CUBE, pattern=pattern)
    for tokens in (1, 8, 32, 64):
        for block in ((64, 64), (128, 128)):
            yield skinny(tokens, 16384, *block, 1 / 4)
    yield skinny(1, 8192, 128, 128, eighth)
    yield grouped(8192, 4096, 14336, (128, 128), eighth)
    yield grouped(8192, 4096, 14336, (128, 128), eighth, run=256)
    for block in ((128, 128), (64, 64), (32, 32), (16, 16)):
        for density in DENSITIES:
            if density != eighth:
                yield sparse(*block, density, triton=mode if density in (1 / 4, 1 / 2) else "")


def gate_cases() -> Iterator[Case]:
    """The rows that the speed gate watches: one for each kernel that must not get slower, one peer each."""
    yield dense(4096, 4096, 4096, "NN")
    yield dense(8192, 8192, 1024, "NN")
    yield epilogue(8192, 8192, 1024, "gelu_tanh")
    yield dense(4096, 4096, 4096, "NN", forced="sm_80")
    for block in ((128, 128), (256, 64), (64, 64), (32, 32), (16, 16)):
        yield sparse(*block, 1 / 8, cube=False)
    yield sparse(128, 128, 1 / 8, op="bsr_linear", cube=False)
    yield sparse(512, 112, 16 / 74, K=8288, cube=False)
    yield sparse(512, 112, 16 / 74, K=8288, cube=False, forced="sm_80")
