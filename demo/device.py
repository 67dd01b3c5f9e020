"""Whether there is a GPU here that runs the kernels."""

import torch

from cute_kernels.arch import arch_of


def why_no_gpu() -> str:
    """Empty if this machine's GPU runs the kernels, otherwise the reason."""
    if not torch.cuda.is_available():
        return "There is no CUDA GPU here."
    try:
        arch_of(torch.cuda.get_device_capability())
    except RuntimeError as error:
        return f"The GPU here ({torch.cuda.get_device_name()}) cannot run the kernels: {error}."
    return ""
