"""What this card can do at best, measured in the run that uses it: copy bandwidth, L2 feed, tensor-core rate."""

from collections.abc import Callable

import torch

from .timing import interleaved, median

COPY_BYTES = 2 << 30
FEED_SHAPE = (3072, 4096)  # bf16, 24 MB: half of what L2 holds
FEED_TILES = 2000  # of 32 KB, a CTA
TENSOR_STEPS = 1500  # K-tiles of 128 x 256 x 64, a CTA


def copy() -> Callable[[], torch.Tensor]:
    """A device-to-device copy of COPY_BYTES, which reads and writes each."""
    src = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    dst = torch.empty_like(src)
    return lambda: dst.copy_(src)


def measure(rounds: int = 20, warm_s: float = 0.5) -> dict[str, float]:
    """{"copy_tbs", "l2_tbs", "tensor_tflops"}: TB/s, TB/s, TFLOP/s; the last two on sm_90 only.

    copy: bytes read plus bytes written. L2 feed: TMA loads of a matrix that L2 holds, into the shared memory of all
    SMs. Tensor rate: bf16 WGMMA out of shared memory, random operands, nothing loaded.
    """

    def microseconds(call: Callable) -> float:
        return median(interleaved({"": call}, warm_s=warm_s, rounds=rounds)[""])

    found = {"copy_tbs": 2 * COPY_BYTES / microseconds(copy()) / 1e6}
    if torch.cuda.get_device_capability() == (9, 0):
        from .probes import FEED_TILE, TENSOR_TILE, ProbeFacts, probe

        sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        src = torch.randn(*FEED_SHAPE, device="cuda", dtype=torch.bfloat16)
        feed, tensor = probe(ProbeFacts("feed")), probe(ProbeFacts("tensor"))
        feed_us = microseconds(lambda: feed(src, FEED_TILES, sms))
        tensor_us = microseconds(lambda: tensor(src, TENSOR_STEPS, sms))
        m, n, k = TENSOR_TILE
        found["l2_tbs"] = sms * FEED_TILES * FEED_TILE[0] * FEED_TILE[1] * 2 / feed_us / 1e6
        found["tensor_tflops"] = sms * TENSOR_STEPS * 2 * m * n * k / tensor_us / 1e6
    return {name: round(value, 2) for name, value in found.items()}
