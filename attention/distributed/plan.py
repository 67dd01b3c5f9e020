"""Plans of context-parallel attention: which tokens each process has, and which keys and values it fetches from whom.

    query tiles of process 1, and the tiles of K and V that they need:

        process        0           1           2
        tiles      0  1 10 11  2  3  8  9  4  5  6  7        dealt head and tail
        needed     x  x  .  .  x  x  x  x  x  x  x  x        by tiles 2, 3, 8 and 9 of a causal mask
        buffer     2  3  8  9 | 0  1 | 4  5  6  7            its own, then what others send; 10 and 11 do not move

The buffer holds whole tiles. With a capacity each process gets as many of each other one, and its buffer has all of its
own, also tiles that its mask does not need. The mask of a process has the blocks of its query tiles as rows
and those of the buffer as columns; its mask_mod gets positions in the whole sequence (AtPositions).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from cute_kernels.runtime.peers import peers_of

from ..masks import cache, patterns
from ..masks.block_mask import BlockMask
from ..masks.element_mask import H_INPUT, trace_mask
from ..masks.mask_mods import AtPositions, Band
from ..masks.score_mod import inputs_of
from ..masks.sharded import dispatch as kernels
from . import deal as dealing
from . import moves
from .check import UNCOMPARED, check_equal, check_moves, check_sizes
from .moves import blocks_of

OP = "plan_context_parallel"
STAGES = 4  # between hosts


@dataclass(frozen=True, eq=False)
class ContextParallelPlan:
    """The part of one process in context-parallel attention; made by plan_context_parallel.

    It is immutable, so copies of a model share it. It has a process group, so it cannot be pickled.

    Attributes:
        length: tokens of the whole sequence, S.
        tile: tokens of a tile.
        tiles: int64 (processes, tiles of one): the tiles of each process. Those from ceil(S / tile) on are empty.
        rank, size: this process, and how many there are.
        deal: how the tiles were dealt, see deal.py.
        capacity: most tiles that a process gets of another one, the same number on all processes.
        own: int64 (tiles,) on the mask's device: this process's tiles in its buffer, by their place in its shard.
        sends: int64 (tiles,): for each other process in turn, this process's tiles that go there, by their place.
        send_counts, receive_counts: how many tiles go to, and come from, each process, 0 for this one.
        buffer: int64 (tiles,): numbers in the whole sequence of the tiles in the buffer, first this process's own.
        numbers: this process's tiles and those of the buffer, int32, as masks and score functions read them.
        mask: the BlockMask of this process's queries over the buffer.
        most_moved: tiles that the process that receives most gets, the same number on all processes.
        stages: most stages of a call, see plan_context_parallel.
        group: the process group, or None for a plan of a process that does not exist (see `plans`).
    """

    length: int
    tile: int
    tiles: Tensor
    rank: int
    size: int
    deal: str
    capacity: int
    own: Tensor
    sends: Tensor
    send_counts: list[int]
    receive_counts: list[int]
    buffer: Tensor
    numbers: tuple[Tensor, Tensor]
    mask: BlockMask
    most_moved: int
    stages: int = 1
    group: Any = None

    @property
    def local_length(self) -> int:
        """Rows of q, k and v of this process, the same for all processes: whole tiles, the last ones maybe empty."""
        return self.tiles.shape[1] * self.tile

    @property
    def positions(self) -> Tensor:
        """Positions of this process's tokens in the whole sequence, int64 (local_length,), for rotary embeddings.

        Those from `length` on belong to padding.
        """
        return blocks_of(self.tiles[self.rank], self.tile)

    def shard(self, x: Tensor, dim: int, *, value: float = 0) -> Tensor:
        """This process's part of a tensor of the whole sequence: its tokens along `dim`, padding filled with `value`.

        Raises:
            TypeError, ValueError: x is no tensor, or does not have `length` tokens along `dim`.

        Example:
            >>> ids, labels = plan.shard(ids, 1), plan.shard(labels, 1, value=-100)
        """
        _check_tokens("shard: x", x, dim, self.length)
        if not isinstance(value, (Number, Tensor)):
            raise TypeError(f"shard: value must be a number, which fills the padding, got {value!r}")
        positions = self.positions.to(x.device)
        if self.length == 0:
            return x.new_full((*x.shape[:dim], len(positions), *x.shape[dim:][1:]), value)
        part = x.index_select(dim, positions.clamp(max=self.length - 1))
        if self.tiles.numel() * self.tile == self.length:
            return part
        past = (positions >= self.length).view(-1, *[1] * (x.dim() - 1 - dim % x.dim()))
        return part.masked_fill(past, value)

    def unshard(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The tensor of the whole sequence from the parts of all processes, in their order (all_gather's output).

        Raises:
            TypeError, ValueError: a part is no tensor or does not have `local_length` tokens along `dim`, or there are
                not as many as processes.
        """
        if len(parts) != self.size:
            raise ValueError(f"unshard: parts must be those of {self.size} processes, got {len(parts)}")
        for number, part in enumerate(parts):
            _check_tokens(f"unshard: parts[{number}]", part, dim, self.local_length)
        order = blocks_of(self.tiles.flatten(), self.tile).argsort()[: self.length]
        return torch.cat([*parts], dim).index_select(dim, order.to(parts[0].device))

    def moved_tiles(self) -> int:
        """Tiles of K and V that this process receives from others. Without capacity, its mask needs all of them."""
        return sum(self.receive_counts)

    def moved_bytes(self, k: Tensor, v: Tensor) -> int:
        """Bytes of K and V that this process receives in a forward pass, of shards k and v."""
        return sum(t.element_size() * t.numel() // max(t.shape[2], 1) for t in (k, v)) * self.tile * self.moved_tiles()

    def __copy__(self) -> ContextParallelPlan:
        return self

    def __deepcopy__(self, memo: dict) -> ContextParallelPlan:
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            raise TypeError(
                "ContextParallelPlan: a plan cannot be pickled, since it belongs to a process group; save "
                "model.state_dict() instead of the model, and plan again after loading"
            )
        return vars(self)

    def __repr__(self) -> str:
        stages = f", at most {self.stages} stages" if self.stages > 1 else ""
        blocks = f"{self.moved_tiles()} of {len(self.buffer)} tiles of K and V from others"
        return (
            f"ContextParallelPlan(rank {self.rank} of {self.size}, {self.length} tokens in tiles of {self.tile}, "
            f"{self.deal}, {self.local_length} here, {blocks}{stages})"
        )


def _check_tokens(name: str, x: Tensor, dim: int, length: int) -> None:
    """Check that a tensor has `length` tokens along a dimension, which may be negative."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    try:
        dim = operator.index(dim)
    except TypeError:
        raise TypeError(f"{name.partition(':')[0]}: dim must be an int, got {dim!r}") from None
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != length:
        raise ValueError(f"{name} must have {length} tokens in dimension {dim}, got shape {tuple(x.shape)}")


def plan_context_parallel(
    mask=None,
    mesh=None,
    *,
    length: int | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] | None = None,
    cu_seqlens: Tensor | None = None,
    deal: str | ContextParallelPlan = "auto",
    capacity: int | None = None,
    stages: int | None = None,
    check: bool = True,
    device: torch.device | str | None = None,
) -> ContextParallelPlan:
    """Plan attention over a sequence that the processes of a mesh share. Make a plan once per mask, and use it in all
    layers and steps.

    Args:
        mask: a BlockMask or FlexAttention's, with as many queries as keys, for all heads or per head; or None, and the
            mask of the arguments below.
        mesh: a DeviceMesh of one dimension; all its processes, and no others, call this with the same mask.
        length: tokens of the whole sequence, S, if mask is None.
        causal, window_size: see attention.
        cu_seqlens: (B + 1,) int32 or int64, for packed sequences: tokens attend to their own sequence only. They begin
            at 0 and never decrease. Tokens from the last entry to `length` are padding: fully masked, with rows of 0.
        deal: which tokens each process has: "contiguous", "head_tail" or "balanced", see deal.py; or "auto", the
            one of these whose slowest process is expected to take least time; or a plan, to deal the same tokens.
        capacity: tiles of K and V, of max(mask.blocksize) tokens, that each process gets of each other one, whether it
            needs them or not; None: those that it needs. With a capacity the host knows how much moves, so that masks
            that are chosen anew for each step, on a GPU, are planned without waiting for it, also in a CUDA graph.
            plan.capacity of a plan without one is the least that its mask needs with its deal. All tiles of a process,
            plan.tiles.shape[1], are always enough; larger values mean as many. Equal on all processes.
        stages: maximum number of stages of a call: K and V of some heads move in one, while a kernel computes those of
            the stage before. None: 1 if the processes' GPUs read each other's memory, as by NVLink on one host, else 4;
            on a CPU 1. A call's number of stages is the largest divisor of its KV heads up to `stages` with which the
            process that receives most gets at least 16 MiB in each. It is 1 with a score_mod, or a mask_mod that reads
            the head. Equal on all processes.
        check: True compares the processes' masks by a hash of their block lists, of what mask functions compute and of
            the numbers and tensors that they read (of tensors larger than 64 MiB: shapes). It copies them to the host.
            Functions that kernels refuse, which a CPU calls, are compared by name.
            The first call of context_parallel_attention with this plan compares its arguments. With a capacity True
            compares only capacities, deals, stages and which tiles move, without waiting. Equal on all processes.
        device: that of the plan, only without mask and cu_seqlens, whose device it has; by default the mesh's.

    Synchronizes, to read cu_seqlens, which tiles move and which deal is best, and the hashes. With a mask and a
    capacity it does not, but in the first call of its kind, which copies constants to the GPU and must precede a
    capture.

    Raises:
        TypeError, ValueError: an argument's type or value; mask has other numbers of queries than of keys, or is not
            on a device of the mesh; capacity with deal="auto"; on a CPU, capacity is less than the mask needs.
        RuntimeError: with `check` and without capacity, the processes' masks differ, or another process raised an error
            of its arguments. With a capacity, on a GPU, it is raised by the next synchronization, since assertions find
            it there, as an index out of bounds: the mask needs more tiles, or with `check` capacities, deals, stages
            or the tiles that move differ, or another process raised an error.

    Example:
        >>> mesh = init_device_mesh("cuda", (4,))
        >>> plan = plan_context_parallel(mesh=mesh, length=65536, causal=True)
        >>> q, k, v = (plan.shard(t, dim=2) for t in (q, k, v))
        >>> out = context_parallel_attention(q, k, v, plan)
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise TypeError(f"{OP}: mesh must be a DeviceMesh of one dimension, such as mesh['cp'], got {mesh!r}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"{OP}: this process is not in the mesh, {mesh!r}; only its own processes plan")
    if not isinstance(check, bool):
        raise TypeError(f"{OP}: check must be True or False, got {check!r}")
    group = mesh.get_group()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    error, arguments = None, (length, causal, window_size, cu_seqlens)
    try:
        mask = _mask_on(mesh.device_type, mask, *arguments, device)
        _check_deal(mask, size, deal, capacity)
        _check_stages(stages)
    except Exception as caught:
        if not check:
            raise
        error = caught
    if check:
        name, *tiles = (deal.deal, deal.tiles) if isinstance(deal, ContextParallelPlan) else (deal,)
        if capacity is None:
            check_equal(OP, mask, (stages, name, *tiles), group, mesh.device_type, error)
        else:
            sizes = () if error else (capacity, stages, name, mask.lengths, mask.blocksize)
            check_sizes(OP, sizes, group, mesh.device_type, error)
    if stages != 1 and size > 1 and mesh.device_type == "cuda":
        # Also if stages are given: the first transfers of a group must be those of all its processes.
        reached = peers_of(group, mask.device) is not None
        stages = stages or (1 if reached else STAGES)
    if stages not in (None, 1) and _reads_heads(mask):
        stages = 1
    plan = _planned(mask, size, deal, (rank,), group, capacity, stages or 1)[0]
    if check and size > 1:
        if capacity is None:
            UNCOMPARED.add(plan)
        else:
            check_moves(OP, plan)
    return plan


def plans(
    mask, size: int, deal="auto", ranks: Sequence[int] | None = None, capacity: int | None = None
) -> list[ContextParallelPlan]:
    """The plans of `size` processes, or of some of them, without any: to simulate them on one device.

    Example:
        >>> parts = [attend(plan) for plan in plans(mask, 4)]        # tests/attention/test_distributed.py
    """
    return _planned(_block_mask(mask), size, deal, range(size) if ranks is None else ranks, None, capacity)


@torch.inference_mode(False)  # torch.compile saves tensors of a plan for backward
def _planned(
    mask: BlockMask, size: int, deal: str | ContextParallelPlan, ranks, group, capacity: int | None, stages: int = 1
) -> list[ContextParallelPlan]:
    _check_deal(mask, size, deal, capacity)
    length, tile = mask.lengths[0], max(mask.blocksize)
    known = None
    if isinstance(deal, ContextParallelPlan):
        names, known = [deal.deal], deal.tiles.to(mask.device)
        total = known.numel()
    else:
        names = [*dealing.DEALS] if deal == "auto" else [deal]
        total = max(dealing.padded(-(-length // tile), size, name) for name in names)
    by = moves.ByKernels if kernels.supports(mask, total, size) else moves.ByTorch
    deals = by(mask, tile, size, names, total, known, None if capacity is None else min(capacity, total // size))
    chosen = 0
    if len(names) > 1:
        blocks = mask.batch * mask.heads * tile**2 // (mask.blocksize[0] * mask.blocksize[1])  # of a tile
        chosen = dealing.best([dealing.cost(*pair, blocks) for pair in zip(deals.loads, deals.counts, strict=True)])
    tiles, rows = deals.tiles[chosen], deals.counts[chosen]
    received = [[n for other, n in enumerate(row) if other != one] for one, row in enumerate(rows)]
    most, most_moved = max((n for row in received for n in row), default=0), max(map(sum, received))
    ragged = tiles.numel() * tile != length
    result = []
    for rank in ranks:
        sends_to, receives = [row[rank] for row in rows], [*rows[rank]]
        sends_to[rank] = receives[rank] = 0
        own, sends, buffer, numbers, lists = deals.moves(chosen, rank)
        mask_mod = mask.mask_mod
        if mask_mod is not None or ragged:
            mask_mod = AtPositions(mask_mod or Band(None, None), *numbers, tile, length if ragged else None)
        lengths = tiles.shape[1] * tile, len(buffer) * tile
        local = BlockMask(*lists, lengths=lengths, blocksize=mask.blocksize, mask_mod=mask_mod, check=False)
        dealt = length, tile, tiles, rank, size, names[chosen], most
        moved = own, sends, sends_to, receives, buffer, numbers
        result.append(ContextParallelPlan(*dealt, *moved, local, most_moved, stages, group))
    return result


def _check_deal(mask: BlockMask, size: int, deal: str | ContextParallelPlan, capacity: int | None) -> None:
    """Reject a mask that is not square, an unknown deal or one of other tokens, and a wrong capacity."""
    length, columns = mask.lengths
    if length != columns:
        raise ValueError(f"{OP}: the mask must have as many queries as keys, got lengths {mask.lengths}")
    tile = max(mask.blocksize)
    if isinstance(deal, ContextParallelPlan):
        if (deal.length, deal.tile, deal.size) != (length, tile, size):
            raise ValueError(
                f"{OP}: deal must be a plan of {length} tokens in tiles of {tile} for {size} processes, got {deal!r}"
            )
    elif deal not in ("auto", *dealing.DEALS):
        raise ValueError(f"{OP}: deal must be 'auto' or one of {', '.join(map(repr, dealing.DEALS))}, got {deal!r}")
    if capacity is None:
        return
    if not isinstance(capacity, int) or isinstance(capacity, bool):
        raise TypeError(f"{OP}: capacity must be an int, a number of tiles, or None, got {capacity!r}")
    if capacity < 0:
        raise ValueError(f"{OP}: capacity must not be negative, got {capacity}")
    if deal == "auto":
        known = ", ".join(map(repr, dealing.DEALS))
        raise ValueError(f"{OP}: with capacity, deal must be a plan or one of {known}; 'auto' reads which one is best")


def _reads_heads(mask: BlockMask) -> bool:
    """True if mask_mod may depend on the head."""
    if mask.mask_mod is None:
        return False
    try:
        program = trace_mask(mask.mask_mod, mask.device).program
    except TypeError:  # the reference on a CPU calls functions that kernels refuse
        return True
    return H_INPUT in inputs_of(program, program.output)


def _check_stages(stages: int | None) -> None:
    if stages is not None and (not isinstance(stages, int) or isinstance(stages, bool)):
        raise TypeError(f"{OP}: stages must be an int or None, got {stages!r}")
    if stages is not None and stages < 1:
        raise ValueError(f"{OP}: stages must be at least 1, got {stages}")


@torch.inference_mode(False)
def _mask_on(device_type: str, mask, length, causal, window_size, cu_seqlens, device) -> BlockMask:
    """The mask of plan_context_parallel's arguments, on a device of the mesh."""
    if not isinstance(causal, bool):
        raise TypeError(f"{OP}: causal must be True or False, got {causal!r}")
    if device is not None and (mask is not None or cu_seqlens is not None):
        raise TypeError(f"{OP}: device is for a plan without mask and cu_seqlens, got {device!r}; the plan has theirs")
    if mask is None:
        mask = _mask_of(length, causal, window_size, cu_seqlens, device_type if device is None else device)
    elif length is not None or causal or window_size is not None or cu_seqlens is not None:
        raise TypeError(
            f"{OP}: pass a mask, or length with causal, window_size and cu_seqlens; for both intersect two masks with &"
        )
    mask = _block_mask(mask)
    if mask.device.type != device_type:
        raise ValueError(
            f"{OP}: the mask must be on a device of the mesh, {device_type}, got {mask.device}; "
            f"call mask.to({device_type!r})"
        )
    if cu_seqlens is not None:
        starts = cu_seqlens.tolist()
        if starts[0] != 0 or starts != sorted(starts) or starts[-1] > length:
            raise ValueError(
                f"{OP}: cu_seqlens must begin at 0, never decrease and end at or before length, {length}, got {starts}"
            )
    return mask


def _mask_of(length, causal, window_size, cu_seqlens, device) -> BlockMask:
    """The mask of the arguments of these names."""
    if not isinstance(length, int) or isinstance(length, bool):
        raise TypeError(f"{OP}: without a mask, length must be the number of tokens, got {length!r}")
    if length < 0:
        raise ValueError(f"{OP}: length must be at least 0, got {length}")
    lengths = length, length
    if cu_seqlens is not None:
        return patterns.packed_documents(cu_seqlens, lengths=lengths, window_size=window_size, causal=causal)
    window = (None, None) if window_size is None else window_size
    return patterns.sliding_window(lengths, window, causal=causal, device=device)


def _block_mask(mask) -> BlockMask:
    if isinstance(mask, cache.FlexBlockMask):
        return cache.of_flex(mask)
    if not isinstance(mask, BlockMask):
        raise TypeError(
            f"{OP}: mask must be a BlockMask or FlexAttention's, got {type(mask).__name__}; make one with "
            "attention.create_block_mask or attention.patterns, or of a bool tensor with BlockMask.from_elements or "
            "BlockMask.from_blocks"
        )
    return mask
