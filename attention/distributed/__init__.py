"""Context parallelism: attention whose q, k and v are sharded over the sequence, one shard for each process.

    plan = plan_context_parallel(patterns.causal((S, S), device="cuda"), mesh)  # once per mask
    q, k, v = (plan.shard(t, dim=2) for t in (q, k, v))                         # or tokens: plan.shard(ids, dim=-1)
    out = context_parallel_attention(q, k, v, plan)

deal.py decides which process has which tokens, plan.py which keys and values move where, check.py compares the
processes' masks and calls, exchange.py moves keys and values, passes.py has the forward and backward passes, stages.py
those in stages of some heads (stages_op.py for torch.compile), and ops.py the op. styles.py has the parallel style for
parallelize_module.
"""

from .ops import context_parallel_attention
from .plan import ContextParallelPlan, plan_context_parallel
from .styles import ContextParallel

__all__ = ["ContextParallel", "ContextParallelPlan", "context_parallel_attention", "plan_context_parallel"]
