"""What context-parallel attention is measured against: Ulysses, torch's context parallelism, and torch's ring.

    Ulysses     each rank has a range of tokens; all-to-alls give it all tokens of some heads, and its tokens back
    torch       head-tail shards; K and V are all-gathered, their gradients go round a ring
    torch_ring  the same with K and V going round, too

Each is a Peer, whose results are compared with those of one GPU for the whole sequence before anything is timed.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

ERROR = 0.02  # norm of the difference of two BF16 results over the norm of one


class Peer(NamedTuple):
    """Attention of this rank's tokens, at `positions` of the sequence: out = forward(), (dq, dk, dv) = backward()."""

    positions: Tensor
    forward: Callable[[], Tensor]
    backward: Callable[[], Sequence[Tensor]]


def peer_of(attend: Callable, positions: Tensor, tensors: Sequence[Tensor], dout: Tensor) -> Peer:
    """The Peer of attend(q, k, v), of this rank's shards and the gradient of the output."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = cache(lambda: attend(*leaves))

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*leaves)

    return Peer(positions, forward, lambda: torch.autograd.grad(out(), leaves, dout, retain_graph=True))


def errors(peer: Peer, whole: Sequence[Tensor]) -> list[float] | str:
    """Relative errors of out, dq, dk and dv, the largest of all ranks, or the reason why it does not run.

    whole: the results for the whole sequence.
    """
    try:
        results = peer.forward(), *peer.backward()
    except Exception as failure:  # on all ranks alike
        return f"{type(failure).__name__}: {failure}"[:300]
    found = []
    for mine, of_all in zip(results, whole, strict=True):
        expected = of_all[:, :, peer.positions].float()
        found.append((mine.float() - expected).norm() / expected.norm())
    largest = torch.stack(found)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return [round(error, 6) for error in largest.tolist()]


def right(found: list[float] | str) -> bool:
    """True if these are errors of a peer that runs, and within rounding."""
    return not isinstance(found, str) and max(found) <= ERROR


class AllToAll(torch.autograd.Function):
    """What the ranks have for this one, (ranks, ...), of what this one has for each; gradients move alike."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> Tensor:
        return AllToAll.apply(dout.contiguous())


def by_heads(attend: Callable, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Ulysses: attend(q, k, v) of all tokens and some heads, from and to (1, heads, tokens of a rank, D)."""
    ranks = dist.get_world_size()
    parts = [t[0].unflatten(0, (ranks, -1)).transpose(1, 2) for t in (q, k, v)]  # (ranks, tokens, heads of one, D)
    rows = AllToAll.apply(torch.cat(parts, 2)).flatten(0, 1)  # (S, heads of q, k and v of this rank, D)
    of_heads = rows.split([part.shape[2] for part in parts], 1)
    out = attend(*(t.transpose(0, 1)[None] for t in of_heads))[0].transpose(0, 1)  # (S, heads, D)
    return AllToAll.apply(out.unflatten(0, (ranks, -1)).contiguous()).transpose(1, 2).flatten(0, 1)[None]


def ulysses(whole: Callable, mask, tensors: Sequence[Tensor], dout: Tensor) -> Peer:
    """whole(q, k, v, mask=mask) of this rank's heads; tensors and dout are those of the whole sequence."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    heads, tokens = (n // ranks for n in tensors[0].shape[1:3])
    if mask.heads > 1:
        mask = mask[:, rank * heads : (rank + 1) * heads]
    *local, local_dout = (t[:, :, rank * tokens : (rank + 1) * tokens] for t in (*tensors, dout))
    positions = torch.arange(rank * tokens, (rank + 1) * tokens, device=dout.device)
    return peer_of(partial(by_heads, partial(whole, mask=mask)), positions, local, local_dout)


@contextlib.contextmanager
def torch_peers(tensors: Sequence[Tensor], dout: Tensor, mesh: DeviceMesh) -> Iterator[dict[str, Peer]]:
    """torch's context parallelism of causal attention, to be called inside the `with`.

    With the kernels of FlashAttention 2. Before torch 2.14 cuDNN's backward is told the length of another part of q
    than it gets, and some layouts fail on some ranks only (pytorch#176915), for which the others would wait.
    """
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return nnf.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def rotating(method: str, call: Callable):
        set_rotate_method(method)  # read in forward and in backward
        return call()

    positions = torch.arange(dout.shape[2], device=dout.device)
    buffers = [*(t.clone(memory_format=torch.contiguous_format) for t in (*tensors, dout)), positions]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4 + [0], no_restore_buffers=set(buffers)):
        peer = peer_of(attend, positions, buffers[:3], buffers[3])
        yield {
            name: Peer(positions, partial(rotating, method, peer.forward), partial(rotating, method, peer.backward))
            for name, method in (("torch", "allgather"), ("torch_ring", "alltoall"))
        }
        set_rotate_method("allgather")
