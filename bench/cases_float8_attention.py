"""Attention of 8-bit floats, with P of 16 bits and of 8 (fast), beside ours of bfloat16: the same numbers, quantised
with a scale for each head, or for each 128 tokens of it.

Both count the same useful operations, so ratios are of times. A row's note says how far each result is from the exact
one, in Frobenius norm, of some queries.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from unittest.mock import patch

import torch
from torch import Tensor

from attention import attention, block_sparse, block_sparse_attention, eager
from attention.forward import choose
from cute_kernels import quantize
from cute_kernels.runtime.call_plan import PlanCache
from tests.cases import uniform

from .cases_attention import FIRST, AttentionProblem, dense_problem, kept_mask, named
from .peers import Call, compare, own_call
from .peers_attention import Attention
from .rows import Candidate, Case

SUITE = "attention-float8"
WIDE = "our bfloat16"
LONG = (1, 32768, 16, 128)
SHORT = (16, 1024, 16, 128)
TILES = {  # of head dimension 128, by whether P and V are of 8 bits: as in choose.FLOAT8 and SM_90
    True: ((192, 96, 4, 3), (128, 128, 4, 2), (128, 160, 3, 2), (128, 192, 2, 2)),
    False: ((192, 80, 4, 3), (128, 128, 3, 2), (128, 144, 3, 2), (128, 160, 2, 2), (128, 176, 2, 2)),
}
TOLERANCE = 0.08  # P has three bits of mantissa: 0.025 in norm on random numbers


class NarrowAttention(Attention):
    """Attention of q, k and v (B, S, H, D) of bfloat16, which are numbers of 8 bits times their scales."""

    def __init__(self, make: Callable, *args, per: str = "head", **terms) -> None:
        super().__init__(*(partial(self.wide, i) for i in range(3)), *args, **terms)
        self._make, self._per = make, per

    @cached_property
    def quantised(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """(values (B, H, S, D), scales (B, H) or of blocks of tokens (B, H, S / 128)) of q, k and v."""
        return tuple(quantize(make().transpose(1, 2), per=self._per) for make in self._make)

    def wide(self, which: int) -> Tensor:
        values, scale = self.quantised[which]
        scale = scale[..., None] if self._per == "head" else scale.repeat_interleave(128, -1)[..., : values.shape[2]]
        return (values.float() * scale[..., None]).to(torch.bfloat16).transpose(1, 2)

    def verified(self, call: Call) -> Call:
        """The call with its error; WrongResult where that is too large."""
        call().fill_(float("nan"))
        index, reference = self.sample
        found = call()[index].float()
        compare(found, reference, TOLERANCE)
        return replace(call, note=f"error {((found - reference).norm() / reference.norm()).item():.2e}")


def row(
    problem: AttentionProblem,
    name: str,
    asked: float | None,
    fast: bool,
    blocks: Tensor | None = None,
    tile: tuple | None = None,
    per: str = "head",
    inside: bool | None = None,
) -> Case:
    """Attention of a problem.

    blocks: of a block mask. tile: the one that is taken, whatever is estimated, and inside: where v is converted. per:
    what has a scale.
    """
    shapes = [(problem.batch, problem.queries, problem.heads, problem.head_dim)]
    shapes += 2 * [(problem.batch, problem.keys, problem.kv_heads, problem.head_dim)]
    make = [partial(randn, *shape) for shape in shapes]
    terms = {} if blocks is None else {"blocks": lambda: blocks.to(device()), "block_size": problem.block}
    x = NarrowAttention(make, problem.causal, per=per, **terms)
    op, more = (attention, ()) if blocks is None else (block_sparse_attention, (kept_mask,))

    def call_of(q, k, v, **scales) -> tuple:
        given = scales if more else scales | {"causal": problem.causal}
        return own_call(x, op, q, k, v, *(mask(x) for mask in more), out=x.out().transpose(1, 2), **given)

    def ours() -> tuple:
        (q, q_descale), (k, k_descale), (v, v_descale) = x.quantised
        scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale, "use_fast_accum": fast}
        if tile is None and inside is None:
            return call_of(q, k, v, **scales)
        within = partial(forced, tile, inside, PlanCache(operands=3))
        with within():
            call, plan = call_of(q, k, v, **scales)
        return replace(call, run=within()(call.run), within=within), plan

    peer = Candidate(WIDE, problem.flops, lambda: call_of(*x.heads_first)[0])
    problem = replace(problem, dtype="float8_e4m3fn")
    return Case(SUITE, f"{name}, e4m3fn{', fast' * fast}, over {WIDE}", problem, ours, [peer], WIDE, asked)


@contextlib.contextmanager
def forced(tile: tuple | None, inside: bool | None, plans: PlanCache) -> Iterator[None]:
    """Within it calls have plans of their own, at head dimension 128 this tile alone, and v converted inside of the
    forward kernel or before it; None: as is estimated."""
    with contextlib.ExitStack() as stack:
        if tile is not None:
            for table in (choose.FLOAT8, choose.FLOAT8_SCORES):
                stack.enter_context(patch.dict(table, {128: ((tile, 1.0),)}))
            for name in ("FLOAT8_UNMASKED_ONLY", "UNMASKED_ONLY"):
                stack.enter_context(patch.object(choose, name, set()))
        if inside is not None:
            stack.enter_context(patch.object(choose, "converts_inside", lambda *_: inside))
        for module in (eager, block_sparse):
            stack.enter_context(patch.object(module, "_PLANS", plans))
        yield


def dense(
    shape: tuple[int, int, int, int],
    causal: bool,
    asked: float | None = None,
    fast: bool = False,
    tile: tuple | None = None,
    per: str = "head",
    inside: bool | None = None,
) -> Case:
    name = f"forward {named(shape, causal)}" + (f", tile {tile[0]}x{tile[1]}" if tile else "") + of_tokens(per)
    return row(dense_problem(shape, causal), name + where(inside), asked, fast, tile=tile, per=per, inside=inside)


def where(inside: bool | None) -> str:
    """What a row's name says of where v is converted, if it is not the call's own choice."""
    return "" if inside is None else f", v converted {'inside' if inside else 'before'}"


def of_tokens(per: str) -> str:
    """What a row's name says of scales that are not of heads."""
    return ", scales of 128 tokens" if per == "tokens" else ""


def sparse(
    shape: tuple[int, int, int, int],
    side: int,
    density: float,
    asked: float | None = None,
    fast: bool = False,
    per: str = "head",
    inside: bool | None = None,
) -> Case:
    """Equally many random full blocks in each row of blocks."""
    B, S, H, D = shape
    blocks = uniform(S // side, S // side, round(density * S / side))
    kept = blocks.double().mean().item()
    problem = AttentionProblem("block_sparse_attention", B, S, S, H, H, D, block=(side, side), density=kept)
    name = f"block-sparse {side}x{side}, {density:.3g}, B{B} S{S} H{H} D{D}{of_tokens(per)}{where(inside)}"
    return row(problem, name, asked, fast, blocks, per=per, inside=inside)


def float8_attention_cases(mode: str) -> Iterator[Case]:
    """Rows with a number asked of them; "full" has other head dimensions, shorter sequences, smaller blocks, tiles
    beside each other, both places in which v is converted, and scales of tokens."""
    for shape in (FIRST, LONG):
        for fast in (False, True):
            for causal in (False, True):
                yield dense(shape, causal, 1.45, fast)
            yield sparse(shape, 128, 1 / 8, 1.3, fast)
    if mode == "full":
        for shape in (SHORT, (2, 8192, 32, 64), (2, 8192, 8, 256)):
            for causal in (False, True):
                yield dense(shape, causal)
        yield sparse(FIRST, 64, 1 / 8)
        for inside in (False, True):
            for shape in (FIRST, SHORT):
                for causal in (False, True):
                    yield dense(shape, causal, inside=inside)
            yield sparse(FIRST, 128, 1 / 8, inside=inside)
            yield sparse(FIRST, 64, 1 / 8, inside=inside)
        for fast, causal in itertools.product((True, False), (False, True)):
            for tile in TILES[fast]:
                yield dense(FIRST, causal, fast=fast, tile=tile)
        for fast in (False, True):
            for shape in (FIRST, (2, 8192, 32, 64)):
                for causal in (False, True):
                    yield dense(shape, causal, fast=fast, per="tokens")
            yield sparse(FIRST, 128, 1 / 8, fast=fast, per="tokens")


def host_calls() -> dict[str, Callable]:
    """Of which the host's cost is measured: on a preallocated output, 64 rows."""
    wide = [randn(1, 64, 2, 64).transpose(1, 2) for _ in range(3)]
    (q, q_descale), (k, k_descale), (v, v_descale) = (quantize(t, per="head") for t in wide)
    terms = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale, "out": torch.empty_like(wide[0])}
    return {
        "attention, e4m3fn": lambda: attention(q, k, v, **terms),
        "attention, bfloat16": lambda: attention(*wide, out=terms["out"]),
    }


def device() -> str:
    return "cuda"


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=device(), dtype=torch.bfloat16)
