"""The compiled function of a set of facts, through the cache that all kernels share."""

from cute_kernels.runtime.cache import Built, default_cache
from cute_kernels.runtime.compile import compile_for
from cute_kernels.runtime.fake import fake_tensor

from .config import FlashFacts


def flash_args(facts: FlashFacts) -> tuple:
    """Fakes of all arguments of the attention kernels."""
    import cutlass.cute as cute
    from cutlass import Float32, Int32
    from cutlass.cute.runtime import make_fake_stream

    rank = 3 if facts.packed else 4

    def heads(width: int):
        return fake_tensor(facts.dtype, rank, rank - 1, 8, (*(cute.sym_int32() for _ in range(rank - 1)), width))

    tensors = (heads(w) for w in (facts.head_dim, facts.head_dim, facts.head_dim_v, facts.head_dim_v))
    lse = fake_tensor("float32", rank - 1, rank - 2, 1) if facts.lse else None
    counter = fake_tensor("int32", 1, 0, 1) if facts.config.dynamic else None
    scalars = Float32(1.0), Float32(0.0), Int32(0), Int32(0), Int32(1)
    more = []
    if facts.packed:
        more = [fake_tensor("int32", 1, 0, 1) for _ in range(2)]
    if facts.blocks is not None:
        index, table = (fake_tensor("int32", n, n - 1, 1) for n in (4, 2))
        mask = facts.blocks.mask.tensors if facts.blocks.mask else ()
        mask = (fake_tensor(dtype, rank, contiguous, 1) for dtype, rank, contiguous in mask)
        more = [(index, Int32(1), table, *mask)]
    return *tensors, lse, counter, *more, *scalars, make_fake_stream(use_tvm_ffi_env_stream=True)


def compile_flash(facts: FlashFacts, *, keep_cubin: bool = False) -> Built:
    """Compile the kernel of `facts`, on any machine; its metadata holds the dynamic shared memory."""
    if facts.path == "sm_90":
        from .kernel_sm90 import FlashForwardSm90 as Flash
    else:
        from .kernel_sm80 import FlashForwardSm80 as Flash
    entry = Flash(facts)
    if facts.packed:
        from .entry_packed import PackedForward

        entry = PackedForward(entry)
    elif facts.blocks is not None:
        from .entry_blocks import BlocksForward

        entry = BlocksForward(entry)
    compiled = compile_for(facts.arch, entry, *flash_args(facts), keep_cubin=keep_cubin)
    return Built(compiled, {"smem": entry.smem_bytes, "config": str(facts.config), "path": facts.path})


def function_for(facts: FlashFacts):
    """The kernel's function, from memory, a bundle, the disk, or compiled now."""
    return default_cache().get(facts, lambda: compile_flash(facts))
