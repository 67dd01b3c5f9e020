"""Calls of every op as a function of its floating-point tensors, for the fuzz of torch's mechanisms.

`subject(op, inner, seed, device)` turns a random case of fuzz_products or fuzz_attention into a `Subject`: a function
that calls the op, the same function by torch, and the tensors in guarded memory, with the strides of the case.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch
from torch import Tensor

from attention import BlockMask, attention, block_sparse_attention, create_block_mask, scaled_dot_product_attention
from cute_kernels.testing.reference import ACTIVATIONS, dense_of, normal, seed, truth
from sparse_collective import BsrMatrix, bsr_gated_linear

from .. import gemm_calls, gemm_cases
from ..attention.mask_parts import elements
from ..guard_zones import Zones
from . import attention as fuzz_attention

PRODUCTS = ("gemm", "bsr_matmul", "bsr_linear", "bsr_gated_linear", "bsr_grouped_linear")
ATTENTION = ("attention", "packed attention", "block_sparse_attention", "scaled_dot_product_attention")
SCORE_MODS = True  # False: no call has a function on scores, which the emulation of kernels on the CPU ignores
FORMS = ("ours", "flex", "bool", "bsr", "torch bsr", "function", "flex function", "per head")


@dataclass
class Subject:
    """A call. `run` and `plain` take `tensors` in order, and return a tuple of one or two tensors.

    Attributes:
        run: the op. run(*tensors, move=f) applies f to the index tensors and masks of the call first.
        plain: the same by torch, in the dtype of the first tensor.
        names: of the tensors.
        writes: (name, function that writes in place to what the call reads besides `tensors`, True if the replay of a
            CUDA graph sees that).
        traceable: False if torch.compile refuses the form of the mask.
        on_meta: True if all that the call reads can be moved to the meta device.
        captures: True if a score_mod captures one of the tensors.
    """

    op: str
    run: Callable
    plain: Callable
    names: list[str]
    tensors: list[Tensor]
    path: str | None = None
    writes: list[tuple[str, Callable[[], None], bool]] = field(default_factory=list)
    traceable: bool = True
    on_meta: bool = True
    captures: bool = False
    zones: Zones | None = None


def stay(t):
    return t


def subject(op: str, inner, number: int, device: str) -> Subject:
    """The subject of a random case; `number` seeds what the case does not say."""
    if op in PRODUCTS:
        return of_product(op, inner, device)
    draw = random.Random(number)
    seed(inner.seed)
    inner = replace(inner, nan_q=(), nan_k=(), give_out=False, family=replace(inner.family, splits=None))
    made = {"block_sparse_attention": of_mask, "scaled_dot_product_attention": of_sdpa}.get(op, of_attention)
    return made(inner, draw, device)


# -- products --------------------------------------------------------------------------------------------------


def of_product(op: str, case: gemm_cases.Case, device: str) -> Subject:
    signature = replace(case.signature, out_dtype=case.signature.dtype)
    if op == "bsr_gated_linear":  # 64 rows of the gate and 64 of the other half in turn
        each = 128 // math.gcd(128, signature.block[0])
        signature = replace(signature, bias=None, function=False, view=False)
        case = replace(case, m=-(-case.m // each) * each)
    call = gemm_cases.make(replace(case, signature=signature, give_out=False), device)
    terms, args = dict(call.terms), list(call.args)
    linear = op.endswith("linear")
    names, tensors = (["x"] if linear else ["a", "b"] if op == "gemm" else ["b"]), []
    tensors += [t for t in args if isinstance(t, Tensor) and t.is_floating_point()]
    W = next((t for t in args if isinstance(t, BsrMatrix)), None)
    experts = terms.pop("expert_ids", None)
    base = W if W is None or W.base is None else W.base
    if W is not None:
        base.check_indices()  # which waits for the GPU, so that a capture refuses it
        names, tensors = [*names, "values"], [*tensors, base.values]
    extra = [name for name in ("bias", "residual") if name in terms]
    names, tensors = names + extra, tensors + [terms.pop(name) for name in extra]

    def arguments(given: tuple, matrix: Callable, move: Callable) -> tuple[tuple, dict]:
        named = dict(zip(names, given, strict=True))
        more = terms | {name: named[name] for name in extra}
        if op == "gemm":
            return (named["a"], named["b"]), more
        M = matrix(named["values"])
        more |= {} if experts is None else {"expert_ids": move(experts)}
        return (named["x"], M) if linear else (M, named["b"]), more

    def run(*given, move=stay):
        def matrix(values):
            if move is stay:
                M = base.with_values(values)
            else:
                M = BsrMatrix(move(base.crow_indices), move(base.col_indices), values, base.shape, check=False)
            return M if W is base else M.t()

        operands, more = arguments(given, matrix, move)
        if op == "bsr_gated_linear":
            return (bsr_gated_linear(*operands, **more),)
        return (call.op(*operands, **more),)

    def plain(*given):
        def matrix(values):
            parts = {"crow_indices": base.crow_indices, "col_indices": base.col_indices, "values": values}
            M = SimpleNamespace(base=None, shape=base.shape, blocksize=base.blocksize, **parts)
            return M if W is base else SimpleNamespace(base=M)

        operands, more = arguments(given, matrix, stay)
        if op == "bsr_gated_linear":
            z = operands[0] @ dense_of(operands[1]).mT
            gate, up = z.unflatten(-1, (-1, 2, 64)).unbind(-2)
            return ((ACTIVATIONS[more["activation"]](gate) * up).flatten(-2),)
        left, right, more = gemm_calls.plainly(op, operands, more)
        y = truth(left, right, **more, dtype=given[0].dtype)
        if op == "bsr_grouped_linear":
            y = y.flatten(0, 1)
        return (y[0] if op == "bsr_linear" and operands[0].dim() == 1 else y,)

    path = "sm_80" if signature.path == "sm_80" else None
    found = Subject(op, run, plain, names, tensors, path, zones=call.zones)
    if experts is not None:
        found.writes.append(("expert_ids", lambda: experts.copy_(experts.flip(0)), True))
    return found


# -- attention -------------------------------------------------------------------------------------------------


def plain_attention(q, k, v, seen, *, softcap=None, scale=None, sinks=None, bias=None) -> tuple[Tensor, Tensor]:
    """(out, lse) as reference.attention_plainly computes them, with gradients of 0 for rows that see nothing."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
        seen = seen & ~scores.isneginf()
    empty = ~seen.any(-1, keepdim=True).expand(*scores.shape[:-1], 1)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
        empty = torch.zeros_like(empty)
    scores = scores.masked_fill(empty, 0.0)
    weights = scores.softmax(-1).masked_fill(empty, 0.0)[..., : v.shape[2]]
    return weights @ v, scores.logsumexp(-1).masked_fill(empty[..., 0], -math.inf)


def common(case: fuzz_attention.Case, draw: random.Random, zones: Zones, kind: dict, given) -> tuple:
    """(names and tensors of q, k, v and terms that have gradients, options, True if a score_mod captures one)"""
    f = case.family
    tensors = [zones.input(*each) for each in zip(given, case.places[:3], ("q", "k", "v"), strict=True)]
    names = ["q", "k", "v"]
    options = {"causal": f.causal, "softcap": f.softcap, "return_lse": f.lse}
    if f.sinks:
        names.append("sinks")
        sinks = normal(case.heads[0], dtype=fuzz_attention.DTYPES[f.sinks], device=kind["device"])
        tensors.append(zones.input(sinks, name="sinks"))
    captures = SCORE_MODS and f.softcap is None and draw.random() < 0.3
    if captures:
        names.append("slope")
        tensors.append(zones.input(normal(case.heads[0], device=kind["device"]).float() / 16, name="slope"))
    return names, tensors, options, captures


def with_terms(named: dict, options: dict) -> tuple[list[Tensor], dict]:
    """The operands and options of a call of attention with these tensors."""
    options = dict(options)
    if "sinks" in named:
        options["sinks"] = named["sinks"]
    if "slope" in named:
        slope = named["slope"]
        options["score_mod"] = lambda score, b, h, q, kv: score + slope[h] * (kv - q)
    return [named[name] for name in ("q", "k", "v")], options


def bias_of(named: dict, rows: Tensor, columns: Tensor) -> Tensor | None:
    """Bias that the score_mod adds; rows and columns are positions."""
    if "slope" not in named:
        return None
    slope = named["slope"].to(named["q"].dtype)
    return slope[:, None, None] * (columns - rows[:, None]).to(slope.dtype)


def outputs(found) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def of_attention(case: fuzz_attention.Case, draw: random.Random, device: str) -> Subject:
    """attention, dense or packed."""
    f, zones = case.family, Zones(device)
    kind, packed = {"dtype": fuzz_attention.DTYPES[f.dtype], "device": device}, f.op == "packed attention"
    given, _, seen, more = (fuzz_attention.packed if packed else fuzz_attention.batched)(case, zones, kind)
    names, tensors, options, captures = common(case, draw, zones, kind, given)
    if f.window:
        options["window_size"] = case.window

    def positions(lengths, total):
        ends = [torch.arange(n) for n in (lengths if packed else [total])]
        return torch.cat([*ends, torch.zeros(max(0, total - sum(map(len, ends))), dtype=torch.int64)]).to(device)

    def run(*given, move=stay):
        operands, terms = with_terms(dict(zip(names, given, strict=True)), options)
        return outputs(attention(*operands, **terms, **{name: move(t) for name, t in more.items()}))

    def plain(*given):
        named = dict(zip(names, given, strict=True))
        q, k, v = (t.transpose(0, 1)[None] if packed else t for t in given[:3])
        bias = bias_of(named, positions(case.rows, q.shape[2]), positions(case.cols, k.shape[2]))
        out, lse = plain_attention(q, k, v, seen, softcap=f.softcap, sinks=named.get("sinks"), bias=bias)
        if packed:
            out, lse, rows = out[0].transpose(0, 1), lse[0], sum(case.rows)
            out = torch.cat([out[:rows], out[rows:].detach()])  # rows of no sequence give sinks no gradient
            lse = torch.cat([lse[:, :rows], lse[:, rows:].detach()], 1)
        return (out, lse) if f.lse else (out,)

    return Subject("attention", run, plain, names, tensors, path_of(f), captures=captures, zones=zones)


def path_of(family: fuzz_attention.Family) -> str | None:
    return "sm_80" if family.path == "sm_80" else None


def of_mask(case: fuzz_attention.Case, draw: random.Random, device: str) -> Subject:
    """block_sparse_attention of every form of a mask."""
    form, (H, Hkv), B = draw.choice(FORMS), case.heads, len(case.rows)
    rows, cols = case.rows[0], case.cols[0]
    if form in ("bool", "bsr", "torch bsr"):
        case = replace(case, family=replace(case.family, blocksize=(128, 128)))
    if form.endswith("bsr"):
        rows, cols = (128 * max(1, -(-n // 128)) for n in (rows, cols))
    f, zones, kind = case.family, Zones(device), {"dtype": fuzz_attention.DTYPES[case.family.dtype], "device": device}
    given = (
        normal(B, h, n, d, **kind)
        for h, n, d in zip((H, Hkv, Hkv), (rows, cols, cols), (*f.dims[:1] * 2, f.dims[1]), strict=True)
    )
    names, tensors, options, captures = common(case, draw, zones, kind, tuple(given))
    grid = tuple(-(-n // side) for n, side in zip((rows, cols), f.blocksize, strict=True))
    shape = {"per head": (B, H), "bool": draw.choice([(), (H,), (B, H)])}.get(
        form, () if form.endswith("bsr") else (1, 1)
    )
    blocks = torch.rand(*shape, *grid, device=device) < case.density
    seen, mask, writes = mask_of(form, blocks, f.blocksize, (rows, cols), draw, device)
    seen = seen & fuzz_attention.band_mask(rows, cols, None, 0 if f.causal else None, device)
    moved = form in ("ours", "per head", "bool")

    def run(*given, move=stay):
        operands, terms = with_terms(dict(zip(names, given, strict=True)), options)
        return outputs(block_sparse_attention(*operands, mask if move is stay else move(mask), **terms))

    def plain(*given):
        named = dict(zip(names, given, strict=True))
        bias = bias_of(named, torch.arange(rows, device=device), torch.arange(cols, device=device))
        found = plain_attention(*given[:3], seen, softcap=f.softcap, sinks=named.get("sinks"), bias=bias)
        return found if f.lse else found[:1]

    return Subject(
        f"block_sparse_attention ({form})", run, plain, names, tensors, path_of(f), writes, form != "torch bsr",
        moved and form == "bool", captures, zones,
    )  # fmt: skip


def mask_of(form: str, blocks: Tensor, blocksize, lengths, draw: random.Random, device: str) -> tuple:
    """(what it sees, the mask, its writes)"""
    if "function" in form:
        reach = torch.tensor([draw.randint(0, 40)] * max(1, lengths[0]), dtype=torch.int32, device=device)

        def near(b, h, q, kv):
            return (q - kv).abs() < reach[q]

        away = torch.arange(lengths[0], device=device)[:, None] - torch.arange(lengths[1], device=device)
        mask = create_block_mask(near, None, None, *lengths, device=device, BLOCK_SIZE=blocksize)
        mask = mask.to_flex() if "flex" in form else mask
        return away.abs() < reach[: lengths[0], None], mask, [("reach", lambda: reach.sub_(3), True)]
    seen = elements(blocks, blocksize, lengths)
    if form in ("bsr", "torch bsr"):
        values = normal(int(blocks.sum()), *blocksize, device=device)
        counts = torch.zeros(len(blocks) + 1, dtype=torch.int32, device=device)
        counts[1:] = blocks.sum(1).cumsum(0)
        W = BsrMatrix(counts, blocks.nonzero()[:, 1].int(), values, lengths)
        return seen, W if form == "bsr" else W.to_torch(), []
    if form == "bool":
        return seen, blocks, [("blocks", lambda: blocks.copy_(~blocks), True)]
    mask = BlockMask.from_blocks(blocks, blocksize, lengths=lengths)
    if form == "flex":
        mask = mask.to_flex()
        return seen, mask, [("lists", lambda: mask.kv_num_blocks.zero_(), True)]
    return seen, mask, [("lists", lambda: [t.copy_(t.clone()) for t in mask.lists()], False)]


def of_sdpa(case: fuzz_attention.Case, draw: random.Random, device: str) -> Subject:
    """scaled_dot_product_attention with every form of attn_mask."""
    f, zones, (H, Hkv), B = case.family, Zones(device), case.heads, len(case.rows)
    kind = {"dtype": fuzz_attention.DTYPES[f.dtype], "device": device}
    given, _, _, _ = fuzz_attention.batched(case, zones, kind)
    tensors = [zones.input(*each) for each in zip(given, case.places[:3], ("q", "k", "v"), strict=True)]
    names, form = ["q", "k", "v"], draw.choice(["none", "causal", "bool", *(["float", "-inf"] if SCORE_MODS else [])])
    options, L, S = {"is_causal": form == "causal", "enable_gqa": H != Hkv}, case.rows[0], case.cols[0]
    shape = draw.choice([(L, S), (1, 1, L, S), (B, 1, L, S), (B, H, L, S), (B, 1, 1, S), (1, H, L, 1)])
    seen, mask, writes = torch.ones(L, S, dtype=torch.bool, device=device), None, []
    if form == "causal":
        seen = seen.tril()
    elif form == "bool":
        mask = seen = torch.rand(shape, device=device) < 0.7
        seen = seen.clone()
        writes = [("attn_mask", lambda: mask.copy_(~mask), True)]
    elif form != "none":
        bias = normal(*shape, dtype=draw.choice([torch.float32, kind["dtype"]]), device=device)
        if form == "-inf":
            bias = bias.masked_fill(torch.rand(shape, device=device) < 0.3, -math.inf)
        names, tensors = [*names, "attn_mask"], [*tensors, bias]

    def run(*given, move=stay):
        given_mask = given[3] if len(given) > 3 else None if mask is None else move(mask)
        return (scaled_dot_product_attention(*given[:3], given_mask, **options),)

    def plain(*given):
        bias = given[3].to(given[0].dtype) if len(given) > 3 else None
        return (plain_attention(*given[:3], seen, bias=bias)[0],)

    return Subject(
        f"scaled_dot_product_attention ({form})", run, plain, names, tensors, path_of(f), writes, zones=zones
    )
