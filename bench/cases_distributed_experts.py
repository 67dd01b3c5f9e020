"""Rows of expert parallelism: a mixture of experts over all ranks, beside one GPU that has all experts."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from sparse_collective.distributed import BsrExpertParallel
from sparse_collective.distributed.routing import Routing
from sparse_collective.nn import BsrMixtureOfExperts

from .cases_distributed import LAYERS, in_a_row, step_of
from .distributed import Row, timed

EXPERTS, TOP_K = 8, 2
TOKENS, DIM, HIDDEN = 8192, 4096, 14336  # of each rank; weak scaling
DENSITY = 0.125


def expert_parallel(density: float, training: bool) -> Callable[[torch.device], dict]:
    """Each rank's tokens through the experts of all ranks, and through all experts on one GPU, without communication.

    ms, alone_ms: of a call, where LAYERS of them follow each other: the host waits for the GPU in each.
    efficiency: tokens per second and rank over those of one GPU alone: 1 is linear scaling.
    single_ms: of one call; the host has waited for 10 ms when it reads the table of rows, and is slower after that.
    """

    def run(device: torch.device) -> dict:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        alone = BsrMixtureOfExperts(
            DIM, HIDDEN, EXPERTS, TOP_K, density=density, device=device, dtype=torch.bfloat16
        ).train(training)  # fmt: skip
        model = parallelize_module(copy.deepcopy(alone), mesh, BsrExpertParallel())
        torch.manual_seed(1 + dist.get_rank())
        x, dy = (torch.randn(TOKENS, DIM, device=device, dtype=torch.bfloat16) for _ in range(2))
        moved = traffic(model, x, mesh)
        if training:
            leaf = x.requires_grad_()
            calls = {name: step_of(m, leaf, dy, list(m.parameters())) for name, m in named(alone, model)}
        else:
            calls = {name: lambda m=m: m(x) for name, m in named(alone, model)}
        with torch.set_grad_enabled(training):
            times = timed({name: in_a_row(call) for name, call in calls.items()} | {"single": calls["ranks"]})
        ms, alone_ms = times["ranks"] / LAYERS, times["alone"] / LAYERS
        return {
            "ms": ms, "alone_ms": alone_ms, "efficiency": alone_ms / ms, "single_ms": times["single"],
            "tokens_per_s_per_rank": 1e3 * TOKENS / ms, "tokens_per_s_alone": 1e3 * TOKENS / alone_ms, **moved,
        }  # fmt: skip

    return run


def named(alone: torch.nn.Module, model: torch.nn.Module) -> tuple:
    return ("alone", alone), ("ranks", model)


def traffic(model: BsrMixtureOfExperts, x: torch.Tensor, mesh) -> dict:
    """Megabytes of rows that a rank sends to others, and as many come back; the largest rank's rows over the mean."""
    with torch.no_grad():
        moved = torch.tensor(Routing(model.route(x)[1], EXPERTS, mesh).read(), dtype=torch.float64)
    sent = (moved.sum() - moved.trace()) / mesh.size()
    arriving = moved.sum(0)
    return {
        "MB_sent": sent.item() * x.shape[1] * x.element_size() / 1e6,
        "largest_load": (arriving.max() / arriving.mean()).item(),
    }  # fmt: skip


def rows() -> list[Row]:
    size = f"{EXPERTS} experts, top {TOP_K}, {DIM} to {HIDDEN}, {TOKENS} tokens per rank"
    limits = {"efficiency": {2: 0.85, 4: 0.80}}
    found = []
    for density, experts in ((DENSITY, f"{DENSITY:.1%}"), (1.0, "dense")):
        for training, what in ((False, "forward"), (True, "forward and backward")):
            run, name = expert_parallel(density, training), f"EP MoE {size}, {experts}, {what}"
            found.append(Row(name, run, ranks=(2, 4, 8), target=limits))
    return found
