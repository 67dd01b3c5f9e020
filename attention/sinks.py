"""Attention sinks: a learned logit per head, which takes part in the softmax and has no value (gpt-oss).

    out = out' e^(lse' - lse)     lse = log(e^lse' + e^sink), with out' and lse' of attention without sinks

torch's operations around the kernels, so that gradients reach the sinks, too. One more pass over out: no kernel adds
the sink to its sums yet.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels import checks

NOTE = "sinks: one more pass over out, by torch's operations"


def check_sinks(op: str, sinks: Tensor, q: Tensor) -> None:
    """(H,) floating-point on q's device; TypeError or ValueError with what is wrong."""
    checks.check_tensor(f"{op}: sinks", sinks)
    if not sinks.dtype.is_floating_point:
        raise TypeError(f"{op}: sinks is {sinks.dtype}; it must be floating-point, a logit for each head of q")
    heads = q.shape[1]
    if tuple(sinks.shape) != (heads,):
        raise ValueError(f"{op}: sinks has shape {tuple(sinks.shape)}; it must be ({heads},), one for each head of q")
    checks.check_device(op, q.device, sinks=sinks)


def with_sinks(
    op: str, run: Callable, sinks: Tensor, q: Tensor, return_lse: bool, out: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    """What `op` gives with sinks (H,); `run` gives (out', lse') of the call without them, in `out` if
    that is given."""
    checks.check_tensor(f"{op}: q", q)
    check_sinks(op, sinks, q)
    if not isinstance(return_lse, bool):
        raise TypeError(f"{op}: return_lse must be True or False, got {return_lse!r}")
    if out is not None:
        checks.check_no_grad(op, sinks)
    plain, lse = run()
    packed = lse.dim() == 2  # (H, total)
    sink = sinks.to(lse.dtype).view(-1, 1) if packed else sinks.to(lse.dtype).view(1, -1, 1)
    total = torch.logaddexp(lse, sink.expand_as(lse))
    share = (lse - total).masked_fill(lse == -torch.inf, -torch.inf).exp()  # 0 for rows that see nothing
    share = share.t() if packed else share
    result = (plain * share.unsqueeze(-1)).to(plain.dtype)
    if out is not None:
        result = out.copy_(result)
    return (result, total) if return_lse else result


def plan_with_sinks(op: str, plan: Callable, sinks: Tensor, q: Tensor):
    """The plan of a call with sinks; plan(return_lse=True) makes that of the call without them."""
    check_sinks(op, sinks, q)
    found = plan(return_lse=True)
    found.notes.append(NOTE)
    return found
