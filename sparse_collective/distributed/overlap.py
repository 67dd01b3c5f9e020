"""Transfers of sequence-parallel layers, beside their GEMMs.

Each rank has t tokens. The first layer multiplies the tokens of all ranks; the second computes each rank's summand of
its result for all tokens, and the owner of a token adds these. Rank r works on its own tokens, then on those of
r + 1, r + 2, ..., and finishes its own last. Two ranks:

    GEMMs     1st own | 1st other | 2nd other | 2nd own, adds what arrived
    copies    x       |           |           |
    stores                        | y, by the GEMM itself

x is copied to the memory of the others, to r - 1, r - 2, ..., so that no rank is sent to by two at once. The GEMM of
another rank's tokens stores its result to that rank's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cute_kernels.runtime.links import PUSHED, STORED, Link, link_of
from cute_kernels.runtime.peers import PeerBuffer, Peers
from cute_kernels.runtime.torch_compat import all_gather_single

from .. import dispatch
from ..arguments import BsrArgs
from ..bsr import BsrMatrix

__all__ = ["Exchange", "captured", "gated_into", "linear_into"]


def linear_into(
    W: BsrMatrix, x: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> None:
    """Write x @ W.T + bias + residual to out, without gradients."""
    dispatch.call(BsrArgs("bsr_linear", W, x, out, bias=bias, residual=residual))


def gated_into(W: BsrMatrix, activation: Any, x: Tensor, out: Tensor) -> None:
    """Write act(gate) * up of x @ W.T to out, without gradients."""
    dispatch.call(BsrArgs("bsr_gated_linear", W, x, out, activation=activation))


@dataclass
class Exchange:
    """Two layers, or one of them, on the tokens of all ranks, with the exchange of tokens and results.

    like: a tensor with the dtype and device of x and of the results.
    tokens: t, of each rank.
    columns: of the second layer's result.
    x: (t, K), this rank's tokens.
    first: (x, rows), the first layer, of tokens that are these rows of all ranks' together.
    gathered: (ranks * t, K), written with x of all ranks; None: not needed.
    second: (rows, out), this rank's summand of the second layer for tokens of another rank.
    last: (rows, others), the result of own tokens, to which it adds the sum of the other ranks' summands, None for a
        single rank.
    meanwhile: () called before `last`, while results arrive.

    x and `first`, or `second` and `last`, may both be missing. Where ranks share a host they write to each other's
    memory (cute_kernels.runtime.links); elsewhere plain collectives surround the GEMMs. The summands of more than two
    ranks are added in FP32, in the order of ranks, and rounded.
    """

    like: Tensor
    tokens: int
    columns: int = 0
    x: Tensor | None = None
    first: Callable[[Tensor, slice], Any] | None = None
    gathered: Tensor | None = None
    second: Callable[[slice, Tensor], Any] | None = None
    last: Callable[[slice, Tensor | None], Any] | None = None
    meanwhile: Callable[[], Any] | None = None

    def run(self, group: Any) -> None:
        alone = not self.tokens or dist.get_world_size(group) == 1
        memory = None if alone or captured(self.like) else link_of(group, self.like.device)
        if memory is None:
            return self.collect(group)
        try:
            self.push(*memory)
        except BaseException:
            memory[1].join()
            raise

    def collect(self, group: Any) -> None:
        """By all_gather_single and all_to_all_single, before and after all GEMMs."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        places = [self._rows(r) for r in range(ranks)]
        if self.first and self.x is not None:
            xs = self.x.new_empty(ranks * self.tokens, self.x.shape[1]) if self.gathered is None else self.gathered
            all_gather_single(xs, self.x.contiguous(), group)
            for rows in places:
                self.first(xs[rows], rows)
        arrived = self.like.new_empty(ranks - 1, self.tokens, self.columns)
        if self.second:
            summands = arrived.new_empty(arrived.shape)
            for out, rows in zip(summands, places[:rank] + places[rank + 1 :], strict=True):
                self.second(rows, out)
            sizes = [0 if r == rank else self.tokens for r in range(ranks)]
            dist.all_to_all_single(arrived.flatten(0, 1), summands.flatten(0, 1), sizes, sizes, group=group)
        if self.meanwhile:
            self.meanwhile()
        if self.last:
            self.last(places[rank], _sum_of(arrived))

    def push(self, peers: Peers, link: Link) -> None:
        """Copy and store to peers' memory, during the GEMMs."""
        link.check_ended()
        rank, ranks, size = link.rank, link.ranks, self.like.element_size()
        x = None if self.x is None else self.x.contiguous()
        all_x = 0 if x is None else -(-(ranks - 1) * x.numel() * size // 256) * 256  # bytes
        buffer = peers.acquire(all_x + (ranks - 1) * self.tokens * self.columns * size)
        mine, theirs = self._inboxes(buffer, rank, ranks, all_x)
        own = self._rows(rank)

        link.begin()
        if self.first and x is not None:
            for place in reversed(range(ranks - 1)):
                link.push((rank + 1 + place) % ranks, theirs[place].x, x)
            self.first(x, own)
            if self.gathered is not None:
                self.gathered[own].copy_(x)
        for place in range(ranks - 1):
            source = (rank + 1 + place) % ranks
            rows = self._rows(source)
            if self.first:
                link.wait(source, PUSHED)
                tokens = mine.x[place]
                self.first(tokens if self.gathered is None else self.gathered[rows].copy_(tokens), rows)
            if self.second:
                self.second(rows, theirs[place].y)
                link.signal(source)
        if self.meanwhile:
            self.meanwhile()
        if self.last:
            for source in range(ranks):
                if source != rank:
                    link.wait(source, STORED)
            self.last(own, _sum_of(mine.y))
        link.end()

    def _rows(self, rank: int) -> slice:
        """The rows of a rank's tokens among those of all ranks."""
        return slice(rank * self.tokens, (rank + 1) * self.tokens)

    def _inboxes(self, buffer: PeerBuffer, rank: int, ranks: int, all_x: int) -> tuple[Inbox, list[Inbox]]:
        """Memory where this rank receives from the others, and where they receive from it, in the order of its work.

        Each rank has x of the others in the order in which it works on them, (ranks - 1, t, K), and y by rank,
        (ranks - 1, t, N).
        """
        width, dtype, others = 0 if self.x is None else self.x.shape[1], self.like.dtype, ranks - 1

        def inbox(buffer: Tensor) -> Inbox:
            x = buffer[: others * self.tokens * width * dtype.itemsize].view(dtype)
            y = buffer[all_x:].view(dtype)
            return Inbox(x.view(others, self.tokens, width), y.view(others, self.tokens, self.columns))

        def inboxes() -> tuple[Inbox, list[Inbox]]:
            theirs = []
            for place in range(others):
                other = (rank + 1 + place) % ranks
                x, y = inbox(buffer.of_rank(other))
                theirs.append(Inbox(x[others - 1 - place], y[rank - (rank > other)]))
            return inbox(buffer.own), theirs

        return buffer.views((self.tokens, width, self.columns, dtype), inboxes)


class Inbox(NamedTuple):
    """Memory of a rank for x and summands y of the others."""

    x: Tensor
    y: Tensor


def captured(x: Tensor) -> bool:
    """True if a CUDA graph records this call; its replays would not alternate buffers."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _sum_of(arrived: Tensor) -> Tensor | None:
    """Sum over ranks of summands (ranks, t, N); torch adds in FP32."""
    if len(arrived) < 2:
        return arrived[0] if len(arrived) else None
    return arrived.sum(0)
