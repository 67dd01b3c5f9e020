"""A parallel style of torch.distributed.tensor.parallel for modules that compute attention."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from .ops import context_parallel_attention
from .plan import ContextParallelPlan

OP = "ContextParallel"
PASSED_ON = ("scale", "softcap", "score_mod", "deterministic")
OPERANDS = ("q", "k", "v")
SHARDED = (Shard(2),)  # the tokens of (B, H, L, D)


class ContextParallel(ParallelStyle):
    """Share the sequence of a module whose forward is attention of (q, k, v), for parallelize_module.

    The module's forward is replaced by context_parallel_attention. Such a module, often named inner_attention, has no
    parameters, and calls F.scaled_dot_product_attention, flex_attention or attention.attention.

    Its q, k and v, by position or by these names, are (B, H or Hkv, L, D), the shards of this process as plan.shard
    makes them: tensors, or DTensors of the mesh with placements [Shard(2)]; the output is then one, too. The local
    tensors of DTensors are plan.shard's as well, so their whole tensors have the plan's order of tokens, padding
    included: DTensor.from_local(plan.shard(q, 2), mesh, [Shard(2)]). What distribute_tensor makes has the order of the
    sequence, which is that of the plan for deal="contiguous" alone; others give wrong results without an error. scale,
    softcap, score_mod, return_lse and deterministic are passed on. enable_gqa has no effect: k and v may always have
    fewer heads. Other keyword arguments (is_causal, attn_mask, block_mask, dropout_p) must be None, False or 0: masks
    are part of the plan.

    Args:
        plan: see plan_context_parallel; of the mesh that parallelize_module gets.
        keep_kv, reduce_dtype: see context_parallel_attention.

    parallelize_module raises:
        ValueError: the mesh is not that of the plan.

    Example::

        plan = plan_context_parallel(mesh=mesh, length=65536, causal=True)
        parallelize_module(model, mesh, {"layers.*.inner_attention": ContextParallel(plan)})
    """

    def __init__(
        self, plan: ContextParallelPlan, *, keep_kv: bool = False, reduce_dtype: torch.dtype = torch.float32
    ) -> None:
        if not isinstance(plan, ContextParallelPlan):
            raise TypeError(f"{OP}: plan must be what plan_context_parallel returns, got {type(plan).__name__}")
        self.plan = plan
        self.options: dict[str, Any] = {"keep_kv": keep_kv, "reduce_dtype": reduce_dtype}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1 or device_mesh.get_group() != self.plan.group:
            raise ValueError(f"{OP}: parallelize_module must get the mesh of the plan, got {device_mesh!r}")
        module.forward = functools.partial(self._forward, device_mesh)
        return module

    def _forward(self, mesh: DeviceMesh, *operands: Tensor, return_lse: bool = False, **options):
        by_name = [name for name in OPERANDS if name in options]
        if len(operands) > 3 or (*OPERANDS[: len(operands)], *by_name) != OPERANDS:
            raise TypeError(
                f"{OP}: the module takes three tensors, q, k and v, by position or by these names, and options by "
                f"name; got {len(operands)} by position and the names {', '.join(options) or 'none'}; call it as "
                "inner_attention(q, k, v, scale=...)"
            )
        tensors = [*operands, *(options.pop(name) for name in by_name)]
        options.pop("enable_gqa", None)
        for name in options.keys() - set(PASSED_ON):
            value = options.pop(name)
            number = isinstance(value, (bool, int, float))
            if value is not None and (not number or value):
                raise ValueError(
                    f"{OP}: {name} must be None, False or 0, got {value if number else type(value).__name__}; masks "
                    "are part of the plan, as in plan_context_parallel(causal=True)"
                )
        sharded = isinstance(tensors[0], DTensor)
        q, k, v = (_local(name, t, mesh, sharded) for name, t in zip(OPERANDS, tensors, strict=True))
        options |= self.options
        output = context_parallel_attention(q, k, v, self.plan, return_lse=return_lse, **options)
        if not sharded:
            return output
        parts = output if isinstance(output, tuple) else (output,)
        whole = tuple(DTensor.from_local(part, mesh, SHARDED, run_check=False) for part in parts)
        return whole if isinstance(output, tuple) else whole[0]


def _local(name: str, x: Tensor, mesh: DeviceMesh, sharded: bool) -> Tensor:
    """This process's shard of a tensor, or of a DTensor if `sharded`."""
    if isinstance(x, DTensor) != sharded:
        raise TypeError(f"{OP}: q, k and v must be all tensors or all DTensors, got {name} of {type(x).__name__}")
    if not isinstance(x, DTensor):
        return x
    if x.device_mesh != mesh or tuple(x.placements) != SHARDED:
        raise ValueError(
            f"{OP}: {name} must have placements [Shard(2)] on the mesh of the plan, got {list(x.placements)} on "
            f"{x.device_mesh!r}"
        )
    return x.to_local()
