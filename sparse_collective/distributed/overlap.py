"""Transfers of sequence-parallel layers, beside their GEMMs.

Each rank has t tokens. The first layer multiplies the tokens of all ranks; the second computes each rank's summand of
its result for all tokens, and the owner of a token adds these. Rank r works on its own tokens, then on those of
r + 1, r + 2, ... The second layer is one GEMM. Two ranks:

    GEMMs     1st own | 1st other | 2nd, all tokens | sum
    copies    x       |           |                 |
    stores                        | y, by the GEMM  |

x is copied to the memory of the others, to r - 1, r - 2, ..., so that no rank is sent to by two at once. The second
GEMM stores each rank's tokens to that rank's memory, tiles of all ranks in turn, so that links are used all the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from cute_kernels.runtime.links import PUSHED, STORED, Link, link_of
from cute_kernels.runtime.peers import PeerBuffer, Peers
from cute_kernels.runtime.torch_compat import all_gather_single

from .. import dispatch
from ..arguments import BsrArgs
from ..bsr import BsrMatrix
from ..expert_rows.dispatch import from_layouts, takes_rows

__all__ = ["Exchange", "captured", "gated_into", "linear_into", "linear_into_each"]

ALIGN = 256  # bytes, of tensors in the memory of ranks


def linear_into(W: BsrMatrix, x: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """Write x @ W.T + bias to out, without gradients."""
    dispatch.call(BsrArgs("bsr_linear", W, x, out, bias=bias))


def linear_into_each(W: BsrMatrix, x: Tensor, outs: Tensor) -> None:
    """Write x @ W.T, without gradients; x (ranks * t, K), outs (ranks, t, M) with any distance between ranks."""
    items = x.unflatten(0, outs.shape[:2])
    dispatch.call(BsrArgs("bsr_matmul", W, items.mT, outs.mT), interleaved=True)


def gated_into(W: BsrMatrix, activation: Any, x: Tensor, out: Tensor) -> None:
    """Write act(gate) * up of x @ W.T to out, without gradients."""
    dispatch.call(BsrArgs("bsr_gated_linear", W, x, out, activation=activation))


@dataclass
class Exchange:
    """Two layers, or one of them, on the tokens of all ranks, with the exchange of tokens and results.

    x: (t, K), this rank's tokens.
    first: (x, rows), the first layer, of tokens that are these rows of all ranks' together.
    gathered: (ranks * t, K), written with x of all ranks during the GEMMs; None: not needed.
    second: (out), the second layer: writes to out (ranks, t, N) this rank's summands, for the tokens of each rank.
    y: (t, N), written with the sum of all ranks' summands for this rank's tokens.
    meanwhile: () called before the sum, while results arrive.

    x and `first`, or `second` and y, may be missing. Where ranks share a host they write to each other's memory
    (cute_kernels.runtime.links); elsewhere plain collectives surround the GEMMs. Summands are added in FP32, in the
    order of ranks, and rounded.
    """

    x: Tensor | None = None
    first: Callable[[Tensor, slice], Any] | None = None
    gathered: Tensor | None = None
    second: Callable[[Tensor], Any] | None = None
    y: Tensor | None = None
    meanwhile: Callable[[], Any] | None = None

    @property
    def _like(self) -> Tensor:
        return cast("Tensor", self.y if self.x is None else self.x)

    @property
    def tokens(self) -> int:
        """t, of each rank."""
        return len(self._like)

    def run(self, group: Any) -> None:
        alone = not self.tokens or dist.get_world_size(group) == 1
        memory = None if alone or captured(self._like) else link_of(group, self._like.device)
        if memory is None:
            return self.collect(group)
        try:
            self.push(*memory)
        except BaseException:
            memory[1].join()
            raise

    def collect(self, group: Any) -> None:
        """By all_gather_single and all_to_all_single, before and after all GEMMs."""
        ranks = dist.get_world_size(group)
        if self.first and self.x is not None:
            xs = self.x.new_empty(ranks * self.tokens, self.x.shape[1]) if self.gathered is None else self.gathered
            all_gather_single(xs, self.x.contiguous(), group)
            for rank in range(ranks):
                self.first(xs[self._rows(rank)], self._rows(rank))
        arrived = None
        if self.second and self.y is not None and ranks == 1:
            self.second(self.y[None])
        elif self.second and self.y is not None:
            summands = self.y.new_empty(ranks, *self.y.shape)
            self.second(summands)
            arrived = torch.empty_like(summands)
            dist.all_to_all_single(arrived, summands, group=group)
        if self.meanwhile:
            self.meanwhile()
        if arrived is not None and self.y is not None:
            add_summands(arrived, self.y, places_by_token(arrived))

    def push(self, peers: Peers, link: Link) -> None:
        """Copy and store to peers' memory, during the GEMMs."""
        link.check_ended()
        rank, ranks, x = link.rank, link.ranks, None if self.x is None else self.x.contiguous()
        sizes = [-(-size_of(t) // ALIGN) * ALIGN for t in (x, self.y)]
        buffer = peers.acquire((ranks - 1) * sizes[0] + ranks * sizes[1])
        others = [(rank + 1 + i) % ranks for i in range(ranks - 1)]

        link.begin()
        memory = self._parts(buffer, rank, ranks, *sizes)
        if self.first and x is not None:
            for other in reversed(others):
                link.push(other, memory.remote_x[other], x)
            for source in (rank, *others):
                tokens, rows = x, self._rows(source)
                if source != rank:
                    link.wait(source, PUSHED)
                    tokens = memory.x[source]
                if self.gathered is not None:
                    link.keep(self.gathered[rows], tokens)
                self.first(tokens, rows)
        if self.second:
            self.second(memory.summands)
            for other in others:
                link.signal(other)
        if self.meanwhile:
            link.join()  # it may read x of all ranks
            self.meanwhile()
        if self.second and self.y is not None:
            for other in others:
                link.wait(other, STORED)
            add_summands(memory.arrived, self.y, memory.places)
        link.end()

    def _rows(self, rank: int) -> slice:
        """The rows of a rank's tokens among those of all ranks."""
        return slice(rank * self.tokens, (rank + 1) * self.tokens)

    def _parts(self, buffer: PeerBuffer, rank: int, ranks: int, x_bytes: int, y_bytes: int) -> Parts:
        """A buffer has x of the other ranks, then summands of all ranks, both by the rank that they come from."""
        begin = (ranks - 1) * x_bytes

        def parts() -> Parts:
            all_x = buffer.of_ranks[:, :begin].view(ranks, ranks - 1, x_bytes)
            all_y = buffer.of_ranks[:, begin:].view(ranks, ranks, y_bytes)
            others = [other for other in range(ranks) if other != rank]
            x = {other: view_like(all_x[rank, other - (other > rank)], self.x) for other in others}
            remote_x = {other: view_like(all_x[other, rank - (rank > other)], self.x) for other in others}
            arrived = view_like(all_y[rank], self.y)
            return Parts(x, remote_x, view_like(all_y[:, rank], self.y), arrived, places_by_token(arrived))

        shapes = [None if t is None else t.shape for t in (self.x, self.y)]
        return buffer.views((*shapes, self._like.dtype), parts)


class Parts(NamedTuple):
    """Parts of the memory of all ranks.

    x: where this rank receives x, (t, K), by the rank that it comes from.
    remote_x: where x of this rank goes, by the rank that receives it.
    summands: (ranks, t, N), where this rank's summands go, by the rank that receives them.
    arrived: (ranks, t, N), those for this rank, by the rank that they come from.
    places: see places_by_token.
    """

    x: dict[int, Tensor]
    remote_x: dict[int, Tensor]
    summands: Tensor
    arrived: Tensor
    places: Tensor | None


def size_of(t: Tensor | None) -> int:
    """Bytes of a contiguous tensor."""
    return 0 if t is None else t.numel() * t.element_size()


def view_like(memory: Tensor, t: Tensor | None) -> Tensor:
    """Memory (..., bytes) as contiguous tensors of the shape and dtype of t."""
    if t is None:
        return memory[..., :0]
    return memory[..., : size_of(t)].view(t.dtype).unflatten(-1, t.shape)


def captured(x: Tensor) -> bool:
    """True if a CUDA graph records this call; its replays would not alternate buffers."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def places_by_token(summands: Tensor) -> Tensor | None:
    """The rows of each token among those of summands (ranks, t, N), int64 (t * ranks,), for the kernel that adds them;
    None where torch adds: without a kernel, and two summands, for which torch is as fast.
    """
    ranks, tokens, width = summands.shape if summands.dim() == 3 else (0, 0, 0)
    if ranks < 3 or not (summands.is_cuda and summands.is_contiguous() and takes_rows(summands.dtype, width)):
        return None
    return torch.arange(ranks * tokens, device=summands.device).view(ranks, tokens).T.flatten()


def add_summands(arrived: Tensor, y: Tensor, places: Tensor | None = None) -> None:
    """Write the sum over ranks of summands (ranks, t, N) to y: added in FP32 in their order, rounded once; without
    `places`, those of more than two ranks in torch's order."""
    if len(arrived) == 2:
        torch.add(*arrived, out=y)
    elif places is None:
        torch.sum(arrived, 0, out=y)
    else:
        from_layouts(arrived.flatten(0, 1), places, None, y.dtype, y, len(arrived))
