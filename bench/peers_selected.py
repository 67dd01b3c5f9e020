"""What selected-block attention is measured against: FlashAttention 4 with a membership mask, a Triton kernel that
gathers each token's blocks, and cuDNN frontend's block-sparse attention.

One `Selected` makes the tensors of a row, (1, S, H, D), which all candidates share. Ours is compared with the truth in
FP32 of some tokens and keys, and peers with all of ours.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from . import timing
from .peers import Call, compare, fastest, made, needs, peer
from .peers_attention import FA4
from .peers_attention_backward import BACKWARD, FORWARD, TOLERANCE, timed

GATHER = "Triton gather"
CUDNN_BSA = "cuDNN frontend BSA"
NAMES = {FORWARD: ("out",), BACKWARD: ("dq", "dk", "dv")}

SAMPLE = 32  # tokens whose rows are compared with the truth, and
KEYS = 6  # keys, of all tokens that selected them
CHUNK = 2**28  # bytes of gathered keys in FP32
TILE = 128  # tokens of a query tile of FA4, whose lists are united
FA4_COLUMNS = {FORWARD: {128: 128, 256: 80}, BACKWARD: {128: 128, 256: 64}}  # D -> keys of its tile with block sparsity
LARGEST = 2**31  # elements of a table that is read with 32-bit offsets
# Of the Triton kernel: gathered keys of a step, warps, pipeline stages
SETTINGS = (
    (32, 1, 3), (32, 2, 2), (32, 2, 3), (32, 2, 4), (32, 4, 3), (64, 2, 2),
    (64, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 2),
)  # fmt: skip
TUNED = 8192  # last tokens, which settings are timed with
_best: dict[tuple, tuple] = {}


class Truth(NamedTuple):
    """Some tokens' rows of the heads that share a KV head, in FP32: n tokens, g heads, L selected keys.

    out and dq (n, g, D); P and dS (n, g, L), dS without the scale of the scores; keys (n, L), which may repeat.
    """

    out: Tensor
    dq: Tensor
    P: Tensor
    dS: Tensor
    keys: Tensor


class Selected:
    """Attention of one sequence in which every token, or run of tokens, has its own list of KV blocks.

    Args:
        q, dout: (1, S, H, D). These, k, v and indices are each a tensor or a function that makes it.
        k, v: (1, S, Hkv, D).
        indices: (S / run, G, top) int32, G in 1, Hkv: ascending blocks, padded with -1.
        block_size: tokens of a block.
        run: consecutive tokens that share a list.
        causal: True if a token sees keys up to its own.
        what: FORWARD or BACKWARD.
    """

    bias = activation = None  # which a peer would have to fuse

    def __init__(self, q, k, v, dout, indices, block_size: int, run: int = 1, causal=True, what=FORWARD) -> None:
        self._q, self._k, self._v, self._dout, self._indices = q, k, v, dout, indices
        self.block_size, self.run, self.causal, self.what = block_size, run, causal, what
        self.ours: list[Tensor] | None = None  # results, once they have been compared with the truth

    def _leaf(self, value) -> Tensor:
        return made(value).requires_grad_(self.what == BACKWARD)

    q = cached_property(lambda self: self._leaf(self._q))
    k = cached_property(lambda self: self._leaf(self._k))
    v = cached_property(lambda self: self._leaf(self._v))
    dout = cached_property(lambda self: made(self._dout))
    indices = cached_property(lambda self: made(self._indices))
    counts = cached_property(lambda self: (self.indices >= 0).sum(-1, dtype=torch.int32))

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v

    @property
    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as torch takes them: (1, H, S, D) views."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.q.shape[2] // self.k.shape[2]

    def table(self, tokens: int, columns: int) -> Tensor:
        """(G, S / tokens, S / columns) bool: pairs of tiles in which a token has a block. A multiple of run and
        block_size each."""
        size, groups = self.q.shape[1], self.indices.shape[1]
        grid = -(-size // tokens), -(-size // columns)
        row = torch.arange(len(self.indices), device=self.indices.device)[:, None, None] * self.run // tokens
        column = (self.indices.long() * self.block_size // columns).masked_fill(self.indices < 0, grid[1])
        found = torch.zeros(groups, grid[0] * (grid[1] + 1), dtype=torch.bool, device=self.indices.device)
        for group in range(groups):
            found[group, (row * (grid[1] + 1) + column)[:, group].flatten()] = True
        return found.view(groups, grid[0], -1)[..., :-1]

    def truth(self, tokens: Tensor, kv_head: int) -> Iterator[tuple[Tensor, Truth]]:
        """(tokens, truth) of parts of these tokens, so large that gathered keys fit into CHUNK."""
        k, v = (t[0, :, kv_head].detach().float() for t in (self.k, self.v))
        heads, scale = slice(kv_head * self.group, (kv_head + 1) * self.group), k.shape[-1] ** -0.5
        span = torch.arange(self.block_size, device=k.device)
        size = 4 * self.indices.shape[2] * self.block_size * k.shape[-1]
        for some in tokens.split(max(1, CHUNK // size)):
            blocks = self.indices[some // self.run, kv_head % self.indices.shape[1]].long()
            keys = (blocks[..., None] * self.block_size + span).flatten(1)
            seen = (blocks >= 0).repeat_interleave(self.block_size, 1) & (keys < len(k))
            if self.causal:
                seen &= keys <= some[:, None]
            keys = keys.clamp(0, len(k) - 1)
            q, dout = (t[0, some, heads].detach().float() for t in (self.q, self.dout))
            some_k, some_v = k[keys], v[keys]
            scores = (q @ some_k.mT * scale).masked_fill(~seen[:, None], float("-inf"))
            P = scores.softmax(-1)
            out = P @ some_v
            dS = P * (dout @ some_v.mT - (out * dout).sum(-1, keepdim=True))
            yield some, Truth(out, scale * dS @ some_k, P, dS, keys)

    def truth_of_key(self, key: int, kv_head: int) -> tuple[Tensor, Tensor]:
        """(dk, dv), two (D,), of a key: of all tokens that selected its block."""
        of_key = (self.indices[:, kv_head % self.indices.shape[1]] == key // self.block_size).any(-1)
        tokens = of_key.nonzero().flatten()
        tokens = (tokens[:, None] * self.run + torch.arange(self.run, device=tokens.device)).flatten()
        heads, D = slice(kv_head * self.group, (kv_head + 1) * self.group), self.k.shape[-1]
        dk, dv = torch.zeros(2, D, device=self.k.device)
        for some, exact in self.truth(tokens, kv_head):
            q, dout = (t[0, some, heads].detach().float() for t in (self.q, self.dout))
            at = (exact.keys == key)[:, None]
            dv += torch.einsum("ng,ngd->d", (exact.P * at).sum(-1), dout)
            dk += torch.einsum("ng,ngd->d", (exact.dS * at).sum(-1), q) * D**-0.5
        return dk, dv

    def verified(self, call: Call) -> Call:
        """`call`, once all that it returns agrees with ours; the first one, which is ours, with the truth."""
        # Memory that another candidate freed may hold the right result: what this call leaves unwritten is to be NaN.
        for found in call():
            found.detach().fill_(float("nan"))
        results = [found.detach() for found in call()]
        if self.ours is None:
            self.agree(results)
            self.ours = results
            return call
        for name, found, wanted in zip(NAMES[self.what], results, self.ours, strict=True):
            compare(found, wanted, TOLERANCE, f" of {name}")
        return call

    def agree(self, results: list[Tensor]) -> None:
        """Raise WrongResult unless rows of some tokens, and in backward those of some keys, are right."""
        S, kv_heads = self.q.shape[1], self.k.shape[2]
        # Tokens at both ends of tiles and in between
        spread = torch.linspace(0, S - 1, min(S, SAMPLE), dtype=torch.float64).long().to(self.q.device)
        for kv_head in range(min(kv_heads, len(spread))):
            heads = slice(kv_head * self.group, (kv_head + 1) * self.group)
            for tokens, exact in self.truth(spread[kv_head::kv_heads], kv_head):
                rows = results[0][0, tokens, heads]
                if self.what == BACKWARD:
                    compare(rows, exact.dq, TOLERANCE, " of dq")
                    continue
                size = exact.out.norm(dim=-1, keepdim=True).clamp(min=1e-6)  # tokens with few keys have larger outputs
                compare(rows.float() / size, exact.out / size, TOLERANCE, " of out")
        if self.what == BACKWARD:
            # Not in the first blocks, which most tokens select
            keys = torch.linspace(S // 4, S - 1, KEYS, dtype=torch.float64).long().tolist()
            pairs = [(key, number % kv_heads) for number, key in enumerate(keys)]
            exact = [torch.stack(rows) for rows in zip(*(self.truth_of_key(*pair) for pair in pairs), strict=True)]
            for name, found, wanted in zip(("dk", "dv"), results[1:], exact, strict=True):
                compare(torch.stack([found[0, key, head] for key, head in pairs]), wanted, TOLERANCE, f" of {name}")


# -- FlashAttention 4 ----------------------------------------------------------------------------------------


def membership(x: Selected) -> tuple[Tensor, int]:
    """(table, blocks of a byte): (G, S, n) uint8, a byte for each block, or a bit where that would be too large."""
    size, blocks, groups = x.q.shape[1], -(-x.q.shape[1] // x.block_size), x.indices.shape[1]
    of_byte = 1 if groups * size * blocks < LARGEST else 8
    table = torch.zeros(groups, size, -(-blocks // of_byte), dtype=torch.uint8, device=x.q.device)
    for part in torch.arange(size, device=x.q.device).split(max(1, LARGEST // 8 // (groups * blocks))):
        bytes_of = torch.zeros(len(part), groups, blocks + 1, dtype=torch.uint8, device=x.q.device)
        index = x.indices[part].long()
        bytes_of = bytes_of.scatter_(-1, index.masked_fill(index < 0, blocks), 1)[..., :blocks].transpose(0, 1)
        if of_byte > 1:
            padded = torch.nn.functional.pad(bytes_of, (0, -blocks % of_byte)).unflatten(-1, (-1, of_byte))
            bytes_of = sum(padded[..., bit] << bit for bit in range(of_byte))
        table[:, part] = bytes_of
    return table, of_byte


def member_mod(block_size: int, share: int, of_byte: int) -> Callable:
    """A mask_mod of FA4: the key's block is in the list of the token, aux_tensors[0], and the key is not later."""
    cutlass, cute = needs("cutlass", "nvidia-cutlass-dsl"), needs("cutlass.cute", "nvidia-cutlass-dsl")
    utils = needs("flash_attn.cute.utils", "flash-attn-4")

    @cute.jit
    def member(b, h, q, kv, seqlen, aux):
        block = kv[0] // block_size
        entry = cutlass.Int32(aux[0][h[0] // share, q[0], block // of_byte])
        bit = utils.scalar_to_ssa((entry >> (block % of_byte)) & 1, cutlass.Int32)
        return (bit != utils.scalar_to_ssa(0, cutlass.Int32)) & (kv <= q)

    return member


def lists_of(table: Tensor) -> tuple[Tensor, Tensor]:
    """(1, G, rows) int32 counts and (1, G, rows, columns) int32 indices, of which the first `count` are those of it."""
    counts = table.sum(-1, dtype=torch.int32)
    indices = table.byte().argsort(dim=-1, descending=True, stable=True).int()
    return counts[None], indices[None].contiguous()


@peer(FA4)
def fa4(x: Selected) -> Call:
    """FlashAttention 4 with a mask_mod that reads a table of membership, and lists of tiles of 128 tokens."""
    attend = needs("flash_attn.cute.interface", "flash-attn-4").flash_attn_func
    make = needs("flash_attn.cute.block_sparsity", "flash-attn-4").BlockSparseTensorsTorch
    groups, heads = x.indices.shape[1], x.q.shape[2]
    table, of_byte = membership(x)

    def sparsity(what: str):
        columns = FA4_COLUMNS[what][x.q.shape[-1]]
        tiles = x.table(TILE, columns)
        if groups > 1:
            tiles = tiles.repeat_interleave(heads // groups, 0)
        counts, indices = lists_of(tiles if what == FORWARD else tiles.mT)
        none = {"full_block_cnt": torch.zeros_like(counts), "full_block_idx": indices}
        return make(mask_block_cnt=counts, mask_block_idx=indices, block_size=(TILE, columns), **none)

    options = {"mask_mod": member_mod(x.block_size, heads // groups, of_byte), "aux_tensors": [table]}
    options["block_sparse_tensors"] = sparsity(FORWARD)
    if x.what == BACKWARD:
        options["block_sparse_tensors_bwd"] = sparsity(BACKWARD)
    q, k, v = x.q, x.k, x.v
    note = f"membership of {'a byte' if of_byte == 1 else 'a bit'} a block, unions of {TILE} tokens"
    return timed(x, lambda: attend(q, k, v, **options)[0], note=note)


# -- Triton --------------------------------------------------------------------------------------------------


@peer(GATHER)
def gather(x: Selected, measure: Callable = timing.interleaved) -> Call:
    """selected_gather's kernel with the fastest of SETTINGS, timed with the last tokens of the first row of a shape."""
    needs("triton", "triton")
    if x.what == BACKWARD:
        raise NotImplementedError("the Triton kernel written for this benchmark has no backward")
    from .selected_gather import launch

    tensors, out = (x.q, x.k, x.v, x.indices, x.counts), torch.empty_like(x.q)
    size, wanted = x.q.shape[1], x.ours
    shape = (*x.q.shape[2:], x.k.shape[2])

    def make(setting: tuple, first: int = 0) -> Callable[[], Tensor]:
        def run() -> Tensor:
            launch(*tensors, out, x.block_size, first, *setting)
            return out[:, first:]

        return run

    if shape not in _best:
        first = max(0, size - TUNED)
        expected = slice(None), wanted[0][:, first:].float()
        _best[shape], _ = fastest(lambda setting: make(setting, first), list(SETTINGS), lambda: expected, measure)
    call = make(_best[shape])
    return Call(lambda: (call(),), note="{} keys a step, {} warps, {} stages".format(*_best[shape]))


# -- cuDNN frontend ------------------------------------------------------------------------------------------


@peer(CUDNN_BSA)
def cudnn_bsa(x: Selected) -> Call:
    """cuDNN frontend's CuTe DSL kernels, forward or backward, of lists of query blocks that all are as long."""
    bsa = needs("cudnn.block_sparse_attention.api", "nvidia-cudnn-frontend")
    if x.causal or x.run != x.block_size:
        raise NotImplementedError("cuDNN frontend's block-sparse attention has no causal masks, and lists of blocks")
    q, k, v, dout = (t.detach().transpose(1, 2) for t in (*x.leaves, x.dout))
    lists = x.indices.transpose(0, 1)[None].contiguous()  # (1, H, rows, top)

    def forward() -> tuple[Tensor, Tensor]:
        found = bsa.block_sparse_attention_forward(q, k, v, lists, sparse_block_size=x.block_size)
        return found["o_tensor"], found["lse_tensor"]

    if x.what == FORWARD:
        return Call(lambda: (forward()[0].transpose(1, 2),))
    out, lse = forward()

    def backward() -> tuple[Tensor, ...]:
        found = bsa.block_sparse_attention_backward(dout, q, k, v, out, lse, lists, sparse_block_size=x.block_size)
        return tuple(found[f"{name}_tensor"].transpose(1, 2) for name in NAMES[BACKWARD])

    return Call(backward, note="transposes the lists in each call")
