"""What attention's backward is measured against what: each case one call through autograd, and what is asked of it.

All tensors are bf16, standard normal, (B, S, H, D) in memory; ours and torch's functions get (B, H, S, D) views. A
backward is timed alone, of one forward whose graph is kept. Its useful operations are five products where forward has
two.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product

import torch
from torch import Tensor

from attention import BlockMask, attention, block_sparse_attention
from attention.masks.score_mods import Alibi, alibi_slopes
from cute_kernels import path
from cute_kernels.testing.patterns import uniform

from . import peers_attention_backward as peers
from .cases_attention import DTYPE, FIRST, OUR_DENSE, AttentionProblem, named
from .peers_attention import FA4, FLASH, FLEX
from .peers_attention_backward import BACKWARD, FORWARD, STEP, Training
from .rows import FASTEST, Candidate, Case

SUITE = "attention-backward"
ANY_ORDER = "ours, any order"
NO_SINKS = "ours, no sinks"
NO_SCORE = "ours, no score_mod"
PRODUCTS = {FORWARD: 1.0, BACKWARD: 2.5, STEP: 3.5}  # over forward's two

# (B, S, H, D)
SHAPES = (
    FIRST, (16, 1024, 16, 128), (1, 16384, 16, 128), (4, 4096, 16, 128),
    (2, 8192, 32, 64), (8, 2048, 32, 64), (2, 8192, 8, 256), (8, 2048, 8, 256),
)  # fmt: skip
GROUPED = ((1, 8192, 64, 8), (4, 4096, 32, 8), (1, 32768, 64, 8))  # B, S, heads of q, of k and v; D128
QUICK = ((FIRST, True), (FIRST, False), ((2, 8192, 32, 64), True))  # and whether causal
SM_80 = (FIRST, (2, 8192, 32, 64))
SPARSE = FIRST
DENSITY = 1 / 8
# Side of a block -> asked of our useful rate over FlexAttention's, and over our own dense one.
OVER_FLEX = {128: 1.8, 64: 2.0}
OVER_DENSE = {128: 0.85, 64: 0.60}
DOCUMENTS = (5000, 3500, 2500, 2000, 1500, 1000, 600, 284)  # 16384 tokens
DOCUMENT_HEADS = (16, 128)  # H, D
LONG = 32768
WINDOW = (1023, 0)  # the last 1024 keys, the query's own among them
WINDOW_HEADS = (16, 128)
GPT_OSS = (64, 8, 64)  # heads of q, of k and v, D
PEERS = (peers.sdpa_cudnn, peers.sdpa_flash, peers.fa4)


@dataclass(frozen=True)
class TrainingProblem(AttentionProblem):
    """As AttentionProblem, of a forward, a backward or both."""

    what: str = BACKWARD
    lengths: tuple[int, ...] | None = None  # of packed documents
    deterministic: bool = False
    sinks: bool = False
    alibi: bool = False

    @cached_property
    def pairs(self) -> float:
        """(query, key) pairs of one head of one item that are seen."""
        if self.lengths is None:
            return super().pairs
        return float(sum(n * (n + 1) / 2 if self.causal else n * n for n in self.lengths))

    @property
    def flops(self) -> float:
        """The useful ones."""
        return PRODUCTS[self.what] * super().flops

    @property
    def bytes(self) -> float:
        """The least that passes through device memory: q, k, v, the output, and in backward all gradients, once."""
        # Forward: q, k, v and the output. Backward reads these and dout, and writes three gradients: as much again.
        return {FORWARD: 1, BACKWARD: 2, STEP: 3}[self.what] * super().bytes


def operands(p: TrainingProblem, blocks: Tensor | None = None, device: str = "cuda") -> Training:
    """The tensors of a problem, made when first asked for."""
    of_q, of_kv = (p.batch, p.queries, p.heads, p.head_dim), (p.batch, p.keys, p.kv_heads, p.head_dim)
    make = partial(torch.randn, device=device, dtype=DTYPE)
    q, k, v, dout = (partial(make, *shape) for shape in (of_q, of_kv, of_kv, of_q))
    terms = {} if blocks is None else {"blocks": lambda: blocks.to(device), "block_size": p.block}
    sinks = partial(make, p.heads) if p.sinks else None
    slopes = partial(alibi_slopes, p.heads, device) if p.alibi else None
    more = {"what": p.what, "sinks": sinks, "slopes": slopes, "lengths": p.lengths, "window": p.window}
    return Training(q, k, v, dout, causal=p.causal, **more, **terms)


def sharing(x: Training, **changes) -> Training:
    """The same q, k, v and dout, of another call: without sinks and ALiBi, and with changes of its other terms."""
    same = {"what": x.what, "causal": x.causal, "window": x.window, "lengths": x.lengths}
    return Training(lambda: x.q, lambda: x.k, lambda: x.v, lambda: x.dout, **(same | changes))


def dense_problem(shape: tuple[int, int, int, int], causal: bool = False, **terms) -> TrainingProblem:
    """Of (B, S, H, D), with as many keys as queries and as many heads of each."""
    B, S, H, D = shape
    return TrainingProblem("attention", B, S, S, H, H, D, causal, **terms)


def ours_of(x: Training, forced: str | None = None, deterministic: bool = False) -> tuple:
    """(call, None) of ours as users call it, whose result has been compared with x's reference.

    Args:
        forced: "sm_80" to force that path.
        deterministic: whether q's gradient is summed up in one order.
    """
    q, k, v = x.heads_first if x.lengths is None else tuple(t.squeeze(0) for t in (x.q, x.k, x.v))
    args, terms = (q, k, v), {"causal": x.causal, "deterministic": deterministic}
    op = attention
    if x.blocks is not None:
        op, args = block_sparse_attention, (*args, BlockMask.from_blocks(x.blocks, x.block_size))
    else:
        terms["window_size"] = x.window
    if x.sinks is not None:
        terms["sinks"] = x.sinks
    if x.slopes is not None:
        terms["score_mod"] = Alibi(x.slopes, x.offset)
    if x.lengths is not None:
        terms |= {"cu_seqlens_q": x.cu_seqlens, "cu_seqlens_k": x.cu_seqlens}

    def forward() -> Tensor:
        out = op(*args, **terms)
        return out.transpose(1, 2) if x.lengths is None else out[None]

    @contextlib.contextmanager
    def on() -> Iterator[None]:
        # Backward runs in threads of autograd's own, which do not know the path; so it may not leave this one.
        with path(forced), torch.autograd.set_multithreading_enabled(False):
            yield

    return x.verified(peers.timed(x, forward, on if forced else contextlib.nullcontext)), None


def case(name: str, problem, x: Training, others: list[Candidate], against: str, asked, ours=None) -> Case:
    """A case of this suite; those with FA4 come after all others, and ours is compiled before it is imported."""
    ours = ours or (lambda: ours_of(x, problem.path, problem.deterministic))
    return Case(SUITE, name, problem, ours, others, against, asked, any(other.name == FA4 for other in others))


def our_other(name: str, x: Training, flops: float, **changes) -> Candidate:
    """Ours of the same tensors, but for some changes: see sharing."""
    return Candidate(name, flops, lambda: ours_of(sharing(x, **changes))[0])


def backward(shape: tuple[int, int, int, int], causal: bool, flex: bool = False) -> Case:
    """The gradients of q, k and v beside cuDNN's, FlashAttention 2's and 4's, and FlexAttention's where asked for."""
    problem = dense_problem(shape, causal)
    x = operands(problem)
    others = [make(x, problem.flops) for make in (*PEERS, *([peers.flex_attention] if flex else []))]
    return case(f"{BACKWARD} {named(shape, causal)}", problem, x, others, FASTEST, 0.95)


def grouped(shape: tuple[int, int, int, int]) -> Case:
    """Causal, where several query heads share a head of K and V, as `backward`."""
    B, S, heads, kv_heads = shape
    problem = TrainingProblem("attention", B, S, S, heads, kv_heads, 128, True)
    x = operands(problem)
    name = f"{BACKWARD} B{B} S{S} {heads}/{kv_heads} heads D128 causal"
    return case(name, problem, x, [make(x, problem.flops) for make in PEERS], FASTEST, 0.95)


def one_order(shape: tuple[int, int, int, int], causal: bool) -> Case:
    """deterministic=True beside ours without it."""
    problem = dense_problem(shape, causal, deterministic=True)
    x = operands(problem)
    others = [our_other(ANY_ORDER, x, problem.flops)]
    return case(f"deterministic {named(shape, causal)}", problem, x, others, ANY_ORDER, 0.88)


def older(shape: tuple[int, int, int, int], causal: bool) -> Case:
    """The sm_80 path beside FlashAttention 2, which has the same instructions."""
    problem = dense_problem(shape, causal, path="sm_80")
    x = operands(problem)
    others = [peers.sdpa_flash(x, problem.flops)]
    return case(f"sm_80 path {named(shape, causal)}", problem, x, others, FLASH, 0.95)


def documents() -> Case:
    """Packed documents of mixed length, causal, beside FA4's varlen function."""
    (heads, D), tokens = DOCUMENT_HEADS, sum(DOCUMENTS)
    problem = dense_problem((1, tokens, heads, D), True, lengths=DOCUMENTS)
    x = operands(problem)
    name = f"packed, {len(DOCUMENTS)} documents, {named((1, tokens, heads, D), True)}"
    return case(name, problem, x, [peers.fa4(x, problem.flops)], FA4, 1.05)


def sparse(side: int, flex: bool) -> Case:
    """Random full blocks beside our own dense backward of the same shape, or held against FlexAttention too.

    What is asked over our own dense rate is a check in any case.
    """
    B, S, H, D = SPARSE
    blocks = uniform(S // side, S // side, round(DENSITY * S / side))
    kept = blocks.double().mean().item()
    problem = TrainingProblem("block_sparse_attention", B, S, S, H, H, D, block=(side, side), density=kept)
    x = operands(problem, blocks)
    others = [our_other(OUR_DENSE, x, dense_problem(SPARSE).flops)]
    if not flex:
        return case(sparse_name(side), problem, x, others, OUR_DENSE, OVER_DENSE[side])
    others.append(peers.flex_attention(x, problem.flops))
    return case(sparse_name(side), problem, x, others, FLEX, OVER_FLEX[side])


def sparse_name(side: int) -> str:
    return f"block-sparse {side}x{side}, {DENSITY:.3g}"


def window_step() -> Case:
    """Forward and backward of a causal window beside FA4's."""
    shape = (1, LONG, *WINDOW_HEADS)
    problem = dense_problem(shape, True, window=WINDOW, what=STEP)
    x = operands(problem)
    name = f"window {WINDOW[0] + 1}, {named(shape, True)}, {STEP}"
    return case(name, problem, x, [peers.fa4(x, problem.flops)], FA4, 1.05)


def gpt_oss(what: str, asked: float, sinks: bool = False) -> Case:
    """A windowed layer of gpt-oss's shape: beside FlexAttention and FA4; or with sinks, beside ours without them."""
    heads, kv_heads, D = GPT_OSS
    terms = {"causal": True, "window": WINDOW, "what": what, "sinks": sinks}
    problem = TrainingProblem("attention", 1, LONG, LONG, heads, kv_heads, D, **terms)
    x = operands(problem)
    shown = f"{heads}/{kv_heads} heads D{D}, S{LONG}, window {WINDOW[0] + 1}, {what}"
    if sinks:
        return case(f"sinks, {shown}", problem, x, [our_other(NO_SINKS, x, problem.flops)], NO_SINKS, asked)
    others = [make(x, problem.flops) for make in (peers.flex_attention, peers.fa4)]
    return case(f"gpt-oss, {shown}", problem, x, others, FASTEST, asked)


def alibi(what: str, asked: float) -> Case:
    """Causal, with ALiBi as a score_mod, beside ours without one."""
    problem = dense_problem(FIRST, True, what=what, alibi=True)
    x = operands(problem)
    others = [our_other(NO_SCORE, x, problem.flops)]
    return case(f"score_mod ALiBi, {named(FIRST, True)}, {what}", problem, x, others, NO_SCORE, asked)


def backward_cases(mode: str) -> Iterator[Case]:
    """With "full" every row that a number is asked of; else some, without FlexAttention, whose kernels compile long.

    FlexAttention is beside dense rows of the first shape alone.
    """
    if mode != "full":
        yield older(FIRST, True)
        yield one_order(FIRST, True)
        for side in OVER_DENSE:
            yield sparse(side, flex=False)
        for shape, causal in QUICK:
            yield backward(shape, causal)
        yield documents()
        return
    for shape, causal in product(SM_80, (False, True)):
        yield older(shape, causal)
    for causal in (False, True):
        yield one_order(FIRST, causal)
    for side in OVER_FLEX:
        yield sparse(side, flex=True)
    for what in (FORWARD, BACKWARD):
        yield gpt_oss(what, 0.98, sinks=True)
    for what, asked in ((FORWARD, 0.92), (BACKWARD, 0.90)):
        yield alibi(what, asked)
    for shape, causal in product(SHAPES, (False, True)):
        yield backward(shape, causal, flex=shape == FIRST)
    for shape in GROUPED:
        yield grouped(shape)
    yield documents()
    yield window_step()
    for what, asked in ((FORWARD, 1.10), (BACKWARD, 1.05)):
        yield gpt_oss(what, asked)
