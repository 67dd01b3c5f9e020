"""Selected-block attention in the shapes of models, at three similarities of neighboring tokens' lists, and video
attention with lists of query blocks.

Rates are of useful operations: visible keys of selected blocks. All candidates of a row have the row's operations, so
"ours over it" is also the ratio of times: of ours to making its mask or selecting blocks the share that these take, and
to dense attention how many times as fast selection makes it.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from attention import BlockMask, attention, block_sparse_attention, select_blocks, selected_attention
from attention.arguments import AttentionArgs
from attention.selected.blocks import SIDE, SelectedBlocks, mask_of
from attention.selected.gather import gathered
from attention.selected.gather import tables as union_tables
from cute_kernels import explain
from cute_kernels.testing.selected_blocks import mean_similarity, similar_lists

from . import peers_selected as peers
from . import timing
from .cases_attention import DTYPE
from .findings import Check, over_peer, shown
from .peers import Call
from .peers_attention import FA4
from .peers_attention_backward import BACKWARD, FORWARD, timed
from .peers_selected import CUDNN_BSA, GATHER, Selected
from .rows import FASTEST, Candidate, Case, Row

SUITE = "selected"
DENSE = "ours, dense causal"
MASK = "ours, making the mask"
SELECT = "ours, select_blocks"
FRESH = "ours, lists passed in each call"
STRETCH = 1024  # tokens after which lists start anew, so that they can be drawn side by side
SIMILARITIES = (0.9, 0.5, 0.0)
PRODUCTS = {FORWARD: 1.0, BACKWARD: 2.5}  # over forward's two
SAMPLED = 100  # pairs of neighbors whose similarity is measured


@dataclass(frozen=True)
class Model:
    """Shapes of a model's attention. `select` makes its lists from an indexer's operands, with `index_heads` heads."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    top: int
    groups: int  # lists of a token
    index_heads: int
    select: Callable[[Tensor, Tensor], Tensor]


def selection(top: int, block_size: int, **terms) -> Callable[[Tensor, Tensor], Tensor]:
    return partial(select_blocks, top=top, block_size=block_size, causal=True, local=1, **terms)


QSA = Model("QSA", 24, 2, 256, 4, 512, 1, 4, selection(512, 4, activation="relu"))
MSA = Model("MSA", 64, 4, 128, 128, 16, 4, 4, selection(16, 128, pool="max", groups=4))
NSA = Model("NSA", 64, 4, 128, 64, 16, 4, 64, selection(16, 64, groups=4))
INDEX_DIM = 128
SHAPES = ((QSA, 65536), (QSA, 131072), (MSA, 65536), (MSA, 131072), (NSA, 65536))
# Tokens, heads, selected blocks of 64 x 64 -> asked over cuDNN frontend, forward and backward
VIDEO = {"VSA": (109632, 7, 64, {FORWARD: 1.25, BACKWARD: 1.05})}
VIDEO["MiniMax-H3"] = 37760, 56, 152, {FORWARD: 1.15, BACKWARD: 1.05}
VIDEO_BLOCK, VIDEO_DIM = 64, 128
OVER_FA4, OVER_DENSE, OVER_GATHER, LOW_OVER_GATHER = 3.0, 12.0, 6.0, 0.8  # asked of QSA; MSA; QSA; lower similarities
RATES = {("QSA", FORWARD): 450, ("MSA", FORWARD): 550, ("QSA", BACKWARD): 300, ("MSA", BACKWARD): 420}
SELECT_SHARE = 0.15


@dataclass(frozen=True)
class SelectedProblem:
    """Shapes of a row, as result files name it."""

    op: str
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    top: int
    groups: int  # lists of a token, or of a run of tokens
    similarity: float  # of neighboring lists, asked for; 0: independent
    what: str = FORWARD
    run: int = 1  # tokens that share a list
    causal: bool = True
    stretch: int = STRETCH
    dtype: str = "bfloat16"

    @property
    def pairs(self) -> float:
        """(query, key) pairs of one head."""
        if not self.causal:
            return float(self.tokens * self.top * self.block_size)
        position = torch.arange(self.tokens, dtype=torch.int64)
        whole = (position // self.block_size).clamp(max=self.top - 1) * self.block_size  # and the newest block in part
        return float((whole + position % self.block_size + 1).sum())

    @property
    def flops(self) -> float:
        return PRODUCTS[self.what] * 4.0 * self.pairs * self.head_dim * self.heads

    @property
    def bytes(self) -> float:
        """The least that passes through device memory: lists, q, k, v and the output, in backward all gradients too."""
        tensors = 4.0 * self.tokens * self.head_dim * (self.heads + self.kv_heads)
        return PRODUCTS[self.what] // 1 * tensors + 4.0 * self.tokens / self.run * self.groups * self.top


@lru_cache(maxsize=1)
def lists(p: SelectedProblem, device: str) -> Tensor:
    """(S / run, G, top) lists of a problem; rows one after another often have the same."""
    blocks = p.tokens // p.block_size
    if p.causal:
        terms = {"groups": p.groups, "similarity": p.similarity, "stretch": p.stretch, "device": device}
        return similar_lists(p.tokens, blocks, p.top, **terms)
    generator = torch.Generator(device=device).manual_seed(0)
    scores = torch.rand(p.tokens // p.run, p.groups, blocks, generator=generator, device=device)
    return scores.topk(p.top).indices.sort().values.int()


def operands(p: SelectedProblem, device: str = "cuda") -> Selected:
    """The tensors of a problem, made when first asked for; with lists of blocks (1, H, S, D) in memory."""

    def normal(heads: int, width: int = p.head_dim) -> Tensor:
        if p.run > 1:
            return torch.randn(1, heads, p.tokens, width, device=device, dtype=DTYPE).transpose(1, 2)
        return torch.randn(1, p.tokens, heads, width, device=device, dtype=DTYPE)

    q, k, v, dout = (partial(normal, heads) for heads in (p.heads, p.kv_heads, p.kv_heads, p.heads))
    forward = SelectedProblem(**(vars(p) | {"what": FORWARD}))
    return Selected(q, k, v, dout, lambda: lists(forward, device), p.block_size, p.run, p.causal, p.what)


def stated(x: Selected) -> str:
    """The similarity of a row's lists as measured."""
    return f"similarity {mean_similarity(x.indices, SAMPLED):.2f}"


def call_of(x: Selected, op: Callable, *more, **terms) -> Call:
    """The call that a row times of an op of ours, through autograd."""
    return timed(x, lambda: op(*x.heads_first, *more, **terms).transpose(1, 2), note=stated(x))


def plan_of(op: Callable, *args, **terms):
    with contextlib.suppress(Exception):  # an op without a plan, as on the CPU
        return explain(op, *args, **terms)
    return None


# -- prefill -------------------------------------------------------------------------------------------------


def dense(x: Selected) -> Call:
    return timed(x, lambda: attention(*x.heads_first, causal=True).transpose(1, 2), note="its time over ours")


def making_the_mask(x: Selected) -> Call:
    """The tables that a call of selected_attention makes of the lists before its kernel: union tiles, or bits and lists
    of blocks of scores."""
    (_, size, heads, _), kv_heads = x.q.shape, x.k.shape[2]
    packed = heads // kv_heads if heads <= kv_heads * SIDE else 1
    selected = SelectedBlocks(x.indices[None], x.block_size, True, packed)
    args = AttentionArgs(*x.heads_first, block_mask=selected)
    if gathered(args):
        return Call(lambda: union_tables(args), note="its time over ours")
    return Call(lambda: mask_of(selected, heads // packed, (size * packed, size)), note="its time over ours")


def selecting(model: Model, x: Selected) -> Call:
    size, device = x.q.shape[1], x.q.device
    q_index, k_index = (
        torch.randn(1, heads, size, INDEX_DIM, device=device, dtype=DTYPE) for heads in (model.index_heads, 1)
    )
    return Call(lambda: model.select(q_index, k_index), note="its time over ours")


def prefill(model: Model, tokens: int, similarity: float, what: str, beside: bool = True) -> Case:
    """selected_attention, and its peers if `beside`.

    At the first similarity dense attention, the mask and the selection take turns too, and FA4, whose tiles unite the
    lists of 128 tokens.
    """
    shape = model.heads, model.kv_heads, model.head_dim, model.block_size, model.top, model.groups
    problem = SelectedProblem("selected_attention", tokens, *shape, similarity, what)
    x, trained = operands(problem), similarity == SIMILARITIES[0]
    makes: dict[str, Callable] = {}
    if trained and beside:
        makes[DENSE] = lambda: dense(x)
        if what == FORWARD:
            makes |= {MASK: lambda: making_the_mask(x), SELECT: lambda: selecting(model, x)}
    others = [Candidate(name, problem.flops, make) for name, make in makes.items()]
    if what == FORWARD:
        others.append(peers.gather(x, problem.flops))
    if trained and beside:
        others.append(peers.fa4(x, problem.flops))

    def ours() -> tuple:
        terms = (x.indices[None], x.block_size)
        call = x.verified(call_of(x, selected_attention, *terms, causal=True))
        if DENSE in makes:
            with contextlib.suppress(Exception):  # compiled before FA4 is imported; its own line will say
                dense(x)()
        return call, plan_of(selected_attention, *x.heads_first, *terms, causal=True)

    against, asked = FASTEST, None
    if what == FORWARD:
        against, asked = GATHER, (OVER_GATHER if model is QSA else None) if trained else LOW_OVER_GATHER
        if trained and model is MSA:
            against, asked = DENSE, OVER_DENSE if tokens == max(size for _, size in SHAPES) else None
    name = f"{model.name} {tokens // 1024}k {what}, similarity {similarity:g}"
    return Case(SUITE, name, problem, ours, others, against, asked, trained and beside, timer=timing.paced)


# -- video ---------------------------------------------------------------------------------------------------


def video(name: str, what: str) -> Case:
    """block_sparse_attention with as many blocks for each block of queries, of a kept mask; independent lists."""
    tokens, heads, top, asked = VIDEO[name]
    shape = heads, heads, VIDEO_DIM, VIDEO_BLOCK, top, heads
    terms = {"run": VIDEO_BLOCK, "causal": False, "stretch": VIDEO_BLOCK}
    problem = SelectedProblem("block_sparse_attention", tokens, *shape, 0.0, what, **terms)
    x = operands(problem)

    def mask(indices: Tensor | None = None) -> BlockMask:
        indices = x.indices.transpose(0, 1)[None].contiguous() if indices is None else indices
        return BlockMask.from_indices(indices, (VIDEO_BLOCK, VIDEO_BLOCK), lengths=(tokens, tokens))

    def ours() -> tuple:
        kept = mask()
        call = x.verified(call_of(x, block_sparse_attention, kept))
        return call, plan_of(block_sparse_attention, *x.heads_first, kept)

    def fresh() -> Call:
        indices = x.indices.transpose(0, 1)[None].contiguous()
        return timed(x, lambda: block_sparse_attention(*x.heads_first, mask(indices)).transpose(1, 2))

    others = [Candidate(FRESH, problem.flops, lambda: x.verified(fresh()))] if what == FORWARD else []
    others.append(peers.cudnn_bsa(x, problem.flops))
    named = f"{name} {tokens} tokens, {heads} heads, 64x64, {top} of {tokens // VIDEO_BLOCK}, {what}, similarity 0"
    options = {"patches_dsl": True, "timer": timing.paced}
    return Case(SUITE, named, problem, ours, others, CUDNN_BSA, asked[what], **options)


def selected_cases(mode: str) -> Iterator[Case]:
    """Every row and peer with "full"; else lower similarities, and peers in backward, of each model's shortest sequence
    alone."""
    shortest = {model.name: min(size for other, size in SHAPES if other is model) for model, _ in SHAPES}
    for model, tokens in SHAPES:
        whole = mode == "full" or tokens == shortest[model.name]
        for similarity in SIMILARITIES if whole else SIMILARITIES[:1]:
            for what in PRODUCTS:
                yield prefill(model, tokens, similarity, what, beside=whole or what == FORWARD)
    for name in VIDEO:
        for what in PRODUCTS:
            yield video(name, what)


# -- checks --------------------------------------------------------------------------------------------------


def checks(rows: Sequence[Row]) -> list[Check]:
    """Numbers that are asked for beside those that rows are held against."""
    found = []
    for row in rows:
        p = row.problem
        model = row.name.split()[0]
        if p.similarity != SIMILARITIES[0]:
            continue
        if (asked := RATES.get((model, p.what))) is not None:
            rate = None if row.ours.error else row.ours.tflops
            found.append(Check(f"{row.name}: useful TFLOP/s", rate, asked))
        if p.what == FORWARD:
            if model == QSA.name:
                found.append(over_peer(row, FA4, "useful rate over FlashAttention 4 with a membership mask", OVER_FA4))
            share = row.peer(SELECT)
            value = None if share is None or row.ours.error else share.median / row.ours.median
            found.append(Check(f"{row.name}: time of select_blocks over that of ours", value, SELECT_SHARE, True))
    return found


def of_selected(rows: Sequence[Row], only: str = "") -> dict:
    """The checks of selected-block attention."""
    return shown(checks(rows))
