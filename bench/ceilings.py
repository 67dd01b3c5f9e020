"""What this card can do at best, measured in the run that uses it: copy bandwidth."""

from collections.abc import Callable

import torch

from .timing import interleaved, median

COPY_BYTES = 2 << 30


def copy() -> Callable[[], torch.Tensor]:
    """A device-to-device copy of COPY_BYTES, which reads and writes each."""
    src = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    dst = torch.empty_like(src)
    return lambda: dst.copy_(src)


def measure(rounds: int = 20, warm_s: float = 0.5) -> dict[str, float]:
    """{"copy_tbs": TB/s}, bytes read plus bytes written."""
    times = interleaved({"": copy()}, warm_s=warm_s, rounds=rounds)[""]
    return {"copy_tbs": round(2 * COPY_BYTES / median(times) / 1e6, 2)}
