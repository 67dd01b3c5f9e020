"""Torch in the kernels' place: the ops' whole host side on CPU tensors, for machines without a GPU.

`install` makes the ops plan CPU calls as those of a given architecture. In place of a compiled function comes one that
insists on what the compiled one would insist on (ranks, contiguous modes, alignments), sees the tensors through the
same views, and uses of the epilogue what its facts say, no more.
"""

import contextlib
import itertools
from dataclasses import replace

import torch

import cute_kernels.dispatch as dense_ops
import cute_kernels.sparse24.dispatch as structured_ops
import sparse_collective.dispatch as sparse_ops
import sparse_collective.plan as sparse_plan
import sparse_collective.sddmm_kernel.dispatch as sampled_ops
from cute_kernels import reference
from cute_kernels.arch import ARCHS
from cute_kernels.dtypes import TORCH
from cute_kernels.matmul.arguments import contiguous_mode
from cute_kernels.runtime import families
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.runtime.families import family_of
from cute_kernels.sparse24.format import KEPT, expand, unpack_metadata
from sparse_collective.bsr24.matrix import unpack_blocks
from sparse_collective.small_blocks.tile import CONSUMERS, Geometry

from .attention import emulate_attention
from .attention.emulate_blocks import number
from .signatures import insist_on_arguments


def with_zeros(facts, operands: list) -> list:
    """A kernel's operands with a whole A in the place of a 2:4 sparse one's values and metadata."""
    if facts.block is None:
        values, metadata, *others = operands
        places = unpack_metadata(metadata, len(values), KEPT * values.shape[1], values.itemsize)
        return [expand(values, places), *others]
    *pattern, metadata, values, b, d = operands
    places = unpack_blocks(metadata, facts.block.bm, facts.block.bk, values.itemsize)
    return [*pattern, None, expand(values, places), b, d]


class Emulated:
    """The function that stands for the compiled kernel of some facts."""

    built = set()  # facts of all kernels since the last install: how many a GPU run would compile

    def __init__(self, facts):
        assert family_of(facts).unsupported(facts) == ""
        self.facts = facts
        self.built.add(repr(facts))

    @reference.outside_autocast  # which a kernel does not see
    @torch.autocast("cpu", enabled=False)
    def __call__(self, *args):
        insist_on_arguments(self.facts, args)
        *operands, alpha, beta, group, max_ctas = args
        sampled = self.facts.block is not None and self.facts.block.operand == "d"
        names, structured = self.facts.epilogue_tensors, family_of(self.facts).structured
        at = len(operands) - len(names)
        operands, given = operands[:at], dict(zip(names, operands[at:], strict=True))
        bias, residual, z, scale_out, amax, scale_m, scale_n = (
            given.get(name) for name in ("bias", "residual", "z", "scale_out", "amax", "scale_m", "scale_n")
        )
        assert all(t is None or t.shape == (1,) for t in (scale_out, amax)) and (amax is None or amax == 0)
        assert isinstance(alpha, (int, float)) and isinstance(beta, (int, float)), "what TVM-FFI takes for a float"
        assert all(n is None or n >= 1 for n in (group, max_ctas)), "a count that is given is at least 1"
        if structured:
            stored, operands = operands[0], with_zeros(self.facts, operands)
        if self.facts.block is None:
            (a, b, d), scales = operands, (scale_m, scale_n)
            self.insist("a", stored if structured else a, 0)
            if structured:
                b = b[: a.shape[1]]  # K may be padded
            acc = self.with_blocks(a, scales, 0) @ self.with_blocks(b, scales, 1)
            acc = acc.expand(len(d), *acc.shape) if d.dim() > acc.dim() else acc  # zeros of K = 0
            if self.facts.epilogue.scales_operands:
                acc = self.scaled(acc, *scales)
        elif sampled:
            groups, columns, runs, starts, a, b, d = operands
            self.insist("a", a, 0)
            acc = self.sampled(groups, columns, runs, starts, a, b, d)
        else:
            of_w, of_b = scale_m, scale_n
            *parts, b, d = operands
            if self.facts.block.scaled:
                values = parts[-1]
                assert of_w.shape == (values.shape[:-2].numel(),) and of_w.is_contiguous()
                parts[-1] = values.float() * of_w.view(*values.shape[:-2], 1, 1)
            kind = self.small_blocks if self.facts.family == "small blocks" else self.sparse
            acc = kind(*parts, b)
            if self.facts.epilogue.scales_operands:
                of_w = None if self.facts.block.scaled else of_w
                assert of_w is None or of_w.shape == (1,)
                transposed = self.facts.transposed
                acc = self.scaled(acc.mT if transposed else acc, None if of_w is None else of_w[None], of_b)
                acc = acc.mT if transposed else acc
        self.insist("b", b, 1)
        self.insist("d", d, 2)
        self.insist_on_whole_granules(d)
        spec = self.facts.epilogue
        acc = acc.half().float() if self.facts.acc_dtype == "float16" else acc
        if spec.gated:
            assert acc.shape[:-1] == d.shape[:-1] and acc.shape[-1] == 2 * d.shape[-1]
            rounded = acc.to(d.dtype).to(acc.dtype) if self.facts.element.width == 1 else acc
            d.copy_(reference.gate(rounded, spec.activation))
            return
        assert acc.shape[-2:] == d.shape[-2:], f"{tuple(acc.shape)} does not fit {tuple(d.shape)}"
        assert (bias is not None) == bool(spec.bias) and (residual is not None) == bool(spec.residual)
        if spec.bias_items:
            assert self.facts.block.batch and spec.bias == "row" and bias.is_contiguous() and bias.dim() == 2
            assert bias.shape[1] == d.shape[-1 if self.facts.transposed else -2], "bias length"
            if self.facts.block.run:
                bias = bias[operands[3].clamp(0, len(bias) - 1).long()].repeat_interleave(self.facts.block.run, 0)
            else:
                bias = bias[:, None] if self.facts.transposed else bias[:, :, None]
        elif spec.bias:
            assert bias.dim() == 1 and bias.dtype == TORCH[spec.bias_dtype]
            assert bias.stride(0) == 1 or len(bias) == 1, "a bias is compiled as one mode of stride 1"
            rows = spec.bias == "row"
            assert bias.shape[0] == d.shape[-1 if rows == self.facts.transposed else -2], "bias length"
            bias = bias[:, None] if rows != self.facts.transposed else bias
        if spec.residual:
            assert residual.shape == d.shape and residual.dtype == d.dtype
            self.insist("residual", residual, 2, major=spec.residual, align=1)
        assert (z is not None) == spec.stores_z
        scale = alpha if spec.scale else 1.0
        if spec.stores_z:
            assert z.shape == d.shape and z.stride() == d.stride()
            self.insist("z", z, 2)
            z.copy_(reference.linear_terms(acc, bias, residual, scale, beta))
        result = reference.apply_epilogue(acc, bias, spec.activation, residual, scale, beta, spec.function)
        if self.facts.narrow:
            result = reference.narrowed(result, scale_out, amax, d.dtype)
        d.copy_(result)

    def scaled(self, acc, scale_a, scale_b):
        """Times the scales (1 or L, 1) or (L, extent) of rows and of columns."""
        (M, N), spec = acc.shape[-2:], self.facts.epilogue
        assert spec.scales_operands
        for scale, kind, extent, dim in ((scale_a, spec.scale_m, M, -1), (scale_b, spec.scale_n, N, -2)):
            assert (scale is not None) == (kind is not None)
            if scale is not None and kind not in ("1x128", "128x128"):
                items = len(acc) if acc.dim() == 3 else 1
                assert scale.shape in ([(1, 1), (items, 1)] if kind == "tensor" else [(items, extent)])
                assert scale.shape[0] > 1 or kind != "tensor" or items == 1 or self.facts.block, "read item by item"
                assert scale.stride(1) == 1 or scale.shape[1] == 1
                scale = scale.unsqueeze(dim)  # (1 or L, M, 1) or (1 or L, 1, N)
                acc = acc * (scale if acc.dim() == 3 else scale[0])
        return acc

    def with_blocks(self, operand, scales, which):
        """a (0) or b (1) in fp32, times the scales (L, M or N / 128, K / 128) of its blocks, if it has any."""
        kind = (self.facts.epilogue.scale_m, self.facts.epilogue.scale_n)[which]
        if kind not in ("1x128", "128x128"):
            return operand.float()
        scale = scales[which].repeat_interleave(128, 2)  # (L, M or N / 128, K)
        if which:
            scale = scale.repeat_interleave(128, 1).mT  # (L, K, N)
        scale = scale[:, : operand.shape[-2], : operand.shape[-1]]
        return operand.float() * (scale if operand.dim() == 3 or len(scale) > 1 else scale[0])

    def insist(self, name, tensor, operand, *, major=None, align=None):
        """Check an argument as a compiled function does before it launches."""
        facts = self.facts
        dtype = facts.out_dtype if operand == 2 else facts.dtype
        assert tensor.dtype == TORCH[dtype], f"{name} is {tensor.dtype}, compiled for {dtype}"
        assert tensor.dim() == facts.ranks[operand], f"{name} has {tensor.dim()} dimensions"
        major, align = major or facts.majors[operand], align or facts.aligns[operand]
        last = ("k", "k" if facts.transposed else "n", "m" if facts.transposed else "n")[operand]
        contiguous = None if major == "any" else tensor.dim() - (1 if major == last else 2)
        assert tensor.data_ptr() % (align * tensor.element_size()) == 0, f"{name}'s address"
        for mode, (extent, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if extent > 1:  # the stride of an extent of 1 is not looked at
                right = stride == 1 if mode == contiguous else stride % align == 0
                assert right, f"{name}: stride {stride} of mode {mode}, {major}-major, aligned to {align}"

    def insist_on_whole_granules(self, d):
        """TMA stores 16 bytes at a time: where a contiguous extent ends inside of them, it writes what lies behind."""
        if self.facts.tma_store:
            mode = contiguous_mode(self.facts, 2)
            assert d.shape[mode] * d.element_size() % 16 == 0, f"TMA would write past the end of d {tuple(d.shape)}"

    def sparse(self, crow, col, order, groups, numbers, values, b):
        """W @ b from the stored blocks alone, or its transpose; of a batch item by item, or run by run of columns."""
        assert values.is_contiguous()
        assert (numbers is not None) == self.facts.block.permuted == (self.facts.majors[0] == "m")
        if numbers is not None:
            assert numbers.dtype == torch.int32
            values = values.index_select(-3, numbers).mT
        facts, (bm, bk) = self.facts, values.shape[-2:]
        batch, run = facts.block.batch, facts.block.run
        assert (crow.dim(), values.dim()) == {None: (1, 3), "values": (1, 4), "patterns": (2, 3)}[batch]
        assert values.dim() == facts.ranks[0] and (groups is not None) == (run > 0)
        self.insist_on_order(order)
        assert (bm, bk) == (facts.block.bm, facts.block.bk)
        assert crow.dtype == col.dtype == getattr(torch, facts.block.index_dtype)
        b = (b.mT if facts.transposed else b).float()  # (..., K, N)

        def product(crow, values, b):
            stored = slice(int(crow[0]), int(crow[-1]))
            rows = torch.arange(len(crow) - 1).repeat_interleave(crow.diff())
            parts = b.unflatten(-2, (b.shape[-2] // bk, bk))[..., col[stored].long(), :, :]
            out = b.new_zeros(*b.shape[:-2], len(crow) - 1, bm, b.shape[-1])
            return out.index_add_(-3, rows, values[stored].float() @ parts).flatten(-3, -2)

        def item(l, b):
            return product(crow, values[l], b) if batch == "values" else product(crow[l], values, b)

        items = len(values if batch == "values" else crow)
        if batch is None:
            out = product(crow, values, b)
        elif run:
            assert groups.dtype == torch.int32 and b.dim() == 2 and b.shape[1] == len(groups) * run
            taken = groups.clamp(0, items - 1)
            out = torch.cat([item(l, part) for l, part in zip(taken.tolist(), b.split(run, 1), strict=True)], 1)
            out.view(-1, len(groups), run)[:, groups != taken] = 0.0
        else:
            out = torch.stack([item(l, b[l] if b.dim() == 3 else b) for l in range(items)])
        return out.mT if facts.transposed else out

    def insist_on_order(self, order):
        """Every work tile comes once, or there is no order."""
        assert (order is not None) == self.facts.ordered
        if order is not None:
            tiles = order[order[:, 0] >= 0]
            m, n = (tiles.max(0).values + 1).tolist()
            assert order.dtype == torch.int32 and torch.equal(
                (tiles[:, 1] * m + tiles[:, 0]).sort().values, torch.arange(m * n).int()
            )

    def sampled(self, groups, columns, runs, starts, a, b, d):
        """The stored blocks of a @ b, in the order of the groups of boxes; of a batch, over each item's runs of K."""
        block, cfg = self.facts.block, self.facts.config
        assert groups.dtype == torch.int32 and columns.dtype == getattr(torch, block.index_dtype)
        a, b = a.float().unflatten(0, (-1, block.bm)), b.float().mT.unflatten(0, (-1, block.bk))
        out = torch.full(d.shape, float("nan"))
        parts = -(-block.bk // cfg.box_n)
        of_items = out if block.batch == "values" else out[None]
        for (l, values), (row, first, boxes) in itertools.product(enumerate(of_items), groups.tolist()):
            k = slice(None)
            if block.run:
                item, row = (l, row) if block.batch == "values" else divmod(row, len(a))
                mine = runs[starts[item] : starts[item + 1]]
                k = (mine[:, None] * block.run + torch.arange(block.run)).flatten()
            assert 0 <= boxes <= cfg.boxes and 0 <= row < len(a)
            for box in range(first, first + boxes):
                p, part = box // parts, slice(box % parts * cfg.box_n, (box % parts + 1) * cfg.box_n)
                assert values[p, :, part].isnan().all(), "every box comes once"
                values[p, :, part] = a[row][:, k] @ b[columns[p]][part][:, k].mT
        return out

    def small_blocks(self, crow, counts, slices, words, order, values, b):
        """The same, in the order of the small-block kernel: every group's chunks, and in each what its words say."""
        facts, (bm, bk) = self.facts, (self.facts.block.bm, self.facts.block.bk)
        assert values.is_contiguous() and values.shape[-2:] == ((bk, bm) if facts.block.permuted else (bm, bk))
        assert facts.block.permuted == (facts.majors[0] == "m")
        if facts.block.batch:  # one item after the other; of a single b each takes the same
            assert facts.block.batch == "values" and facts.block.run == 0 and values.dim() == facts.ranks[0] == 4
            single = Emulated(replace(facts, block=replace(facts.block, batch=None)))
            items = b if b.dim() == 3 else [b] * len(values)
            tables = crow, counts, slices, words, order
            return torch.stack([single.small_blocks(*tables, v, x) for v, x in zip(values, items, strict=True)])
        g, cluster = Geometry.of_block(bm, bk, facts.majors[1] == "k"), facts.config.cluster_m
        assert crow.dtype == getattr(torch, facts.block.index_dtype)
        assert counts.dtype == slices.dtype == words.dtype == order.dtype == torch.int32
        b = (b.mT if facts.transposed else b).float()  # (..., K, N)
        rows = (len(crow) - 1) * bm
        out = b.new_zeros(*b.shape[:-2], rows, b.shape[-1])
        for group, segment in itertools.product(range(len(counts)), range(CONSUMERS * cluster)):
            first = (group * CONSUMERS * cluster + segment) * g.rows
            at = int(crow[min(first, len(crow) - 1)])
            needed = slices[group, : int(counts[group])].tolist()
            for i in range(0, len(needed), g.slices):
                word = int(words[group, i // g.slices, segment])
                bits = [bit for bit in range(g.rows * g.steps) if word >> bit & 1]
                for j, bit in enumerate(bits):
                    r, s = divmod(bit, g.steps)
                    unit = needed[i + s // g.gather] * g.gather + s % g.gather  # of g.width columns
                    part = slice(unit % g.parts * g.width, (unit % g.parts + 1) * g.width)
                    k, row = unit * g.width, (first + r) * bm
                    stored = values[int(order[at + j])]
                    block = (stored.mT if facts.block.permuted else stored)[:, part].float()
                    out[..., row : row + bm, :] += block @ b[..., k : k + g.width, :]
                if needed[i] % g.parts == g.parts - 1:
                    at += len(bits)
        return out.mT if facts.transposed else out


def numbers(coordinate) -> tuple:
    """The plain numbers of a coordinate."""
    return tuple(number(x) for x in coordinate)


@contextlib.contextmanager
def without_gpu(request, monkeypatch):
    """A fixture's: `install`, or with pytest's option --emulator the kernels themselves, on the CPU."""
    if request.config.getoption("--emulator"):
        from .emulator.ops import on_emulator

        with on_emulator("sm_90"):
            yield
    else:
        install(monkeypatch)
        yield


def install(monkeypatch, arch: str = "sm_90", sms: int = 132) -> None:
    """From here on, CPU calls of the ops are planned and launched as on a GPU of `arch`."""
    for ops in (dense_ops, sparse_plan, sampled_ops, structured_ops):
        monkeypatch.setattr(ops, "plans_kernel", lambda device: True)
        monkeypatch.setattr(ops, "device_arch", lambda index: (ARCHS[arch], sms))
    for ops in (dense_ops, sparse_ops, sampled_ops, structured_ops):
        monkeypatch.setattr(ops, "_PLANS", PlanCache())
    monkeypatch.setattr(Emulated, "built", set())
    monkeypatch.setattr(families, "function_for", Emulated)
    emulate_attention.install(monkeypatch, arch, sms)
