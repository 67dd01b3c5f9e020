"""Expert parallelism on one host: kernels read tokens and results from the memory of other ranks.

A rank publishes its tokens and the order that sorts its choices. One kernel fills the padded layout of its experts from
all ranks' tokens. The results are published likewise, and one kernel adds those of each token. There are no buffers for
sending, and no copies between the order of a transfer and that of the layout. The host reads the table of where each
rank's rows of each expert begin, for the number of rows in the layout; all else is computed on the device:

    stream    sort [ exchange table ] copy tokens, barrier, places, dispatch      experts, barrier, combine
    host                              launches these, waits for the table   -> launches these       time ->

`dispatch` is launched before the table has arrived, into a layout with room for what earlier calls make likely; then it
is cut to its rows, and keeps its memory. If there are more, `dispatch` runs again. Without gradients the experts may
write results to the shared buffer themselves.

Gradients go the same ways: those of the sums to the layouts, times weights, and those of the layouts to tokens.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cute_kernels.runtime.peers import PeerBuffer, Peers

from ..expert_rows.dispatch import from_layouts, gradient_of_layout, places_of, to_layout, values_of
from .routing import Layers, Routing

__all__ = ["routed_over_peers"]

ORDER, WEIGHT = 8, 4  # bytes of a choice in the order of choices, and of its weight
LEAST = 16  # bytes of a buffer
HEADROOM = 1 / 16  # of the rows that are expected: room for more
DECAY = 1 / 8  # of the difference, if a call has fewer than expected
MAX_SHARE = 2  # times this rank's choices: with more rows the host waits for their number

_SHARES: weakref.WeakKeyDictionary[Peers, dict[int, float]] = weakref.WeakKeyDictionary()  # see PeerRouting.expected


class PeerRouting(Routing):
    """A Routing of which the layouts are read and written by kernels.

    After `receive`:

    rows: of each rank's layout.
    tokens: the largest number of tokens of a rank.
    """

    rows: list[int]
    tokens: int
    _buffer: PeerBuffer | None = None  # of results that layers write

    def __init__(self, choices: Tensor, experts: int, group_rows: int, mesh: Any, peers: Peers) -> None:
        super().__init__(choices, experts, mesh)
        self.peers, self.group_rows = peers, group_rows

    def publish(self, x: Tensor, weights: Tensor | None, buffer: PeerBuffer, tokens: int) -> None:
        """Copy x (T, N), the order and weights (T, k) to this rank's buffer, which has room for so many tokens."""
        fill(buffer.own, 0, x)
        order_at, weights_at = self.offsets(x, tokens)
        fill(buffer.own, order_at, self.order)
        if weights is not None:
            fill(buffer.own, weights_at, weights)

    def offsets(self, x: Tensor, tokens: int) -> tuple[int, int]:
        """Bytes from the tokens to the order, and to weights, in a buffer for so many tokens."""
        order_at = tokens * x.shape[1] * x.element_size()
        return order_at, order_at + tokens * self.k * ORDER

    def size(self, x: Tensor, tokens: int) -> int:
        return tokens * (x.shape[1] * x.element_size() + self.k * (ORDER + WEIGHT))

    def receive(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Publish tokens, and return the layout of those that this rank's experts multiply. Synchronizes.

        Tokens are published before the host knows how many other ranks have, if the buffer has room for them. If it has
        not for those of another rank, all ranks do so again.
        """
        buffer, early, room = None, None, self.peers.room
        published = room // self.size(x, 1)  # tokens that there is room for
        if room:
            buffer = self.peers.acquire(room)
            if len(x) <= published:
                self.publish(x, None, buffer, published)
            buffer.ready()
        self.locate(published if room else None)
        if buffer is not None and (expected := self.expected()):
            early = self.layout(x, buffer, published, expected)
        self.wait()
        # The host has slept, and the GPU waits for it: plain Python is faster here than small tensors.
        runs = [-(-(end - begin) // self.group_rows) for begin, end in itertools.pairwise(self.totals[:-1])]
        self.rows = [self.group_rows * sum(runs[i : i + self.each]) for i in range(0, self.experts, self.each)]
        self.tokens = max(line[-1] for line in self.table) // self.k
        if buffer is None or self.tokens > published:
            if buffer is not None:
                self.locate(None)
            published, early = self.tokens, None
            buffer = self.acquire(self.size(x, published))
            self.publish(x, None, buffer, published)
            buffer.ready()
        rows = self.rows[self.rank]
        if early is None or rows > len(early[0]):
            return self.layout(x, buffer, published, rows)
        return early[0].resize_(rows, x.shape[1]), early[1].resize_(rows // self.group_rows)

    def locate(self, tokens: int | None) -> None:
        """Compute the place of each choice, and segments, which are empty if a rank has more tokens than these."""
        self.places, self.segments = places_of(self.starts, self.order, self.rank, self.k, self.group_rows, tokens)

    def layout(self, x: Tensor, buffer: PeerBuffer, tokens: int, rows: int) -> tuple[Tensor, Tensor]:
        """The layout, cut to these rows, and the expert of each run; buffers have room for so many tokens."""
        order_at, _ = self.offsets(x, tokens)
        return to_layout(buffer.pointers, self.segments, rows, x.shape[1], x.dtype, order_at)

    def expected(self) -> int:
        """Rows that the layout hardly exceeds: this rank's choices times the share of earlier calls. 0: unknown."""
        share = _SHARES.get(self.peers, {}).get(self.experts, MAX_SHARE)
        rows = int(share * (1 + HEADROOM) * len(self.order)) + self.each * self.group_rows
        return rows // self.group_rows * self.group_rows if share < MAX_SHARE else 0

    def update_expected(self) -> None:
        """Keep the rows of this rank's experts over its choices, the most of late, of layers with as many experts."""
        if not len(self.order):
            return
        first, shares = self.rank * self.each, _SHARES.setdefault(self.peers, {})
        share = (self.totals[first + self.each] - self.totals[first]) / len(self.order)
        before = shares.get(self.experts, 0.0)
        shares[self.experts] = min(MAX_SHARE, max(share, before - DECAY * (before - share)))

    def room_for(self, like: Tensor) -> Tensor:
        """Memory for results like these rows (rows, N), in the shared buffer; `sums` must be called with them."""
        size = like.shape[1] * like.element_size()
        self._buffer = buffer = self.acquire(max(self.rows) * size)

        def rows() -> Tensor:
            return buffer.own[: len(buffer.own) // size * size].view(like.dtype).view(-1, like.shape[1])

        return buffer.views((like.dtype, like.shape[1]), rows)[: len(like)]

    def undo_acquire(self) -> None:
        """Take back `room_for`, if it was called and its results will not come."""
        if self._buffer is not None:
            self._buffer = None
            self.peers.undo_acquire()

    def acquire(self, size: int) -> PeerBuffer:
        return self.peers.acquire(max(size, LEAST))

    def sums(self, y: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """(T, N) sums of the rows of this rank's choices, from the y (rows, N) of all ranks."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            buffer = self.acquire(max(self.rows) * y.shape[1] * y.element_size())
            fill(buffer.own, 0, y)
        buffer.ready()
        out = y.new_empty(len(self.order) // self.k, y.shape[1], dtype=dtype)
        return from_layouts(buffer.pointers, self.places, weights, y.dtype, out, self.k)

    def gradients(
        self, grad: Tensor, y: Tensor | None, weights: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of y (rows, N) and, unless it is None, of weights (T, k), of those of the sums (T, N)."""
        buffer = self.acquire(self.size(grad, self.tokens))
        self.publish(grad, weights, buffer, self.tokens)
        buffer.ready()
        dy = grad.new_empty(self.rows[self.rank], grad.shape[1], dtype=dtype)
        published = buffer.pointers, self.segments, grad.dtype, *self.offsets(grad, self.tokens)
        if y is None:
            return gradient_of_layout(*published, dy, None, None), None
        back = self.acquire(max(self.rows) * WEIGHT)
        dots = back.own[: len(y) * WEIGHT].view(torch.float32)
        gradient_of_layout(*published, dy, y, dots)
        back.ready()
        return dy, values_of(back.pointers, self.places).view(weights.shape)


def fill(buffer: Tensor, begin: int, x: Tensor) -> None:
    """Copy x to uint8 memory, from byte `begin` on."""
    end = begin + x.numel() * x.element_size()
    buffer[begin:end].view(x.dtype).view(x.shape).copy_(x)


class Dispatch(torch.autograd.Function):
    """(rows, K) the tokens x (T, K) of all ranks in this rank's layout, and the expert of each run."""

    @staticmethod
    def forward(ctx, x, routing):
        ctx.routing, ctx.dtype = routing, x.dtype
        rows, expert_ids = routing.receive(x)
        ctx.mark_non_differentiable(expert_ids)
        return rows, expert_ids

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _):
        return ctx.routing.sums(dy, None, ctx.dtype), None


class Combine(torch.autograd.Function):
    """(T, N) weighted sums of the results y (rows, N) in the layouts of all ranks."""

    @staticmethod
    def forward(ctx, y, weights, routing, dtype):
        ctx.routing, ctx.dtypes = routing, (y.dtype, weights.dtype)
        weights = weights.float().contiguous()
        ctx.save_for_backward(weights, y if ctx.needs_input_grad[1] else None)
        return routing.sums(y, weights, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (weights, y), (dtype, weights_dtype) = ctx.saved_tensors, ctx.dtypes
        dy, dweights = ctx.routing.gradients(grad, y, weights, dtype)
        return dy, None if dweights is None else dweights.to(weights_dtype), None, None


def routed_over_peers(
    x: Tensor, choices: Tensor, weights: Tensor, experts: int, group_rows: int, layers: Layers, mesh: Any, peers: Peers
) -> Tensor:
    """dispatch.routed_over_ranks for ranks that read each other's memory; see there."""
    routing = PeerRouting(choices, experts, group_rows, mesh, peers)
    rows, expert_ids = Dispatch.apply(x, routing)
    plain = not torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type)
    try:
        y = layers(rows, expert_ids, functools.partial(routing.room_for, rows) if plain else None)
    except BaseException:
        routing.undo_acquire()
        raise
    routing.update_expected()  # here, as the GPU waits for the launches above
    return Combine.apply(y, weights, routing, x.dtype)
