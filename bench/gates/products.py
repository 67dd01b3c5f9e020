"""The products that gates compute: ops on random operands, with their dense equivalents for the truth.

A `Product` is plain data with a name. `call()` draws its operands, the same ones each time, on the CPU whatever the
device, so that one problem is one set of numbers on every machine.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attention import attention, block_sparse_attention
from cute_kernels import explain, gemm
from cute_kernels import path as forced_path
from cute_kernels.matmul.catalogue import squared_relu
from sparse_collective import BsrMatrix, bsr_linear, bsr_matmul
from tests import reference
from tests.cases import PATTERNS, mask_to_indices

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHORT = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}


def one_tensor(op: Callable) -> Callable:
    """The op, with an lse that it gives as one more column of the output, in fp32: bits that are compared together."""

    def call(*args, out: Tensor, **terms) -> Tensor:
        found = op(*args, out=out, **terms)
        if isinstance(found, Tensor):
            return found
        out, lse = found
        return torch.cat([out.float(), (lse if out.dim() == 4 else lse.t())[..., None]], -1)  # packed: (H, rows)

    return call


OPS: dict[str, Callable] = {"gemm": gemm, "bsr_matmul": bsr_matmul, "bsr_linear": bsr_linear}
OPS |= {op.__name__: one_tensor(op) for op in (attention, block_sparse_attention)}


@dataclass(frozen=True)
class Product:
    """One call of an op.

    `layout` is "nn", "nt" or "tn": of each dense operand in the op's order whether it is row-major ("n") or the
    transposed view of a row-major matrix ("t"); of the sparse ops only the second letter, their dense operand's,
    counts. `block` and `pattern` (a name in tests.cases.PATTERNS) describe a sparse W, whose m and k are multiples of
    the block's sides. `terms` names what is fused, joined by "+": bias, row bias, residual, alpha, beta, squared_relu
    (a user's function) or an activation. `path` forces a family of kernels.
    """

    op: str
    m: int
    n: int
    k: int
    layout: str = "nn"
    block: tuple[int, int] | None = None
    pattern: str = ""
    dtype: torch.dtype = BF16
    out_dtype: torch.dtype = BF16
    terms: str = ""
    path: str | None = None

    @property
    def name(self) -> str:
        types = SHORT[self.dtype] + (f">{SHORT[self.out_dtype]}" if self.out_dtype != self.dtype else "")
        sparse = f"{self.block[0]}x{self.block[1]} {self.pattern}" if self.block else ""
        parts = (self.path, self.op, f"{self.m}x{self.n}x{self.k}", self.layout, sparse, types, self.terms)
        return " ".join(filter(None, parts))

    @property
    def extents(self) -> tuple[int, int]:
        """Of the two operands, how long the contiguous mode is."""
        last = {"gemm": self.n, "bsr_matmul": self.n, "bsr_linear": self.k}[self.op]
        first = {"gemm": self.k, "bsr_matmul": self.k, "bsr_linear": self.n}[self.op]
        return self.m if self.layout[0] == "t" else self.k, first if self.layout[1] == "t" else last

    def call(self, device: str = "cpu") -> "Call":
        """Operands drawn from the product's name, so that its two paths get the same shape but not the same luck."""
        reference.seed(self.name)
        if self.op == "gemm":
            a = reference.operand(self.m, self.k, self.layout[0], dtype=self.dtype).to(device)
            b = reference.operand(self.k, self.n, self.layout[1], dtype=self.dtype, k=self.k).to(device)
            args, dense, shape = (a, b), (a, b), (self.m, self.n)
        elif self.op == "bsr_matmul":
            W, b = self.weight().to(device), reference.operand(self.k, self.n, self.layout[1], dtype=self.dtype)
            b = b.to(device)
            args, dense, shape = (W, b), (W.to_dense(), b), (self.m, self.n)
        else:
            W, x = self.weight().to(device), reference.operand(self.n, self.k, self.layout[1], dtype=self.dtype)
            x = x.to(device)
            args, dense, shape = (x, W), (x, W.to_dense().t()), (self.n, self.m)
        terms = {}
        for term in filter(None, self.terms.split("+")):
            terms |= self.term(term, shape)
        terms = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in terms.items()}
        return Call(self, args, terms, dense, shape, torch.device(device))

    def weight(self) -> BsrMatrix:
        """W of unit variance over K, as if it were dense: rows with fewer blocks have smaller sums."""
        (bm, bk), shape = self.block, (self.m, self.k)
        crow, col = mask_to_indices(PATTERNS[self.pattern](self.m // bm, self.k // bk))
        return BsrMatrix(crow, col, reference.normal(len(col), bm, bk, dtype=self.dtype, k=self.k), shape)

    def term(self, name: str, shape: tuple[int, int]) -> dict:
        """The keyword arguments of one fused term."""
        if name in ("alpha", "beta"):
            return {name: {"alpha": 0.5, "beta": -0.25}[name]}
        if name == "bias":
            return {"bias": reference.normal(shape[1], dtype=self.dtype)}
        if name == "row bias":
            return {"bias": reference.normal(shape[0], 1, dtype=self.dtype)}
        if name == "residual":
            return {"residual": reference.normal(*shape, dtype=self.out_dtype)}
        return {"epilogue": squared_relu} if name == "squared_relu" else {"activation": name}


@dataclass
class Call:
    """A product with its operands: `args` and `terms` are the op's, `dense` the two matrices it multiplies.

    Dense operands are the same tensors in `args` and in `dense`: writing into one changes the truth with it.
    """

    product: Product
    args: tuple
    terms: dict
    dense: tuple[Tensor, Tensor]
    shape: tuple[int, int]
    device: torch.device

    def run(self, ops: Mapping[str, Callable] = OPS) -> Tensor:
        """The op's result in an output that was full of NaN, under the product's path."""
        out = reference.poisoned(*self.shape, dtype=self.product.out_dtype, device=self.device)
        return under(self.product.path, lambda: ops[self.product.op](*self.args, out=out, **self.terms))

    def plan(self):
        """What cute_kernels.explain says of the call: it compiles the kernel, and lets messages name a tile."""
        out = reference.poisoned(*self.shape, dtype=self.product.out_dtype, device=self.device)
        return under(self.product.path, lambda: explain(OPS[self.product.op], *self.args, out=out, **self.terms))

    def renew(self, turn: int) -> None:
        """Other numbers of the same scale in the last dense operand, in place."""
        x = next(arg for arg in self.args[::-1] if isinstance(arg, Tensor))
        x.copy_(-x.roll(1 + turn, 0))

    def complaint(self, out: Tensor) -> str:
        """What is wrong with a result, "" if nothing is: see `correctness`."""
        exact, by_torch = reference.exact_and_torch(*self.dense, self.product.out_dtype, **self.terms)
        try:
            reference.assert_as_good_as_torch(out, exact, by_torch, k=self.product.k, plan=self.plan())
            near_each(out, exact, self.product.k)
            if self.product.dtype is FP16:
                within_a_thousandth(out, exact)
        except AssertionError as error:
            return str(error)
        return ""


def under(path: str | None, call: Callable):
    """The call's result with a family of kernels forced; with None it is free."""
    if path is None:
        return call()
    with forced_path(path):
        return call()


def near_each(out: Tensor, exact: Tensor, k: int) -> None:
    """Each element by itself: twice the half ulp that one rounding may cost, and the same floor as the whole has.

    The largest error of a whole matrix is that of its largest elements; it says nothing of a small one that is off.
    """
    floor = (8 + k / 16) * reference.ULP32 * max(1.0, exact.abs().max().item())
    error = (out.double() - exact).abs()
    wrong = ~(error <= torch.finfo(out.dtype).eps * exact.abs() + 4 * floor)  # NaN is wrong
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} elements err more than two roundings of their own, first at {first}: "
            f"got {out[first].item():.6g}, expected {exact[first].item():.6g}"
        )


def within_a_thousandth(out: Tensor, exact: Tensor, limit: float = 1e-3) -> None:
    """fp16 operands of unit variance, one of them over sqrt(K): the absolute error is below 1e-3.

    With fp32 output everywhere; with fp16 output where |exact| < 4: above that, fp16's own spacing is 2^-8, so that one
    rounding of the exact result alone may cost 2e-3.
    """
    looked_at = exact.abs() < (math.inf if out.dtype is FP32 else 4.0)
    error = torch.where(looked_at, (out.double() - exact).abs(), 0.0).max().item()
    if not error < limit:
        raise AssertionError(f"absolute error {error:.3g} of fp16 operands, must be below {limit}")
