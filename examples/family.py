"""User-defined kernel family, registered from outside the library: out = silu(gate) * up, elementwise.

Algorithm. A gated feed-forward layer multiplies the two halves of a GEMM's output, one of them after silu(x) =
x * sigmoid(x) = x * (1 + tanh(x / 2)) / 2. Each thread loads 16 bytes of both, computes in FP32, and stores 16 bytes.

A family tells the library's tools the facts that a kernel is compiled from, the unsupported facts and the reason, the
compiled entry, its fake arguments, and the catalogue of facts. The cache, bundles, `inspect` and the tests that use the
registry then work as for the library's own families:

    python examples/family.py
    CUTE_KERNELS_FAMILIES=examples.family python -m cute_kernels inspect --arch sm_90 --family "silu product"
"""

from dataclasses import dataclass
from typing import ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch

from cute_kernels import checks
from cute_kernels.arch import arch_named
from cute_kernels.dtypes import NAMES, OPERANDS
from cute_kernels.runtime.device import device_arch
from cute_kernels.runtime.families import Family, function_for, register

try:
    from .show import DEVICE, compare, inspect_facts, measure, normal, refused
except ImportError:  # run as a file: python examples/family.py
    from show import DEVICE, compare, inspect_facts, measure, normal, refused

THREADS, VECTOR = 256, 8  # VECTOR elements of 2 bytes are 16 bytes

# Code: facts, kernel, family, call


@dataclass(frozen=True)
class SiluFacts:
    family: ClassVar[str] = "silu product"
    arch: str  # the compiler's target
    dtype: str


class SiluProduct:
    @cute.jit
    def __call__(self, gate: cute.Tensor, up: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        # (VECTOR, n / VECTOR): one column per thread
        gate, up, out = (cute.zipped_divide(t, (VECTOR,)) for t in (gate, up, out))
        blocks = cute.ceil_div(cute.size(out, mode=[1]), THREADS)
        self.kernel(gate, up, out).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, gate: cute.Tensor, up: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * THREADS + thread
        if i < cute.size(out, mode=[1]):
            x, y = (t[(None, (i,))].load().to(cutlass.Float32) for t in (gate, up))
            out[(None, (i,))].store((x * (0.5 + 0.5 * cute.math.tanh(0.5 * x, fastmath=True)) * y).to(out.element_type))


class SiluFamily(Family):
    name = "silu product"

    def entry(self, facts: SiluFacts) -> SiluProduct:
        return SiluProduct()

    def arguments(self, facts: SiluFacts) -> tuple:
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

        from cute_kernels.dtypes import cutlass_dtype

        length = cute.sym_int32(divisibility=VECTOR)  # one symbol: the compiled function checks that lengths are equal
        tensors = (make_fake_compact_tensor(cutlass_dtype(facts.dtype), (length,), assumed_align=16) for _ in range(3))
        return *tensors, make_fake_stream(use_tvm_ffi_env_stream=True)

    def unsupported(self, facts: SiluFacts) -> str:
        known = [NAMES[dtype] for dtype in OPERANDS]
        return "" if facts.dtype in known else f"{facts.dtype} is not supported; use {' or '.join(known)}"

    def catalogue(self, arch: str, quick: bool = False) -> list[SiluFacts]:
        return [SiluFacts(arch_named(arch).target, NAMES[dtype]) for dtype in OPERANDS]

    def describe(self, facts: SiluFacts) -> dict[str, str]:
        return {"configuration": f"{THREADS} threads", "problem": "silu(gate) * up", "operands": facts.dtype}


FAMILY = register(SiluFamily())


def silu_product(gate, up):
    """silu(gate) * up for contiguous tensors of the same shape; CPU tensors use torch, in FP32."""
    for name, tensor in (("gate", gate), ("up", up)):
        checks.check_tensor(f"silu_product: {name}", tensor)
        if tensor.shape != gate.shape or not tensor.is_contiguous() or tensor.numel() % VECTOR:
            raise ValueError(
                f"silu_product: {name} must be contiguous, have gate's shape and a multiple of {VECTOR} elements, got "
                f"{tuple(tensor.shape)}, strides {tensor.stride()}; .contiguous() copies a strided tensor"
            )
    checks.check_operands("silu_product", gate=gate, up=up)
    if gate.device.type == "cpu":
        return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)
    out = torch.empty_like(gate)
    facts = SiluFacts(device_arch(gate.get_device())[0].target, NAMES[gate.dtype])
    function_for(facts)(gate.ravel(), up.ravel(), out.ravel())
    return out


# Test and measurement


def check(rows: int = 37) -> None:
    gate, up = normal(rows, 1024, seed=1), normal(rows, 1024, seed=2)
    silu = torch.nn.functional.silu
    compare(silu_product(gate, up), silu(gate.double()) * up.double(), silu(gate) * up)


def inspect() -> None:
    inspect_facts(lambda arch: FAMILY.catalogue(arch)[0])


def errors() -> None:
    gate = normal(64, 64)
    refused(lambda: silu_product(gate, gate[:32]))
    refused(lambda: silu_product(gate.float(), gate.float()))
    print("refused:", FAMILY.unsupported(SiluFacts("sm_80", "float32")))


def times(rows: int = 8192) -> None:
    gate, up = (normal(rows if DEVICE == "cuda" else 8, 8192, seed=seed) for seed in range(2))
    measure(one_kernel=lambda: silu_product(gate, up), torch=lambda: torch.nn.functional.silu(gate) * up)


if __name__ == "__main__":
    check()
    inspect()
    errors()
    times()
