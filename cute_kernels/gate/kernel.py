"""h = act(g) * u of z, or dz of z and dh, in one pass over memory.

    z, dz      (rows, 2 H) as groups of 128 elements: 64 of g, 64 of u. Rows are contiguous, so their ends do not matter
    h, dh      (rows, H) as groups of 64 elements
    thread     UNROLL vectors of h and the pairs of vectors of z that belong to them: loads first, then FP32 arithmetic,
               rounded once. 8 threads share a group, so a warp reads and writes whole lines of 128 bytes
    CTA        GROUPS neighboring groups; only the last CTA checks that a group exists

Nothing is shared between threads, and each element is written once.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, range_constexpr

from ..reference import GATE
from ..tile.vectors import VECTOR, load, store, widened
from ..traced.derivative import derivative, followed_by
from ..traced.lower import lower
from .config import THREADS, UNROLL

LANES = GATE // VECTOR  # threads that share a group
STEP = THREADS // LANES  # groups between two vectors of a thread
GROUPS = STEP * UNROLL


class Gate:
    """The kernel of one `GateFacts`."""

    def __init__(self, facts):
        self.facts = facts
        self.activation = followed_by(facts.activation, None)
        self.slope = derivative(self.activation)

    @cute.jit
    def __call__(
        self,
        z: cute.Tensor,  # (rows, 2 H), contiguous as all are
        h: cute.Tensor,  # (rows, H); dh of a gradient
        dz: cute.Tensor | None,  # (rows, 2 H)
        stream: cuda.CUstream,
    ):
        groups = z.shape[0] * (z.shape[1] // (2 * GATE))
        self.kernel(z, h, dz, groups).launch(
            grid=(cute.ceil_div(groups, GROUPS), 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, z: cute.Tensor, h: cute.Tensor, dz: cute.Tensor | None, groups: Int32):
        tidx = cute.arch.thread_idx()[0]
        first = cute.arch.block_idx()[0] * GROUPS
        left, group = groups - first, tidx // LANES
        z_place = Int64(first) * (2 * GATE) + (group * (2 * GATE) + tidx % LANES * VECTOR)
        h_place = Int64(first) * GATE + tidx * VECTOR
        if left >= GROUPS:
            self.vectors(z, h, dz, z_place, h_place, UNROLL)
        else:
            for u in range_constexpr(UNROLL):
                if group + u * STEP < left:
                    self.vectors(z, h, dz, z_place + u * STEP * 2 * GATE, h_place + u * STEP * GATE, 1)

    def vectors(self, z: cute.Tensor, h: cute.Tensor, dz: cute.Tensor | None, z_place: Int64, h_place: Int64, count):
        """`count` vectors of h, STEP groups apart, from these elements on."""
        places = [(z_place + u * STEP * 2 * GATE, h_place + u * STEP * GATE) for u in range(count)]
        loaded = [(load(z, g), load(z, g + GATE), load(h, at) if self.facts.gradient else None) for g, at in places]
        for (at_g, at_h), (g, u, dh) in zip(places, loaded, strict=True):
            if self.facts.gradient:
                self.backward(widened(g), widened(u), widened(dh), dz, at_g)
            else:
                self.forward(widened(g), widened(u), h, at_h)

    def forward(self, g: list, u: list, h: cute.Tensor, place: Int64):
        result = cute.make_rmem_tensor(VECTOR, h.element_type)
        for v in range(VECTOR):
            result[v] = (self.lowered(self.activation, g[v]) * u[v]).to(h.element_type)
        store(result, h, place)

    def backward(self, g: list, u: list, dh: list, dz: cute.Tensor, place: Int64):
        dg, du = (cute.make_rmem_tensor(VECTOR, dz.element_type) for _ in range(2))
        for v in range(VECTOR):
            dg[v] = (self.lowered(self.slope, g[v]) * (dh[v] * u[v])).to(dz.element_type)
            du[v] = (self.lowered(self.activation, g[v]) * dh[v]).to(dz.element_type)
        store(dg, dz, place)
        store(du, dz, place + GATE)

    def lowered(self, program, x: Float32) -> Float32:
        return lower(program, [x]).to(Float32)
