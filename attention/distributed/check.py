"""Comparison of the processes' masks, before they plan different transfers and wait for each other."""

import hashlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from sparse_collective.nn.shards import reasons

from ..masks.block_mask import BlockMask

PLAIN = (bool, int, float, str, type(None))


def check_equal(
    op: str, mask: BlockMask, deal: tuple, group, device: torch.device | str, error: Exception | None
) -> None:
    """Compare masks and deals by a hash that the processes of a group exchange. Synchronizes.

    Args:
        deal: its name, and its tiles if they are those of another plan.
        device: of the mesh.
        error: of this process's arguments, which takes the place of its hash; None: they are right.

    Raises:
        RuntimeError: they differ, or a process has an error; on all processes, but that `error` is raised itself.
    """
    import torch.distributed as dist

    digest = hashlib.sha256()
    if error is None:
        for fact in (
            mask.lengths,
            mask.blocksize,
            mask.batch,
            mask.heads,
            *deal,
            *mask.tables(),
            *facts(mask.mask_mod),
        ):
            digest.update(_bytes(fact))
    number = 0 if error else int.from_bytes(digest.digest()[:8], "little") >> 1 | 1
    mine = torch.tensor([number], dtype=torch.int64, device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    values = torch.cat(found).tolist()
    if 0 in values:
        text = reasons(error, group)
        raise error or RuntimeError(f"{op}: {text}")
    if others := [rank for rank, value in enumerate(values) if value != values[0]]:
        raise RuntimeError(
            f"{op}: the masks of the processes {others} differ from that of process 0; all must plan the same mask"
        )


def facts(mask_mod: Any) -> Iterator[Any]:
    """Yield the name of a mask function and, if it is a dataclass, the numbers and tensors in it."""
    yield getattr(mask_mod, "__qualname__", type(mask_mod).__qualname__)
    if not is_dataclass(mask_mod):
        return
    for field in fields(mask_mod):
        value = getattr(mask_mod, field.name)
        if isinstance(value, (Tensor, *PLAIN)):
            yield value
        else:
            yield from facts(value)


def _bytes(fact: Any) -> bytes:
    if not isinstance(fact, Tensor):
        return repr(fact).encode()
    return repr((fact.dtype, fact.shape)).encode() + fact.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
