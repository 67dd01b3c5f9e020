"""The attention ops registered with torch.library, for torch.compile and opcheck; eager calls do not use them.

Each op returns (out, lse), with an empty lse if none is asked for; its variant `.._out` returns lse alone. A BlockMask
enters the schema as its lists, lengths and block size, with its mask_mod as a text, numbers and tensors
(function_text.py). Other masks enter it as `crossing` describes, and are converted once, inside of the op (cache.py).
With a score_mod the ops have other names, and take it as a text, numbers and tensors, which get gradients.
"""

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import noop_mask

from cute_kernels.checks import check_no_grad, watched
from cute_kernels.dtypes import accumulator, default_out_dtype
from cute_kernels.runtime.derived import captured
from cute_kernels.runtime.front import check_traced, undisturbed
from cute_kernels.runtime.library import call, define, register
from sparse_collective.bsr import BsrMatrix

from . import checks, dispatch, flops, gradients
from .checks import NO_CACHE, check_gradient_dims, narrow
from .masks import cache, convert, mask_text
from .masks.block_mask import BlockMask
from .masks.function_text import written
from .masks.score_mod import WHAT as SCORE_MOD
from .masks.score_text import read_score
from .plan import gradient_of

QKV = "Tensor q, Tensor k, Tensor v"
ATTENTION = (
    "bool causal=False, SymInt? left=None, SymInt? right=None, float? softcap=None, float? scale=None, "
    "SymInt? q_offset=None, SymInt? k_offset=None, bool return_lse=False, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? seqused_k=None, "
    "Tensor? page_table=None, bool? deterministic=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, bool use_fast_accum=False, Tensor? sinks=None"
)
MASK = (
    "Tensor[] lists, SymInt[] lengths, SymInt[] blocksize, str? mask_mod, SymInt[] mask_numbers, Tensor[] mask_tensors"
)
MASK_PARTS = 6
SCORE = "str score_mod, SymInt[] score_numbers, Tensor[] score_tensors"
SCORED = "_with_score"  # end of the names of ops that take these, after q, k and v, and the mask
BLOCK_SPARSE = (
    "bool causal=False, float? softcap=None, float? scale=None, SymInt? q_offset=None, SymInt? k_offset=None, "
    'bool return_lse=False, str form="lists", '
    "bool? deterministic=None, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "bool use_fast_accum=False, Tensor? sinks=None"
)


def _run_attention(q, k, v, *score, left, right, return_lse, **terms) -> tuple[Tensor, Tensor]:
    terms |= _score_of(q, score)
    result = dispatch.attention(q, k, v, window_size=_window(left, right), return_lse=return_lse, **terms)
    return _pair(q, result, return_lse)


def _fake_attention(q, k, v, *score, return_lse, cu_seqlens_q, cu_seqlens_k, **terms) -> tuple[Tensor, Tensor]:
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    return _fake("attention", q, k, v, return_lse, packed)


def _run_block_sparse(q, k, v, *mask_and_score, form, return_lse, **terms) -> tuple[Tensor, Tensor]:
    mask, score = mask_and_score[:MASK_PARTS], mask_and_score[MASK_PARTS:]
    terms |= _score_of(q, score)
    result = dispatch.block_sparse_attention(q, k, v, _block_mask(*mask, form), return_lse=return_lse, **terms)
    return _pair(q, result, return_lse)


def _score_of(q, score: tuple) -> dict:
    """Keyword arguments with the score_mod for eager calls; empty for an op without one."""
    return {"score_mod": read_score(*score, q.device)[0]} if score else {}


def _fake_block_sparse(q, k, v, *mask, return_lse, **terms) -> tuple[Tensor, Tensor]:
    return _fake("block_sparse_attention", q, k, v, return_lse)


# -- gradients ------------------------------------------------------------------------------------------------

BACKWARD = "Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"


def _run_attention_backward(
    dout, dlse, q, k, v, out, lse, causal, left, right, softcap, scale, q_offset, k_offset, cu_q, cu_k, deterministic,
    grad_dtype, sinks, **score,
):  # fmt: skip
    options = {"causal": causal, "window_size": _window(left, right), "softcap": softcap, "scale": scale}
    options |= {"deterministic": deterministic, "sinks": sinks, "q_offset": q_offset, "k_offset": k_offset}
    options["grad_dtype"] = grad_dtype
    return _four(q, gradients.gradients_of(q, k, v, out, lse, dout, dlse, cu_q, cu_k, None, **options, **score))


def _run_block_sparse_backward(dout, dlse, q, k, v, out, lse, *mask_and_terms, **score):
    *mask, causal, softcap, scale, q_offset, k_offset, form, deterministic, grad_dtype, sinks = mask_and_terms
    options = {"causal": causal, "softcap": softcap, "scale": scale, "deterministic": deterministic, "sinks": sinks}
    options |= {"q_offset": q_offset, "k_offset": k_offset, "grad_dtype": grad_dtype}
    mask = _block_mask(*mask, form)
    return _four(q, gradients.gradients_of(q, k, v, out, lse, dout, dlse, None, None, mask, **options, **score))


def _fake_backward(dout, dlse, q, k, v, *others):
    _fake("attention_backward", q, k, v, False, q.dim() == 3)  # checks their shapes
    *_, grad_dtype, sinks = others
    found = tuple(gradient_of(t, dtype=grad_dtype) for t in (q, k, v))
    return _four(q, (*found, None if sinks is None else gradient_of(sinks)))


def _four(q, found: tuple) -> tuple[Tensor, ...]:
    """(dQ, dK, dV, dsinks), the last without elements where sinks want none."""
    return *found[:3], q.new_empty(0) if found[3] is None else found[3]


def _fake_backward_with_score(dout, dlse, q, k, v, out, lse, text, numbers, tensors, wanted, *others):
    return *_fake_backward(dout, dlse, q, k, v, *others), [t.new_empty(t.shape) for t, w in zip(tensors, wanted) if w]


def _flops_backward(dout, dlse, q, k, v, out, lse, *terms) -> int:
    if isinstance(terms[0], str):  # of a score_mod: its text, numbers, tensors, and which of them are wanted
        terms = terms[4:]
    if isinstance(terms[0], list):
        form = next(term for term in terms[MASK_PARTS:] if isinstance(term, str))
        return flops.backward(q, k, v, flops.block_scores(q, k, terms[0], terms[2], form))
    cu_seqlens = terms[7:9] if q.dim() == 3 else (None, None)
    return flops.backward(q, k, v, flops.dense_scores(q, k, *cu_seqlens))


def _register_backward(name: str, run, terms: str) -> None:
    """The op that computes gradients, and the one of a score_mod, which also has those of its wanted tensors."""

    def run_with_score(dout, dlse, q, k, v, out, lse, text, numbers, tensors, wanted, *terms):
        score, places = read_score(text, numbers, tensors, q.device)
        *_, deterministic, _, _ = terms
        gradients.check_score(score, any(wanted), q, deterministic)
        slots = {place: slot for slot, place in enumerate(places)}
        sums = gradients.sums_of(q, score.tensors, [slots[i] for i, w in enumerate(wanted) if w and i in slots])
        found = run(dout, dlse, q, k, v, out, lse, *terms, score_mod=score, sums=sums)
        of_tensors = [
            sums[slots[i]].to(t.dtype) if i in slots else t.new_zeros(t.shape)
            for i, (t, w) in enumerate(zip(tensors, wanted, strict=True))
            if w
        ]
        return *found, of_tensors

    terms += ", ScalarType? grad_dtype, Tensor? sinks"
    schema = f"({BACKWARD}, {terms}) -> (Tensor, Tensor, Tensor, Tensor)"
    define(name, schema, run, _fake_backward, flops=_flops_backward)
    schema = f"({BACKWARD}, {SCORE}, bool[] wanted, {terms}) -> (Tensor, Tensor, Tensor, Tensor, Tensor[])"
    define(name + SCORED, schema, run_with_score, _fake_backward_with_score, flops=_flops_backward)


_register_backward(
    "attention::attention_backward",
    _run_attention_backward,
    "bool causal, SymInt? left, SymInt? right, float? softcap, float? scale, SymInt? q_offset, SymInt? k_offset, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, bool? deterministic",
)
_register_backward(
    "attention::block_sparse_attention_backward",
    _run_block_sparse_backward,
    f"{MASK}, bool causal, float? softcap, float? scale, SymInt? q_offset, SymInt? k_offset, str form, "
    "bool? deterministic",
)


def _save(ctx, inputs, output, tensors: tuple, at: int) -> None:
    """`at`: where among the inputs a score_mod is, if there is one; what follows, the terms, is returned."""
    out, lse = output
    ctx.score = inputs[at : at + 2] if isinstance(inputs[at], str) else ()
    ctx.scored_at = at + 2 if ctx.score else None
    captured = inputs[at + 2] if ctx.score else ()
    ctx.save_for_backward(*inputs[:3], out, lse, *tensors, *captured)
    ctx.set_materialize_grads(False)


def _terms(inputs, at: int) -> tuple:
    """The inputs after a score_mod's, which would begin at `at`."""
    return inputs[at + 3 :] if isinstance(inputs[at], str) else inputs[at:]


def names_of(schema: str) -> list[str]:
    """Return the names of the arguments, in order."""
    return [argument.partition("=")[0].split()[-1] for argument in schema.split(", ")]


def _attention_context(ctx, inputs, output) -> None:
    terms = list(_terms(inputs, 3))
    at = {name: i for i, name in enumerate(names_of(ATTENTION))}
    cu_q, cu_k, seqused_k, page_table, deterministic, sinks = (
        terms[at[name]]
        for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table", "deterministic", "sinks")
    )
    if seqused_k is not None or page_table is not None or narrow(*inputs[1:3]):
        raise RuntimeError(NO_CACHE)
    _save(ctx, inputs, output, (cu_q, cu_k, sinks), 3)
    ctx.terms = terms[: at["return_lse"]]
    ctx.deterministic = deterministic


def _attention_gradients(ctx, dout, dlse):
    q, k, v, out, lse, cu_q, cu_k, sinks, *captured = ctx.saved_tensors
    score = (*ctx.score, captured) if ctx.score else ()
    if lse.numel() == 0:  # the op was called without it
        out, lse = _op("attention", score)(q, k, v, *score, *ctx.terms, True, cu_q, cu_k, sinks=sinks)
        dlse = None
    terms = *ctx.terms, cu_q, cu_k, ctx.deterministic
    return _gradients(ctx, "attention_backward", (dout, dlse, q, k, v, out, lse), score, terms, sinks)


def _block_sparse_context(ctx, inputs, output) -> None:
    lists, lengths, blocksize, mask_mod, numbers, tensors = inputs[3 : 3 + MASK_PARTS]
    causal, softcap, scale, q_offset, k_offset, _, form, deterministic, *_, sinks = _terms(inputs, 3 + MASK_PARTS)
    if narrow(*inputs[1:3]):
        raise RuntimeError(NO_CACHE)
    _save(ctx, inputs, output, (sinks, *lists, *tensors), 3 + MASK_PARTS)
    ctx.mask = len(lists), len(tensors), lengths, blocksize, mask_mod, numbers
    ctx.terms = causal, softcap, scale, q_offset, k_offset, form
    ctx.deterministic = deterministic


def _block_sparse_gradients(ctx, dout, dlse):
    q, k, v, out, lse, sinks, *tensors = ctx.saved_tensors
    count, of_mask, *facts = ctx.mask
    mask = tensors[:count], *facts, tensors[count : count + of_mask]
    score = (*ctx.score, tensors[count + of_mask :]) if ctx.score else ()
    if lse.numel() == 0:
        *terms, form = ctx.terms
        out, lse = _op("block_sparse_attention", score)(q, k, v, *mask, *score, *terms, True, form, sinks=sinks)
        dlse = None
    terms = *mask, *ctx.terms, ctx.deterministic
    return _gradients(ctx, "block_sparse_attention_backward", (dout, dlse, q, k, v, out, lse), score, terms, sinks)


def _gradients(ctx, name: str, tensors: tuple, score: tuple, terms: tuple, sinks: Tensor | None) -> tuple:
    """The results of the op of that name, per input: a list for each list of tensors. Sinks, if there are any, are
    the last; inputs that are their defaults may be left out."""
    needed = ctx.needs_input_grad
    nothing = [[None] * len(n) if isinstance(n, list) else None for n in needed]
    wanted = (needed[ctx.scored_at],) if score else ()
    sinks = sinks if sinks is not None and needed[-1] else None
    dq, dk, dv, of_sinks, *of_captured = _op(name, score)(*tensors, *score, *wanted, *terms, None, sinks)
    if score:
        captured = iter(of_captured[0])
        nothing[ctx.scored_at] = [next(captured) if w else None for w in wanted[0]]
    if sinks is not None:
        nothing[-1] = of_sinks
    return dq, dk, dv, *nothing[3:]


def _op(name: str, score: tuple):
    """The op of that name, or, with a score_mod, the one that takes it."""
    return getattr(torch.ops.attention, name + SCORED if score else name)


def _flops_attention(q, k, v, *terms, **more) -> int:
    given = dict(zip(names_of(ATTENTION), _terms(terms, 0), strict=False)) | more if terms else more
    return flops.forward(q, k, v, flops.dense_scores(q, k, given.get("cu_seqlens_q"), given.get("cu_seqlens_k")))


def _flops_block_sparse(q, k, v, *mask_and_terms, **more) -> int:
    lists, _, blocksize = mask_and_terms[:3]
    terms = mask_and_terms[MASK_PARTS:]
    given = dict(zip(names_of(BLOCK_SPARSE), _terms(terms, 0), strict=False)) | more if terms else more
    return flops.forward(q, k, v, flops.block_scores(q, k, lists, blocksize, given.get("form", "lists")))


ATTENTION_OP, BLOCK_SPARSE_OP = "attention::attention", "attention::block_sparse_attention"
OPS = (
    (ATTENTION_OP, QKV, ATTENTION, _run_attention, _fake_attention, (_attention_context, _attention_gradients),
     _flops_attention),
    (BLOCK_SPARSE_OP, f"{QKV}, {MASK}", BLOCK_SPARSE, _run_block_sparse, _fake_block_sparse,
     (_block_sparse_context, _block_sparse_gradients), _flops_block_sparse),
)  # fmt: skip
for _name, _inputs, *_rest, _gradient, _flops in OPS:
    register(_name, _inputs, *_rest, more="Tensor", gradient=_gradient, flops=_flops)
    register(_name + SCORED, f"{_inputs}, {SCORE}", *_rest, more="Tensor", gradient=_gradient, flops=_flops)


def traced_attention(
    q, k, v, *, causal, window_size, softcap, scale, return_lse, out, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table,
    sinks, deterministic, q_descale, k_descale, v_descale, use_fast_accum, q_offset, k_offset, score_mod=None,
):  # fmt: skip
    """ops.attention inside a torch.compile trace, and of calls that go through the dispatcher."""
    check_traced("attention", q, k, v, sinks, out)
    if window_size is not None and (not isinstance(window_size, (tuple, list)) or len(window_size) != 2):
        raise TypeError(f"window_size must be (left, right), each an int or None without bound, got {window_size!r}")
    left, right = (None, None) if window_size is None else window_size
    score = () if score_mod is None else written(score_mod, SCORE_MOD)
    with_lse = return_lse or _differentiable("attention", q, k, v, sinks, out, score)
    terms = causal, left, right, _float(softcap), _float(scale), q_offset, k_offset, with_lse
    terms += cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, deterministic, q_descale, k_descale, v_descale
    terms += use_fast_accum, sinks
    result = call(ATTENTION_OP + SCORED if score else ATTENTION_OP, (q, k, v, *score), out, terms)
    return result if return_lse else result[0]


def traced_block_sparse(
    q, k, v, block_mask, *, causal, softcap, scale, return_lse, out, sinks, deterministic, q_descale, k_descale,
    v_descale, use_fast_accum, q_offset, k_offset, score_mod=None,
):  # fmt: skip
    """ops.block_sparse_attention inside a torch.compile trace, and of calls that go through the dispatcher."""
    check_traced("block_sparse_attention", q, k, v, sinks, out)
    if not is_compiling() and isinstance(block_mask, Tensor) and block_mask.layout is torch.sparse_bsr:
        with undisturbed():
            block_mask = cache.of_torch_bsr(block_mask)
    mask, form = crossing(block_mask)
    score = () if score_mod is None else written(score_mod, SCORE_MOD)
    with_lse = return_lse or _differentiable("block_sparse_attention", q, k, v, sinks, out, score)
    terms = causal, _float(softcap), _float(scale), q_offset, k_offset, with_lse, form, deterministic
    terms += q_descale, k_descale, v_descale, use_fast_accum, sinks
    result = call(BLOCK_SPARSE_OP + SCORED if score else BLOCK_SPARSE_OP, (q, k, v, *mask, *score), out, terms)
    return result if return_lse else result[0]


def traced_backward(
    dout, dlse, q, k, v, out, lse, block_mask, cu_q, cu_k, score_mod, *, causal, window_size, softcap, scale, q_offset,
    k_offset, deterministic, grad_dtype,
):  # fmt: skip
    """shards.attention_backward inside a torch.compile trace, and of calls that go through the dispatcher."""
    check_traced("attention_backward", q, k, v, out, lse, dout, dlse)
    score = () if score_mod is None else written(score_mod, SCORE_MOD)
    check_no_grad("attention_backward", dout, dlse, q, k, v, out, lse, *(score[2] if score else ()))
    wanted = ([False] * len(score[2]),) if score else ()
    checks.check_results("attention_backward", dout, dlse, q, v, out, lse, grad_dtype)
    tensors, name = (dout, dlse, q, k, v, out, lse), "attention_backward"
    scalars = _float(softcap), _float(scale), q_offset, k_offset
    if block_mask is None:
        left, right = (None, None) if window_size is None else window_size
        terms = causal, left, right, *scalars, cu_q, cu_k, deterministic, grad_dtype, None
    else:
        checks.refuse_with_mask("attention_backward", window_size, cu_q, cu_k)
        mask, form = crossing(block_mask)
        name, terms = "block_sparse_attention_backward", (causal, *scalars, form, deterministic, grad_dtype, None)
        return _op(name, score)(*tensors, *score, *wanted, *mask, *terms)[:3]
    return _op(name, score)(*tensors, *score, *wanted, *terms)[:3]


def _differentiable(op: str, q, k, v, sinks, out, score: tuple) -> bool:
    """True if a traced call needs gradients, and so LSE."""
    captured = score[2] if score else ()
    if not watched(q, k, v, sinks, *captured):
        return False
    if out is not None:
        if captured:
            check_no_grad(op, *captured)
        return False
    check_gradient_dims(op, q, v, q.is_cuda)
    return True


def crossing(block_mask) -> tuple[tuple, str]:
    """A mask as arguments of a registered op, and its form, which `_block_mask` reads; torch.compile traces it.

    (tensors, lengths, block size, and the mask_mod's text, numbers and tensors). The tensors are the four "lists" of a
    BlockMask; the two or four of FlexAttention's, "flex"; the indices of a BsrMatrix, "bsr"; or one of bool "blocks" or
    "elements".
    """
    if isinstance(block_mask, BlockMask):
        mask_mod = mask_text.written_mask(block_mask.mask_mod)
        return (list(block_mask.lists()), list(block_mask.lengths), list(block_mask.blocksize), *mask_mod), "lists"
    if isinstance(block_mask, cache.FlexBlockMask):
        lists = [block_mask.kv_num_blocks, block_mask.kv_indices]
        if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
            lists += [block_mask.full_kv_num_blocks, block_mask.full_kv_indices]
        mask_mod = None if block_mask.mask_mod is noop_mask else block_mask.mask_mod
        sizes = list(block_mask.seq_lengths), list(block_mask.BLOCK_SIZE)
        return (lists, *sizes, *mask_text.written_mask(mask_mod)), "flex"
    if isinstance(block_mask, BsrMatrix):
        indices = [block_mask.crow_indices, block_mask.col_indices]
        return (indices, list(block_mask.shape[-2:]), list(block_mask.blocksize), None, [], []), "bsr"
    if isinstance(block_mask, cache.ElementTensor):
        return ([block_mask.seen], [], [], None, [], []), "elements"
    if isinstance(block_mask, Tensor) and block_mask.layout is torch.strided:
        return ([block_mask], [], [], None, [], []), "blocks"
    raise TypeError(
        "block_sparse_attention: under torch.compile block_mask must be a BlockMask, FlexAttention's BlockMask, a "
        f"BsrMatrix or a bool tensor, got {type(block_mask).__name__}; of a torch.sparse_bsr tensor, which "
        "torch.compile does not take, make BsrMatrix.from_torch(t) outside"
    )


def _float(value):
    return None if value is None else float(value)


def _window(left: int | None, right: int | None) -> tuple | None:
    return None if left is None and right is None else (left, right)


def _pair(q, result, return_lse: bool) -> tuple[Tensor, Tensor]:
    return result if return_lse else (result, q.new_empty(0, dtype=accumulator(q.dtype)))


def _fake(op: str, q, k, v, return_lse: bool, packed: bool = False) -> tuple[Tensor, Tensor]:
    rank = 3 if packed else 4
    torch._check(q.dim() == k.dim() == v.dim() == rank, lambda: f"{op}: q, k and v must have {rank} dimensions")
    torch._check(q.shape[-1] == k.shape[-1], lambda: f"{op}: q has head_dim {q.shape[-1]} and k {k.shape[-1]}")
    rows = 0 if packed else 2
    torch._check(k.shape[rows] == v.shape[rows], lambda: f"{op}: k has {k.shape[rows]} rows and v {v.shape[rows]}")
    shape = (q.shape[1], q.shape[0]) if packed else q.shape[:3]
    lse = q.new_empty(shape if return_lse else (0,), dtype=accumulator(q.dtype))
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=default_out_dtype(q.dtype)), lse


def _block_mask(lists, lengths, blocksize, mask_mod, numbers, tensors, form: str = "lists"):
    """Rebuild the mask that `crossing` was given, as block_sparse_attention takes it; a BlockMask is made once of the
    same tensors.

    The contents of lists and indices were checked, or trusted, where the caller's mask was made.
    """
    if form == "blocks":
        return lists[0]
    if form == "elements":
        return cache.ElementTensor(lists[0])

    lengths, blocksize = tuple(lengths), tuple(blocksize)

    mask_mod = mask_text.read_mask(mask_mod, numbers, tensors, lists[0].device)

    def make(*lists: Tensor) -> BlockMask:
        if form == "bsr":
            return BlockMask.from_blocks(*convert.blocks_of_indices(*lists, lengths, blocksize, None))
        facts = {"lengths": lengths, "blocksize": blocksize, "mask_mod": mask_mod}
        if form == "flex":
            lists, facts = convert.tables_of_flex(*lists, *[None] * (4 - len(lists)), **facts)
        return BlockMask(*lists, **facts, check=False)

    if form == "flex" and captured(lists[0]):
        return make(*lists)  # see cache.py
    key = form, *lengths, *blocksize, mask_mod is None
    mask = cache.of_op_tensors(lists, key, make, versioned=form != "lists")
    return mask if mask_mod is None else mask.with_mask_mod(mask_mod)
