"""Kernels that compile in a twentieth of a second, for tests of what surrounds kernels."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a")
THREADS = 128
SPILLED = 160  # values a thread keeps, in a block so large that it may have 64 registers
SPILL_THREADS = 1024


@cute.kernel
def add_kernel(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < cute.size(out):
        out[i] = a[i] + b[i]


@cute.jit
def add(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
    grid = [cute.ceil_div(cute.size(out), THREADS), 1, 1]
    add_kernel(a, b, out).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)


@cute.kernel
def reverse_kernel(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    shared = cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, THREADS), cute.make_layout(THREADS))
    shared[thread] = a[thread] + b[thread]
    cute.arch.barrier()
    out[thread] = shared[THREADS - 1 - thread]


@cute.jit
def reverse(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
    """One block with 512 bytes of static shared memory."""
    reverse_kernel(a, b, out).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.kernel
def spill_kernel(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    kept = cute.make_rmem_tensor(cute.make_layout(SPILLED), cutlass.Float32)
    for i in cutlass.range(SPILLED, unroll_full=True):
        kept[i] = a[thread * SPILLED + i]
    cute.arch.barrier()
    for i in cutlass.range(SPILLED, unroll_full=True):
        out[thread * SPILLED + i] = kept[i] * kept[SPILLED - 1 - i] + b[i]


@cute.jit
def spill(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
    """More live values than registers: the compiler has to put them on the stack."""
    spill_kernel(a, b, out).launch(
        grid=[1, 1, 1], block=[SPILL_THREADS, 1, 1], max_number_threads=[SPILL_THREADS, 1, 1], stream=stream
    )


def fake_arguments():
    """Three vectors of one length and the stream of the calling context."""
    n = cute.sym_int(divisibility=8)
    vectors = [make_fake_compact_tensor(cutlass.Float32, (n,)) for _ in range(3)]
    return [*vectors, make_fake_stream(use_tvm_ffi_env_stream=True)]
