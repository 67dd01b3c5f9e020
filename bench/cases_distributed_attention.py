"""Rows of context-parallel attention, beside one GPU's own time for the whole problem.

With one rank, the shards of 4 processes run one after another on one GPU, and nothing moves: what sharding costs the
kernels. With more, times are those of the slowest rank, with everything that moves; beside them those of
peers_distributed.py.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from attention import attention, block_sparse_attention, patterns
from attention.distributed import context_parallel_attention, exchange, plan_context_parallel
from attention.distributed.plan import STAGES, ContextParallelPlan, plans
from attention.masks.block_mask import BlockMask

from .distributed import Row, timed
from .peers_distributed import ERROR, Peer, errors, peer_of, right, torch_peers, ulysses
from .simulate import KV_HEADS, PACKED

HEADS, HEAD_DIM = 64, 128
ROUNDS = 5
HOT_MS = 400  # calls take up to 400 ms themselves; after 100 the clock still falls
SHARDS = 4  # of one GPU


@dataclass(frozen=True)
class Problem:
    """Attention of one sequence: the mask, the call of one GPU, and the least of its rate, forward and backward."""

    name: str
    length: int  # with 2 and 4 ranks
    longer: int  # with 8
    mask: Callable[[int, torch.device], BlockMask]  # of the length
    whole: Callable  # (q, k, v, mask=mask) -> out
    least: tuple[float, float]
    by_torch: bool = False  # torch's context parallelism has this mask


def causal(length: int, device: torch.device) -> BlockMask:
    return patterns.causal((length, length), device=device)


def cu_seqlens(length: int, device: torch.device) -> torch.Tensor:
    ends = torch.tensor(PACKED, dtype=torch.int64).cumsum(0) * length // sum(PACKED)
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int().to(device)


def packed(length: int, device: torch.device) -> BlockMask:
    return patterns.packed_documents(cu_seqlens(length, device), lengths=(length, length), causal=True)


def random(length: int, device: torch.device) -> BlockMask:
    """12.5 % of the blocks, another choice for each head."""
    generator = torch.Generator(device).manual_seed(0)
    blocks = length // 128
    listed = torch.rand(HEADS, blocks, blocks, device=device, generator=generator) < 0.125
    return BlockMask.from_blocks(listed)


def window(length: int, device: torch.device) -> BlockMask:
    return patterns.sliding_window((length, length), (4095, 0), global_columns=128, causal=True, device=device)


def whole_blocks(q, k, v, mask):
    return block_sparse_attention(q, k, v, mask)


def whole_packed(q, k, v, mask):
    cu = cu_seqlens(q.shape[2], q.device)
    rows = (t[0].transpose(0, 1) for t in (q, k, v))
    return attention(*rows, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu).transpose(0, 1)[None]


PROBLEMS = (
    Problem("causal", 65536, 131072, causal, lambda q, k, v, mask: attention(q, k, v, causal=True), (0.92, 0.92), True),
    Problem("packed causal, 16 documents", 131072, 524288, packed, whole_packed, (0.9, 0.9)),
    Problem("12.5 % of 128x128 per head", 131072, 262144, random, whole_blocks, (0.85, 0.85)),
    Problem("window 4096, 128 global", 131072, 524288, window, whole_blocks, (0.95, 0.95)),
)


def qkv(length: int, device: torch.device) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, the same in each process, laid out (B, S, H, D)."""
    generator = torch.Generator(device).manual_seed(1)
    make = functools.partial(torch.randn, device=device, dtype=torch.bfloat16, generator=generator)
    tensors = [make(1, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [t.transpose(1, 2) for t in tensors]


def times_of(peers: dict[str, Peer]) -> dict[str, list[float]]:
    """Milliseconds of each, forward and backward. Forward passes alternate, and then backward passes, so that a call
    follows one of the same kind: a backward pass heats a GPU more than a forward pass, and clocks rise slowly."""
    forward, backward = (timed({name: peer[i] for name, peer in peers.items()}, ROUNDS, hot_ms=HOT_MS) for i in (1, 2))
    return {name: [round(forward[name], 3), round(backward[name], 3)] for name in peers}


def over(first: list[float], second: list[float], factor: float = 1) -> list[float]:
    return [round(factor * a / b, 3) for a, b in zip(first, second, strict=True)]


def sharded_on_one_gpu(problem: Problem, device: torch.device) -> dict:
    """The shards of SHARDS processes over the whole, on one GPU."""
    *tensors, dout = qkv(problem.length, device)
    mask = problem.mask(problem.length, device)
    shards = []
    for plan in plans(mask, SHARDS):
        rows = (plan.buffer[:, None] * plan.tile + torch.arange(plan.tile, device=device)).flatten()
        q, k, v = plan.shard(tensors[0], 2), *(t.transpose(1, 2)[:, rows].transpose(1, 2) for t in tensors[1:])
        attend = functools.partial(whole_blocks, mask=plan.mask)
        shards.append(peer_of(attend, plan.positions, (q, k, v), plan.shard(dout, 2)))
    everywhere = torch.arange(problem.length, device=device)
    whole = peer_of(functools.partial(problem.whole, mask=mask), everywhere, tensors, dout)
    blocks = peer_of(functools.partial(whole_blocks, mask=mask), everywhere, tensors, dout)
    each = Peer(everywhere, *(functools.partial(all_of, [shard[i] for shard in shards]) for i in (1, 2)))
    times = times_of({"whole": whole, "shards": each, "blocks": blocks})
    return {
        "whole_ms": times["whole"], "whole_by_blocks_ms": times["blocks"], "shards_ms": times["shards"],
        "over_whole": over(times["shards"], times["whole"]), "deal": plan.deal,
    }  # fmt: skip


def all_of(calls: list[Callable]) -> list:
    return [call() for call in calls]


def on_ranks(problem: Problem, device: torch.device) -> dict:
    """Attention of a sequence that the ranks share."""
    size = dist.get_world_size()
    mesh = init_device_mesh(device.type, (size,))
    *tensors, dout = qkv(problem.length, device)
    mask = problem.mask(problem.length, device)
    plan = plan_context_parallel(mask, mesh)
    attend = functools.partial(context_parallel_attention, plan=plan)
    *local, local_dout = (plan.shard(t.transpose(1, 2), 1).transpose(1, 2) for t in (*tensors, dout))
    everywhere = torch.arange(problem.length, device=device)
    one = peer_of(functools.partial(problem.whole, mask=mask), everywhere, tensors, dout)
    ours = peer_of(attend, plan.positions, local, local_dout)
    with contextlib.ExitStack() as stack:
        peers = {"ours": ours, "ulysses": ulysses(problem.whole, mask, tensors, dout)}
        if problem.by_torch:
            peers |= stack.enter_context(torch_peers(tensors, dout, mesh))
        whole = one.forward(), *one.backward()
        wrong = {name: errors(peer, whole) for name, peer in peers.items()}
        del whole
        if not right(wrong["ours"]):
            raise AssertionError(
                f"errors of out, dq, dk, dv must be at most {ERROR} of their norms, got {wrong['ours']}"
            )
        times = times_of({"one": one} | {name: peer for name, peer in peers.items() if right(wrong[name])})
    kept = peer_of(functools.partial(attend, keep_kv=True), plan.positions, local, local_dout)
    narrow = peer_of(functools.partial(attend, reduce_dtype=torch.bfloat16), plan.positions, local, local_dout)
    in_stages = plan_context_parallel(mask, mesh, stages=STAGES)
    staged = peer_of(functools.partial(context_parallel_attention, plan=in_stages), plan.positions, local, local_dout)
    torch.compiler.reset()  # of the limit of how often a function is compiled
    compiled_call = torch.compile(context_parallel_attention, fullgraph=True)
    compiled, compiled_stages = (
        peer_of(functools.partial(compiled_call, plan=p), plan.positions, local, local_dout) for p in (plan, in_stages)
    )
    options = times_of({
        "kept": kept, "narrow": narrow, "staged": staged, "compiled": compiled, "compiled_stages": compiled_stages,
    })  # fmt: skip
    forward, backward = over(times["one"], times["ours"], 1 / size)
    found = {
        "one_gpu_ms": times["one"], "ms": times["ours"], "forward": forward, "backward": backward, "deal": plan.deal,
        "errors": wrong.pop("ours"), **moved(plan, local),
        "backward_kept": over(times["one"], options["kept"], 1 / size)[1],
        "backward_bf16": over(times["one"], options["narrow"], 1 / size)[1],
        "in_stages": over(times["one"], options["staged"], 1 / size),
        "compiled": over(times["one"], options["compiled"], 1 / size),
        "compiled_in_stages": over(times["one"], options["compiled_stages"], 1 / size),
    }  # fmt: skip
    for name, error in wrong.items():
        found[f"{name}_errors"] = error
        if name in times:
            rates = over(times["one"], times[name], 1 / size)
            found |= {f"{name}_ms": times[name], f"{name}_forward": rates[0], f"{name}_backward": rates[1]}
    return found


def moved(plan: ContextParallelPlan, local: list[torch.Tensor]) -> dict:
    """Megabytes of K and V that the rank with most receives, and the time of moving them and their gradients.

    moved_over_needed: what all ranks receive over the rows of K and V, of single heads, that a score of theirs needs.
    """
    parts = [t.float() for t in exchange.gathered(local[1:], plan)]
    times = timed({
        "gather": lambda: exchange.gathered(local[1:], plan),
        "reduce": lambda: exchange.reduced(parts, plan, [torch.bfloat16] * 2),
    }, ROUNDS)  # fmt: skip
    most = torch.tensor(plan.moved_bytes(*local[1:]) / 1e6, device=local[0].device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    kv_heads = local[1].shape[1]
    rows = plan.moved_tiles() * plan.tile * kv_heads
    total = torch.tensor([rows, int(needed(plan, kv_heads).sum())], device=local[0].device)
    dist.all_reduce(total)
    return {
        "moved_mb": round(most.item(), 1), "moved_over_needed": round((total[0] / total[1]).item(), 4),
        "gather_ms": round(times["gather"], 3), "reduce_ms": round(times["reduce"], 3),
    }  # fmt: skip


def needed(plan: ContextParallelPlan, kv_heads: int) -> torch.Tensor:
    """Bool (KV heads, rows of other ranks in the buffer): True if a query of this rank sees the row in that head."""
    mask, step = plan.mask, plan.mask.blocksize[0]
    if mask.mask_mod is None:
        partial, full = mask.tables()
        seen = (partial | full)[0].any(1).repeat_interleave(mask.blocksize[1], 1)
    else:
        parts = [mask.elements(i, i + step)[0].any(1) for i in range(0, plan.local_length, step)]
        seen = torch.stack(parts).any(0)
    seen = seen[:, len(plan.own) * plan.tile :]
    return seen.expand(kv_heads, -1) if len(seen) == 1 else seen.unflatten(0, (kv_heads, -1)).any(1)


def planning(device: torch.device) -> dict:
    """Planning from a new mask of 128k tokens, for one process: milliseconds, of the host too. With a capacity (all
    tiles), which waits for nothing, also those of the GPU alone, by a CUDA graph."""
    mask = causal(131072, device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    plan = functools.partial(plan_context_parallel, mask, mesh, check=False)
    without_waiting = functools.partial(plan, deal="head_tail", capacity=plan().tiles.shape[1])
    calls = {"ms": plan, "capacity_ms": without_waiting}
    if device.type == "cuda":
        without_waiting()  # before a capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            without_waiting()
        calls["capacity_gpu_ms"] = graph.replay
    return timed(calls, ROUNDS)


def name_of(problem: Problem) -> str:
    return f"attention, {problem.name}, {problem.length // 1024}k tokens"


def rows() -> list[Row]:
    found = []
    for problem in PROBLEMS:
        name, shards = name_of(problem), functools.partial(sharded_on_one_gpu, problem)
        found.append(Row(f"{name}, {SHARDS} shards on one GPU", shards, (1,), {"over_whole": {1: 1.03}}))
        forward, backward = problem.least
        target = {"forward": {2: forward, 4: forward}, "backward": {2: backward, 4: backward}}
        target |= {"moved_over_needed": {2: 1.05, 4: 1.05}}
        found.append(Row(f"{name}, sharded", functools.partial(on_ranks, problem), (2, 4), target))
        longer = dataclasses.replace(problem, length=problem.longer)
        found.append(Row(f"{name_of(longer)}, sharded", functools.partial(on_ranks, longer), (8,)))
    target = {"capacity_gpu_ms": {2: 0.2, 4: 0.2}}
    found.append(Row("attention, plan of a causal mask, 128k tokens", planning, target=target))
    return found
