"""What is tuned: a product in one line of text, as the kernels' facts see it and as tensors.

    gemm 4096x4096x4096 NT bf16                 M x N x K; A and B are row-major (N) or transposes of row-major (T)
    bsr_matmul 8192x8192x8192 128x128 12.5%     W (M, K) in blocks, the share of blocks kept; b (K, N)
    bsr_linear 8192x8192x8288 512x112 16/74     W (M, K), x (N, K)

Further words, in any order: bf16, fp16, bf16>fp32 (operands > output), and terms of an epilogue joined by +: bias,
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
OPS = ("gemm", "bsr_matmul", "bsr_linear")
ALIGNED = 256  # an address as torch's allocator gives it


@dataclass(frozen=True)
class TuneProblem:
    """A product of contiguous tensors. `per_row` of the K / bk blocks of each block row are kept."""

    op: str
    M: int
    N: int
    K: int
    layout: str = "NN"
    block: tuple[int, int] | None = None
    per_row: int = 0
    dtype: str = "bf16"
    out: str = "bf16"
    bias: bool = False
    residual: bool = False
    activation: str | None = None

    @property
    def text(self) -> str:
        """The line that `parse` makes this problem of."""
        words = [self.op, f"{self.M}x{self.N}x{self.K}"]
        if self.block:
            words += [f"{self.block[0]}x{self.block[1]}", f"{self.per_row}/{self.K // self.block[1]}"]
        else:
            words.append(self.layout)
        words.append(self.dtype if self.out == self.dtype else f"{self.dtype}>{self.out}")
        named = (("bias", self.bias), ("residual", self.residual), (self.activation, self.activation))
        terms = [name for name, there in named if there]
        return " ".join(words + (["+".join(terms)] if terms else []))

    @property
    def kept(self) -> float:
        """The share of A's blocks that are stored."""
        return self.per_row * self.block[1] / self.K if self.block else 1.0

    @property
    def flops(self) -> float:
        return 2.0 * self.M * self.N * self.K * self.kept

    def as_planned(self) -> Problem:
        """The problem as `runtime.plan.choose` takes it; no tensor is made."""
        dtype, out = DTYPES[self.dtype], DTYPES[self.out]
        linear = self.op == "bsr_linear"
        extents = Extents(self.M, self.N, self.K)
        bias = ("row" if linear else "col") if self.bias else None
        b = _matrix(self.N, self.K) if linear else _matrix(self.K, self.N, self.layout[1] == "T")
        d = _matrix(self.N, self.M, itemsize=_size(out)) if linear else _matrix(self.M, self.N, itemsize=_size(out))
        b_names, d_names = (("n", "k"), ("n", "m")) if linear else (("k", "n"), ("m", "n"))
        a = Layout("row", 8, 8) if self.block else _matrix(self.M, self.K, self.layout[0] == "T")
        majors = (major(a, ("m", "k")), major(b, b_names), major(d, d_names))
        epilogue = EpilogueSpec(
            bias=bias,
            bias_dtype=dtype if bias else None,
            residual=major(d, d_names) if self.residual else None,
            activation=self.activation,
        )
        block = BlockFacts(*self.block, "int32") if self.block else None
        ranks = (3 if self.block else 2, 2, 2)
        return Problem(extents, dtype, out, (a, b, d), majors, ranks, epilogue, block, linear, self.kept)


def _size(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _matrix(rows: int, cols: int, transposed: bool = False, itemsize: int = 2) -> Layout:
    """The layout of a contiguous torch matrix (rows, cols), or of the transpose of a contiguous (cols, rows)."""
    return layout_of((rows, cols), (1, rows) if transposed else (cols, 1), ALIGNED, itemsize)


def parse(text: str) -> TuneProblem:
    """The problem that `text` names; ValueError says which word is wrong."""
    words = text.split()
    if len(words) < 2 or words[0] not in OPS:
        raise ValueError(f"problem {text!r} must begin with one of {', '.join(OPS)} and MxNxK")
    op, extents = words[0], _numbers(words[1], 3, text)
    if extents is None:
        raise ValueError(f"problem {text!r}: {words[1]!r} is not MxNxK")
    found: dict = {}
    density = None
    for word in words[2:]:
        if block := _numbers(word, 2, text):
            found["block"] = block
        elif re.fullmatch("[NT]{2}", word):
            found["layout"] = word
        elif match := re.fullmatch(r"([\d.]+)%|(\d+)/(\d+)", word):
            density = Fraction(match[1]) / 100 if match[1] else Fraction(int(match[2]), max(1, int(match[3])))
        elif match := re.fullmatch(r"(bf16|fp16)(?:>(bf16|fp16|fp32))?", word):
            found |= {"dtype": match[1], "out": match[2] or match[1]}
        else:
            found |= _epilogue(word, text)
    if (op == "gemm") == ("block" in found) or ("block" in found) != (density is not None):
        raise ValueError(f"problem {text!r}: a block shape and a density belong to bsr_matmul and bsr_linear, always")
    if op != "gemm" and "layout" in found:
        raise ValueError(f"problem {text!r}: only gemm has a layout")
    if op == "bsr_linear" and found.get("residual"):
        raise ValueError(f"problem {text!r}: bsr_linear has no residual")
    if density is not None:
        found["per_row"] = _per_row(extents, found["block"], density, text)
    return TuneProblem(op, *extents, **found)


def _numbers(word: str, count: int, text: str) -> tuple | None:
    if not re.fullmatch("x".join([r"\d+"] * count), word):
        return None
    numbers = tuple(map(int, word.split("x")))
    if min(numbers) < 1:
        raise ValueError(f"problem {text!r}: {word!r} has a zero in it")
    return numbers


def _per_row(extents: tuple, block: tuple[int, int], density: Fraction, text: str) -> int:
    M, _, K = extents
    if M % block[0] or K % block[1]:
        raise ValueError(f"problem {text!r}: blocks of {block[0]}x{block[1]} do not divide {M}x{K}")
    columns = K // block[1]
    if not 0 < density <= 1:
        raise ValueError(f"problem {text!r}: a density lies above 0 and is at most 100%")
    return max(1, round(density * columns))


def _epilogue(word: str, text: str) -> dict:
    found: dict = {}
    for term in word.split("+"):
        if term in ("bias", "residual"):
            found[term] = True
        elif term in ACTIVATIONS and "activation" not in found:
            found["activation"] = term
        else:
            known = ", ".join(("bias", "residual", *ACTIVATIONS))
            raise ValueError(f"problem {text!r}: {term!r} is no layout, type, density or epilogue term ({known})")
    return found


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
