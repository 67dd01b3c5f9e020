"""Adding up a tile whose K-tiles were shared among CTAs, in whatever order they come (GemmConfig.atomic).

The CTAs are no cluster and never wait for each other. A tile has a slot of the workspace, fp32 numbers that are zero
before and after every call, and each of its warpgroups a part of the slot with a counter behind it:

    all 128 threads    add their accumulators to the slot
    barrier
    thread 0           count this CTA, and publish what the count was before
    barrier
    all 128 threads    the last CTA's: read the sums, write zeros to the slot and the counter, store the tile

The additions flush subnormal numbers to zero, and fp32 addition is not associative, so bits differ from run to run.
Which CTA is the last is not known before, so one that has nothing to add is counted too; and a warpgroup's last CTA may
be another than its neighbour's.

A thread's accumulators mean the same elements in every CTA, so they are added as they lie: 4 a thread and step, and a
warp's 512 bytes in one piece.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, range_constexpr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from .config import COUNTER_WORDS

WARPGROUP = 128
VECTOR = 4  # fp32 of one addition
STEP_BYTES = WARPGROUP * VECTOR * 4


@dsl_user_op
def add_vector(address: Int64, offset: int, values: tuple, *, loc=None, ip=None) -> None:
    """Add 4 fp32 to those at `address` + `offset` in global memory, each atomically; sm_90."""
    operands = [address.ir_value(loc=loc, ip=ip), *(Float32(x).ir_value(loc=loc, ip=ip) for x in values)]
    text = f"red.relaxed.gpu.global.add.v4.f32 [$0 + {offset}], {{$1, $2, $3, $4}};"
    llvm.inline_asm(
        None, operands, text, "l,f,f,f,f",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def load_vector(address: Int64, offset: int, *, loc=None, ip=None) -> list:
    """4 fp32 at `address` + `offset` in global memory, as other SMs have left them: not from L1."""
    out = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32()] * VECTOR), [address.ir_value(loc=loc, ip=ip)],
        f"ld.relaxed.gpu.global.v4.f32 {{$0, $1, $2, $3}}, [$4 + {offset}];", "=f,=f,=f,=f,l",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return [Float32(llvm.extractvalue(T.f32(), out, [i], loc=loc, ip=ip)) for i in range(VECTOR)]


@dsl_user_op
def clear_vector(address: Int64, offset: int, *, loc=None, ip=None) -> None:
    """Write 4 zeros to `address` + `offset` in global memory."""
    llvm.inline_asm(
        None, [address.ir_value(loc=loc, ip=ip), Float32(0.0).ir_value(loc=loc, ip=ip)],
        f"st.relaxed.gpu.global.v4.f32 [$0 + {offset}], {{$1, $1, $1, $1}};", "l,f",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


class AtomicSumSm90:
    """The sums of `split` CTAs, of `groups` warpgroups with `accumulators` a thread."""

    def __init__(self, split: int, groups: int, accumulators: int):
        self.split, self.groups, self.accumulators = split, groups, accumulators
        self.part = accumulators * WARPGROUP + COUNTER_WORDS  # words of the workspace for one warpgroup of a tile

    @cute.jit
    def reduce(
        self,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N), this CTA's sum
        k_tiles,  # that it was summed over
        workspace: cute.Tensor,  # (words,) fp32, all zero but for what this call adds
        counts: cute.Pointer,  # (groups,) Int32 in shared memory
        tile: Int32,  # number of the work tile
        group: Int32,
        sync,  # waits for all threads of a warpgroup
    ):
        """Whether this CTA is the tile's last, for this warpgroup; acc is then the sum of all, else it is spent."""
        tidx = cute.arch.thread_idx()[0] % WARPGROUP
        slot = workspace.iterator + (tile * self.groups + group) * self.part
        address = (slot + tidx * VECTOR).toint()
        counter = cute.recast_ptr(slot + self.accumulators * WARPGROUP, dtype=Int32)
        published = cute.make_tensor(counts + group, cute.make_layout(1))
        if k_tiles.count > 0:
            for step in range_constexpr(self.accumulators // VECTOR):
                values = tuple(acc[step * VECTOR + v] for v in range(VECTOR))
                add_vector(address, step * STEP_BYTES, values)
        sync(group)
        if tidx == 0:
            # Release: what the barrier has put before it is there first. Acquire: and all that others have counted.
            published[0] = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        sync(group)
        last = cute.arch.make_warp_uniform(published[0]) == self.split - 1
        if last:
            for step in range_constexpr(self.accumulators // VECTOR):
                values = load_vector(address, step * STEP_BYTES)
                for v in range_constexpr(VECTOR):
                    acc[step * VECTOR + v] = values[v]
            for step in range_constexpr(self.accumulators // VECTOR):
                clear_vector(address, step * STEP_BYTES)
            if tidx == 0:
                cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)
        return last
