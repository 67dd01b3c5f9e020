"""Sharded `values`: DTensors whose dimension 0, the stored blocks, is split over ranks as torch.chunk splits it.

FSDP2 makes them. The pattern is replicated: every rank has all indices. Scores of blocks are all-gathered, so that each
rank makes the same choice; then only blocks whose rank changes are sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels.runtime.torch_compat import is_dtensor, resize_fully_sharded, without_modes

from ..pattern_update import moved

__all__ = [
    "WHOLE",
    "bounds",
    "check_held",
    "check_same",
    "gathered",
    "hash_of",
    "local_part",
    "moved_shards",
    "reasons",
    "replace_shards",
    "shard_dim",
    "shard_range",
]


WHOLE = (
    "call {0} before parallelize_module or fully_shard, or load sparse_collective.distributed.full_state_dict(model) "
    "into an unsharded model and call {0} there"
)


def check_held(op: str, name: str, layer: Any) -> None:
    """Reject a tensor- or expert-parallel layer, of which this rank holds a part.

    Raises:
        TypeError: it is one.
    """
    if hasattr(layer, "place"):
        raise TypeError(f"{op}: parallelize_module has split {name} over ranks; {WHOLE.format(op)}")


def shard_dim(t: Any) -> int | None:
    """The mesh dimension that dimension 0 of a DTensor is split over; None if every rank holds all of it.

    Raises:
        TypeError: the DTensor is placed otherwise.
    """
    sharded = [i for i, placement in enumerate(t.placements) if not placement.is_replicate()]
    plain = all(type(t.placements[i]).__name__ == "Shard" and t.placements[i].dim == 0 for i in sharded)
    if not plain or len(sharded) > 1:
        raise TypeError(
            f"values are a DTensor placed as {t.placements}; blocks can be scored and changed with Shard(0) over one "
            "mesh dimension, as fully_shard makes it; change the pattern before parallelize_module"
        )
    return sharded[0] if sharded else None


def bounds(blocks: int, parts: int) -> list[int]:
    """(parts + 1,) where each part begins, as torch.chunk and Shard split `blocks`."""
    each = -(-blocks // parts)
    return [min(i * each, blocks) for i in range(parts + 1)]


def shard_range(t: Any) -> tuple[int, int]:
    """[begin, end) of the blocks that this rank holds."""
    dim, mesh = shard_dim(t), t.device_mesh
    if dim is None:
        return 0, t.shape[0]
    cuts, rank = bounds(t.shape[0], mesh.size(dim)), mesh.get_local_rank(dim)
    return cuts[rank], cuts[rank + 1]


def local_part(t: Tensor) -> Tensor:
    """The blocks of this rank, without a gradient."""
    part: Any = t
    return part.detach().to_local() if is_dtensor(t) else part.detach()


def gathered(part: Tensor, like: Any) -> Tensor:
    """(nnz,) numbers of all blocks, from those of each rank; `like` is placed as the blocks are."""
    from torch.distributed.tensor import DTensor

    if shard_dim(like) is None:
        return part
    whole = DTensor.from_local(
        part.contiguous(), like.device_mesh, like.placements, run_check=False, shape=like.shape[:1], stride=(1,)
    )
    return whole.full_tensor()


def moved_shards(t: Any, origin: Tensor) -> Any:
    """`pattern_update.moved` of a DTensor: its blocks at new positions. Only blocks that change ranks are sent.

    Args:
        t: (nnz, ...) DTensor.
        origin: (n,) int64, the same on all ranks: the previous position of each block, -1 for zeros. Positions
            ascend, as those of blocks that are sorted by row and column do.

    Returns:
        (n, ...) DTensor of the same placements. Synchronizes.
    """
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    dim, mesh, part = shard_dim(t), t.device_mesh, t.to_local()
    shape = torch.Size((len(origin), *t.shape[1:]))
    if dim is None:
        return DTensor.from_local(moved(part, origin), mesh, t.placements, run_check=False)
    parts, rank = mesh.size(dim), mesh.get_local_rank(dim)
    old, new = bounds(t.shape[0], parts), bounds(len(origin), parts)
    stored = (origin >= 0).nonzero().flatten()
    where = origin[stored]
    cut = [torch.tensor(cuts[1:-1], dtype=torch.int64, device=origin.device) for cuts in (old, new)]
    source, target = torch.bucketize(where, cut[0], right=True), torch.bucketize(stored, cut[1], right=True)
    sent, received = (source == rank) & (target != rank), (target == rank) & (source != rank)
    counts = torch.stack([
        torch.bincount(target[sent], minlength=parts), torch.bincount(source[received], minlength=parts)
    ]).tolist()  # fmt: skip
    outgoing = part.index_select(0, where[sent] - old[rank]).contiguous()
    incoming = outgoing.new_empty(sum(counts[1]), *t.shape[1:])
    raw = [x.view(torch.uint8) for x in (incoming, outgoing)]
    dist.all_to_all_single(raw[0], raw[1], counts[1], counts[0], group=mesh.get_group(dim))
    kept = (source == rank) & (target == rank)
    result = part.new_zeros(new[rank + 1] - new[rank], *t.shape[1:])
    result.index_copy_(0, stored[kept] - new[rank], part.index_select(0, where[kept] - old[rank]))
    result.index_copy_(0, stored[received] - new[rank], incoming)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(result, mesh, t.placements, run_check=False, shape=shape, stride=strides)


def replace_shards(parameter: Any, new: Any) -> None:
    """Put a DTensor with another number of blocks into the same Parameter; FSDP2 manages it as before.

    Its gradient must be None.
    """
    dim, part = shard_dim(new), new.to_local()
    room = part
    if dim is not None:
        room = part.new_zeros(bounds(len(new), new.device_mesh.size(dim))[1], *part.shape[1:])
        room[: len(part)] = part
    new = type(new).from_local(
        room[: len(part)], new.device_mesh, new.placements, run_check=False, shape=new.shape, stride=new.stride()
    )
    torch.utils.swap_tensors(parameter, torch.nn.Parameter(new, requires_grad=parameter.requires_grad))
    resize_fully_sharded(parameter, room)


def hash_of(*parts: Any) -> int:
    """A 63-bit hash of tensors, and of the repr of anything else. Synchronizes."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(repr((part.dtype, part.shape)).encode())
            contents = part.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
        else:
            contents = repr(part).encode()
        digest.update(len(contents).to_bytes(8, "little"))
        digest.update(contents)
    return int.from_bytes(digest.digest(), "little") >> 1


@without_modes()  # a recomputation by activation checkpointing, which compares nothing, runs the same operations
def check_same(
    op: str, what: str, number: int | Callable[[], int], mesh: Any, advice: str, dims: Sequence[int] | None = None,
    extra_groups: Sequence[Any] = (),
) -> None:  # fmt: skip
    """Compare a number on all ranks of a mesh, by one all-gather of 8 bytes for each of its dimensions.

    Args:
        op, what, advice: for the message.
        number: not negative; or a function that checks arguments and returns it, whose errors all ranks learn.
        dims: mesh dimensions; None: all.
        extra_groups: process groups to compare it in, too.

    Raises:
        RuntimeError: the numbers differ; on all ranks, so that none waits for those that raised.
        Exception: that of the function, on its rank; RuntimeError with its text on the other ranks.
    """
    import torch.distributed as dist

    error, refusal = "", None
    if callable(number):
        try:
            number = number()
        except Exception as caught:
            number, refusal = -1, caught
    groups = [mesh.get_group(dim) for dim in (range(mesh.ndim) if dims is None else dims)]
    for group in (*groups, *extra_groups):
        mine = torch.tensor([number], dtype=torch.int64, device=mesh.device_type)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, mine, group=group)
        numbers = torch.cat(every).tolist()
        if len(set(numbers)) > 1:
            ranks = dist.get_process_group_ranks(group)
            if -1 in numbers:
                text = reasons(refusal or error, group)  # on all ranks of the group
                error = error or f"{op}: {text}"
                number = -1
                continue
            alike = [ranks[i] for i, n in enumerate(numbers) if n == numbers[0]]
            error = error or (
                f"{op}: {what} differs between ranks: ranks {alike} agree, ranks "
                f"{[rank for rank in ranks if rank not in alike]} do not; {advice}"
            )
            number = -1  # tells the ranks of the next group
    if refusal is not None:
        raise refusal
    if error:
        raise RuntimeError(error)


def reasons(error: Exception | str | None, group: Any) -> str:
    """Exchange the errors of a group's ranks, "" or None where there is none; returns them with their ranks."""
    import torch.distributed as dist

    text = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else error or ""
    texts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, text, group=group)
    ranks = dist.get_process_group_ranks(group)
    return "; ".join(f"rank {rank} raised {text}" for rank, text in zip(ranks, texts, strict=True) if text)
