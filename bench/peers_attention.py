"""What attention is measured against: torch's SDPA, FlexAttention and FlashAttention 4, forward only.

As in peers.py: one `Attention` makes the tensors of a row, which all candidates share, and every set-up ends with its
`verified`. Tensors are (B, S, H, D), as FlashAttention takes them; torch's functions get (B, H, S, D) views, which
they take as they are.
"""

from collections.abc import Callable
from functools import cache, cached_property, partial

import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention.masks.mask_mods import window_bounds
from cute_kernels.testing.reference import attention_plainly

from .peers import Call, compare, fastest, made, needs, peer, verified

FLASH = "SDPA flash"
CUDNN = "SDPA cuDNN"
FLEX = "FlexAttention"
FA4 = "FA4"

SAMPLE = 24  # queries compared, each with a head of its own
# Of FlexAttention's kernel for blocks smaller than the 128 x 128 that it takes by itself: warps, pipeline stages.
FLEX_SETTINGS = ((4, 3), (4, 2), (4, 4))


class Attention:
    """softmax(scale * Q K^T, masked) V, with scale = 1 / sqrt(D), whose tensors are made once, when first asked for.

    Query i of S is at position i + S_kv - S: the last query at the last key, whatever the lengths.

    Args:
        q: (B, S, H, D). This, k, v and blocks are each a tensor or a function that makes it.
        k, v: (B, S_kv, H_kv, D), H a multiple of H_kv.
        causal: whether key j is seen only by queries at its position and after it.
        blocks: (S / bq, S_kv / bk) bool, the same for all heads: which blocks of the scores are kept, wholly.
        block_size: (bq, bk).
        window: (left, right): a query at position p sees keys p - left to p + right, None for no bound.
    """

    def __init__(
        self, q, k, v, causal: bool = False, blocks=None, block_size: tuple[int, int] = (128, 128), window=None
    ) -> None:
        if (causal or window is not None) and blocks is not None:
            raise ValueError("causal or window and blocks are both given; a block mask says by itself what is kept")
        self._q, self._k, self._v, self._blocks = q, k, v, blocks
        self.causal, self.block_size, self.window = causal, block_size, window

    bias = activation = None  # which a peer would have to fuse

    q = cached_property(lambda self: made(self._q))
    k = cached_property(lambda self: made(self._k))
    v = cached_property(lambda self: made(self._v))
    blocks = cached_property(lambda self: made(self._blocks))

    def verified(self, call: Call) -> Call:
        """As peers.verified, and each query by itself: one that sees few keys has a much larger output than others."""
        verified(call, lambda: self.sample)
        index, reference = self.sample
        size = reference.norm(dim=1, keepdim=True).clamp(min=1e-6)
        compare(call()[index].float() / size, reference / size, where=", but not where queries see few keys")
        return call

    def shown(self, out: Tensor) -> Tensor:
        """(B, S, H, D) of an output as an op of ours writes it."""
        return out.transpose(1, 2)

    @property
    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as torch takes them: (B, H, S, D) views."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)

    @property
    def grouped(self) -> bool:
        """Whether several query heads share one of K and V."""
        return self.q.shape[2] != self.k.shape[2]

    @property
    def offset(self) -> int:
        """The position of the first query."""
        return self.k.shape[1] - self.q.shape[1]

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """(left, right) of the keys that a query sees about its position; None without bound."""
        return window_bounds(self.window, self.causal)

    @cached_property
    def sample(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """((batch, query, head), reference): some queries, each in another place, and their output in fp32."""
        batch, queries, heads, _ = self.q.shape
        pick = torch.arange(SAMPLE, device=self.q.device)
        b, h = pick % batch, (pick // batch) % heads
        i = torch.linspace(0, queries - 1, SAMPLE, dtype=torch.float64).long().to(self.q.device)
        rows = (self.head(b[n], h[n], i[n : n + 1], torch.float32) for n in range(SAMPLE))
        return (b, i, h), torch.cat(list(rows))

    def exact(self) -> Tensor:
        """(B, S, H, D): all of the output in fp64."""
        batch, queries, heads, _ = self.q.shape
        i = torch.arange(queries, device=self.q.device)
        items = ([self.head(b, h, i, torch.float64) for h in range(heads)] for b in range(batch))
        return torch.stack([torch.stack(of_item, 1) for of_item in items])

    def head(self, b, h, queries: Tensor, dtype: torch.dtype) -> Tensor:
        """(len(queries), D): what these queries of a head get, computed in `dtype`; 0 where a query sees no key."""
        of_kv = h // (self.q.shape[2] // self.k.shape[2])
        q, k, v = (t.to(dtype)[None, None] for t in (self.q[b, queries, h], self.k[b, :, of_kv], self.v[b, :, of_kv]))
        return attention_plainly(q, k, v, self.kept(queries))[0][0, 0]

    def kept(self, queries: Tensor) -> Tensor:
        """(len(queries), S_kv) bool: the keys that each sees."""
        keys = torch.arange(self.k.shape[1], device=queries.device)
        if self.blocks is not None:
            return self.blocks[queries // self.block_size[0]][:, keys // self.block_size[1]]
        away = keys - (queries[:, None] + self.offset)
        left, right = (self.q.shape[1] + self.k.shape[1] if n is None else n for n in self.bounds)
        return (away >= -left) & (away <= right)

    def out(self) -> Tensor:
        """A new output for one candidate, (B, S, H, D)."""
        return torch.empty_like(self.q)

    def kept_blocks(self) -> tuple[Tensor, Tensor]:
        """(1, 1, rows) int32 counts and (1, 1, rows, columns) int32 indices, of which the first `count` are kept."""
        counts = self.blocks.sum(dim=1, dtype=torch.int32)
        indices = self.blocks.int().argsort(dim=1, descending=True, stable=True).int()
        return counts[None, None], indices[None, None].contiguous()


def sdpa(x: Attention, backend: SDPBackend) -> Call:
    """torch's scaled_dot_product_attention, of which only one backend may run; torch raises if it cannot."""
    for given, what in ((x.blocks, "block masks"), (x.window, "window")):
        if given is not None:
            raise NotImplementedError(f"SDPA has no {what}; a dense mask would skip no work")
    queries, keys = x.q.shape[1], x.k.shape[1]
    if x.causal and queries not in (1, keys):
        raise NotImplementedError(f"SDPA aligns {queries} queries with the first of {keys} keys, not with the last")
    q, k, v = x.heads_first
    options = {"is_causal": x.causal and queries > 1, "enable_gqa": x.grouped}  # one query sees all up to its own key

    def bare() -> Tensor:
        return nnf.scaled_dot_product_attention(q, k, v, **options)

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return bare().transpose(1, 2)

    return Call(run, bare=bare, within=lambda: sdpa_kernel(backend))


sdpa_flash = peer(FLASH)(partial(sdpa, backend=SDPBackend.FLASH_ATTENTION))  # FlashAttention 2, as torch ships it
sdpa_cudnn = peer(CUDNN)(partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION))


@peer(FLEX)
def flex_attention(x: Attention, settings: int = 1, measure: Callable | None = None) -> Call:
    """FlexAttention's Triton kernel, compiled for this shape alone; skips what its block mask drops.

    Blocks smaller than its tiles need tiles of their size; of them the fastest of so many `settings` is taken.
    """
    needs("torch.nn.attention.flex_attention", "torch")
    mask, (q, k, v) = flex_mask(x), x.heads_first

    def make(options: tuple) -> Callable[[], Tensor]:
        attend = compiled((q.shape, k.shape, x.bounds, x.blocks is None, tuple(x.block_size), options))
        terms = {"block_mask": mask, "enable_gqa": x.grouped, "kernel_options": dict(options) or None}
        return lambda: attend(q, k, v, **terms).transpose(1, 2)

    if x.blocks is None or min(x.block_size) >= 128:
        return Call(make(()))
    tile = (("BLOCK_M", x.block_size[0]), ("BLOCK_N", x.block_size[1]))
    tried = [(*tile, ("num_warps", warps), ("num_stages", stages)) for warps, stages in FLEX_SETTINGS[:settings]]
    best, call = tried[0], make(tried[0])
    if len(tried) > 1:
        best, call = fastest(make, tried, lambda: x.sample, *([measure] if measure else []))
    return Call(call, note=", ".join(f"{name} {value}" for name, value in best))


@cache
def compiled(key: tuple) -> Callable:
    """torch.compile'd flex_attention, one for all masks of one kind, which differ in what their tensors hold."""
    from torch.nn.attention.flex_attention import flex_attention

    # Past eight recompilations torch runs the function uncompiled, which keeps all scores: start anew, and let
    # fullgraph make it an error.
    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def flex_mask(x: Attention):
    """FlexAttention's block mask of what x sees; None where it sees all."""
    flex = needs("torch.nn.attention.flex_attention", "torch")
    if x.blocks is not None:
        blocks, (bq, bk) = x.blocks, x.block_size

        def seen(b, h, i, j):  # said in full, though it is not applied to blocks kept wholly, which all are
            return blocks[i // bq, j // bk]

        counts, indices = x.kept_blocks()
        full = {"full_kv_num_blocks": counts, "full_kv_indices": indices, "BLOCK_SIZE": x.block_size}
        return flex.BlockMask.from_kv_blocks(torch.zeros_like(counts), indices, mask_mod=seen, **full)
    (left, right), offset = x.bounds, x.offset
    if left is None and right is None:
        return None

    def near(b, h, i, j):
        if left is None:
            return j <= i + (offset + right)
        if right is None:
            return j >= i + (offset - left)
        return (j >= i + (offset - left)) & (j <= i + (offset + right))

    return flex.create_block_mask(near, None, None, Q_LEN=x.q.shape[1], KV_LEN=x.k.shape[1], device=x.q.device)


@peer(FA4)
def fa4(x: Attention) -> Call:
    """FlashAttention 4, the CuTe DSL one; blocks must be what its tiles are for the head size, (128, 128) up to 128."""
    attend = needs("flash_attn.cute.interface", "flash-attn-4").flash_attn_func
    options = {"causal": x.causal}
    if x.window is not None:
        options["window_size"] = x.bounds
    if x.blocks is not None:
        sparsity = needs("flash_attn.cute.block_sparsity", "flash-attn-4")
        counts, indices = x.kept_blocks()
        lists = {"mask_block_cnt": torch.zeros_like(counts), "mask_block_idx": indices}
        lists |= {"full_block_cnt": counts, "full_block_idx": indices, "block_size": tuple(x.block_size)}
        options["block_sparse_tensors"] = sparsity.BlockSparseTensorsTorch(**lists)
    q, k, v = x.q, x.k, x.v
    return Call(lambda: attend(q, k, v, **options)[0])
