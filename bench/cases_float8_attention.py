"""Attention of 8-bit floats, with P of 16 bits and of 8 (fast), beside ours of bfloat16: the same numbers, quantised
with a scale for each head, or for each 128 tokens of it.

Both count the same useful operations, so ratios are of times. A row's note says how far each result is from the exact
one, in Frobenius norm, of some queries.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from attention import attention, block_sparse_attention
from cute_kernels import quantize
from cute_kernels.testing.patterns import uniform

from .cases_attention import FIRST, AttentionProblem, dense_problem, kept_mask, named
from .peers import Call, compare, own_call
from .peers_attention import Attention
from .rows import Candidate, Case

SUITE = "attention-float8"
WIDE = "our bfloat16"
LONG = (1, 32768, 16, 128)
SHORT = (16, 1024, 16, 128)
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
    problem: AttentionProblem, name: str, asked: float | None, fast: bool, per: str, blocks: Tensor | None = None
) -> Case:
    """FP8 attention over BF16 attention with the same numbers; `per` says what has a scale."""
    shapes = [(problem.batch, problem.queries, problem.heads, problem.head_dim)]
    shapes += 2 * [(problem.batch, problem.keys, problem.kv_heads, problem.head_dim)]
    make = [partial(randn, *shape) for shape in shapes]
    terms = {} if blocks is None else {"blocks": lambda: blocks.to(device()), "block_size": problem.block}
    x = NarrowAttention(make, problem.causal, per=per, **terms)
    op, masks = (attention, ()) if blocks is None else (block_sparse_attention, (kept_mask,))

    def call_of(q, k, v, **scales) -> tuple:
        options = scales if masks else scales | {"causal": problem.causal}
        return own_call(x, op, q, k, v, *(mask(x) for mask in masks), out=x.out().transpose(1, 2), **options)

    def ours() -> tuple:
        (q, q_descale), (k, k_descale), (v, v_descale) = x.quantised
        scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale, "use_fast_accum": fast}
        return call_of(q, k, v, **scales)

    peer = Candidate(WIDE, problem.flops, lambda: call_of(*x.heads_first)[0])
    problem = replace(problem, dtype="float8_e4m3fn")
    name += ", scales of 128 tokens" if per == "tokens" else ""
    return Case(SUITE, f"{name}, e4m3fn{', fast' * fast}, over {WIDE}", problem, ours, [peer], WIDE, asked)


def dense(shape: tuple, causal: bool, asked: float | None = None, fast: bool = False, per: str = "head") -> Case:
    return row(dense_problem(shape, causal), f"forward {named(shape, causal)}", asked, fast, per)


def sparse(
    shape: tuple, side: int, density: float, asked: float | None = None, fast: bool = False, per: str = "head"
) -> Case:
    """Equally many random full blocks in each row of blocks."""
    B, S, H, D = shape
    blocks = uniform(S // side, S // side, round(density * S / side))
    kept = blocks.double().mean().item()
    problem = AttentionProblem("block_sparse_attention", B, S, S, H, H, D, block=(side, side), density=kept)
    return row(problem, f"block-sparse {side}x{side}, {density:.3g}, B{B} S{S} H{H} D{D}", asked, fast, per, blocks)


def float8_attention_cases(mode: str) -> Iterator[Case]:
    """Rows with a number asked of them; "full" has other head dimensions, shorter sequences, smaller blocks, and
    scales of tokens."""
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
        for fast in (False, True):
            for shape in (FIRST, (2, 8192, 32, 64)):
                for causal in (False, True):
                    yield dense(shape, causal, fast=fast, per="tokens")
            yield sparse(FIRST, 128, 1 / 8, fast=fast, per="tokens")


def device() -> str:
    return "cuda"


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=device(), dtype=torch.bfloat16)
