"""Attention sinks: a learned logit for each head, which takes part in the softmax and has no value (gpt-oss).

The kernels add a row's sink to its sum when it is done (forward.softmax.OnlineSoftmax.finish, decode.combine), so LSE
has it, and the gradients of q, k and v are what they are without sinks. With delta = sum of dO * O over a row, less the
gradient of its LSE, backward.prepare adds up the gradient of a sink over all rows of its head:

    dsink = - sum of exp(sink - LSE) delta
"""

import torch
from torch import Tensor

from cute_kernels import checks
from cute_kernels.runtime.device import plans_kernel

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_sinks(op: str, sinks: Tensor | None, q: Tensor) -> None:
    """None, or (H,) on q's device: float32, bfloat16 or float16, on the CPU float64, too."""
    if sinks is None:
        return
    checks.check_tensor(f"{op}: sinks", sinks)
    kernel = plans_kernel(q.device)
    if sinks.dtype not in KERNEL_DTYPES and (kernel or sinks.dtype != torch.float64):
        raise TypeError(
            f"{op}: sinks is {sinks.dtype}; it must be torch.float32, torch.bfloat16 or torch.float16"
            f"{'' if kernel else ', or torch.float64 on the CPU'}, a logit for each head of q"
        )
    heads = q.shape[1]
    if tuple(sinks.shape) != (heads,):
        raise ValueError(f"{op}: sinks has shape {tuple(sinks.shape)}; it must be ({heads},), one for each head of q")
    checks.check_device(op, q.device, sinks=sinks)
