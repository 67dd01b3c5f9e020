"""What is tuned: a product of contiguous tensors in one line of text, and as the planner sees it.

    gemm 4096x4096x4096 NT bf16                 M x N x K; A and B are row-major (N) or transposes of row-major (T)
    bsr_matmul 8192x8192x8192 128x128 12.5%     W (M, K) in blocks, the share of blocks kept; b (K, N)
    bsr_linear 8192x8192x8288 512x112 16/74     W (M, K), x (N, K)

Two words may follow: bf16, fp16 or operands>output as in bf16>fp32; then terms of an epilogue joined by +: bias,
residual, relu, gelu, gelu_tanh, silu.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from cute_kernels.functions import ACTIVATIONS
from cute_kernels.matmul.config import BlockFacts, EpilogueSpec
from cute_kernels.matmul.problem import Extents, Problem
from cute_kernels.operand import Layout, layout_of, major

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ALIGNED = 256  # an address as torch's allocator gives it
FORM = re.compile(
    r"(?P<op>gemm|bsr_matmul|bsr_linear) (?P<shape>\d+x\d+x\d+)"
    r"( (?P<layout>[NT]{2}))?( (?P<block>\d+x\d+) (?P<density>[\d.]+%|\d+/\d+))?"
    r"( (?P<dtype>bf16|fp16)(>(?P<out>bf16|fp16|fp32))?)?( (?P<terms>[a-z_+]+))?"
)


@dataclass(frozen=True)
class TuneProblem:
    """`text` says all the rest. `per_row` of the K / bk blocks of each block row are kept."""

    text: str
    op: str
    M: int
    N: int
    K: int
    layout: str
    block: tuple[int, int] | None
    per_row: int
    dtype: str
    out: str
    terms: str

    @property
    def kept(self) -> float:
        """The share of A's blocks that are stored."""
        return self.per_row * self.block[1] / self.K if self.block else 1.0

    def as_planned(self) -> Problem:
        """The problem as `runtime.plan.choose` takes it; no tensor is made."""

        def matrix(rows: int, cols: int, transposed: bool = False, itemsize: int = 2) -> Layout:
            return layout_of((rows, cols), (1, rows) if transposed else (cols, 1), ALIGNED, itemsize)

        linear = self.op == "bsr_linear"
        size = 4 if self.out == "fp32" else 2
        a = Layout("row", 8, 8) if self.block else matrix(self.M, self.K, self.layout[0] == "T")
        b = matrix(self.N, self.K) if linear else matrix(self.K, self.N, self.layout[1] == "T")
        d = matrix(self.N, self.M, itemsize=size) if linear else matrix(self.M, self.N, itemsize=size)
        b_modes, d_modes = (("n", "k"), ("n", "m")) if linear else (("k", "n"), ("m", "n"))
        terms = self.terms.split("+")
        epilogue = EpilogueSpec(
            bias=("row" if linear else "col") if "bias" in terms else None,
            bias_dtype=DTYPES[self.dtype] if "bias" in terms else None,
            residual=major(d, d_modes) if "residual" in terms else None,
            activation=next((term for term in terms if term in ACTIVATIONS), None),
        )
        return Problem(
            Extents(self.M, self.N, self.K),
            DTYPES[self.dtype],
            DTYPES[self.out],
            (a, b, d),
            (major(a, ("m", "k")), major(b, b_modes), major(d, d_modes)),
            (3 if self.block else 2, 2, 2),
            epilogue,
            BlockFacts(*self.block, "int32") if self.block else None,
            linear,
            density=self.kept,
        )


def parse(text: str) -> TuneProblem:
    """The problem that `text` names; ValueError says what is wrong with it."""
    text = " ".join(text.split())
    found = FORM.fullmatch(text)
    if not found:
        raise ValueError(f"problem {text!r} is not OP MxNxK [LAYOUT] [BLOCK DENSITY] [DTYPE] [TERMS]; see --help")
    op, M, N, K = found["op"], *map(int, found["shape"].split("x"))
    block = tuple(map(int, found["block"].split("x"))) if found["block"] else None
    terms, known = found["terms"].split("+") if found["terms"] else [], ("bias", "residual", *ACTIVATIONS)
    unknown, share = sorted(set(terms) - set(known)), share_of(found["density"] or "1/1")
    zero = min(M, N, K, *(block or ())) < 1
    wrong = {
        "an extent is zero": zero,
        "bsr_matmul and bsr_linear take a block shape and a density, gemm neither": (op == "gemm") == bool(block),
        "only gemm has a layout": op != "gemm" and found["layout"],
        f"{', '.join(unknown)} is no epilogue term ({', '.join(known)})": unknown,
        "each term may be given once": len(set(terms)) < len(terms),
        "one activation may be given once": len(set(terms) & ACTIVATIONS.keys()) > 1,
        "bsr_linear has no residual": op == "bsr_linear" and "residual" in terms,
        f"blocks of {found['block']} do not divide {M}x{K}": block and not zero and (M % block[0] or K % block[1]),
        f"{found['density']} is no density, which is above 0 and at most 100%": not 0 < share <= 1,
    }
    if reason := next((reason for reason, is_so in wrong.items() if is_so), ""):
        raise ValueError(f"problem {text!r}: {reason}")
    dtype = found["dtype"] or "bf16"
    return TuneProblem(
        text=text, op=op, M=M, N=N, K=K, layout=found["layout"] or "NN", block=block,
        per_row=max(1, round(share * (K // block[1]))) if block else 0, dtype=dtype, out=found["out"] or dtype,
        terms=found["terms"] or "",
    )  # fmt: skip


def share_of(density: str) -> Fraction:
    """Of "12.5%" or "16/74"; 0 of what is no number."""
    try:
        return Fraction(density[:-1]) / 100 if density.endswith("%") else Fraction(density)
    except (ValueError, ZeroDivisionError):
        return Fraction(0)


# The rows of the README, and layers of transformers: 8192 tokens, Llama 3 8B and 70B, and decoding steps of 64 and 128.
STANDARD = (
    "gemm 4096x4096x4096 NN bf16",
    "gemm 4096x4096x4096 NT bf16",
    "gemm 8192x8192x8192 NN bf16",
    "gemm 8192x8192x1024 NN bf16",
    "bsr_matmul 8192x8192x8192 128x128 12.5%",
    "bsr_matmul 8192x8192x8192 128x64 12.5%",
    "bsr_matmul 8192x8192x8192 256x64 12.5%",
    "bsr_matmul 8192x8192x8192 64x64 12.5%",
    "bsr_matmul 8192x8192x8192 32x32 12.5%",
    "bsr_matmul 8192x8192x8192 16x16 12.5%",
    "bsr_matmul 8192x8192x8288 512x112 16/74",
    "bsr_linear 8192x8192x8192 128x128 12.5%",
    "gemm 8192x4096x4096 NT bf16",
    "gemm 8192x14336x4096 NT bf16",
    "gemm 8192x4096x14336 NT bf16",
    "gemm 8192x8192x8192 NT bf16 bias+gelu",
    "gemm 64x4096x4096 NT bf16",
    "gemm 128x4096x4096 NT bf16",
    "gemm 128x14336x4096 NT bf16",
    "gemm 128x4096x14336 NT bf16",
    "bsr_linear 14336x8192x4096 128x128 25%",
    "bsr_linear 4096x8192x14336 128x128 25% bias+gelu",
)
