"""The compiled function of a set of decoding facts, through the cache that all kernels share."""

from cute_kernels.runtime.cache import Built, default_cache
from cute_kernels.runtime.compile import compile_for
from cute_kernels.runtime.fake import fake_tensor

from ..forward.compile import scalar_args, tensor_args
from ..forward.config import DecodeFacts


def decode_args(facts: DecodeFacts) -> tuple:
    """Fakes of all arguments of DecodeSm90 or DecodeSm80."""
    from cutlass import Int32
    from cutlass.cute.runtime import make_fake_stream

    seqlens = fake_tensor("int32", 1, 0, 1) if facts.seqlens else None
    table = fake_tensor("int32", 2, 1, 1) if facts.page_size else None
    parts = (fake_tensor("float32", 5, 4, 4), fake_tensor("float32", 4, 3, 1)) if facts.split else (None, None)
    ctas = (Int32(1),) if facts.path == "sm_90" else ()
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return *tensor_args(facts), seqlens, table, *parts, *scalar_args(facts), Int32(1), *ctas, stream


def compile_decode(facts: DecodeFacts, *, keep_cubin: bool = False) -> Built:
    """Compile the kernel of `facts`, on any machine; its metadata holds the dynamic shared memory."""
    if facts.path == "sm_90":
        from .kernel_sm90 import DecodeSm90 as Decode
    else:
        from .kernel_sm80 import DecodeSm80 as Decode
    entry = Decode(facts)
    compiled = compile_for(facts.arch, entry, *decode_args(facts), keep_cubin=keep_cubin)
    return Built(compiled, {"smem": entry.smem_bytes, "config": str(facts.config), "path": facts.path})


def function_for(facts: DecodeFacts):
    """The kernel's function, from memory, a bundle, the disk, or compiled now."""
    return default_cache().get(facts, lambda: compile_decode(facts))
