"""Comparison of the processes' masks and calls, before they transfer different numbers of bytes or wait for each other.

Masks are compared when they are planned, and the arguments of attention in the first call with a plan; functions by
what they compute. Later calls are not compared, whatever their arguments: a process cannot know that those of another
one have changed, and a comparison in which only some take part would wait for the others. For the same reason a plan is
compared either by all processes or, with check=False, by none. Plans with a capacity compare, without waiting, what
sizes depend on and which tiles move, and nothing in the first call. What remains: if one process records its first call
(torch.compile, a CUDA graph), which is not compared, and another one runs it, the latter waits until the process
group's timeout.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from cute_kernels.runtime.derived import captured
from cute_kernels.runtime.torch_compat import assert_on_gpu, in_graph_trace
from cute_kernels.traced.record import trace
from sparse_collective.nn.shards import hash_of, reasons

from ..masks.block_mask import BlockMask
from ..masks.element_mask import INPUTS as mask_inputs
from ..masks.score_mod import INPUTS as score_inputs

PLAIN = (bool, int, float, str, type(None))
MOST_BYTES = 2**26  # of a tensor that a function reads, if its contents are compared
UNCOMPARED: WeakSet[Any] = WeakSet()  # plans whose next eager call is compared


def check_equal(
    op: str, mask: BlockMask, choices: tuple, group, device: torch.device | str, error: Exception | None
) -> None:
    """Compare masks and choices by a hash that the processes of a group exchange. Synchronizes.

    Args:
        choices: stages, the name of the deal, and its tiles if they are those of another plan.
        device: of the mesh.
        error: of this process's arguments, which takes the place of its hash; None: they are right.

    Raises:
        RuntimeError: they differ, or a process has an error; on all processes, but that `error` is raised itself.
    """
    values: tuple = ()
    if error is None:
        try:
            values = mask.lengths, mask.blocksize, *choices, *mask.tables(), *facts_of_mask(mask)
        except Exception as caught:
            error = caught
    numbers = _exchanged(op, values, error, group, device)
    if different := [rank for rank, number in enumerate(numbers) if number != numbers[0]]:
        raise RuntimeError(
            f"{op}: the masks, deals or stages of the processes {different} differ from those of process 0; all must "
            "pass the same"
        )


def check_sizes(op: str, values: tuple, group, device: torch.device | str, error: Exception | None) -> None:
    """Compare what the sizes of a plan with a capacity depend on. On a GPU by an assertion there, which the host does
    not wait for.

    Args:
        error: of this process's arguments, which is raised; None: they are right.

    Raises:
        RuntimeError: on a CPU, values differ, or another process has an error.
    """
    numbers = _hashes(values, error, group, device)
    if error:
        raise error
    _check_same(
        numbers, numbers[:1], f"{op}: the processes' deals, stages, capacities or lengths differ, or one has an error"
    )


def _check_same(numbers: Tensor, expected: Tensor, text: str) -> None:
    """Raise RuntimeError unless all are the same; on a GPU by an assertion there, which the host does not wait for."""
    same = (numbers == expected).all()
    if same.is_cuda:
        assert_on_gpu(same, text)
    elif not same:
        raise RuntimeError(text)


def check_moves(op: str, plan: Any) -> None:
    """Compare the tiles that the processes send with those that others expect of them, of plans with one capacity. On a
    GPU by an assertion there, which the host does not wait for.

    Raises:
        RuntimeError: on a CPU, in each process that would get others.
    """
    import torch.distributed as dist

    expected = plan.buffer[len(plan.own) :]
    arrived = torch.empty_like(expected)
    sent = plan.tiles[plan.rank].index_select(0, plan.sends)
    dist.all_to_all_single(arrived, sent, plan.receive_counts, plan.send_counts, group=plan.group)
    _check_same(arrived, expected, f"{op}: the processes' masks differ; all must plan the same mask")


def awaits_comparison(plan: Any) -> bool:
    """True if an eager call with this plan is the first one; False for calls that a CUDA graph or a trace records."""
    return plan in UNCOMPARED and not (in_graph_trace() or captured(plan.own))


def compare_call(op: str, plan: Any, describe: Callable[[], dict[str, Any]]) -> None:
    """Compare what the processes pass in their first call with a plan. Synchronizes.

    Args:
        describe: checks this process's arguments, and returns those that must be equal, by name.

    Raises:
        RuntimeError: they differ, or `describe` raised an error in a process; on all processes, but that error is
            raised itself. The next call is then compared again.
    """
    import torch.distributed as dist

    error, mine = None, {}
    try:
        mine = describe()
    except Exception as caught:
        error = caught
    numbers = _exchanged(op, mine.items(), error, plan.group, plan.own.device)
    if len(set(numbers)) == 1:
        UNCOMPARED.discard(plan)
        return
    every: list[Any] = [None] * plan.size
    dist.all_gather_object(every, {name: str(value) for name, value in mine.items()}, group=plan.group)
    ranks, differences = dist.get_process_group_ranks(plan.group), []
    for name in mine:
        by_value: dict[str, list[int]] = {}
        for rank, other in zip(ranks, every, strict=True):
            by_value.setdefault(other[name], []).append(rank)
        if len(by_value) > 1:
            differences.append(f"{name} is " + ", ".join(f"{value} on ranks {on}" for value, on in by_value.items()))
    raise RuntimeError(f"{op}: arguments differ between ranks: {'; '.join(differences)}; pass the same on all ranks")


def _exchanged(op: str, values: Any, error: Exception | None, group, device: torch.device | str) -> list[int]:
    """A hash of each process's values. If one has an error, it raises that, and all others a RuntimeError."""
    numbers = _hashes(values, error, group, device).tolist()
    if 0 in numbers:
        text = reasons(error, group)
        raise error or RuntimeError(f"{op}: {text}")
    return numbers


def _hashes(values: Any, error: Exception | None, group, device: torch.device | str) -> Tensor:
    """Exchange a hash of each process's values, 0 if it has an error: int64 (processes,). Synchronizes only to read
    tensors among the values."""
    import torch.distributed as dist

    number = 0 if error else hash_of(*values) | 1
    mine = torch.full((1,), number, dtype=torch.int64, device=device)
    numbers = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(numbers, mine, group=group)
    return torch.cat(numbers)


def facts_of_mask(mask: BlockMask) -> tuple:
    """Program of a mask function, and the numbers and tensors that it reads."""
    if mask.mask_mod is None:
        return ()
    try:
        return program_of(mask.mask_mod, mask_inputs, mask.device)
    except TypeError:  # the reference on a CPU calls functions that kernels refuse
        return tuple(facts(mask.mask_mod))


def name_of_score(score_mod: Callable | None, device: torch.device) -> str:
    """The name of a score function, and a hash of what it computes and of the numbers and tensors that it reads."""
    if score_mod is None:
        return "None"
    return f"{next(facts(score_mod))} ({hash_of(*program_of(score_mod, score_inputs, device)):016x})"


def program_of(function: Callable, inputs: Sequence[str], device: torch.device) -> tuple:
    """The Program of a function and the tensors that it reads; of large ones dtypes and shapes.

    It is traced here: the cached Program has numbers as arguments that had other values in this process.

    Raises:
        TypeError: kernels refuse the function.
    """
    traced = trace(function, next(facts(function)), inputs, (), device)
    tensors = ((t.dtype, t.shape) if t.numel() * t.element_size() > MOST_BYTES else t for t in traced.tensors)
    return traced.program.text, *tensors


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
