"""Torch in the attention kernels' place: see host_emulation.py, whose `install` calls this one."""

import dataclasses
import functools
import itertools
import math

import torch

import attention.dispatch as eager
import attention.gradients  # noqa: F401 (what it imports of plan must not be what `install` puts there)
import attention.masks.transposed.dispatch as transposed
import attention.operands  # noqa: F401
import attention.plan as plan
import attention.selected.decode.dispatch as selected
import attention.selected.tables.dispatch as tables
import attention.selected.unions.dispatch as unions
from attention.forward.config import SCALE_TOKENS, FlashFacts, Float8Facts, GatherFacts
from attention.forward.fp8.transposed_values import KEYS, place_of
from attention.reference import spans_of
from attention.selected.rows import as_heads, as_rows
from attention.selected.unions.config import SIDE
from cute_kernels.arch import ARCHS
from cute_kernels.dtypes import FLOAT8, NAMES_OF_OPERANDS, TORCH
from cute_kernels.runtime import families
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.testing.reference import band_mask

from ..signatures import insist_on_arguments
from .emulate_blocks import Walked
from .emulate_tables import EmulatedTables, EmulatedTranspose

LOG2E = plan.LOG2E


class EmulatedFlash:
    """The function that stands for the compiled attention kernel of some facts."""

    built = set()  # facts of all kernels since the last install: how many a GPU run would compile

    def __init__(self, facts):
        self.facts = facts
        self.built.add(repr(facts))

    def __call__(self, q, k, v, out, lse, sinks, cu_q, cu_k, blocks, score, *more):
        """`more` are the counter and the number of CTAs of the sm_90 path, around the scalars."""
        insist_on_arguments(self.facts, (q, k, v, out, lse, sinks, cu_q, cu_k, blocks, score, *more))
        assert score is None and self.facts.score is None
        scalars = self.scalars(*more)
        self.insist(q, k, v, out, lse, *scalars[1:4])
        if not self.facts.packed:
            assert cu_q is None and cu_k is None
            self.attend(q, k, v, out, lse, sinks, *scalars)
            return
        assert all(t.dtype is torch.int32 and t.is_contiguous() for t in (cu_q, cu_k))
        out.zero_()
        if lse is not None:
            lse.copy_(torch.tensor(-math.inf) if sinks is None else sinks.view(-1, 1))
        rows, cols = cu_q.tolist(), cu_k.tolist()
        for a, b, c, d in zip(rows[:-1], rows[1:], cols[:-1], cols[1:], strict=True):
            if a < b:
                parts = (t.transpose(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d], out[a:b]))
                self.attend(*parts, None if lse is None else lse[None, :, a:b], sinks, *scalars)

    def scalars(self, *more):
        """(scale_log2, softcap, left, right, offsets), of what a forward kernel is given after its tensors."""
        if self.facts.path == "sm_90":
            counter, *more, max_ctas = more
            assert (counter is not None) == self.facts.config.dynamic and max_ctas > 0
        assert len(more) == 5 and (more[-1] is not None) == self.facts.offsets
        return more

    def insist(self, q, k, v, out, lse, softcap, left, right):
        """Check the arguments as a compiled function does, and what the host promises."""
        facts = self.facts
        widths = {"q": facts.head_dim, "k": facts.head_dim, "v": facts.head_dim_v, "out": facts.head_dim_v}
        rank = 3 if facts.packed else 4
        for (name, width), t in zip(widths.items(), (q, k, v, out), strict=True):
            dtype = getattr(facts, "cache", None) if name in ("k", "v") else None
            assert t.dim() == rank and t.shape[-1] == width and t.dtype is TORCH[dtype or facts.dtype], name
            assert t.data_ptr() % 16 == 0 and t.stride(-1) == 1, name
            whole = all(stride * t.element_size() % 16 == 0 for stride in t.stride()[:-1])
            assert whole, f"{name}: strides {t.stride()}"
        assert all(0 <= x < 2**30 and isinstance(x, int) for x in (left, right))
        assert (lse is not None) == facts.lse
        if lse is not None:
            shape = (q.shape[1], q.shape[0]) if facts.packed else q.shape[:3]
            assert lse.shape == shape and lse.is_contiguous() and lse.dtype is torch.float32

    @torch.autocast("cpu", enabled=False)
    def attend(self, q, k, v, out, lse, sinks, scale_log2, softcap, left, right, offsets=None):
        """For (B, H, Sq, D) tensors, all items of one length, into out and lse."""
        facts, rows, columns = self.facts, q.shape[2], k.shape[2]
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, 1).float() for t in (k, v))
        scores = q.float() @ k.mT
        if facts.softcap:
            scores = 1 - 2 / (1 + torch.exp2(scores * softcap))
        bounds = left if facts.window.left else None, right if facts.window.right else None
        scores = scores.masked_fill(~band_mask(rows, columns, *bounds, offsets=offsets), -math.inf) * scale_log2
        log2 = (scores / LOG2E).logsumexp(-1, keepdim=True) * LOG2E
        if sinks is not None:
            log2 = torch.logaddexp(log2 / LOG2E, sinks.float().view(-1, 1, 1)) * LOG2E
        out.copy_(torch.exp2(scores - log2).masked_fill(log2.isneginf() | scores.isneginf(), 0.0) @ v)
        if lse is not None:
            lse.copy_(log2[..., 0] / LOG2E)


class EmulatedFloat8:
    """The same for FP8 kernels, which are given a 16-bit or transposed V, and scales; in FP32, of dequantized
    numbers."""

    def __init__(self, facts):
        known = {field.name: getattr(facts, field.name) for field in dataclasses.fields(FlashFacts)}
        plain = FlashFacts(**known | {"dtype": "float32", "out_dtype": "float32"})
        self.facts, self.plain = facts, (EmulatedFlash if facts.blocks is None else EmulatedBlocks)(plain)
        EmulatedFlash.built.discard(repr(plain))
        EmulatedFlash.built.add(repr(facts))

    def __call__(self, q, k, v, out, lse, sinks, cu_q, cu_k, blocks, score, *more):
        facts, scales = self.facts, more[:3]
        insist_on_arguments(facts, (q, k, v, out, lse, sinks, cu_q, cu_k, blocks, score, *more))
        assert [s is not None for s in scales] == [facts.q_descale, facts.k_descale, facts.v_descale]
        assert all(s is None or s.dim() == 2 + facts.tokens for s in scales)
        assert all(t.data_ptr() % 16 == 0 and t.stride(-1) == 1 for t in (q, k, v, out))
        if facts.fast:
            assert v.shape[3] == facts.head_dim_v * facts.config.tile_n and all(s % 16 == 0 for s in v.stride()[:-1])
        else:
            assert NAMES_OF_OPERANDS[v.dtype] == facts.loaded_v and v.shape[:-1] == k.shape[:-1]
        starts = (cu_q, cu_k, cu_k) if facts.packed else (None,) * 3
        tensors = q, k, self.rows_of(v, k, cu_k) if facts.fast else v.float()
        wide = [of_sequences(*each) for each in zip(tensors, scales, starts, strict=True)]
        result = torch.full(out.shape, math.nan)
        self.plain(*wide, result, lse, sinks, cu_q, cu_k, blocks, score, *more[3:])
        out.copy_(result)

    def rows_of(self, v, k, cu_k):
        """V as it was before it was transposed."""
        places = [KEYS.index(key) for key in range(16)]
        t = v.float()[..., places_of(self.facts.head_dim_v, self.facts.config.tile_n)]  # (B, Hkv, tiles, Dv, tile_n)
        t = t.transpose(3, 4).flatten(2, 3).unflatten(2, (-1, 16))[:, :, :, places].flatten(2, 3)
        if not self.facts.packed:
            return t[:, :, : k.shape[2]].contiguous()
        found = torch.zeros(k.shape[0], v.shape[1], self.facts.head_dim_v)
        for part, rows in parts_of(cu_k, self.facts.config.tile_n):
            found[rows] = t[0, :, part].transpose(0, 1)
        return found


class EmulatedValues:
    """The function that stands for the kernel that converts or transposes V."""

    def __init__(self, facts):
        self.facts = facts
        EmulatedFlash.built.add(repr(facts))

    def __call__(self, v, to, cu_k):
        insist_on_arguments(self.facts, (v, to, cu_k))
        tile, dim = self.facts.tile, self.facts.head_dim
        if not tile:
            assert v.shape == to.shape and to.dtype is torch.float16 and cu_k is None
            to.copy_(v.float())
            return
        found = torch.zeros(*to.shape[:2], to.shape[2] * tile, dim)
        if not self.facts.packed:
            found[:, :, : v.shape[2]] = v.float()
        else:
            for part, rows in parts_of(cu_k, tile):
                found[0, :, part] = v[rows].transpose(0, 1).float()
        found = found.unflatten(2, (-1, 16))[:, :, :, list(KEYS)].flatten(2, 3)
        tiles = found.unflatten(2, (-1, tile)).transpose(3, 4).flatten(3).to(to.dtype)
        to.view(torch.uint8)[..., places_of(dim, tile).flatten()] = tiles.view(torch.uint8)


@functools.cache
def places_of(head_dim: int, tile: int) -> torch.Tensor:
    """(head_dim, tile): where a tile of V has its elements."""
    columns = range(tile)
    return torch.tensor(
        [[place_of(c // 16 * 16, d, head_dim, tile) + c % 16 for c in columns] for d in range(head_dim)]
    )


def parts_of(cu_k, tile: int):
    """(columns of the transposed V, rows of V) of each packed sequence."""
    for b, (first, after) in enumerate(itertools.pairwise(cu_k.tolist())):
        begin = (first // tile + b) * tile
        yield slice(begin, begin + after - first), slice(first, after)


def of_sequences(t, scale, cu):
    """Q, K or V in fp32 times scales (B, heads); cu: where packed sequences begin, whose rows are t's first ones."""
    t = t.float()
    if scale is None:
        return t
    if cu is None:
        of_blocks = -(-t.shape[2] // SCALE_TOKENS), SCALE_TOKENS
        assert scale.shape in (t.shape[:2], (*t.shape[:2], of_blocks[0]))
        each = scale if scale.dim() == 3 else scale[..., None].expand(*scale.shape, of_blocks[0])
        return t * each[..., None].expand(*t.shape[:2], *of_blocks).flatten(2)[:, :, : t.shape[2], None]
    for b, (first, after) in enumerate(itertools.pairwise(cu.tolist())):
        t[first:after] *= scale[b][:, None]
    return t


class EmulatedDecode(EmulatedFlash):
    """The same of the decoding kernel, which sees of an item's cache its own rows alone."""

    def __call__(self, q, k, v, out, lse, sinks, seqlens, table, score, parts, part_lses, *more):
        insist_on_arguments(self.facts, (q, k, v, out, lse, sinks, seqlens, table, score, parts, part_lses, *more))
        assert score is None and self.facts.score is None
        scales = (None, None)
        if self.facts.cache:
            *scales, more = *more[:2], more[2:]
            assert [s is not None for s in scales] == [self.facts.k_descale, self.facts.v_descale]
        facts, (*scalars, count) = self.facts, more[:5]
        assert len(more) == 5 + (facts.path == "sm_90") and all(x > 0 for x in more[4:])
        assert (seqlens is not None) == facts.seqlens and (table is not None) == (facts.page_size > 0)
        assert (parts is not None) == facts.split == (count > 1)
        if parts is not None:
            assert parts.shape == (count, *out.shape) and part_lses.shape == (count, *out.shape[:3])
        self.insist(q, k, v, out, lse, *scalars[1:])
        if seqlens is None:
            k, v = (dequantised(t, scale) for t, scale in zip((k, v), scales, strict=True))
            self.attend(q, k, v, out, lse, sinks, *scalars)
            return
        assert seqlens.dim() == 1 + facts.spans and facts.window.left >= facts.spans
        for b, (first, length) in enumerate(spans_of(seqlens)):
            one, kv = slice(b, b + 1), (k[b : b + 1], v[b : b + 1])
            if table is not None:
                pages = table[b, : -(-length // facts.page_size)].long()
                kv = (t[pages].transpose(0, 1).flatten(1, 2)[None] for t in (k, v))
            kv = (t[:, :, first:length] for t in kv)
            kv = (dequantised(t, s if s is None else s[one]) for t, s in zip(kv, scales, strict=True))
            self.attend(q[one], *kv, out[one], None if lse is None else lse[one], sinks, *scalars)


class EmulatedSelectedDecode(EmulatedFlash):
    """The same of decode from selected blocks: the reference, from the arguments as the kernel reads them."""

    def __call__(self, q, k, v, out, lse, sinks, lists, seqlens, table, parts, part_lses, *more):
        facts = self.facts
        insist_on_arguments(facts, (q, k, v, out, lse, sinks, lists, seqlens, table, parts, part_lses, *more))
        *scales, scale_log2, softcap, right, count = more
        assert [s is not None for s in scales] == [facts.k_descale, facts.v_descale] and right in (0, q.shape[2])
        assert facts.smem_bytes <= facts.spec.smem and (table is not None) == (facts.page_size > 0)
        assert (parts is not None) == facts.split == (count > facts.cluster) and facts.cluster in (1, count)
        if parts is not None:
            assert parts.shape == (count, *out.shape) and part_lses.shape == (count, *out.shape[:3])
        self.insist(q, k, v, out, lse, softcap, 0, right)
        scale = softcap * scale_log2 / (2 * LOG2E**2) if facts.softcap else scale_log2 / LOG2E
        terms = {
            "softcap": scale_log2 / LOG2E if facts.softcap else None,
            "scale": scale,
            "sinks": sinks,
            "causal": right == 0,
        }
        args = selected.CacheArgs(q, k, v, seqused_k=seqlens, page_table=table, **terms)
        args = args._replace(k_descale=scales[0], v_descale=scales[1])
        result, result_lse = selected._reference(args, lists, facts.block_size)
        out.copy_(result)
        if lse is not None:
            lse.copy_(result_lse)


def dequantised(t, scale):
    """K or V of 8 bits (B, Hkv, S, D) times its scales (B, Hkv), None for 1; of 16 bits as it is."""
    t = t.float() if t.dtype in FLOAT8 else t
    if scale is not None:
        assert scale.shape == t.shape[:2] and scale.dtype is torch.float32
        t = t * scale[..., None, None]
    return t


class EmulatedBlocks(Walked, EmulatedFlash):
    """The same of the kernel of a block mask."""

    __init__ = EmulatedFlash.__init__


class EmulatedUnions:
    """The function that stands for the kernel of union tiles."""

    def __init__(self, facts):
        self.facts = facts
        EmulatedFlash.built.add(repr(facts))

    def __call__(self, indices, blocks, counts, bits, kv_blocks, packed, tokens):
        insist_on_arguments(self.facts, (indices, blocks, counts, bits, kv_blocks, packed, tokens))
        facts, (batch, length, groups, _) = self.facts, indices.shape
        tiles = len(counts) // (batch * groups)
        for number in range(len(counts)):
            tile, group = number % tiles, number // tiles
            first, last = tile * SIDE // packed, min((tile * SIDE + SIDE - 1) // packed, length - 1)
            lists = indices[group // groups, first : last + 1, group % groups].tolist()
            own = [{n for n in row if 0 <= n < kv_blocks} for row in lists]
            union = sorted(set().union(*own))
            used = -(-len(union) // facts.per_step) * facts.per_step
            counts[number] = len(union)
            blocks[number, :used] = torch.tensor(union + union[-1:] * (used - len(union)), dtype=torch.int32)
            member = torch.tensor([[n in row for row in own] for n in union], dtype=torch.int64).view(-1, len(own))
            member = torch.nn.functional.pad(member, (0, tokens - len(own), 0, used - len(union)))
            words = (member.view(-1, facts.per_word, tokens) << torch.arange(facts.per_word)[:, None]).sum(1)
            bits[number, : words.numel()] = words.flatten().to(torch.int32)


class EmulatedGather(EmulatedFlash):
    """The same of the kernel that gathers KV tiles; it reads the bits of each step as the kernel does."""

    def __call__(self, q, k, v, out, lse, sinks, cu_q, cu_k, tables, score, *more):
        facts = self.facts
        insist_on_arguments(facts, (q, k, v, out, lse, sinks, cu_q, cu_k, tables, score, *more))
        assert cu_q is None and cu_k is None and score is None
        scale_log2, softcap, left, right, _ = self.scalars(*more)
        self.insist(q, k, v, out, lse, softcap, left, right)
        union, counts, bits, tokens, packed = tables
        size, q, cols = facts.block_size, as_rows(q, packed), k.shape[2]
        per_word, rows = min(SIDE // size, 32), q.shape[2]
        found, logs = torch.empty(*q.shape[:3], v.shape[3], dtype=out.dtype), torch.empty(q.shape[:3])
        for b, h in itertools.product(range(len(q)), range(q.shape[1])):
            for tile in range(counts.shape[2]):
                place = b, min(h, counts.shape[1] - 1), tile
                row = torch.arange(tile * SIDE, min(rows, tile * SIDE + SIDE))
                token = row // packed
                key = torch.arange(-(-int(counts[place]) * size // facts.config.tile_n) * facts.config.tile_n)
                block = key // size
                words = bits[place][block // per_word * tokens + (token - tile * SIDE // packed)[:, None]]
                position = union[place][block].long() * size + key % size
                seen = (words >> (block % per_word) & 1 != 0) & (position < cols)
                if facts.causal:
                    seen &= position <= token[:, None] + cols - rows // packed
                keys, values = (t[b, h, position.clamp(max=cols - 1)].float() for t in (k, v))
                scores = q[b, h, row].float() @ keys.mT
                scores = 1 - 2 / (1 + torch.exp2(scores * softcap)) if facts.softcap else scores
                scores = scores.masked_fill(~seen, -math.inf) * scale_log2
                if sinks is not None:  # one more column
                    sink = sinks.float()[h * packed + row % packed, None] * LOG2E
                    scores = torch.cat([scores, sink], 1)
                log2 = (scores / LOG2E).logsumexp(-1, keepdim=True) * LOG2E
                p = torch.exp2(scores[:, : len(key)] - log2).masked_fill(~seen, 0.0)
                found[b, h, row], logs[b, h, row] = (p @ values).to(out.dtype), log2[:, 0] / LOG2E
        out.copy_(as_heads(found, packed))
        if lse is not None:
            lse.copy_(as_heads(logs, packed))


def of_forward(facts):
    """The function that replaces the forward kernel of these facts."""
    if isinstance(facts, GatherFacts):
        return EmulatedGather(facts)
    if isinstance(facts, Float8Facts):
        return EmulatedFloat8(facts)
    return (EmulatedFlash if facts.blocks is None else EmulatedBlocks)(facts)


KINDS = {
    "flash forward": of_forward,
    "FP8 values": EmulatedValues,
    "decode": EmulatedDecode,
    "selected decode": EmulatedSelectedDecode,
    "union tiles": EmulatedUnions,
    "selected tables": EmulatedTables,
    "transposed lists": EmulatedTranspose,
}


def install(monkeypatch, arch: str = "sm_90", sms: int = 132) -> None:
    """From here on, CPU calls of attention are planned and launched as on a GPU of `arch`."""
    monkeypatch.setattr(plan, "has_kernel", lambda tensor: True)
    for module in (plan, tables, transposed):
        monkeypatch.setattr(module, "device_arch", lambda index: (ARCHS[arch], sms))
    monkeypatch.setattr(eager, "_PLANS", PlanCache(operands=3))
    monkeypatch.setattr(selected, "_PLANS", PlanCache(operands=3))
    monkeypatch.setattr(EmulatedFlash, "built", set())
    other = families.function_for
    function_for = lambda facts: KINDS.get(facts.family, other)(facts)  # noqa: E731
    monkeypatch.setattr(families, "function_for", function_for)
    monkeypatch.setattr(unions, "function_for", function_for)
    monkeypatch.setattr(unions, "device_arch", lambda index: (ARCHS[arch], sms))
