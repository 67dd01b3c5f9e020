"""Torch in the place of the block-sparse attention kernels: it walks the tiles that a query tile's source names, and
looks at no mask.
"""

import dataclasses
import math

import torch

from attention.forward.block_source import with_blocks
from attention.forward.kv_tiles import FULL
from attention.forward.scheduler import QueryScheduler
from attention.seqlen import SeqlenInfo
from cute_kernels.traced.evaluate import evaluate

from ..signatures import insist_on_arguments


def number(x) -> int:
    return int(getattr(x, "value", x))


class Table:
    """A tensor of numbers as a kernel reads one; no index may lead outside of it."""

    def __init__(self, tensor):
        self.tensor, self.shape = tensor, tuple(tensor.shape)

    def __getitem__(self, key):
        key = tuple(k if k is None else number(k) for k in (key if isinstance(key, tuple) else (key,)))
        assert len(key) == len(self.shape)
        assert all(k is None or 0 <= k < n for k, n in zip(key, self.shape, strict=True)), f"{key} of {self.shape}"
        part = self.tensor[tuple(slice(None) if k is None else k for k in key)]
        return Table(part) if part.dim() else int(part)


class Walked:
    """The function that stands for the compiled kernel of some facts."""

    def __init__(self, facts):
        self.facts = facts

    def __call__(self, q, k, v, o, lse, sinks, cu_q, cu_k, blocks, score, *more):
        insist_on_arguments(self.facts, (q, k, v, o, lse, sinks, cu_q, cu_k, blocks, score, *more))
        counter = None
        if self.facts.path == "sm_90":
            counter, *more, max_ctas = more
            assert max_ctas > 0
        scale_log2, softcap, left, right, offsets = more
        assert (offsets is not None) == self.facts.offsets
        assert left is None and right is None
        cfg, (batch, heads, rows, _), cols = self.facts.config, q.shape, k.shape[2]
        assert (lse is not None) == self.facts.lse and (counter is not None) == cfg.dynamic
        assert all(t.is_contiguous() and t.stride(-1) == 1 for t in blocks if isinstance(t, torch.Tensor))
        tensors = tuple(Table(t) if isinstance(t, torch.Tensor) else t for t in blocks[:3]) + blocks[3:]
        plain = QueryScheduler(-(-rows // cfg.tile_m), heads, batch, heads // k.shape[1])
        scheduler, source = with_blocks(self.facts, plain, tensors)
        done = set()
        for index in range(number(scheduler.count)):
            tile = scheduler.decode(index)
            tile = type(tile)(*(number(x) for x in dataclasses.astuple(tile)))
            done.add((tile.b, tile.h, tile.m))
            assert tile.h_kv == tile.h * k.shape[1] // heads
            tiles = source.for_tile(tile, SeqlenInfo(tile.b, rows, cols))
            seen = self.seen(tiles, tile, rows, cols, blocks[3:], offsets or (0, 0))
            part = slice(tile.m * cfg.tile_m, tile.m * cfg.tile_m + cfg.tile_m)
            scores = q[tile.b, tile.h, part].float() @ k[tile.b, tile.h_kv].float().mT
            scores = torch.tanh(scores * softcap / 2.885390) if self.facts.softcap else scores
            weights = (scores * scale_log2 * math.log(2)).masked_fill(~seen, -math.inf)
            sink = torch.tensor(-math.inf) if sinks is None else sinks[tile.h].float()
            sums = torch.logaddexp(weights.logsumexp(-1), sink)
            if lse is not None:
                lse[tile.b, tile.h, part] = sums
            weights = (weights - sums[:, None]).exp().masked_fill(~seen, 0.0)
            o[tile.b, tile.h, part] = (weights @ v[tile.b, tile.h_kv].float()).to(o.dtype)
        assert len(done) == number(scheduler.count) == batch * heads * plain.tiles_m, "every query tile, once"

    def seen(self, tiles, tile, rows, cols, tensors, offsets):
        """(rows of the tile, Sk) bool, from what is visited."""
        cfg, kind = self.facts.config, self.facts.blocks
        count, ends = number(tiles.count), [number(e) for e in tiles.ends]
        assert 0 <= ends[0] <= ends[1] == count and len(tiles.kinds) == 2
        q = torch.arange(tile.m * cfg.tile_m, min((tile.m + 1) * cfg.tile_m, rows))[:, None]
        visited, outside, seen = set(), 0, torch.zeros(len(q), cols, dtype=torch.bool)
        for i in range(count):
            n = number(tiles.at(i))
            if n >= -(-cols // kind.block_k) * tiles.steps:  # an entry that is no block
                assert tiles.kinds[i >= ends[0]] != FULL and number(tiles.at_partial(i)) == n
                outside += 1
                continue
            visited.add(n)
            kv = torch.arange(n * cfg.tile_n, (n + 1) * cfg.tile_n)
            if tiles.kinds[i >= ends[0]] == FULL:
                assert kv[-1] < cols, "a full block past the last column"
                seen[:, kv] = True
                continue
            assert number(tiles.at_partial(i)) == n
            kv = kv[kv < cols]  # zeros stand past the end, and are masked
            if kind.mask is None:
                seen[:, kv] = True
            elif len(kv):
                b, h = (torch.tensor(int(x)) for x in (tile.b, tile.h))
                indices = [x.to(torch.int32) for x in (b, h, q + offsets[0], kv + offsets[1])]
                seen[:, kv] = evaluate(kind.mask.program, indices, tensors).expand(len(q), len(kv))
        assert len(visited) + outside == count, "a tile is visited twice"
        if count:
            number(tiles.at(count))  # a kernel asks one ahead
        return seen
