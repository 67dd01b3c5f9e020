"""Programs of one position, computed for every position of arrays: by a kernel, or by the compiler's code for this CPU.

The tensors that the programs read are the arrays. What the compiler makes of integers, bool values and IEEE arithmetic
is the same on both, so that their lowering is tested without a GPU, too.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Uint8
from cutlass.cute.runtime import from_dlpack, make_fake_stream
from cutlass.cutlass_dsl import select_

from cute_kernels.runtime.compile import compile_for
from cute_kernels.runtime.fake import fake_tensor
from cute_kernels.traced.lower import lower
from cute_kernels.traced.record import trace

THREADS = 128


def programs_of(functions, device="cpu") -> tuple:
    """Traces of functions of one position, int32."""
    return tuple(trace(function, "function", ("int32",), (), device) for function in functions)


def stored(value, dtype: str):
    return select_(value, Uint8(1), Uint8(0)) if dtype == "bool" else value


class Elementwise:
    """out[i] = program(i) for each of some programs."""

    def __init__(self, traces):
        self.programs = [found.program for found in traces]

    @cute.jit
    def each(self, i: Int32, tensors: tuple, outs: tuple):
        for p, program in enumerate(self.programs):
            outs[p][i] = stored(lower(program, [i], tensors[p]), program.dtype)

    @cute.kernel
    def kernel(self, tensors: tuple, outs: tuple):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * THREADS + thread
        if i < cute.size(outs[0]):
            self.each(i, tensors, outs)

    @cute.jit
    def __call__(self, tensors: tuple, outs: tuple, stream: cuda.CUstream):
        grid = [cute.ceil_div(cute.size(outs[0]), THREADS), 1, 1]
        self.kernel(tensors, outs).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.jit
    def on_host(self, tensors: tuple, outs: tuple):
        for i in cutlass.range(cute.size(outs[0])):
            self.each(i, tensors, outs)

    def fakes(self) -> tuple:
        tensors = tuple(
            tuple(fake_tensor(dtype, max(rank, 1), max(rank, 1) - 1, 1) for dtype, rank in program.tensors)
            for program in self.programs
        )
        return tensors, tuple(fake_tensor(program.dtype, 1, 0, 1) for program in self.programs)


def compiled(traces, arch: str, **options):
    """The kernel's function, of (tensors, outs)."""
    entry = Elementwise(traces)
    return compile_for(arch, entry, *entry.fakes(), make_fake_stream(use_tvm_ffi_env_stream=True), **options)


def arguments(traces, count: int) -> tuple:
    """Views of the tensors that kernels are given, and empty results."""
    views = tuple(
        tuple((t.view(torch.uint8) if t.dtype is torch.bool else t).reshape(t.shape or (1,)) for t in found.tensors)
        for found in traces
    )
    dtypes = (getattr(torch, found.program.dtype) for found in traces)
    device = next((t.device for found in traces for t in found.tensors), torch.device("cpu"))
    outs = (torch.empty(count, dtype=torch.uint8 if d is torch.bool else d, device=device) for d in dtypes)
    return views, tuple(outs)


def results(traces, outs) -> list:
    return [out.bool() if found.program.dtype == "bool" else out for found, out in zip(traces, outs, strict=True)]


def on_host(traces, count: int) -> list:
    """The results for positions 0 to count, of code for this CPU."""
    views, outs = arguments(traces, count)
    given = tuple(tuple(from_dlpack(t) for t in tensors) for tensors in views), tuple(from_dlpack(t) for t in outs)
    cute.compile(Elementwise(traces).on_host, *given, options="--gpu-arch sm_90a")(*given)
    return results(traces, outs)
