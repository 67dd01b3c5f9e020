"""The compiled function of a set of facts, through the cache."""

from ..config import GemmFacts
from .cache import Built, default_cache
from .compile import compile_for
from .fake import dense_args, sparse_args


def compile_kernel(facts: GemmFacts, *, keep_cubin: bool = False) -> Built:
    """Compile the kernel of `facts`, on any machine; its metadata holds the dynamic shared memory."""
    if facts.block is None:
        from ..dense import DenseGemm

        entry, args = DenseGemm(facts), dense_args(facts)
    else:
        if facts.config.swept_by_warps:
            from sparse_collective.sweep_collective_sm80 import SweepCollectiveSm80 as Collective
        elif facts.config.sweep:
            from sparse_collective.sweep_collective import SweepCollective as Collective
        elif facts.config.few:
            from sparse_collective.few_columns import FewCollective as Collective
        elif facts.config.pairs:
            from sparse_collective.pairs_collective import PairedCollective as Collective
        else:
            from sparse_collective.collective import SparseCollective as Collective

        entry, args = Collective(facts), sparse_args(facts)
    compiled = compile_for(facts.arch, entry, *args, keep_cubin=keep_cubin)
    return Built(compiled, {"smem": entry.kernel.smem_bytes, "config": str(facts.config), "path": facts.path})


def function_for(facts: GemmFacts):
    """The kernel's function, from memory, a bundle, the disk, or compiled now."""
    return default_cache().get(facts, lambda: compile_kernel(facts))
