"""The passes in stages (stages.py) as registered ops, for calls that torch.compile traces.

A plan enters the schema as its mask (torch_op.crossing) and as what transfers read of it (exchange.Route).
"""

from typing import Any

import torch
from torch import Tensor

from cute_kernels.dtypes import accumulator
from cute_kernels.runtime.library import define
from cute_kernels.runtime.torch_compat import process_group_of, without_modes

from .. import flops
from ..torch_op import MASK, MASK_PARTS, block_mask_of, crossing, float_or_none
from . import stages
from .exchange import Gather, Route

ROUTE = "Tensor own, Tensor sends, SymInt[] send_counts, SymInt[] receive_counts, SymInt tile, SymInt local_length"
TERMS = "float? softcap, float? scale, bool? deterministic"
GROUP = "str group"  # the last argument, where torch._inductor.comm_analysis looks for it


def attention_in_stages(count: int, q, k, v, mask, plan, options: dict[str, Any], keep: bool) -> tuple:
    """Call stages.attention_in_stages as an op."""
    *route, group = Route.of(plan)
    op = torch.ops.attention.context_parallel_in_stages
    return op(q, k, v, *crossing(mask), *route, count, keep, *_terms(options), group.group_name)


def gradients_in_stages(count: int, dout, dlse, q, kv, out, lse, mask, plan, options: dict[str, Any]) -> tuple:
    """Call stages.gradients_in_stages as an op."""
    *route, group = Route.of(plan)
    op = torch.ops.attention.context_parallel_in_stages_backward
    terms = *_terms(options), options["grad_dtype"], options["dq_dtype"]
    return op(dout, dlse, q, list(kv), out, lse, *crossing(mask), *route, count, *terms, group.group_name)


def _terms(options: dict[str, Any]) -> tuple:
    return float_or_none(options["softcap"]), float_or_none(options["scale"]), options["deterministic"]


def _split(parts: tuple) -> tuple[tuple, Route, tuple]:
    """The mask, the route, whose group is a name, and what is between it and the group of an op's arguments."""
    end = MASK_PARTS + len(Route._fields) - 1
    return parts[:MASK_PARTS], Route._make((*parts[MASK_PARTS:end], parts[-1])), parts[end:-1]


def _with_group(route: Route) -> Route:
    return route._replace(group=process_group_of(route.group))


def _options(softcap, scale, deterministic, *dtypes) -> dict[str, Any]:
    options = {"softcap": softcap, "scale": scale, "deterministic": deterministic}
    return options | dict(zip(("grad_dtype", "dq_dtype"), dtypes, strict=False))


@without_modes()  # they have seen this op
@torch.no_grad()
def _run(q, k, v, *parts) -> tuple[Tensor, Tensor, list[Tensor]]:
    mask, route, (count, keep, *terms) = _split(parts)
    given = block_mask_of(*mask), _with_group(route), _options(*terms)
    return stages.attention_in_stages(count, q, k, v, *given, keep)


def _fake(q, k, v, *parts) -> tuple[Tensor, Tensor, list[Tensor]]:
    _, route, (count, keep, *_) = _split(parts)
    out, lse = q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))
    heads = k.shape[1] // count
    gathers = [Gather((k[:, :heads], v[:, :heads]), route) for _ in range(count * keep)]
    return out, lse, [buffer for gather in gathers for buffer in gather.buffers()]


def _flops(q, k, v, *parts) -> int:
    return flops.forward(q, k, v, _scores(q, parts))


@without_modes()
@torch.no_grad()
def _run_backward(dout, dlse, q, kv, out, lse, *parts) -> tuple[Tensor, Tensor, Tensor]:
    mask, route, (count, *terms) = _split(parts)
    given = block_mask_of(*mask), _with_group(route), _options(*terms)
    return stages.gradients_in_stages(count, dout, dlse, q, kv, out, lse, *given)


def _fake_backward(dout, dlse, q, kv, out, lse, *parts) -> tuple[Tensor, ...]:
    count = _split(parts)[2][0]
    return tuple(stages.new_gradients(q, kv, count))


def _flops_backward(dout, dlse, q, kv, out, lse, *parts) -> int:
    return flops.backward(q, kv[0], kv[1], _scores(q, parts))


def _scores(q: Tensor, parts: tuple) -> int:
    form, lists, lengths, blocksize, *_ = parts
    return flops.block_scores(q, torch.empty(1, 1, lengths[1], 0, device="meta"), lists, blocksize, form)


define(
    "attention::context_parallel_in_stages",
    f"(Tensor q, Tensor k, Tensor v, {MASK}, {ROUTE}, int stages, bool keep_kv, {TERMS}, {GROUP}) "
    "-> (Tensor, Tensor, Tensor[])",
    _run, _fake, flops=_flops, collective=True,
)  # fmt: skip
define(
    "attention::context_parallel_in_stages_backward",
    f"(Tensor dout, Tensor? dlse, Tensor q, Tensor[] kv, Tensor out, Tensor lse, {MASK}, {ROUTE}, int stages, {TERMS}, "
    f"ScalarType? grad_dtype, ScalarType? dq_dtype, {GROUP}) -> (Tensor, Tensor, Tensor)",
    _run_backward, _fake_backward, flops=_flops_backward, collective=True,
)  # fmt: skip
