"""What attention is measured against: torch's SDPA, FlexAttention and FlashAttention 4, forward only.

As in peers.py: one `Attention` makes the tensors of a row, which all candidates share, and every set-up ends with
`verified`. Tensors are (B, S, H, D), as FlashAttention takes them; torch's functions get (B, H, S, D) views, which
they take as they are.
"""

import math
from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .peers import Call, made, needs, verified
from .rows import Candidate

FLASH = "SDPA flash"
CUDNN = "SDPA cuDNN"
FLEX = "FlexAttention"
FA4 = "FA4"

SAMPLE = 24  # queries compared, each with a head of its own


class Attention:
    """softmax(scale * Q K^T, masked) V, with scale = 1 / sqrt(D), whose tensors are made once, when first asked for.

    Args:
        q: (B, S, H, D). This, k, v and blocks are each a tensor or a function that makes it.
        k, v: (B, S_kv, H_kv, D), H a multiple of H_kv.
        causal: whether key j is seen by query i only if j <= i; S and S_kv must be the same.
        blocks: (S / bq, S_kv / bk) bool, the same for all heads: which blocks of the scores are kept, wholly.
        block_size: (bq, bk).
    """

    def __init__(self, q, k, v, causal: bool = False, blocks=None, block_size: tuple[int, int] = (128, 128)) -> None:
        if causal and blocks is not None:
            raise ValueError("causal and blocks are both given; a block mask says by itself what is kept")
        self._q, self._k, self._v, self._blocks = q, k, v, blocks
        self.causal, self.block_size = causal, block_size

    q = cached_property(lambda self: made(self._q))
    k = cached_property(lambda self: made(self._k))
    v = cached_property(lambda self: made(self._v))
    blocks = cached_property(lambda self: made(self._blocks))

    @property
    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as torch takes them: (B, H, S, D) views."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)

    @property
    def grouped(self) -> bool:
        """Whether several query heads share one of K and V."""
        return self.q.shape[2] != self.k.shape[2]

    @cached_property
    def sample(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """((batch, query, head), reference): some queries, each in another place, and their output in fp32."""
        (batch, queries, heads, depth), keys = self.q.shape, self.k.shape[1]
        if self.causal and queries != keys:
            raise ValueError(f"causal attention is compared for as many queries as keys, got {queries} and {keys}")
        pick = torch.arange(SAMPLE, device=self.q.device)
        b, h = pick % batch, (pick // batch) % heads
        i = torch.linspace(0, queries - 1, SAMPLE, dtype=torch.float64).long().to(self.q.device)
        kv = b, slice(None), h // (heads // self.k.shape[2])
        scores = torch.einsum("nd,nsd->ns", self.q[b, i, h].float(), self.k[kv].float()) / math.sqrt(depth)
        if (kept := self.kept(i)) is not None:
            scores.masked_fill_(~kept, -math.inf)
        # A query that sees no key has the output 0.
        return (b, i, h), torch.einsum("ns,nsd->nd", scores.softmax(-1).nan_to_num(0.0), self.v[kv].float())

    def kept(self, queries: Tensor) -> Tensor | None:
        """(len(queries), S_kv) bool: the keys that each sees; None where it sees all."""
        keys = torch.arange(self.k.shape[1], device=queries.device)
        if self.blocks is not None:
            return self.blocks[queries // self.block_size[0]][:, keys // self.block_size[1]]
        return keys <= queries[:, None] if self.causal else None

    def kept_blocks(self) -> tuple[Tensor, Tensor]:
        """(1, 1, rows) int32 counts and (1, 1, rows, columns) int32 indices, of which the first `count` are kept."""
        counts = self.blocks.sum(dim=1, dtype=torch.int32)
        indices = self.blocks.int().argsort(dim=1, descending=True, stable=True).int()
        return counts[None, None], indices[None, None].contiguous()


def peer(name: str) -> Callable:
    """Makes a `Candidate` of a function from Attention to a call, whose output is (B, S, H, D) and `verified`."""

    def decorate(make: Callable[[Attention], Call]) -> Callable[[Attention, float], Candidate]:
        def candidate(x: Attention, flops: float) -> Candidate:
            return Candidate(name, flops, lambda: verified(make(x), lambda: x.sample))

        candidate.__name__, candidate.__doc__ = make.__name__, make.__doc__
        return candidate

    return decorate


def sdpa(x: Attention, backend: SDPBackend) -> Call:
    """torch's scaled_dot_product_attention, of which only one backend may run; torch raises if it cannot."""
    if x.blocks is not None:
        raise NotImplementedError("SDPA has no block masks; a dense mask would skip no work")
    q, k, v = x.heads_first
    options = {"is_causal": x.causal, "enable_gqa": x.grouped}

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return nnf.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return Call(run)


@peer(FLASH)
def sdpa_flash(x: Attention) -> Call:
    """FlashAttention 2, as torch ships it."""
    return sdpa(x, SDPBackend.FLASH_ATTENTION)


@peer(CUDNN)
def sdpa_cudnn(x: Attention) -> Call:
    """cuDNN's attention through torch."""
    return sdpa(x, SDPBackend.CUDNN_ATTENTION)


@peer(FLEX)
def flex_attention(x: Attention) -> Call:
    """FlexAttention, compiled for this shape alone; skips what its block mask drops."""
    flex = needs("torch.nn.attention.flex_attention", "torch")
    q, k, v = x.heads_first
    mask = None
    if x.blocks is not None:
        counts, indices = x.kept_blocks()
        full = {"full_kv_num_blocks": counts, "full_kv_indices": indices, "BLOCK_SIZE": x.block_size}
        blocks, (bq, bk) = x.blocks, x.block_size

        def seen(b, h, i, j):  # said in full, though it is not applied to blocks kept wholly, which all are
            return blocks[i // bq, j // bk]

        mask = flex.BlockMask.from_kv_blocks(torch.zeros_like(counts), indices, mask_mod=seen, **full)
    elif x.causal:
        lengths = {"Q_LEN": q.shape[2], "KV_LEN": k.shape[2], "device": q.device}
        mask = flex.create_block_mask(lambda b, h, i, j: j <= i, None, None, **lengths)
    # Past eight recompilations torch runs the function uncompiled, which keeps all scores: start anew, and let
    # fullgraph make it an error.
    torch._dynamo.reset()
    compiled = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True)
    return Call(lambda: compiled(q, k, v, block_mask=mask, enable_gqa=x.grouped).transpose(1, 2))


@peer(FA4)
def fa4(x: Attention) -> Call:
    """FlashAttention 4, the CuTe DSL one; blocks must be what its tiles are for the head size, (128, 128) up to 128."""
    attend = needs("flash_attn.cute.interface", "flash-attn-4").flash_attn_func
    options = {"causal": x.causal}
    if x.blocks is not None:
        sparsity = needs("flash_attn.cute.block_sparsity", "flash-attn-4")
        counts, indices = x.kept_blocks()
        options["block_sparse_tensors"] = sparsity.BlockSparseTensorsTorch(
            mask_block_cnt=torch.zeros_like(counts),
            mask_block_idx=indices,
            full_block_cnt=counts,
            full_block_idx=indices,
            block_size=tuple(x.block_size),
        )
    q, k, v = x.q, x.k, x.v
    return Call(lambda: attend(q, k, v, **options)[0])
