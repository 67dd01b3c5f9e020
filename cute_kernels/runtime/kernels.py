"""The compiled function of a set of facts, through the cache."""

from ..config import GemmFacts
from .cache import Built, default_cache
from .compile import compile_for
from .fake import dense_args, sparse_args


def entry_class(facts: GemmFacts) -> type:
    """What a kernel's function is compiled from: its `__call__`, whose parameters but `stream` are the call's."""
    cfg = facts.config
    if facts.block is None:
        from ..dense import DenseGemm

        return DenseGemm
    if cfg.sweep:
        from sparse_collective.sweep_collective import SweepCollective

        return SweepCollective
    if cfg.few:
        from sparse_collective.few_columns import FewCollective

        return FewCollective
    if cfg.pairs:
        from sparse_collective.pairs_collective import PairedCollective

        return PairedCollective
    from sparse_collective.collective import SparseCollective

    return SparseCollective


def compile_kernel(facts: GemmFacts, *, keep_cubin: bool = False) -> Built:
    """Compile the kernel of `facts`, on any machine; its metadata holds the dynamic shared memory."""
    entry, args = entry_class(facts)(facts), dense_args(facts) if facts.block is None else sparse_args(facts)
    compiled = compile_for(facts.arch, entry, *args, keep_cubin=keep_cubin)
    return Built(compiled, {"smem": entry.kernel.smem_bytes, "config": str(facts.config), "path": facts.path})


def function_for(facts: GemmFacts):
    """The kernel's function, from memory, a bundle, the disk, or compiled now."""
    return default_cache().get(facts, lambda: compile_kernel(facts))
