"""Checks of expert parallelism between ranks that read each other's memory, which each rank runs; see tests/ranks.py.

GPUs of one host do so anyway. On the CPU, ranks map the same files, and the emulator runs the kernels.
"""

import contextlib
import mmap
import os
import tempfile
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from cute_kernels.dtypes import NAMES
from cute_kernels.runtime.peers import Peers
from sparse_collective.distributed import dispatch, peer_dispatch
from sparse_collective.expert_rows import dispatch as rows
from sparse_collective.expert_rows.config import RowsFacts

from ..emulator.emulate import emulated, emulator
from . import expert_checks
from .distributed_checks import mesh_of, near, normal, raises
from .expert_checks import EXPERTS, counts_of, mixture, own_tokens, parallelized

PEERS = {}  # group -> SharedFiles


class Mapped:
    """The handle of a buffer of all ranks, as torch's symmetric memory has it."""

    def __init__(self, group):
        self.group = group

    def barrier(self, channel, timeout):
        dist.barrier(group=self.group)


class SharedFiles(Peers):
    """Peers whose memory is files that all ranks of a group map."""

    mapped: list = []  # noqa: RUF012 (of all instances)

    def _made(self, place, size):
        group, names = self._group(), [None] * self.ranks
        dist.barrier(group=group)  # all ranks have read the buffers that are replaced
        size = int(size * 1.25)
        with tempfile.NamedTemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
            os.truncate(file.fileno(), size)
            dist.all_gather_object(names, file.name, group=group)
            buffers = []
            for name in names:
                with open(name, "r+b") as shared:
                    buffers.append(torch.frombuffer(mmap.mmap(shared.fileno(), size), dtype=torch.uint8))
            dist.barrier(group=group)
        self.mapped.extend(buffers)
        buffers[self.rank].fill_(0xFF)
        pointers = torch.tensor([b.data_ptr() for b in buffers])
        return SimpleNamespace(own=buffers[self.rank], pointers=pointers, handle=Mapped(group))


def by_emulator(source, step, dtype=torch.bfloat16, out_dtype=torch.bfloat16, weighted=False):
    """expert_rows.dispatch._function of an emulated GPU."""
    run = emulated(RowsFacts("sm_90a", step, NAMES[dtype], NAMES[out_dtype], weighted))

    def call(*arguments):
        with emulator(sms=2, memory=tuple(SharedFiles.mapped)):
            run(*arguments)

    return call, 2


@contextlib.contextmanager
def shared_memory(device):
    """Ranks read each other's memory inside of the block, and check that they did."""
    if device.type == "cuda":
        assert dispatch.peers_of(mesh_of(device).get_group(), device), "the GPUs of this host read each other's memory"
        yield
        return

    def peers_of(group, device):
        if group not in PEERS:
            PEERS[group] = SharedFiles(group, device)
        return PEERS[group]

    before = sum(peers._round for peers in PEERS.values())
    with mock.patch.object(dispatch, "peers_of", peers_of), mock.patch.object(rows, "_function", by_emulator):
        yield
    assert sum(peers._round for peers in PEERS.values()) > before


def experts_between_peers(device):
    """On the CPU what GPUs do in expert_checks."""
    with shared_memory(device):
        for check in (
            expert_checks.mixture_of_experts,
            expert_checks.some_experts_get_all_tokens,
            expert_checks.experts_of_transformers,
            expert_checks.choices_that_are_no_expert,
            expert_checks.tokens_of_one_rank,
            expert_checks.repeated_calls,
            expert_checks.frozen_and_recomputed,
            expert_checks.trained_experts,
            expert_checks.experts_with_fully_shard,
        ):
            torch.manual_seed(0)
            check(device)


def both_ways_agree(device):
    """Gradients of experts are bitwise those by the all-to-all, as rows of layouts are; buffers grow between calls."""
    model = parallelized(mixture(device), mesh_of(device))
    for counts in (counts_of(60), [9] * dist.get_world_size(), counts_of(200), counts_of(300)):
        x, dy = normal(2, sum(counts), expert_checks.DIM, device=device)
        found = []
        for way in (shared_memory(device), mock.patch.object(dispatch, "peers_of", lambda *_: None)):
            model.zero_grad()
            mine = own_tokens(x, counts).clone().requires_grad_()
            with way:
                y = model(mine)
                y.backward(own_tokens(dy, counts))
            found.append([y, mine.grad, model.router.weight.grad, *gradients(model)])
        for number, (a, b) in enumerate(zip(*found, strict=True)):
            near(a, b)
            assert number < 3 or torch.equal(a, b)


def gradients(model):
    return [getattr(model, name).values.grad.to_local() for name in expert_checks.WEIGHTS]


def calls_one_after_another(device):
    """Calls with other numbers of tokens, one after another without waiting, as layers of a model make them."""
    alone = mixture(device)
    model, x = parallelized(alone, mesh_of(device)), normal(40 * EXPERTS, expert_checks.DIM, device=device)
    with shared_memory(device), torch.no_grad():
        parts = x.chunk(dist.get_world_size())[dist.get_rank()].split(7)
        for part, y in zip(parts, [model(part) for part in parts], strict=True):
            near(y, alone(part))


def layouts_with_room(device):
    """A layout is filled before its rows are known, and again if they are more than expected."""
    alone, rank = mixture(device), dist.get_rank()
    model, tokens = parallelized(alone, mesh_of(device)), 192
    even = torch.arange(tokens, device=device)[:, None] % EXPERTS, torch.arange(tokens, device=device)[:, None] + 3
    even = torch.cat(even, 1) % EXPERTS
    first = torch.zeros_like(even)  # the expert of the first rank
    weights, launches = torch.rand(tokens, 2, device=device), []
    peer_dispatch._SHARES.clear()
    with shared_memory(device), torch.no_grad():
        for choices in (even, even, first, even):
            for m in (model, alone):
                m.route = lambda x, choices=choices: (weights, choices)
            x = normal(tokens, expert_checks.DIM, device=device)
            with mock.patch.object(peer_dispatch, "to_layout", wraps=rows.to_layout) as fill:
                near(model(x), alone(x))
            launches.append(len(fill.call_args_list))
    assert launches == [1, 1, 1 if rank else 2, 1]


def results_are_kept(device):
    """Hooks keep or change results, which would otherwise be written to shared memory."""
    alone = mixture(device)
    model, x = parallelized(alone, mesh_of(device)), normal(25, expert_checks.DIM, device=device)
    write = peer_dispatch.PeerRouting.room_for
    written = mock.patch.object(peer_dispatch.PeerRouting, "room_for", autospec=True, side_effect=write)
    with shared_memory(device), written as rooms:
        with torch.no_grad():
            near(model(x), alone(x))
        assert rooms.call_count == 1
        near(model(x), alone(x))  # backward needs the results
        assert rooms.call_count == 1
    with shared_memory(device), torch.no_grad(), written as rooms:
        kept, copies = [], []
        with model.down.register_forward_hook(lambda m, args, y: kept.append(y) or copies.append(y.clone())):
            for part in x.split(5):
                near(model(part), alone(part))
        assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
        with model.down.register_forward_hook(lambda m, args, y: 2 * y.float()):
            near(model(x), 2 * alone(x))
        assert not rooms.called


def modes_mixed(device):
    """Calls with gradients or without, in inference mode, under autocast, and after an error use the same buffers."""
    alone = mixture(device)
    model, x = parallelized(alone, mesh_of(device)), normal(25, expert_checks.DIM, device=device)
    with shared_memory(device):
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad) * 2:
            with mode():
                near(model(x), alone(x))
                with torch.autocast(device.type, torch.bfloat16):
                    near(model(x).float(), alone(x).float(), 8)
        down = model.down
        for _ in range(3):
            with torch.no_grad(), mock.patch.object(type(down), "forward", side_effect=KeyError("an error of a layer")):
                raises(KeyError, "an error of a layer", lambda: model(x))
            leaf, other = (x.clone().requires_grad_() for _ in range(2))
            for m, t in ((model, leaf), (alone, other)):
                m(t).square().sum().backward()
            near(leaf.grad, other.grad, 4)


CHECKS = [
    experts_between_peers,
    both_ways_agree,
    calls_one_after_another,
    layouts_with_room,
    results_are_kept,
    modes_mixed,
]
