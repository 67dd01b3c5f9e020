"""The attention ops registered with torch.library, for torch.compile and opcheck; eager calls do not use them.

Each op returns (out, lse), with an empty lse if none is asked for; its variant `.._out` returns lse alone. A BlockMask
enters the schema as its lists, lengths and block size, with its mask_mod as a text (mask_text.py). Other masks enter it
as `crossing` describes, and are converted once, inside of the op (kept.py).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import noop_mask

from cute_kernels.runtime.derived import captured
from sparse_collective.bsr import BsrMatrix

from . import eager
from .masks import convert, kept, mask_text
from .masks.block_mask import BlockMask

QKV = "Tensor q, Tensor k, Tensor v"
ATTENTION = (
    "bool causal=False, SymInt? left=None, SymInt? right=None, float? softcap=None, float? scale=None, "
    "bool return_lse=False, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqlens_k=None, "
    "Tensor? block_table=None"
)
MASK = (
    "Tensor[] lists, SymInt[] lengths, SymInt[] blocksize, str? mask_mod, SymInt[] mask_numbers, Tensor[] mask_tensors"
)
BLOCK_SPARSE = 'bool causal=False, float? softcap=None, float? scale=None, bool return_lse=False, str form="lists"'


def _run_attention(
    q, k, v, out, causal=False, left=None, right=None, softcap=None, scale=None, return_lse=False, cu_seqlens_q=None,
    cu_seqlens_k=None, seqlens_k=None, block_table=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    result = eager.attention(
        q, k, v, causal=causal, window=_window(left, right), softcap=softcap, scale=scale, return_lse=return_lse,
        out=out, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqlens_k=seqlens_k, block_table=block_table,
    )  # fmt: skip
    return _pair(q, result, return_lse)


def _fake_attention(
    q, k, v, causal=False, left=None, right=None, softcap=None, scale=None, return_lse=False, *tensors
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _fake("attention", q, k, v, return_lse, *tensors)


def _run_block_sparse(
    q, k, v, lists, lengths, blocksize, mask_mod, mask_numbers, mask_tensors, out, causal=False, softcap=None,
    scale=None, return_lse=False, form="lists",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    mask = _block_mask(lists, lengths, blocksize, mask_mod, mask_numbers, mask_tensors, form)
    result = eager.block_sparse_attention(
        q, k, v, mask, causal=causal, softcap=softcap, scale=scale, return_lse=return_lse, out=out
    )
    return _pair(q, result, return_lse)


def _fake_block_sparse(
    q, k, v, lists, lengths, blocksize, mask_mod, mask_numbers, mask_tensors, causal=False, softcap=None, scale=None,
    return_lse=False, form="lists",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _fake("block_sparse_attention", q, k, v, return_lse)


def _register(name: str, inputs: str, terms: str, run: Callable, fake: Callable) -> None:
    """The op attention::`name`, (inputs, terms) -> (out, lse), and its variant (inputs, out, terms) -> lse.

    run: a function of (inputs, out or None, terms); fake: of (inputs, terms).
    """
    at = inputs.count(",") + 1

    def write(*args, **more):
        return run(*args, **more)[1]

    def fake_write(*args, **more):
        return fake(*args[:at], *args[at + 1 :], **more)[1]

    def allocate(*args, **more):
        return run(*args[:at], None, *args[at:], **more)

    op = torch.library.custom_op(
        f"attention::{name}", allocate, mutates_args=(), schema=f"({inputs}, {terms}) -> (Tensor, Tensor)"
    )
    op.register_fake(fake)
    op = torch.library.custom_op(
        f"attention::{name}_out",
        write,
        mutates_args=("out",),
        schema=f"({inputs}, Tensor(a{at}!) out, {terms}) -> Tensor",
    )
    op.register_fake(fake_write)


_register("attention", QKV, ATTENTION, _run_attention, _fake_attention)
_register("block_sparse_attention", f"{QKV}, {MASK}", BLOCK_SPARSE, _run_block_sparse, _fake_block_sparse)


def traced_attention(
    q, k, v, *, causal, window, softcap, scale, return_lse, out, cu_seqlens_q, cu_seqlens_k, seqlens_k, block_table
):
    """ops.attention inside a torch.compile trace."""
    if window is not None and (not isinstance(window, (tuple, list)) or len(window) != 2):
        raise TypeError(f"window must be (left, right), each an int or None without bound, got {window!r}")
    left, right = (None, None) if window is None else window
    terms = causal, left, right, _float(softcap), _float(scale), return_lse
    terms += cu_seqlens_q, cu_seqlens_k, seqlens_k, block_table
    if out is None:
        out, lse = torch.ops.attention.attention(q, k, v, *terms)
    else:
        lse = torch.ops.attention.attention_out(q, k, v, out, *terms)
    return (out, lse) if return_lse else out


def traced_block_sparse(q, k, v, block_mask, *, causal, softcap, scale, return_lse, out):
    """ops.block_sparse_attention inside a torch.compile trace."""
    mask, form = crossing(block_mask)
    terms = causal, _float(softcap), _float(scale), return_lse, form
    if out is None:
        out, lse = torch.ops.attention.block_sparse_attention(q, k, v, *mask, *terms)
    else:
        lse = torch.ops.attention.block_sparse_attention_out(q, k, v, *mask, out, *terms)
    return (out, lse) if return_lse else out


def crossing(block_mask) -> tuple[tuple, str]:
    """A mask as arguments of a registered op, and its form, which `_block_mask` reads; torch.compile traces it.

    (tensors, lengths, block size, and the mask_mod's text, numbers and tensors). The tensors are the four "lists" of a
    BlockMask; the two or four of FlexAttention's, "flex"; the indices of a BsrMatrix, "bsr"; or one of bool "blocks".
    """
    if isinstance(block_mask, BlockMask):
        mask_mod = mask_text.written(block_mask.mask_mod)
        return (list(block_mask.lists()), list(block_mask.lengths), list(block_mask.blocksize), *mask_mod), "lists"
    if isinstance(block_mask, kept.FlexBlockMask):
        lists = [block_mask.kv_num_blocks, block_mask.kv_indices]
        if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
            lists += [block_mask.full_kv_num_blocks, block_mask.full_kv_indices]
        mask_mod = None if block_mask.mask_mod is noop_mask else block_mask.mask_mod
        sizes = list(block_mask.seq_lengths), list(block_mask.BLOCK_SIZE)
        return (lists, *sizes, *mask_text.written(mask_mod)), "flex"
    if isinstance(block_mask, BsrMatrix):
        indices = [block_mask.crow_indices, block_mask.col_indices]
        return (indices, list(block_mask.shape[-2:]), list(block_mask.blocksize), None, [], []), "bsr"
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
    return result if return_lse else (result, q.new_empty(0, dtype=torch.float32))


def _fake(
    op: str, q, k, v, return_lse: bool, cu_q=None, cu_k=None, seqlens_k=None, block_table=None
) -> tuple[Tensor, Tensor]:
    packed = cu_q is not None or cu_k is not None
    rank = 3 if packed else 4
    torch._check(q.dim() == k.dim() == v.dim() == rank, lambda: f"{op}: q, k and v must have {rank} dimensions")
    torch._check(q.shape[-1] == k.shape[-1], lambda: f"{op}: q has head_dim {q.shape[-1]} and k {k.shape[-1]}")
    rows = 0 if packed else 2
    torch._check(k.shape[rows] == v.shape[rows], lambda: f"{op}: k has {k.shape[rows]} rows and v {v.shape[rows]}")
    shape = (q.shape[1], q.shape[0]) if packed else q.shape[:3]
    lse = q.new_empty(shape if return_lse else (0,), dtype=torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


def _block_mask(lists, lengths, blocksize, mask_mod, numbers, tensors, form: str = "lists"):
    """What `crossing` was given, as block_sparse_attention takes it; a BlockMask is made once of the same tensors.

    The contents of lists and indices were checked, or trusted, where the caller's mask was made.
    """
    if form == "blocks":
        return lists[0]

    lengths, blocksize = tuple(lengths), tuple(blocksize)

    def make(*lists: Tensor) -> BlockMask:
        if form == "bsr":
            return BlockMask.from_blocks(*convert.blocks_of_indices(*lists, lengths, blocksize, None))
        facts = {"lengths": lengths, "blocksize": blocksize}
        facts["mask_mod"] = mask_text.read(mask_mod, numbers, [t.detach() for t in tensors])
        if form == "flex":
            lists, facts = convert.tables_of_flex(*lists, *[None] * (4 - len(lists)), **facts)
        return BlockMask(*lists, **facts, check=False)

    if form == "flex" and captured(lists[0]):
        return make(*lists)  # see kept.py
    key = form, *lengths, *blocksize, mask_mod, *numbers
    return kept.of_op_tensors(lists, tensors, key, make, watched=form != "lists")
