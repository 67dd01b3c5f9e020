"""Shared by the tutorials: inspect the machine code, compare with FP64, time a call, show an error."""

import statistics
from collections.abc import Callable

import torch

import cute_kernels
from cute_kernels.report import report_of_kernel

ARCHS = ("sm_80", "sm_90a")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, seed: int = 0, device: str = DEVICE) -> torch.Tensor:
    """BF16 normal random numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(device, torch.bfloat16)


def inspect_call(op, *args, **kwargs) -> None:
    """Compile the kernel of a call for two architectures and print its resources; no GPU is needed."""
    for arch in ARCHS:
        print(cute_kernels.inspect(op, *args, arch=arch, **kwargs))


def inspect_facts(facts_for: Callable) -> None:
    """Compile the kernel for facts_for(arch) for two architectures and print its resources."""
    for arch in ARCHS:
        print(report_of_kernel(facts_for(arch)))


def compare(result: torch.Tensor, exact: torch.Tensor, baseline: torch.Tensor) -> None:
    """Raise if the error of the result exceeds twice that of torch's baseline in the same dtype; exact is FP64."""
    error, allowed = ((x.double() - exact).abs().max().item() for x in (result, baseline))
    print(f"largest error {error:.3g} on {result.device.type}; torch's in the same dtype {allowed:.3g}")
    if not error <= 2 * allowed:
        raise AssertionError(f"an error of {error:.3g}, above twice torch's {allowed:.3g}")


def measure(**calls: Callable) -> None:
    """Print the median time of 20 runs of each call, by CUDA events. Without a GPU, measure nothing."""
    if DEVICE == "cpu":
        print("no GPU: not measured")
        return
    for name, call in calls.items():
        times = []
        for _ in range(23):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000)
        print(f"{name}: {statistics.median(times[3:]):.1f} us")  # the first three compile and warm up


def refused(call: Callable) -> None:
    """Run a call that must raise, and print its error."""
    try:
        call()
    except (TypeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}")
    else:
        raise AssertionError("this call should have raised")
