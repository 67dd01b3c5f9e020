"""Rows of context-parallel attention, beside one GPU's own time for the whole problem.

With one rank, the shards of 4 processes run one after another on one GPU, and nothing moves: what sharding costs the
kernels. With more, times are those of the slowest rank, with everything that moves.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from attention import attention, block_sparse_attention, patterns
from attention.distributed import context_parallel_attention, exchange, plan_context_parallel
from attention.distributed.plan import plans
from attention.masks.block_mask import BlockMask

from .distributed import Row, timed
from .simulate import PACKED

HEADS, KV_HEADS, HEAD_DIM = 64, 8, 128
ROUNDS = 7
SHARDS = 4  # of one GPU


@dataclass(frozen=True)
class Problem:
    """Attention of one sequence: the mask, the call of one GPU, and the least of its rate, forward and backward."""

    name: str
    length: int
    mask: Callable[[int], BlockMask]  # of the length
    whole: Callable  # (q, k, v, mask=mask) -> out
    least: tuple[float, float]


def causal(length: int) -> BlockMask:
    return patterns.causal((length, length), device="cuda")


def cu_seqlens(length: int) -> torch.Tensor:
    ends = torch.tensor(PACKED, dtype=torch.int64).cumsum(0) * length // sum(PACKED)
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int().cuda()


def packed(length: int) -> BlockMask:
    return patterns.packed_documents(cu_seqlens(length), lengths=(length, length), causal=True)


def random(length: int) -> BlockMask:
    """12.5 % of the blocks, another choice for each head."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    blocks = length // 128
    listed = torch.rand(HEADS, blocks, blocks, device="cuda", generator=generator) < 0.125
    return BlockMask.from_blocks(listed)


def window(length: int) -> BlockMask:
    return patterns.sliding_window((length, length), (4095, 0), global_columns=128, causal=True, device="cuda")


def whole_blocks(q, k, v, mask):
    return block_sparse_attention(q, k, v, mask)


def whole_packed(q, k, v, mask):
    cu = cu_seqlens(q.shape[2])
    rows = (t[0].transpose(0, 1) for t in (q, k, v))
    return attention(*rows, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu).transpose(0, 1)[None]


PROBLEMS = (
    Problem("causal", 65536, causal, lambda q, k, v, mask: attention(q, k, v, causal=True), (0.92, 0.92)),
    Problem("packed causal, 16 documents", 131072, packed, whole_packed, (0.9, 0.9)),
    Problem("12.5 % of 128x128 per head", 131072, random, whole_blocks, (0.85, 0.85)),
    Problem("window 4096, 128 global", 131072, window, whole_blocks, (0.95, 0.95)),
)


def qkv(length: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, the same in each process, laid out (B, S, H, D)."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16, generator=generator)
    tensors = [make(1, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [t.transpose(1, 2) for t in tensors]


def calls_of(attend: Callable, tensors, dout) -> tuple[Callable, Callable]:
    """A forward call, and its backward."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = attend(*leaves)

    def forward():
        with torch.no_grad():
            attend(*leaves)

    return forward, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def times_of(**calls: tuple[Callable, Callable]) -> dict[str, list[float]]:
    """Milliseconds of each pair of calls, forward and backward; all take turns."""
    single = {f"{name} {i}": call for name, pair in calls.items() for i, call in enumerate(pair)}
    found = timed(single, ROUNDS)
    return {name: [round(found[f"{name} {i}"], 3) for i in range(2)] for name in calls}


def over(first: list[float], second: list[float], factor: float = 1) -> list[float]:
    return [round(factor * a / b, 3) for a, b in zip(first, second, strict=True)]


def sharded_on_one_gpu(problem: Problem) -> dict:
    """The shards of SHARDS processes over the whole, on one GPU."""
    *tensors, dout = qkv(problem.length)
    mask = problem.mask(problem.length)
    calls = []
    for plan in plans(mask, SHARDS):
        rows = (plan.buffer[:, None] * plan.tile + torch.arange(plan.tile, device="cuda")).flatten()
        q, k, v = plan.shard(tensors[0], 2), *(t.transpose(1, 2)[:, rows].transpose(1, 2) for t in tensors[1:])
        attend = functools.partial(whole_blocks, mask=plan.mask)
        calls.append(calls_of(attend, (q, k, v), plan.shard(dout, 2)))

    def each(i: int) -> Callable:
        return lambda: [pair[i]() for pair in calls]

    whole = calls_of(functools.partial(problem.whole, mask=mask), tensors, dout)
    blocks = calls_of(functools.partial(whole_blocks, mask=mask), tensors, dout)
    times = times_of(whole=whole, shards=(each(0), each(1)), blocks=blocks)
    alone = [times_of(alone=pair)["alone"] for pair in calls]
    return {
        "whole_ms": times["whole"], "whole_by_blocks_ms": times["blocks"], "shards_ms": times["shards"],
        "over_whole": over(times["shards"], times["whole"]), "deal": plan.deal, "alone_ms": alone,
    }  # fmt: skip


def on_ranks(problem: Problem) -> dict:
    """Attention of a sequence that the ranks share."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cuda", (size,))
    *tensors, dout = qkv(problem.length)
    mask = problem.mask(problem.length)
    plan = plan_context_parallel(mask, mesh)
    attend = functools.partial(context_parallel_attention, plan=plan)
    *local, local_dout = (plan.shard(t.transpose(1, 2), 1).transpose(1, 2) for t in (*tensors, dout))
    whole = problem.whole(*tensors, mask=mask)[:, :, plan.positions].float()
    error = (attend(*local).float() - whole).norm() / whole.norm()
    del whole
    one = calls_of(functools.partial(problem.whole, mask=mask), tensors, dout)
    times = times_of(one=one, all=calls_of(attend, local, local_dout))
    kept = calls_of(functools.partial(attend, keep_kv=True), local, local_dout)
    narrow = calls_of(functools.partial(attend, reduce_dtype=torch.bfloat16), local, local_dout)
    options = times_of(kept=kept, narrow=narrow)
    buffers = [exchange.gathered(t, plan) for t in local[1:]]
    parts = [t.float() for t in buffers]
    moves = timed({
        "gather": lambda: [exchange.gathered(t, plan) for t in local[1:]],
        "reduce": lambda: [exchange.reduced(t, plan, torch.bfloat16) for t in parts],
    }, ROUNDS)  # fmt: skip
    moved = torch.tensor([plan.moved_bytes(*local[1:]) / 1e6, error], device="cuda")
    dist.all_reduce(moved, dist.ReduceOp.MAX)
    forward, backward = over(times["one"], times["all"], 1 / size)
    return {
        "one_gpu_ms": times["one"], "ms": times["all"], "forward": forward, "backward": backward, "deal": plan.deal,
        "moved_mb": round(moved[0].item(), 1), "error": round(moved[1].item(), 6),
        "backward_kept": over(times["one"], options["kept"], 1 / size)[1],
        "backward_bf16": over(times["one"], options["narrow"], 1 / size)[1],
        "gather_ms": round(moves["gather"], 3), "reduce_ms": round(moves["reduce"], 3),
    }  # fmt: skip


def planning(device: torch.device) -> dict:
    """Planning from a new mask of 128k tokens, for one process: milliseconds, of the host too."""
    mask = causal(131072)
    size = dist.get_world_size()
    mesh = init_device_mesh("cuda", (size,))
    return {"ms": timed({"plan": lambda: plan_context_parallel(mask, mesh, check=False)}, ROUNDS)["plan"]}


def rows() -> list[Row]:
    found = []
    for problem in PROBLEMS:
        name = f"attention, {problem.name}, {problem.length // 1024}k tokens"
        found.append(Row(f"{name}, {SHARDS} shards on one GPU", lambda _, p=problem: sharded_on_one_gpu(p), (1,)))
        forward, backward = problem.least
        target = {"forward": {2: forward, 4: forward}, "backward": {2: backward, 4: backward}}
        found.append(Row(f"{name}, sharded", lambda _, p=problem: on_ranks(p), (2, 4, 8), target))
    found.append(Row("attention, plan of a causal mask, 128k tokens", planning))
    return found
