"""Processes that run functions of tests together, one for each rank of a torch.distributed process group.

A check is a module-level function of a module of tests. It takes the rank's device, runs in every rank at once, and
raises if a result is wrong. pytest runs checks with gloo on the CPU, `python -m tests.distributed_record` with NCCL.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import multiprocessing
import os
import queue
import socket
import time
import traceback
from typing import Any

# What checks import, torch.compile too: one process imports it for all ranks, which take seconds for it.
PRELOAD = ["torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch.distributed.checkpoint", "pytest"]
PRELOAD += ["torch._inductor.compile_fx", "torch._dynamo.backends.debugging", "cutlass.cute"]
PRELOAD += ["attention.distributed", "sparse_collective.distributed", __name__]
COLLECTIVE_SECONDS = {"gloo": 60, "nccl": 300}  # that a collective waits; on GPUs a rank may be compiling kernels


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _serve(
    rank: int, world: int, backend: str, port: int, seconds: float, group: bool, one_gpu: str, inbox: Any, outbox: Any
) -> None:
    """Body of a process: run the checks that arrive until None does."""
    if not group and backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast is not used
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    gpu = 0 if one_gpu else rank
    if one_gpu:  # for NCCL each rank is a host of its own, or it would refuse a GPU that two ranks have
        os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_NET": "Socket"}
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = str(int(one_gpu == "host"))
    device = torch.device("cuda", gpu) if backend == "nccl" else torch.device("cpu")
    if group:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world,
            timeout=datetime.timedelta(seconds=seconds), device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
    else:
        torchrun = {"RANK": rank, "LOCAL_RANK": gpu, "WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in torchrun.items()}, MASTER_ADDR="127.0.0.1")
    while (task := inbox.get()) is not None:
        (name, arguments), error = task, ""
        try:
            module, _, function = name.partition(":")
            torch.manual_seed(0)
            getattr(importlib.import_module(module), function)(device, *arguments)
        except BaseException:
            error = traceback.format_exc()
        outbox.put((rank, error))
    if group:
        dist.destroy_process_group()


class Ranks:
    """`world` processes of one process group; they start with the first check, and again after one that fails.

    group: if False, processes start as torchrun starts them: with its environment variables and without a group.
    one_gpu: "host" or "hosts": all ranks use the first GPU, and NCCL's data pass through sockets of this machine. As of
        one host, ranks also read each other's memory, where layers do so.
    """

    def __init__(
        self, world: int, backend: str = "gloo", collective_seconds: float | None = None, group: bool = True,
        one_gpu: str = "",
    ) -> None:  # fmt: skip
        self.world, self.backend, self.group, self.one_gpu = world, backend, group, one_gpu
        self.collective_seconds = collective_seconds or COLLECTIVE_SECONDS[backend]
        # A process that forks must not have used CUDA.
        self.context: Any = multiprocessing.get_context("forkserver" if backend == "gloo" else "spawn")
        if backend == "gloo":
            self.context.set_forkserver_preload(PRELOAD)
        self.processes: list[Any] = []

    def start(self) -> None:
        port, make = free_port(), self.context.Queue
        self.inboxes, self.outbox = [make() for _ in range(self.world)], make()
        shared = self.world, self.backend, port, self.collective_seconds, self.group, self.one_gpu
        self.processes = [
            self.context.Process(target=_serve, args=(rank, *shared, inbox, self.outbox), daemon=True)
            for rank, inbox in enumerate(self.inboxes)
        ]
        for process in self.processes:
            process.start()

    def outcomes(self, name: str, *arguments: Any, seconds: float = 120, after_error: float = 3) -> list[str]:
        """Run a check, "module:function"; returns each rank's error, "" where it passed.

        arguments: of the check, after the device.
        after_error: seconds that other ranks get after the first error, before they are killed.
        """
        if not self.processes:
            self.start()
        for inbox in self.inboxes:
            inbox.put((name, arguments))
        errors: dict[int, str] = {}
        failed, end = False, time.monotonic() + seconds
        while len(errors) < self.world and time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                rank, errors[rank] = self.outbox.get(timeout=0.2)
            for rank, process in enumerate(self.processes):
                if not process.is_alive() and rank not in errors:
                    errors[rank] = f"the process ended with exit code {process.exitcode}"
            if any(errors.values()) and not failed:
                failed, end = True, min(end, time.monotonic() + after_error)
        found = [errors.get(rank, "no result; killed") for rank in range(self.world)]
        if any(found):
            self.kill()
        return found

    def run(self, name: str, *arguments: Any, seconds: float = 120) -> None:
        """Run a check, as `outcomes` does.

        Raises:
            AssertionError: it failed; with the errors of all ranks.
        """
        errors = self.outcomes(name, *arguments, seconds=seconds)
        text = "\n".join(f"rank {rank} of {self.world}: {error}" for rank, error in enumerate(errors) if error)
        assert not text, text

    def fail(self, name: str) -> None:
        """Run a check in two ranks, of which the last one raises ArithmeticError or ends with exit code 3.

        Raises:
            AssertionError: it did not, or the other rank did not end with a reason, soon after the group's timeout.
        """
        try:
            other, failed = self.outcomes(name, after_error=30)
        finally:
            self.kill()
        assert "ArithmeticError: this rank had an error" in failed or failed == "the process ended with exit code 3"
        timed_out = f"Timed out waiting {1000 * self.collective_seconds:.0f}ms"
        reasons = timed_out, "Connection closed by peer", "Connection reset by peer"
        assert any(reason in other for reason in reasons), other

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes = []

    def close(self) -> None:
        """End the processes."""
        for inbox in self.inboxes if self.processes else ():
            inbox.put(None)
        for process in self.processes:
            process.join(10)
        self.kill()
