"""What attention's backward is measured against: the peers of peers_attention.py, called through torch's autograd.

One `Training` makes the tensors of a row, which all candidates share: q, k and v are leaves that require gradients, and
`dout` is the gradient of the output. A candidate is a function that computes the output; `timed` makes of it the call
that a row times, forward, backward or both. Every set-up ends with `Training.verified`.
"""

import contextlib
from collections.abc import Callable
from functools import cache, cached_property, partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from cute_kernels.testing.reference import attention_plainly

from . import peers_attention
from .peers import Call, compare, made, needs, peer
from .peers_attention import CUDNN, FA4, FLASH, FLEX, Attention, flex_mask

FORWARD, BACKWARD, STEP = "forward", "backward", "forward and backward"

TILE = 128  # rows that are compared by themselves: a lost tile of small gradients shows
TOLERANCE = 0.02  # P and dS are rounded to bf16 too: 0.0025 to 0.004 of a gradient's norm
SCORES = 1 << 26  # of one head that the reference has in memory at a time


class Training(Attention):
    """As Attention, with gradients.

    Args:
        dout: (B, S, H, D), the output's gradient; a tensor or a function that makes it.
        what: FORWARD, BACKWARD or STEP: what a call computes.
        sinks: (H,), a logit a head that takes part in the softmax and has no value; or a function, or None.
        slopes: (H,) fp32, of ALiBi, which get no gradient; or a function, or None.
        lengths: of documents that are packed one after another in the S tokens of one item; None: one document.
        terms: Attention's causal, blocks, block_size and window.
    """

    def __init__(
        self, q, k, v, dout, *, what: str = BACKWARD, sinks=None, slopes=None, lengths: tuple[int, ...] | None = None,
        **terms,
    ) -> None:  # fmt: skip
        super().__init__(q, k, v, **terms)
        self._dout, self._sinks, self._slopes, self.what, self.lengths = dout, sinks, slopes, what, lengths

    q = cached_property(lambda self: made(self._q).requires_grad_())
    k = cached_property(lambda self: made(self._k).requires_grad_())
    v = cached_property(lambda self: made(self._v).requires_grad_())
    dout = cached_property(lambda self: made(self._dout))
    sinks = cached_property(lambda self: None if self._sinks is None else made(self._sinks).requires_grad_())
    slopes = cached_property(lambda self: made(self._slopes))

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """q, k, v, and the sinks where there are some."""
        return (self.q, self.k, self.v) if self.sinks is None else (self.q, self.k, self.v, self.sinks)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """(documents + 1,) int32: where each begins, and where the last one ends."""
        ends = torch.tensor([0, *self.lengths], dtype=torch.int64).cumsum(0)
        return ends.to(self.q.device, torch.int32)

    def kept(self, queries: Tensor) -> Tensor:
        """(len(queries), S_kv) bool: the keys that each sees."""
        seen = super().kept(queries)
        if self.lengths is None:
            return seen
        lengths = torch.tensor(self.lengths, device=queries.device)
        document = torch.arange(len(lengths), device=queries.device).repeat_interleave(lengths)
        return seen & (document[queries][:, None] == document)

    def alibi(self, head: int, queries: Tensor) -> Tensor | None:
        """(len(queries), S_kv): what ALiBi adds to the scores of a head; None without slopes."""
        if self.slopes is None:
            return None
        keys = torch.arange(self.k.shape[1], device=queries.device)
        return -self.slopes[head] * (keys - (queries[:, None] + self.offset)).abs()

    def verified(self, call: Call) -> Call:
        """`call`, once what it returns has agreed with `expected`: all rows of some heads, and each tile by itself."""
        # Memory that another candidate freed may hold the right result: what this call leaves unwritten is to be NaN.
        for found in call():
            found.detach().fill_(float("nan"))
        results = call()
        for index, wanted in self.expected:
            for (name, reference), found in zip(wanted.items(), results, strict=False):
                if reference is not None:
                    self.agree(name, found.detach()[index[name]], reference)
        return call

    def agree(self, name: str, found: Tensor, reference: Tensor) -> None:
        """Raise WrongResult unless (rows, ...) agree, as a whole and where they are small."""
        compare(found, reference, TOLERANCE, f" of {name}")
        if len(reference) <= TILE:
            return
        tiles = (reference.float().flatten(1).norm(dim=1) ** 2).split(TILE)
        sizes = [tile.sum().sqrt().clamp(min=1e-6).expand(len(tile)) for tile in tiles]
        size = torch.cat(sizes).view(-1, *[1] * (reference.dim() - 1))
        compare(found.float() / size, reference / size, TOLERANCE, f" of {name}, but not where it is small")

    @cached_property
    def expected(self) -> list[tuple[dict, dict]]:
        """(name -> index into a result, name -> reference) of the first and the last head of K, with its queries'.

        The names are in the order in which a call returns its results.
        """
        batch, heads, kv_heads = self.q.shape[0], self.q.shape[2], self.k.shape[2]
        group, found = heads // kv_heads, []
        for b, h in dict.fromkeys(((0, 0), (batch - 1, kv_heads - 1))):
            of_group, everything = slice(h * group, (h + 1) * group), slice(None)
            out, dq, dk, dv, dsinks = self.of_head(b, h)
            rows, cols = (b, everything, of_group), (b, everything, h)
            if self.what == FORWARD:
                found.append(({"out": rows}, {"out": out}))
                continue
            index = {"dq": rows, "dk": cols, "dv": cols, "dsinks": (of_group,)}
            # A sink's gradient is a sum over all items.
            found.append((index, {"dq": dq, "dk": dk, "dv": dv, "dsinks": dsinks if batch == 1 else None}))
        return found

    def of_head(self, b: int, h: int) -> tuple:
        """(out, dq, dk, dv, dsinks) in fp32, of a head of K and those of Q that share it, by torch's autograd.

        out and dq are (S, heads of Q, D), dk and dv (S_kv, D), dsinks (heads of Q,) or None.
        """
        group = self.q.shape[2] // self.k.shape[2]
        k, v = (t[b, :, h].detach().float().requires_grad_() for t in (self.k, self.v))
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        outs, dqs, dsinks = [], [], []
        rows = torch.arange(self.q.shape[1], device=self.q.device).split(max(1, SCORES // len(k)))
        for head in range(h * group, (h + 1) * group):
            sinks = () if self.sinks is None else (self.sinks[head].detach().float().requires_grad_(),)
            parts, dsink = [], 0.0
            for some in rows:
                q = self.q[b, some, head].detach().float().requires_grad_()
                of_one = (t[None, None] for t in (q, k, v))
                out, lse = attention_plainly(*of_one, self.kept(some), bias=self.alibi(head, some))
                out, lse = out[0, 0], lse[0, 0]
                for sink in sinks:
                    out = out * torch.sigmoid(lse - sink)[:, None]
                dout = self.dout[b, some, head].float()
                dq, more_k, more_v, *of_sink = torch.autograd.grad(out, (q, k, v, *sinks), dout)
                dk, dv, dsink = dk + more_k, dv + more_v, sum(of_sink, dsink)
                parts.append((out.detach(), dq))
            out, dq = (torch.cat(part) for part in zip(*parts, strict=True))
            outs.append(out)
            dqs.append(dq)
            dsinks.append(dsink)
        dsinks = None if self.sinks is None else torch.stack(dsinks)
        return torch.stack(outs, 1), torch.stack(dqs, 1), dk, dv, dsinks


def timed(
    x: Training, forward: Callable[[], Tensor], within: Callable = contextlib.nullcontext, note: str = ""
) -> Call:
    """The call that a row times, of a function that computes the differentiable (B, S, H, D) output.

    It returns (out,) or the gradients of x.leaves. BACKWARD keeps the graph of one forward. All runs in `within()`.
    """
    if x.what == BACKWARD:
        with within():
            kept = forward()

    def run() -> tuple[Tensor, ...]:
        with within():
            if x.what == FORWARD:
                return (forward(),)
            if x.what == STEP:
                return torch.autograd.grad(forward(), x.leaves, x.dout)
            return torch.autograd.grad(kept, x.leaves, x.dout, retain_graph=True)

    return Call(run, note)


def refuse(x: Training, name: str) -> None:
    """Raise NotImplementedError for terms that these functions of torch have no argument for."""
    for given, what in ((x.sinks, "sinks"), (x.lengths, "packed documents")):
        if given is not None:
            raise NotImplementedError(f"{name} has no {what}")


def sdpa(x: Training, backend: SDPBackend) -> Call:
    """torch's scaled_dot_product_attention of one backend, whose backward is that backend's too."""
    refuse(x, "SDPA")
    return timed(x, peers_attention.sdpa(x, backend))


sdpa_flash = peer(FLASH)(partial(sdpa, backend=SDPBackend.FLASH_ATTENTION))
sdpa_cudnn = peer(CUDNN)(partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION))


@peer(FLEX)
def flex_attention(x: Training) -> Call:
    """FlexAttention's Triton kernels, forward and backward compiled for this shape.

    Blocks narrower than the tiles that torch takes by itself have no backward but one of torch's own search.
    """
    needs("torch.nn.attention.flex_attention", "torch")
    refuse(x, FLEX)
    # Else torch's backward writes to what it saved, and refuses to run a second time.
    needs("torch._functorch.config", "torch").donated_buffer = False
    mask, (q, k, v) = flex_mask(x), x.heads_first
    search = x.blocks is not None and min(x.block_size) < 128
    attend = compiled((q.shape, k.shape, x.bounds, x.blocks is None, tuple(x.block_size), x.what), search)
    call = partial(attend, q, k, v, block_mask=mask, enable_gqa=x.grouped)
    return timed(x, lambda: call().transpose(1, 2), note="max-autotune" if search else "")


@cache
def compiled(key: tuple, search: bool) -> Callable:
    """torch.compile'd flex_attention, one for all masks of one kind; see peers_attention.compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    mode = "max-autotune-no-cudagraphs" if search else None
    return torch.compile(flex_attention, dynamic=False, fullgraph=True, mode=mode)


@peer(FA4)
def fa4(x: Training) -> Call:
    """FlashAttention 4 through autograd, or its varlen function for packed documents."""
    interface = needs("flash_attn.cute.interface", "flash-attn-4")
    if x.blocks is not None:
        raise NotImplementedError("FA4 takes other lists of blocks for backward, which this peer does not make")
    options, q, k, v = {"causal": x.causal}, x.q, x.k, x.v
    if x.window is not None:
        options["window_size"] = x.bounds
    if x.sinks is not None:
        options["learnable_sink"] = x.sinks
    if x.lengths is None:
        return timed(x, lambda: interface.flash_attn_func(q, k, v, **options)[0])
    options |= {f"cu_seqlens_{side}": x.cu_seqlens for side in "qk"}
    options |= {f"max_seqlen_{side}": max(x.lengths) for side in "qk"}
    packed = tuple(t.squeeze(0) for t in (q, k, v))  # a view in backward, too, where t[0] fills and copies
    return timed(x, lambda: interface.flash_attn_varlen_func(*packed, **options)[0][None])
