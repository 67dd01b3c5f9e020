"""warm_up: compile the kernels of a model's calls before the first one."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .arch import arch_named
from .progress import with_progress
from .runtime import keys
from .runtime.cache import default_cache
from .runtime.device import MULTIPROCESSORS, Assumed, Collected, device_arch
from .runtime.families import family_of
from .runtime.parallel import compile_object
from .runtime.torch_compat import tree_leaves

IN_THIS_PROCESS = 2  # kernels that compile faster than processes start


@dataclass(frozen=True)
class WarmUp:
    """Result of `warm_up`; print it to read it.

    Attributes:
        kernels: parameters of the kernels that the calls need, without duplicates.
        compiled: number of them that were compiled now.
        seconds: of the whole warm-up.
        arch: the compiler's target.
    """

    kernels: tuple
    compiled: int
    seconds: float
    arch: str

    def __str__(self) -> str:
        cached = len(self.kernels) - self.compiled
        counts = f"{len(self.kernels)} kernels for {self.arch}: {self.compiled} compiled, {cached} cached"
        return f"{counts}, in {self.seconds:.1f} s"


def warm_up(
    model: Callable,
    *calls: Tensor | tuple | Mapping[str, Any],
    backward: bool = False,
    arch: str | None = None,
    jobs: int | None = None,
    progress: bool = True,
) -> WarmUp:
    """Compile all kernels that calls of a model need, in parallel, and cache them on disk.

    The model runs once per call on fake tensors (torch's FakeTensorMode), so no kernel is launched and nothing is
    computed. A module is copied first, without its tensors: parameters, buffers, gradients, attributes and the states
    of random number generators do not change. Kernels that are in memory, in a bundle or on disk are not compiled.

    Calls with gradients may need other kernels, as attention does, which then also stores the LSE. So call warm_up
    inside torch.no_grad() or torch.inference_mode() for a model that will run inside one of them.

    Args:
        model: a torch.nn.Module or a function. Tensors that a function captures and their gradients do not change, but
            what it assigns to attributes and other Python variables stays: do not call an optimizer's step().
        calls: the arguments of one call each: a tuple of positional arguments, a dict of keyword arguments, or a single
            tensor. Only dtypes, shapes and strides of floating-point tensors matter. Kernels are selected by shapes, so
            pass each size that differs much, such as the batch of training, a prefill and a single token.
        backward: also compile the kernels of the backward pass, for contiguous gradients of all outputs. For other
            gradients pass a function that returns a loss, or calls its backward().
        arch: the GPU to compile for: "sm_90", "sm_80", "sm_86" or "sm_89"; default the current one. With it no GPU is
            needed, and the kernels are only written to the disk cache.
        jobs: number of processes; default one per CPU.
        progress: False prints no progress to stderr.

    Returns:
        A WarmUp, with the number of kernels.

    Raises:
        TypeError: a call is not a tuple, a dict or a tensor, or the module cannot be copied.
        ValueError: there is no call, or arch is unknown.
        RuntimeError: the model reads the value of a tensor, as `.item()` and branches on tensors do; there is neither a
            GPU nor arch; or a kernel failed to compile.

    Example:
        x = torch.empty(8, 1024, 4096, dtype=torch.bfloat16, device="cuda")
        print(warm_up(model, (x,), backward=True))  # for training
        with torch.no_grad():
            print(warm_up(model, (x,), (x[:, :1],)))  # for inference
    """
    start = time.perf_counter()
    if not calls:
        raise ValueError("warm_up: pass the arguments of at least one call, as in warm_up(model, (x,))")
    if jobs is not None and jobs < 1:
        raise ValueError(f"warm_up: jobs must be at least 1, got {jobs}")
    arguments = [_arguments(call) for call in calls]
    gpu = target_gpu("warm_up", arch)
    facts: dict = {}
    for args, kwargs in arguments:
        facts |= collected_call("warm_up", model, args, kwargs, backward, gpu)[0]
    cache = default_cache()
    missing = [f for f in facts if not cache.has(f)]
    _compile(missing, jobs or os.cpu_count() or 1, progress)
    return WarmUp(tuple(facts), len(missing), time.perf_counter() - start, gpu.spec.target)


def _arguments(call) -> tuple[tuple, Mapping[str, Any]]:
    """(positional, keyword) arguments of a call."""
    if isinstance(call, Tensor):
        return (call,), {}
    if isinstance(call, tuple):
        return call, {}
    if isinstance(call, Mapping):
        return (), call
    raise TypeError(
        "warm_up: a call is a tuple of positional arguments, a dict of keyword arguments or a tensor, got "
        f"{type(call).__name__}"
    )


def target_gpu(what: str, arch: str | None) -> Assumed:
    """The GPU of this architecture, or the current one. what: the function that needs it, for messages."""
    if arch is not None:
        spec = arch_named(arch)
        return Assumed(spec, MULTIPROCESSORS[spec.name])
    if not torch.cuda.is_available():
        raise RuntimeError(f'{what}: there is no GPU; name the one to compile for, such as arch="sm_90"')
    return Assumed(*device_arch(torch.cuda.current_device()))


class _ByReference(TorchFunctionMode):
    """copy.deepcopy does not copy tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__deepcopy__:
            return args[0]
        return func(*args, **(kwargs or {}))


def collected_call(
    what: str, model: Callable, args: tuple, kwargs: Mapping[str, Any], backward: bool, gpu: Assumed
) -> tuple[Collected, int]:
    """The kernels of one call, and the number of launches before its backward pass. what: see target_gpu."""
    try:
        with _ByReference():
            state = (*model.parameters(), *model.buffers()) if isinstance(model, torch.nn.Module) else ()
            model, args, kwargs = copy.deepcopy((model, args, kwargs), {id(t): t for t in state})
    except Exception as error:
        raise TypeError(
            f"{what}: the module or its arguments cannot be copied ({error}); pass a function that calls it, as in "
            "lambda x: model(x), whose run may change the module's Python attributes"
        ) from error
    from .runtime.collect import collect  # imports torch's compiler, which takes seconds

    with collect(gpu) as (facts, collector):
        try:
            result = model(*args, **kwargs)
            forward = len(facts.launches)
            if backward:
                _differentiate(what, result, [leaf for leaf, _ in collector.leaves.values()])
        except Exception as error:
            if "DataDependent" not in type(error).__name__:
                raise
            raise RuntimeError(
                f"{what}: the model reads the value of a tensor, which has none while no kernel runs. Run the program "
                "once with CUTE_KERNELS_RECORD=FILE, and then python -m cute_kernels compile --calls FILE --out DIR"
            ) from error
    return facts, forward


def _differentiate(what: str, result, leaves: Sequence[Tensor]) -> None:
    """Run the backward pass, without adding to any gradient."""
    outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    if not outputs or not leaves:
        raise ValueError(f"{what}: backward=True, but no output of the call requires a gradient; use requires_grad_()")
    ones = [torch.ones_like(t, memory_format=torch.contiguous_format) for t in outputs]
    torch.autograd.grad(outputs, leaves, ones, allow_unused=True)


def _compile(facts: Sequence, jobs: int, progress: bool) -> None:
    """Compile kernels into the cache."""
    cache, failures = default_cache(), []
    named = [(f, keys.function_name(cache.key(f))) for f in facts]
    jobs = 1 if len(facts) <= IN_THIS_PROCESS else jobs
    for outcome in with_progress("compiling", compile_object, named, jobs, shown=progress, own_process=False):
        kernel = outcome.item[0]
        if outcome.error:
            failures.append(f"{family_of(kernel).title(kernel)}: {outcome.error}")
        else:
            data, metadata = outcome.value
            cache.add(kernel, data, metadata, outcome.seconds)
    if failures:
        raise RuntimeError(
            "\n".join([f"warm_up: {len(failures)} of {len(facts)} kernels failed to compile", *failures])
        )
