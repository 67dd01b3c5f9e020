"""The attention ops registered with torch.library, for torch.compile and opcheck; eager calls do not use them.

Each op returns (out, lse), with an empty lse if none is asked for; its variant `.._out` returns lse alone. A BlockMask
enters the schema as its lists, lengths and block size, with its mask_mod as a text, numbers and tensors
(function_text.py). Other masks enter it as `crossing` describes, and are converted once, inside of the op (cache.py).
With a score_mod the ops have other names, and take it as a text, numbers and tensors, which get gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import noop_mask

from cute_kernels.checks import check_no_grad, watched
from cute_kernels.dtypes import accumulator, default_out_dtype
from cute_kernels.runtime.arguments import terms_of
from cute_kernels.runtime.derived import captured
from cute_kernels.runtime.front import check_traced, undisturbed
from cute_kernels.runtime.library import call, define, register
from sparse_collective.bsr import BsrMatrix

from . import checks, dispatch, flops, gradients
from .arguments import BACKWARD_TERMS, TERMS, AttentionArgs
from .block_sparse import as_block_mask
from .masks import cache, convert, mask_text
from .masks.block_mask import BlockMask
from .masks.function_text import written
from .masks.score_mod import WHAT as SCORE_MOD
from .masks.score_text import read_score
from .plan import gradient_of
from .selected.blocks import SelectedBlocks

QKV = "Tensor q, Tensor k, Tensor v"
MASK = (
    "str form, Tensor[] lists, SymInt[] lengths, SymInt[] blocksize, str? mask_mod, SymInt[] mask_numbers, "
    "Tensor[] mask_tensors"
)
EQUAL_ROWS = "full rows", "partial rows"  # forms of a mask whose rows list equally many blocks
SCORE = "str score_mod, SymInt[] score_numbers, Tensor[] score_tensors"
BACKWARD = "Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
MASK_PARTS, SCORE_PARTS = 7, 3
SINKS = TERMS.index("sinks")


class Op:
    """A registered op, its variant with `out`, and the op that computes its gradients.

    Attributes:
        masked: True for block_sparse_attention, which takes MASK after q, k and v.
        scored: True for the op with a score_mod, which takes SCORE after these. The arguments after that are TERMS.
    """

    def __init__(self, masked: bool, scored: bool):
        self.masked, self.scored = masked, scored
        self.public = "block_sparse_attention" if masked else "attention"
        scored_name = "_with_score" if scored else ""
        self.name = f"attention::{self.public}{scored_name}"
        self.score_at = 3 + MASK_PARTS * masked
        self.terms_at = self.score_at + SCORE_PARTS * scored
        inputs = ", ".join([QKV] + [MASK] * masked + [SCORE] * scored)
        gradient = self.save, self.gradients
        forward, read = terms_of(AttentionArgs, TERMS), terms_of(AttentionArgs, BACKWARD_TERMS, False)
        register(self.name, inputs, forward, self.run, self.fake, more="Tensor", gradient=gradient, flops=self.flops)
        terms = ", ".join([MASK] * masked + [SCORE, "bool[] wanted"] * scored + [read])
        results = "Tensor, Tensor, Tensor, Tensor" + ", Tensor[]" * scored
        backward = f"{self.public}_backward{scored_name}"
        dtypes = "ScalarType? grad_dtype, ScalarType? dq_dtype"
        define(
            f"attention::{backward}", f"({BACKWARD}, {terms}, {dtypes}) -> ({results})",
            self.run_backward, self.fake_backward, flops=self.flops_backward,
        )  # fmt: skip
        self.forward, self.backward = (getattr(torch.ops.attention, n) for n in (self.public + scored_name, backward))

    def args(self, q, k, v, parts: tuple, terms: dict) -> AttentionArgs:
        """The call whose mask and score_mod are `parts` of the op's arguments."""
        mask, score = parts[: self.score_at - 3], parts[self.score_at - 3 :]
        if terms["window_size"] is not None:
            terms["window_size"] = tuple(terms["window_size"])
        if mask:
            terms["block_mask"] = block_mask_of(*mask)
        if score:
            text, numbers, tensors = score
            terms["score_mod"] = read_score(text, numbers, tensors, q.device)[0]
        return AttentionArgs(q, k, v, **terms)

    def run(self, q, k, v, *parts, **terms) -> tuple[Tensor, Tensor]:
        args = self.args(q, k, v, parts, terms)
        result: Any = dispatch.attention(args)
        out, lse = result if terms["return_lse"] else (result, q.new_empty(0, dtype=accumulator(q.dtype)))
        # Heads of one KV head are views of packed rows
        return (out.contiguous(), lse.contiguous()) if type(args.block_mask) is SelectedBlocks else (out, lse)

    def fake(self, q, k, v, *parts, cu_seqlens_q, cu_seqlens_k, return_lse, **terms) -> tuple[Tensor, Tensor]:
        return _fake(self.public, q, k, v, return_lse, cu_seqlens_q is not None or cu_seqlens_k is not None)

    def flops(self, q, k, v, *others, **named) -> int:
        """others: the mask, the score_mod and the terms, without trailing ones that equal their defaults."""
        terms = dict(zip(TERMS, others[self.terms_at - 3 :], strict=False)) | named
        return flops.forward(q, k, v, self.scores(q, k, others, terms.get("cu_seqlens_q"), terms.get("cu_seqlens_k")))

    def scores(self, q, k, parts: tuple, cu_seqlens_q, cu_seqlens_k) -> int:
        """Number of scores that are computed."""
        if not self.masked:
            return flops.dense_scores(q, k, cu_seqlens_q, cu_seqlens_k)
        form, lists, _, blocksize, *_ = parts
        return flops.block_scores(q, k, lists, blocksize, form)

    # -- gradients --------------------------------------------------------------------------------------------

    def save(self, ctx, inputs, output) -> None:
        """setup_context of register_autograd."""
        mask, score = inputs[3 : self.score_at], inputs[self.score_at : self.terms_at]
        terms = dict(zip(TERMS, inputs[self.terms_at :], strict=True))
        if terms["seqused_k"] is not None or terms["page_table"] is not None or checks.narrow(*inputs[1:3]):
            raise RuntimeError(checks.NO_CACHE)
        lists, mask_tensors = (mask[1], mask[-1]) if self.masked else ((), ())
        captured = score[-1] if self.scored else ()
        saved = [terms.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "sinks")]
        ctx.save_for_backward(*inputs[:3], *output, *saved, *lists, *mask_tensors, *captured)
        ctx.mask = len(lists), len(mask_tensors), mask[:1], mask[2:-1]
        ctx.score, ctx.terms = score[:-1], terms
        ctx.set_materialize_grads(False)

    def gradients(self, ctx, dout, dlse) -> tuple:
        """Gradients per input, a list for each list of tensors. Trailing inputs that equal their defaults are absent
        from needs_input_grad."""
        q, k, v, out, lse, cu_q, cu_k, sinks, *tensors = ctx.saved_tensors
        n_lists, n_mask, form, facts = ctx.mask
        lists, mask_tensors, captured = tensors[:n_lists], tensors[n_lists:][:n_mask], tensors[n_lists + n_mask :]
        parts = (*form, lists, *facts, mask_tensors) if self.masked else ()
        if self.scored:
            parts = *parts, *ctx.score, captured
        terms = ctx.terms | {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "sinks": sinks}
        if lse.numel() == 0:  # the op was called without it
            terms["return_lse"], dlse = True, None
            out, lse = self.forward(q, k, v, *parts, *(terms[name] for name in TERMS))
        needed = ctx.needs_input_grad
        found = [[None] * len(n) if isinstance(n, list) else None for n in needed]
        if sinks is None or not needed[self.terms_at + SINKS]:
            terms["sinks"] = None
        if self.scored:
            parts = *parts, needed[self.terms_at - 1]
        terms = [terms[name] for name in BACKWARD_TERMS]
        dq, dk, dv, dsinks, *rest = self.backward(dout, dlse, q, k, v, out, lse, *parts, *terms, None, None)
        found[:3] = dq, dk, dv
        if self.scored:
            of_captured = iter(rest[0])
            found[self.terms_at - 1] = [next(of_captured) if needs else None for needs in needed[self.terms_at - 1]]
        if sinks is not None and needed[self.terms_at + SINKS]:
            found[self.terms_at + SINKS] = dsinks
        return tuple(found)

    def run_backward(self, dout, dlse, q, k, v, out, lse, *others) -> tuple:
        mask, score, wanted, terms, grad_dtype, dq_dtype = self._split_backward(others)
        args, dtypes = self.args(q, k, v, mask, terms), (grad_dtype, dq_dtype)
        selected = type(args.block_mask) is SelectedBlocks
        packed = args.block_mask.packed if selected else 1
        if self.masked and not selected:
            args = args._replace(block_mask=as_block_mask(q, k, args.block_mask))
        if not self.scored:
            return _four(q, gradients.gradients_of(args, out, lse, dout, dlse, None, grad_dtype, dq_dtype, packed))
        text, numbers, tensors = score
        bound, places = read_score(text, numbers, tensors, q.device)
        gradients.check_score(bound, any(wanted), q, args.deterministic)
        slots = {place: slot for slot, place in enumerate(places)}
        sums = gradients.sums_of(q, bound.tensors, [slots[i] for i, w in enumerate(wanted) if w and i in slots])
        found = gradients.gradients_of(args._replace(score_mod=bound), out, lse, dout, dlse, sums, *dtypes)
        of_captured = [
            sums[slots[i]].to(t.dtype) if i in slots else t.new_zeros(t.shape)
            for i, (t, w) in enumerate(zip(score[-1], wanted, strict=True))
            if w
        ]
        return *_four(q, found), of_captured

    def fake_backward(self, dout, dlse, q, k, v, out, lse, *others) -> tuple:
        _fake("attention_backward", q, k, v, False, q.dim() == 3)  # checks their shapes
        _, score, wanted, terms, grad_dtype, dq_dtype = self._split_backward(others)
        dsinks = None if terms["sinks"] is None else gradient_of(terms["sinks"])
        found = _four(
            q,
            (gradient_of(q, dtype=dq_dtype or grad_dtype), *(gradient_of(t, dtype=grad_dtype) for t in (k, v)), dsinks),
        )
        if not self.scored:
            return found
        return *found, [t.new_empty(t.shape) for t, w in zip(score[-1], wanted, strict=True) if w]

    def flops_backward(self, dout, dlse, q, k, v, out, lse, *others) -> int:
        mask, _, _, terms, *_ = self._split_backward(others)
        return flops.backward(q, k, v, self.scores(q, k, mask, terms["cu_seqlens_q"], terms["cu_seqlens_k"]))

    def _split_backward(self, others: tuple) -> tuple:
        """(mask, score_mod, wanted, terms by name, grad_dtype, dq_dtype) of the arguments after `lse`."""
        at, end = self.score_at - 3, self.terms_at - 3
        mask, score, wanted = others[:at], others[at:end], others[end] if self.scored else ()
        *terms, grad_dtype, dq_dtype = others[end + self.scored :]
        return mask, score, wanted, dict(zip(BACKWARD_TERMS, terms, strict=True)), grad_dtype, dq_dtype


OPS = {(masked, scored): Op(masked, scored) for masked in (False, True) for scored in (False, True)}


def _four(q, found: tuple) -> tuple[Tensor, ...]:
    """(dQ, dK, dV, dsinks), the last without elements where sinks want none."""
    return *found[:3], q.new_empty(0) if found[3] is None else found[3]


# -- calls ----------------------------------------------------------------------------------------------------


def _op_of(args: AttentionArgs) -> tuple[Op, tuple]:
    """The op of a call, and its mask and score_mod as arguments of it."""
    mask: Any = ()
    score: tuple = ()
    if args.block_mask is not None:
        mask = args.block_mask
        if not is_compiling() and isinstance(mask, Tensor) and mask.layout is torch.sparse_bsr:
            with undisturbed():
                mask = cache.of_torch_bsr(mask)
        mask = crossing(mask)
    if args.score_mod is not None:
        score = written(args.score_mod, SCORE_MOD)
    return OPS[args.block_mask is not None, args.score_mod is not None], (*mask, *score)


def _terms(args: AttentionArgs) -> dict:
    """The arguments by name, as the schema has them."""
    window = args.window_size
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise TypeError(f"window_size must be (left, right), each an int or None without bound, got {window!r}")
        window = [-1 if bound is None else bound for bound in window]
    scalars = {"softcap": float_or_none(args.softcap), "scale": float_or_none(args.scale), "window_size": window}
    return args._asdict() | scalars


def traced(args: AttentionArgs):
    """ops.attention or block_sparse_attention inside a torch.compile trace, and of calls that go through the
    dispatcher."""
    check_traced(args.op, *args[:4], args.sinks)
    checks.check_fast(args)
    op, parts = _op_of(args)
    captured = parts[-1] if op.scored else ()
    terms = _terms(args)
    terms["return_lse"] = args.return_lse or _differentiable(args, captured)
    result = call(op.name, (*args[:3], *parts), args.out, tuple(terms[name] for name in TERMS))
    return result if args.return_lse else result[0]


def traced_backward(args: AttentionArgs, out, lse, dout, dlse, grad_dtype, dq_dtype):
    """shards.attention_backward inside a torch.compile trace, and of calls that go through the dispatcher."""
    tensors = dout, dlse, *args[:3], out, lse
    check_traced("attention_backward", *tensors)
    if args.block_mask is not None:
        checks.refuse_with_mask("attention_backward", args)
    op, parts = _op_of(args)
    captured = parts[-1] if op.scored else ()
    check_no_grad("attention_backward", *tensors, *captured)
    checks.check_results("attention_backward", dout, dlse, args.q, args.v, out, lse, grad_dtype, dq_dtype)
    wanted = ([False] * len(captured),) if op.scored else ()
    terms = _terms(args)
    return op.backward(*tensors, *parts, *wanted, *(terms[name] for name in BACKWARD_TERMS), grad_dtype, dq_dtype)[:3]


def _differentiable(args: AttentionArgs, captured) -> bool:
    """True if a traced call needs gradients, and so LSE."""
    q, _, v = args[:3]
    if not watched(*args[:3], args.sinks, *captured):
        return False
    if args.out is not None:
        if len(captured) > 0:
            check_no_grad(args.op, *captured)
        return False
    checks.check_gradient_dims(args.op, q, v, q.is_cuda)
    return True


def crossing(block_mask) -> tuple:
    """A mask as arguments of a registered op, which `block_mask_of` reads; torch.compile traces it.

    (form, tensors, lengths, block size, and the mask_mod's text, numbers and tensors). The tensors are the four "lists"
    of a BlockMask; the one list of a BlockMask of equal rows, "full rows" or "partial rows"; the two or four of
    FlexAttention's, "flex"; the indices of a BsrMatrix, "bsr"; one of bool "blocks" or "elements"; or the lists of
    blocks that are "selected", with cu_seqlens of packed sequences. Their block size is followed by 1 if they are
    causal, else 0, and the heads packed in rows.
    """
    if isinstance(block_mask, BlockMask):
        mask_mod = mask_text.written_mask(block_mask.mask_mod)
        form, lists = "lists", list(block_mask.lists())
        if block_mask.equal_rows:
            form, lists = ("full rows", lists[3:]) if block_mask._lists_full else ("partial rows", lists[1:2])
        return form, lists, list(block_mask.lengths), list(block_mask.blocksize), *mask_mod
    if isinstance(block_mask, cache.FlexBlockMask):
        lists = [block_mask.kv_num_blocks, block_mask.kv_indices]
        if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
            lists += [block_mask.full_kv_num_blocks, block_mask.full_kv_indices]
        flex_mod = None if block_mask.mask_mod is noop_mask else block_mask.mask_mod
        sizes = list(block_mask.seq_lengths), list(block_mask.BLOCK_SIZE)
        return "flex", lists, *sizes, *mask_text.written_mask(flex_mod)
    if isinstance(block_mask, BsrMatrix):
        indices = [block_mask.crow_indices, block_mask.col_indices]
        return "bsr", indices, list(block_mask.shape[-2:]), list(block_mask.blocksize), None, [], []
    if isinstance(block_mask, SelectedBlocks):
        tensors = [t for t in (block_mask.indices, block_mask.cu_seqlens_q, block_mask.cu_seqlens_k) if t is not None]
        numbers = [block_mask.block_size, int(block_mask.causal), block_mask.packed]
        return "selected", tensors, [], numbers, None, [], []
    if isinstance(block_mask, cache.ElementTensor):
        return "elements", [block_mask.seen], [], [], None, [], []
    if isinstance(block_mask, Tensor) and block_mask.layout is torch.strided:
        return "blocks", [block_mask], [], [], None, [], []
    raise TypeError(
        "block_sparse_attention: under torch.compile block_mask must be a BlockMask, FlexAttention's BlockMask, a "
        f"BsrMatrix or a bool tensor, got {type(block_mask).__name__}; of a torch.sparse_bsr tensor, which "
        "torch.compile does not take, make BsrMatrix.from_torch(t) outside"
    )


def float_or_none(value):
    return None if value is None else float(value)


def _fake(op: str, q, k, v, return_lse: bool, packed: bool = False) -> tuple[Tensor, Tensor]:
    rank = 3 if packed else 4
    torch._check(q.dim() == k.dim() == v.dim() == rank, lambda: f"{op}: q, k and v must have {rank} dimensions")
    torch._check(q.shape[-1] == k.shape[-1], lambda: f"{op}: q has head_dim {q.shape[-1]} and k {k.shape[-1]}")
    rows = 0 if packed else 2
    torch._check(k.shape[rows] == v.shape[rows], lambda: f"{op}: k has {k.shape[rows]} rows and v {v.shape[rows]}")
    shape = (q.shape[1], q.shape[0]) if packed else q.shape[:3]
    lse = q.new_empty(shape if return_lse else (0,), dtype=accumulator(q.dtype))
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=default_out_dtype(q.dtype)), lse


def block_mask_of(form: str, lists, lengths, blocksize, mask_mod, numbers, tensors):
    """Rebuild the mask that `crossing` was given, as block_sparse_attention takes it; a BlockMask is made once of the
    same tensors.

    The contents of lists and indices were checked, or trusted, where the caller's mask was made.
    """
    if form == "blocks":
        return lists[0]
    if form == "elements":
        return cache.ElementTensor(lists[0])
    if form == "selected":
        block_size, causal, packed = blocksize
        return SelectedBlocks(lists[0], block_size, causal != 0, packed, *lists[1:])

    lengths, blocksize = tuple(lengths), tuple(blocksize)

    mask_mod = mask_text.read_mask(mask_mod, numbers, tensors, lists[0].device)

    def make(*lists: Tensor) -> BlockMask:
        if form == "bsr":
            return BlockMask.from_blocks(*convert.blocks_of_indices(lists[0], lists[1], lengths, blocksize, None))
        facts: dict[str, Any] = {"lengths": lengths, "blocksize": blocksize, "mask_mod": mask_mod}
        if form in EQUAL_ROWS:
            return BlockMask.of_equal_rows(lists[0], form == "full rows", **facts)
        tables: Sequence = lists
        if form == "flex":
            tables, facts = convert.tables_of_flex(*lists, *[None] * (4 - len(lists)), **facts)
        return BlockMask(*tables, **facts, check=False)

    if form in ("flex", *EQUAL_ROWS) and captured(lists[0]):
        return make(*lists)  # see cache.py; a mask of equal rows may be made of a tensor that later calls write to
    key = form, *lengths, *blocksize, mask_mod is None
    mask = cache.of_op_tensors(lists, key, make, versioned=form != "lists")
    return mask if mask_mod is None else mask.with_mask_mod(mask_mod)
