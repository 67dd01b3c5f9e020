"""The interface of MiniMax's MSA kernels (`sparse_atten_func`, `build_k2q_csr`), by selected_attention.

transformers loads a kernel with these two functions from the hub for MiniMax-M3. The lists pass between them as a CSR
matrix, which names the query tokens of each KV block. Its rows are KV blocks: block 0 of every sequence that has one,
then block 1 of every sequence that has two, and so on. Both functions run torch ops on the lists' device, without
synchronization: each sorts the lists once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..selected.checks import check_block_size
from ..selected.decode.dispatch import MOST_TOKENS, has_decode_kernel
from ..selected.ops import selected_attention

BUILD, ATTEND = "build_k2q_csr", "sparse_atten_func"


def build_k2q_csr(
    q2k_indices: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    kv_block_size: int,
    *,
    total_k: int | None = None,
    max_seqlen_k: int | None = None,
    max_seqlen_q: int | None = None,
    total_rows: int | None = None,
    qhead_per_kv: int = 1,
    return_schedule: bool = False,
) -> tuple[Tensor, Tensor]:
    """The query tokens that selected each KV block.

    Args:
        q2k_indices: (Hkv, total_q, top) int32: the KV blocks of each query token, counted from its sequence's first
            key and padded with -1. Blocks that the sequence does not have are ignored.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, cumulative lengths of the packed sequences.
        kv_block_size: tokens of a block: 1, 4, 16, 64 or 128.
        total_k: number of keys. Required.
        max_seqlen_k: length of the longest sequence's keys, or more; None: total_k.
        total_rows: number of KV blocks of all sequences, or more; None: a bound that total_k implies.
        max_seqlen_q, qhead_per_kv: not needed; part of the interface for schedules.
        return_schedule: must be False.

    Returns:
        (row_ptr, q_indices): (Hkv, rows + 1) int32 and (Hkv, total_q * top) int32. The tokens of row r, counted from
        their sequence's first, ascending, are q_indices[h, row_ptr[h, r] : row_ptr[h, r + 1]]. Entries after the last
        row are -1.

    Raises:
        TypeError, ValueError: an argument has an unsupported type, dtype, shape or value.

    Example:
        cu_seqlens = torch.tensor([0, 200, 500], dtype=torch.int32)
        newest = torch.cat([torch.arange(200), torch.arange(300)]).int() // 128
        lists = torch.stack([newest, newest - 1], -1)[None]  # (1, 500, 2)
        row_ptr, q_indices = build_k2q_csr(lists, cu_seqlens, cu_seqlens, 128, total_k=500)
    """
    check_block_size(kv_block_size, BUILD)
    if return_schedule:
        raise ValueError(f"{BUILD}: return_schedule must be False: the kernels of {ATTEND} here need no schedule")
    if total_k is None:
        raise ValueError(f"{BUILD}: total_k is required, the number of keys; pass k.shape[0]")
    _check_int32(BUILD, q2k_indices=(q2k_indices, 3), cu_seqlens_q=(cu_seqlens_q, 1), cu_seqlens_k=(cu_seqlens_k, 1))
    _check_sequences(BUILD, cu_seqlens_q, cu_seqlens_k)
    (heads, tokens, top), device = q2k_indices.shape, q2k_indices.device
    sequences = len(cu_seqlens_q) - 1
    rows = (total_k + sequences * (kv_block_size - 1)) // kv_block_size if total_rows is None else total_rows
    blocks = max(1, -(-(total_k if max_seqlen_k is None else max_seqlen_k) // kv_block_size))
    numbers = _row_numbers(cu_seqlens_k, kv_block_size, blocks, rows)  # (blocks, B)
    token = torch.arange(tokens, dtype=torch.int32, device=device)
    sequence = (torch.searchsorted(cu_seqlens_q, token, right=True) - 1).clamp(0, max(sequences - 1, 0))
    ignored = (q2k_indices < 0) | (q2k_indices >= blocks) | (token >= cu_seqlens_q[-1])[:, None]
    if sequences == 0:
        row = torch.full(q2k_indices.shape, rows, device=device)
    else:
        row = numbers[q2k_indices.clamp(0, blocks - 1).long(), sequence[:, None]].masked_fill(ignored, rows)
    local = token if sequences == 0 else token - cu_seqlens_q[sequence]
    ordered, order = row.flatten(1).sort(stable=True)  # of a row, tokens ascend
    q_indices = local.repeat_interleave(top)[order].masked_fill(ordered == rows, -1)
    row_ptr = torch.searchsorted(ordered, torch.arange(rows + 1, device=device).repeat(heads, 1))
    return row_ptr.int(), q_indices


def sparse_atten_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k2q_row_ptr: Tensor,
    k2q_q_indices: Tensor,
    topK: int,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    blk_kv: int = 128,
    causal: bool = False,
    softmax_scale: float | None = None,
    lse_temperature_scale: float = 1.0,
    return_temperature_lse: bool = False,
    partial_dtype: torch.dtype = torch.bfloat16,
    return_softmax_lse: bool = False,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    schedule: None = None,
    usable_SM_count: int = -1,
    qk_dtype: torch.dtype | None = None,
    pv_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Attention of packed sequences whose query tokens selected KV blocks.

    Args:
        q: (total_q, H, D) bfloat16 or float16, on the CPU also float32 or float64.
        k, v: (total_k, Hkv, D), or (pages, Hkv, page_size, D) with page_table. With more than one sequence total_k must
            be cu_seqlens_k[-1], which is not checked: unused rows at the end are supported for one sequence only.
        k2q_row_ptr, k2q_q_indices: result of build_k2q_csr.
        topK: length of the lists.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, cumulative lengths.
        max_seqlen_q, max_seqlen_k: length of the longest sequence's queries, and of its keys or more. If they imply
            that all sequences have the same number of at most 16 queries and of keys, as in decoding, only the keys of
            selected blocks are read, unless a gradient is required.
        blk_kv: tokens of a block: 1, 4, 16, 64 or 128.
        causal: True to mask keys after the token's position; the last query of a sequence is at its last key.
        softmax_scale: None: 1 / sqrt(D).
        return_softmax_lse: True to return the logsumexp of the scores, too.
        return_temperature_lse: True to return it again, with lse_temperature_scale=1, the only supported one.
        partial_dtype: least precision of partial results, which are float32 here.
        page_table, seqused_k: (B, pages per sequence) and (B,) int32, a paged cache with at most 16 queries per
            sequence; seqused_k=None: the lengths of cu_seqlens_k.
        schedule, usable_SM_count, qk_dtype, pv_dtype: not supported, other than the defaults.

    Returns:
        (total_q, H, D) of q's dtype, or (out, lse), lse (total_q, H) float32, or (out, lse, lse).

    Differentiable in q, k and v without page_table, unlike MiniMax's function.

    Raises:
        TypeError, ValueError: an argument is not supported.
        RuntimeError: see selected_attention.

    Example:
        q = torch.randn(500, 8, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(500, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": 300, "max_seqlen_k": 300}
        out = sparse_atten_func(q, k, v, row_ptr, q_indices, 2, **lengths, causal=True)
    """
    check_block_size(blk_kv, ATTEND)
    _refuse(q, schedule, usable_SM_count, qk_dtype, pv_dtype, return_temperature_lse, lse_temperature_scale)
    if return_temperature_lse and not return_softmax_lse:
        raise ValueError(f"{ATTEND}: return_temperature_lse requires return_softmax_lse=True")
    csr = {"k2q_row_ptr": (k2q_row_ptr, 2), "k2q_q_indices": (k2q_q_indices, 2)}
    _check_int32(ATTEND, **csr, cu_seqlens_q=(cu_seqlens_q, 1), cu_seqlens_k=(cu_seqlens_k, 1))
    _check_sequences(ATTEND, cu_seqlens_q, cu_seqlens_k)
    if q.dim() != 3 or k.dim() != (3 if page_table is None else 4) or v.dim() != k.dim():
        raise ValueError(
            f"{ATTEND}: q must be (total_q, heads, head_dim), and k and v (total_k, heads, head_dim), or (pages, "
            f"heads, page_size, head_dim) with page_table, got {q.dim()}, {k.dim()} and {v.dim()} dimensions"
        )
    sequences, tokens = len(cu_seqlens_q) - 1, len(q)
    if not k2q_row_ptr.shape[0] == k2q_q_indices.shape[0] == k.shape[1]:
        raise ValueError(
            f"{ATTEND}: k2q_row_ptr and k2q_q_indices must have a row for each of the {k.shape[1]} heads of k, got "
            f"{tuple(k2q_row_ptr.shape)} and {tuple(k2q_q_indices.shape)}"
        )
    if k2q_q_indices.shape[1] > tokens * topK:
        raise ValueError(
            f"{ATTEND}: topK must be the length of the lists that {BUILD} was called with, got {topK} for "
            f"{k2q_q_indices.shape[1]} entries of {tokens} query tokens"
        )
    lists = _lists_of(k2q_row_ptr, k2q_q_indices, topK, cu_seqlens_q, cu_seqlens_k, blk_kv, tokens, max_seqlen_k)
    options: dict[str, Any] = {"causal": causal, "scale": softmax_scale}
    equal = sequences > 0 and max_seqlen_q <= MOST_TOKENS and tokens == sequences * max_seqlen_q
    if page_table is not None or seqused_k is not None:
        if not equal or page_table is None:
            raise ValueError(
                f"{ATTEND}: page_table and seqused_k require each other and at most {MOST_TOKENS} queries, equally "
                f"many, per sequence, got {tokens} of {sequences} sequences with max_seqlen_q={max_seqlen_q}; for a "
                "prefill pass k and v as (total_k, heads, head_dim)"
            )
        options["page_table"] = page_table
    elif equal and len(k) == sequences * max_seqlen_k and has_decode_kernel(max_seqlen_q, q, k, v):
        k, v = (t.unflatten(0, (sequences, max_seqlen_k)).transpose(1, 2) for t in (k, v))
    else:
        options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        out, lse = selected_attention(q, k, v, lists, blk_kv, return_lse=True, **options)
        return _results(out, lse.transpose(0, 1), return_softmax_lse, return_temperature_lse)
    options["seqused_k"] = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    q, lists = q.unflatten(0, (sequences, max_seqlen_q)).transpose(1, 2), lists.unflatten(0, (sequences, max_seqlen_q))
    out, lse = selected_attention(q, k, v, lists, blk_kv, return_lse=True, **options)
    out, lse = (t.transpose(1, 2).flatten(0, 1) for t in (out, lse))
    return _results(out, lse, return_softmax_lse, return_temperature_lse)


def _results(out: Tensor, lse: Tensor, return_lse: bool, again: bool) -> Tensor | tuple[Tensor, ...]:
    lse = lse.contiguous()
    return (out, lse, lse) if again else (out, lse) if return_lse else out


def _refuse(q, schedule, usable_SM_count, qk_dtype, pv_dtype, return_temperature_lse, temperature) -> None:
    if schedule is not None:
        raise ValueError(f"{ATTEND}: schedule must be None: the kernels here need no schedule")
    if usable_SM_count != -1:
        raise ValueError(f"{ATTEND}: usable_SM_count must be -1, all SMs, got {usable_SM_count}")
    for name, dtype in (("qk_dtype", qk_dtype), ("pv_dtype", pv_dtype)):
        if dtype not in (None, q.dtype):
            raise TypeError(f"{ATTEND}: {name} must be None or q's dtype, {q.dtype}, got {dtype}")
    if return_temperature_lse and temperature != 1.0:
        raise ValueError(
            f"{ATTEND}: lse_temperature_scale must be 1.0 with return_temperature_lse, got {temperature}; call it a "
            "second time with softmax_scale / lse_temperature_scale and return_softmax_lse=True"
        )


def _check_int32(op: str, **tensors) -> None:
    for name, (tensor, rank) in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.int32 or tensor.dim() != rank:
            shape = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{op}: {name} must be an int32 tensor with {rank} dimensions, got {shape}")


def _check_sequences(op: str, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    if cu_seqlens_q.shape != cu_seqlens_k.shape or not len(cu_seqlens_q):
        raise ValueError(
            f"{op}: cu_seqlens_q and cu_seqlens_k must have shape (sequences + 1,), got {tuple(cu_seqlens_q.shape)} "
            f"and {tuple(cu_seqlens_k.shape)}"
        )


def _row_numbers(cu_seqlens_k: Tensor, block_size: int, blocks: int, rows: int) -> Tensor:
    """(blocks, B) int64: the row of each block of each sequence; `rows` if there is none."""
    count = (cu_seqlens_k.diff() + block_size - 1) // block_size
    exists = torch.arange(blocks, device=count.device)[:, None] < count
    number = exists.flatten().cumsum(0).view_as(exists) - 1
    return number.masked_fill(~exists, rows).clamp(max=rows)


def _lists_of(
    row_ptr: Tensor, q_indices: Tensor, top: int, cu_seqlens_q, cu_seqlens_k, block_size: int, tokens: int, longest: int
) -> Tensor:
    """(total_q, Hkv, top) int32: the blocks of each token, ascending, from the result of build_k2q_csr."""
    (heads, edges), rows, device = q_indices.shape, row_ptr.shape[1] - 1, q_indices.device
    blocks, sequences = max(1, -(-longest // block_size)), len(cu_seqlens_q) - 1
    found = torch.full((heads, (tokens + 1) * top), -1, dtype=torch.int32, device=device)  # one more for no token
    if edges and rows and sequences and top:
        numbers = _row_numbers(cu_seqlens_k, block_size, blocks, rows).flatten()
        place = torch.zeros(rows + 1, dtype=torch.int64, device=device)  # block * B + sequence of each row
        place.scatter_(0, numbers, torch.arange(len(numbers), device=device))
        edge = torch.arange(edges, dtype=torch.int32, device=device).repeat(heads, 1)
        row = torch.searchsorted(row_ptr, edge, right=True) - 1
        place = place[row.clamp(0, rows)]
        token = (q_indices + cu_seqlens_q[place % sequences]).masked_fill(edge >= row_ptr[:, -1:], tokens)
        token, order = token.sort(stable=True)
        slot = edge - torch.searchsorted(token, token)  # the token's edges before this one
        target = (token * top + slot).masked_fill((slot >= top) | (token >= tokens), tokens * top)
        found.scatter_(1, target, (place // sequences).int().gather(1, order))
    return found.view(heads, tokens + 1, top)[:, :tokens].transpose(0, 1).contiguous()
