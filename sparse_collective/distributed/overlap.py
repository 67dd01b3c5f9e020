"""Transfers of sequence-parallel layers, beside their GEMMs.

Each rank has t tokens. The first layer multiplies the tokens of all ranks; the second computes each rank's summand of
its result for all tokens, and the owner of a token adds these. Tokens of other ranks are worked on in parts, own ones
last. Two ranks, two parts a and b:

    GEMMs   1st own, half | 1st a | 2nd a | 1st b | 2nd b | 1st own, rest | 2nd own, adds what arrived
    pushes  x a, b                        | y a           | y b

With more ranks rank r works on tokens of r + 1, r + 2, ... and sends its own to r - 1, r - 2, ..., so that no rank is
sent to by two at once, and all own tokens of the first layer come first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cute_kernels.runtime.links import Link, link_of
from cute_kernels.runtime.peers import Peers, Turn
from cute_kernels.runtime.torch_compat import all_gather_single

from .. import dispatch
from ..arguments import BsrArgs
from ..bsr import BsrMatrix

__all__ = ["Exchange", "captured", "gated_into", "linear_into", "parts_of"]

PART_TOKENS = 2048  # of a part at least, for which GEMMs fill the GPU
PART_BYTES = 2**22  # of a part of x or y at least: below it copy engines do not reach NVLink's bandwidth
PARTS = 4  # of a rank's tokens at most: each costs the host two launches, two copies and two waits
EDGE = 256  # parts are multiples of the largest GEMM tile


def linear_into(
    W: BsrMatrix, x: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> None:
    """Write x @ W.T + bias + residual to out, without gradients."""
    dispatch.call(BsrArgs("bsr_linear", W, x, out, bias=bias, residual=residual))


def gated_into(W: BsrMatrix, activation: Any, x: Tensor, out: Tensor) -> None:
    """Write act(gate) * up of x @ W.T to out, without gradients."""
    dispatch.call(BsrArgs("bsr_gated_linear", W, x, out, activation=activation))


def parts_of(tokens: int, row_bytes: int) -> tuple[list[slice], list[slice]]:
    """Parts of a rank's tokens for GEMMs; and pieces of parts in which results are sent, two at least where they are
    large: own tokens can be finished in pieces, and the GEMM of one runs while the next arrives."""
    fit = tokens * row_bytes // PART_BYTES
    parts = max(1, min(PARTS, tokens // PART_TOKENS, fit))
    return _ranges(tokens, parts), _ranges(tokens, max(parts, min(2, tokens // EDGE, fit)))


def _ranges(tokens: int, count: int) -> list[slice]:
    bounds = [tokens * i // (count * EDGE) * EDGE for i in range(count)] + [tokens]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


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
    last: (rows, own, others), the same for own tokens, to which it adds the sum of the other ranks' summands, None for
        a single rank; `own` are the rows among the t.
    meanwhile: () called before `last`, while results arrive.

    x and `first`, or `second` and `last`, may both be missing. Where ranks share a host they push to each other's
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
    last: Callable[[slice, slice, Tensor | None], Any] | None = None
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
        own, places = slice(0, self.tokens), [self._rows(r, slice(0, self.tokens)) for r in range(ranks)]
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
            self.last(places[rank], own, _sum_of(arrived))

    def push(self, peers: Peers, link: Link) -> None:
        """By pushes to peers' memory, during the GEMMs."""
        rank, ranks, item = link.rank, link.ranks, self.like.element_size()
        x = None if self.x is None else self.x.contiguous()
        row_x, row_y = 0 if x is None else x.shape[1] * item, self.columns * item
        parts, pieces = parts_of(self.tokens, min(n for n in (row_x, row_y) if n))
        room_x, room_y = self.tokens * row_x, self.tokens * row_y  # bytes, of each other rank
        all_x = -(-(ranks - 1) * room_x // 256) * 256
        turn = peers.take(all_x + (ranks - 1) * room_y)
        # Of two ranks, all results arrive while the rest of own tokens is multiplied, so one GEMM finishes these.
        whole = ranks == 2 and self.first and self.second and len(parts) > 1
        ends = [slice(0, self.tokens)] if whole else pieces
        received, arrived = self._rooms(turn, ranks - 1, all_x, parts, ends)
        summands = self.like.new_empty(ranks - 1, self.tokens, self.columns)
        front = self.tokens  # rows of own tokens that begin the first layer

        link.begin(turn)
        if self.first and x is not None:
            for place in range(ranks - 1):  # of this rank among those whose tokens the receiver works on
                for part in parts:
                    begin, size = part.start * row_x, (part.stop - part.start) * row_x
                    link.push((rank - 1 - place) % ranks, place * room_x + begin, x.data_ptr() + begin, size)
            if ranks == 2 and self.second:
                front = pieces[(len(pieces) - 1) // 2].stop
            self.first(x[:front], self._rows(rank, slice(0, front)))
        for place in range(ranks - 1):
            source = (rank + 1 + place) % ranks
            for number, part in enumerate(parts, 1):
                rows = self._rows(source, part)
                if self.first:
                    link.wait(source, number)
                    tokens = received[place][number - 1]
                    self.first(tokens if self.gathered is None else self.gathered[rows].copy_(tokens), rows)
                if self.second:
                    self.second(rows, summands[place, part])
                    link.follow()
                    to, out = all_x + (rank - (rank > source)) * room_y, summands.data_ptr() + place * room_y
                    for piece in pieces:
                        if part.start <= piece.start < part.stop:
                            begin, size = piece.start * row_y, (piece.stop - piece.start) * row_y
                            link.push(source, to + begin, out + begin, size)
        if self.first and x is not None:
            if front < self.tokens:
                self.first(x[front:], self._rows(rank, slice(front, self.tokens)))
            if self.gathered is not None:
                self.gathered[self._rows(rank, slice(0, self.tokens))].copy_(x)
        if self.meanwhile:
            self.meanwhile()
        if self.last:
            before = len(parts) if self.first else 0
            for end, summands_of_end in zip(ends, arrived, strict=True):
                pushes = before + sum(piece.start < end.stop for piece in pieces)
                for source in range(ranks):
                    if source != rank:
                        link.wait(source, pushes)
                self.last(self._rows(rank, end), end, _sum_of(summands_of_end))
        link.end()

    def _rows(self, rank: int, part: slice) -> slice:
        """The rows of some of a rank's tokens among those of all ranks."""
        return slice(rank * self.tokens + part.start, rank * self.tokens + part.stop)

    def _rooms(
        self, turn: Turn, others: int, all_x: int, parts: list[slice], ends: list[slice]
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Views of a turn for x of other ranks, by rank and part, and for summands by end, each (others, rows, N)."""
        width, dtype = 0 if self.x is None else self.x.shape[1], self.like.dtype
        key = self.tokens, width, self.columns, dtype, len(parts), len(ends)

        def rooms() -> tuple[list[list[Tensor]], list[Tensor]]:
            received = turn.own[: others * self.tokens * width * dtype.itemsize].view(dtype)
            arrived = turn.own[all_x:].view(dtype).view(others, self.tokens, self.columns)
            tokens = [[x[part] for part in parts] for x in received.view(others, self.tokens, width)]
            return tokens, [arrived[:, end] for end in ends]

        return turn.views(key, rooms)


def captured(x: Tensor) -> bool:
    """True if a CUDA graph records this call; a replay would wait for the counts of the recorded one."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _sum_of(arrived: Tensor) -> Tensor | None:
    """Sum over ranks of summands (ranks, t, N); torch adds in FP32."""
    if len(arrived) < 2:
        return arrived[0] if len(arrived) else None
    return arrived.sum(0)
