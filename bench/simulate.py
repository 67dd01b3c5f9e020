"""Context-parallel attention on more GPUs than there are: `python -m bench distributed --simulate N ...`.

A plan says how many blocks each rank computes and how many tiles it receives, from its own host and from others. The
time of the slowest rank follows from numbers that bench/results/<card>/distributed.json has measured: time of a block,
time of the shards' kernels over those of the whole (rows with one rank; 1 without them), and bandwidths of moving K and
V and of returning their gradients. Across hosts, which were not measured, each GPU has HOST_GBS.

Nothing overlaps, as in attention.distributed. Masks are those of cases_distributed_attention, of TOKENS tokens for each
rank, and at least of the length that was measured. Long sequences are planned in coarser tiles.
"""

import json
from pathlib import Path

import torch

from attention import patterns
from attention.distributed.plan import ContextParallelPlan, plans
from attention.masks.block_mask import BlockMask

from .table import grid, make_console

PACKED = (1024, 2048, 4096, 4096, 5120, 6144, 7168, 8192, 8192, 9216, 10240, 10240, 11264, 12288, 15360, 16384)  # 128k
PER_HOST = 8
HOST_GBS = 50  # of one GPU, each way: 400 Gbit/s
TOKENS = 32768
MOST_TILES = 1024  # of a plan
PACKED_BYTES = 8 * 128 * 2 * 2  # of K and V of a token: KV heads, D, two tensors, BF16


def coarse(length: int) -> int:
    """Tokens that one row of a plan stands for."""
    return max(1, length // 128 // MOST_TILES)


def mask_of(name: str, length: int) -> BlockMask:
    """The mask of a row of the benchmark, in rows that stand for coarse(length) tokens each."""
    each = coarse(length)
    rows = length // each
    if name.startswith("causal"):
        return patterns.causal((rows, rows))
    if name.startswith("packed"):  # documents of the lengths that were measured, more of them
        ends = torch.tensor(PACKED * -(-length // sum(PACKED))).cumsum(0) // each
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), ends[ends < rows], torch.tensor([rows])])
        return patterns.packed_documents(cu.int(), lengths=(rows, rows), causal=True)
    if name.startswith("window"):
        window = max(128, 4096 // each) - 1
        return patterns.sliding_window((rows, rows), (window, 0), global_columns=max(1, 128 // each), causal=True)
    return BlockMask.from_blocks(torch.ones(rows // 128, rows // 128, dtype=torch.bool))  # all heads together need all


def share_of(name: str) -> float:
    """The share of the blocks of mask_of that each head computes."""
    return 0.125 if name.startswith("12.5 %") else 1.0


def blocks(plan: ContextParallelPlan) -> int:
    return int((plan.mask.kv_num_blocks + plan.mask.full_kv_num_blocks).sum())


def received(plan: ContextParallelPlan) -> tuple[int, int]:
    """Tiles that a rank receives from its own host, and from others."""
    host = plan.rank // PER_HOST
    near = sum(n for rank, n in enumerate(plan.receive_counts) if rank // PER_HOST == host)
    return near, sum(plan.receive_counts) - near


def all_or_some(size: int) -> list[int]:
    """Ranks to look at: all, or some of many."""
    return list(range(size)) if size <= 16 else [i * (size - 1) // 15 for i in range(16)]


def predicted(
    name: str, length: int, size: int, block_ms: list[float], kernels: list[float], gather_gbs: float, reduce_gbs: float
) -> dict:
    """Efficiencies of one GPU's rate, forward and backward, and what limits them.

    block_ms: milliseconds of a block of 128 x 128 of all heads, forward and backward, on one GPU.
    kernels: time of the shards' kernels over those of one GPU, forward and backward.
    """
    each = coarse(length)
    mask = mask_of(name, length)
    total, share = int((mask.kv_num_blocks + mask.full_kv_num_blocks).sum()), share_of(name)
    made = plans(mask, size, ranks=all_or_some(size))
    slowest = [0.0, 0.0]
    moved = 0.0
    for plan in made:
        near, far = (n * plan.tile * each * PACKED_BYTES / 1e6 for n in received(plan))  # MB; MB / (GB/s) is ms
        gather, reduce = near / gather_gbs + far / HOST_GBS, 2 * (near / reduce_gbs + far / HOST_GBS)
        work = [blocks(plan) * share * each**2 * ms * k for ms, k in zip(block_ms, kernels, strict=True)]
        slowest = [max(slowest[0], work[0] + gather), max(slowest[1], work[1] + gather + reduce)]
        moved = max(moved, near + far)
    ideal = [total * share * each**2 * ms / size for ms in block_ms]
    return {
        "name": name, "ranks": size, "length": length, "deal": made[0].deal, "moved_mb": round(moved, 1),
        "forward": round(ideal[0] / slowest[0], 3), "backward": round(ideal[1] / slowest[1], 3),
    }  # fmt: skip


def measured(path: Path) -> list[dict]:
    """Rows of context-parallel attention in a distributed.json, with `kernels` of their shards on one GPU.

    Longer sequences than MOST_TILES tiles are left out: mask_of has other documents for them, in coarser tiles.
    """
    rows = json.loads(path.read_text())["rows"]
    kernels = {problem_of(row): row["over_whole"] for row in rows if "over_whole" in row}
    found = [row for row in rows if row["name"].startswith("attention") and "gather_ms" in row]
    found = [row for row in found if coarse(tokens_of(row)) == 1]
    return [row | {"kernels": kernels.get(problem_of(row), [1.0, 1.0])} for row in found]


def problem_of(row: dict) -> str:
    return row["name"].rpartition(", ")[0]


def tokens_of(row: dict) -> int:
    return int(row["name"].rsplit(", ", 2)[1].removesuffix("k tokens")) * 1024


def parameters(row: dict) -> tuple[str, int, list[float], list[float], float, float]:
    """(name, length, block_ms, kernels, gather_gbs, reduce_gbs) of a measured row."""
    name, tokens = row["name"].removeprefix("attention, ").rsplit(", ", 2)[0], tokens_of(row)
    mask = mask_of(name, tokens)
    count = share_of(name) * int((mask.kv_num_blocks + mask.full_kv_num_blocks).sum())
    moved = row["moved_mb"]
    rates = moved / row["gather_ms"], 2 * moved / row["reduce_ms"]
    return name, tokens, [ms / count for ms in row["one_gpu_ms"]], row["kernels"], *rates


def simulate(path: Path, ranks: list[int]) -> list[dict]:
    """Print and return predictions: for the numbers of ranks that were measured beside the measurement, and others."""
    rows = measured(path)
    console, table = make_console(110), grid(["mask", "deal"], ["ranks", "tokens", "MB moved", "forward", "backward"])
    found = []
    for row in rows:
        name, length, *rates = parameters(row)
        found.append(predicted(name, length, row["ranks"], *rates) | {"measured": [row["forward"], row["backward"]]})
    if not rows:
        console.print("no rows of context-parallel attention; python -m bench distributed measures them")
        return []
    for row in rows:
        if row["ranks"] == max(other["ranks"] for other in rows if other["name"] == row["name"]):
            name, length, *rates = parameters(row)
            found += [predicted(name, max(length, TOKENS * size), size, *rates) for size in ranks]
    for entry in found:
        pair = [
            f"{entry[way]:.3f}" + (f" (measured {entry['measured'][i]:.3f})" if "measured" in entry else "")
            for i, way in enumerate(("forward", "backward"))
        ]
        table.add_row(
            entry["name"], entry["deal"], str(entry["ranks"]), str(entry["length"]), f"{entry['moved_mb']:.0f}", *pair
        )
    console.print(table)
    return found
