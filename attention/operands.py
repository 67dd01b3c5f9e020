"""Preparation of q, k and v by other interfaces before they call an op: autocast, and padding of head dimensions."""

from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import pad

from cute_kernels.runtime.autocast import autocast_dtype, cast

from .forward.heuristics import HEAD_DIMS, WIDE
from .plan import has_kernel


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) in the dtype of torch.autocast where it is enabled, as torch casts those of its own attention. float64
    and FP8 stay."""
    dtype = autocast_dtype(q)
    return (q, k, v) if dtype is None else (cast(q, dtype), cast(k, dtype), cast(v, dtype))


def padded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (..., D or Dv) with zeros after D and Dv up to the next of a kernel, where one will read them.

    Scores stay as they are, if the scale is that of the D before, and so do the first Dv columns of the result. It
    copies q, k and v, at each call, and the kernel computes as much as for the padded D. If one of D and Dv is above
    the largest of HEAD_DIMS, both become 512. Nothing changes above 512, and for CPU tensors, which take no kernel.
    """
    if not (q.is_cuda if is_compiling() else has_kernel(q)):
        return q, k, v
    (d, d_new), (dv, dv_new) = ((n, least_head_dim(n)) for n in (q.shape[-1], v.shape[-1]))
    if WIDE in (d_new, dv_new) and max(d_new, dv_new) == WIDE:
        d_new = dv_new = WIDE
    if d_new != d:
        q, k = pad(q, (0, d_new - d)), pad(k, (0, d_new - d))
    if dv_new != dv:
        v = pad(v, (0, dv_new - dv))
    return q, k, v


def least_head_dim(d: int) -> int:
    """The smallest supported head dimension that is at least d; d itself if there is none."""
    return next((n for n in (*HEAD_DIMS, WIDE) if n >= d), d)
