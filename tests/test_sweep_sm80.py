"""The sm_80 path's sweep kernel, run on the host: its own source text, with warps as threads and lanes as NumPy arrays.

What stands for the hardware is made as unkind as it may be: a copy lands when it is waited for and not before, shared
memory begins as NaN, a stage's bytes are lost when its next copies are issued. Every ldmatrix and every group of eight
lanes of a copy must hit all banks.
"""

import __future__

import ast
import inspect
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cute_kernels import heuristics
from cute_kernels.arch import ARCHS
from cute_kernels.catalog import bsr, linear
from cute_kernels.config import unsupported
from sparse_collective.sweep import sweep_plan

from . import cases

LANES = np.arange(32)
SPEC = ARCHS["sm_80"]
WIDE, NARROW = heuristics.sweeps_sm80(SPEC)
BLOCKS = ((16, 16), (32, 32), (64, 64), (16, 32), (32, 16), (64, 16), (16, 64), (32, 64), (64, 32))
BLOCKS += ((16, 128), (64, 128), (32, 192))


class Registers:
    """A tensor in registers, `values` of 32 lanes, from an offset on; its own iterator."""

    def __init__(self, values, offset=0, stride=None):
        self.values, self.offset, self.stride = values, offset, stride

    @property
    def iterator(self):
        return self

    def __add__(self, more):
        return Registers(self.values, self.offset + more)

    def __getitem__(self, i):
        return Registers(self.values, self.offset + 8 * i[1]) if isinstance(i, tuple) else self.values[self.offset + i]

    def __setitem__(self, i, value):
        self.values[self.offset + i] = value

    def load(self):
        return list(self.values)

    def store(self, values):
        self.values[:] = values


class Machine:
    """What the kernel's source calls, for all warps of one CTA; `here` holds which warp a thread is."""

    def __init__(self, warps: int, smem: int, memory: np.ndarray):
        self.here, self.warps, self.memory = threading.local(), warps, memory
        self.shared = np.full(smem // 2, np.nan)
        self.barrier = threading.Barrier(warps, timeout=30)
        self.loads = self.products = 0
        arch = SimpleNamespace(
            lane_idx=lambda: LANES,
            thread_idx=lambda: (self.here.warp * 32 + LANES,),
            shuffle_sync=self.shuffle,
            make_warp_uniform=self.uniform,
            popc=lambda x: self.uniform(x).bit_count(),
            sync_threads=self.barrier.wait,
            cp_async_commit_group=lambda: self.here.groups.append([]),
            cp_async_wait_group=self.wait,
        )
        self.cute = SimpleNamespace(
            arch=arch,
            make_rmem_tensor=lambda shape, dtype: Registers([None] * int(np.prod(shape))),
            make_layout=lambda shape, stride=None: stride,
            make_tensor=lambda at, layout: Registers(at.values, at.offset, layout) if type(at) is Registers else at,
            make_copy_atom=lambda op, dtype: op,
            make_mma_atom=lambda op: op,
            copy=self.ldmatrix,
            gemm=self.mma,
        )
        self.cutlass = SimpleNamespace(min=np.minimum, range=lambda *bounds, unroll: range(*bounds))
        self.warp = SimpleNamespace(
            LdMatrix8x8x16bOp=lambda transposed, count: transposed, MmaF16BF16Op=lambda *_: None
        )

    def uniform(self, x) -> int:
        values = np.broadcast_to(x, 32)
        assert (values == values[0]).all(), "the lanes of a warp differ"
        return int(values[0])

    def shuffle(self, x, lane):
        found = np.broadcast_to(x, 32)[lane]
        return int(found) if np.ndim(lane) == 0 else found

    def copy_vector(self, source, to):
        """What lies there is lost at once, and what is copied appears at a wait."""
        source, to = (np.broadcast_to(x, 32) for x in (source, to))
        assert not (source % 16).any() and not (to % 16).any()
        assert len(set(to.tolist())) == 32 and (source >= 0).all() and (source + 16 <= 2 * len(self.memory)).all()
        self.insist_on_banks(to)
        into = (to[:, None] // 2) + np.arange(8)
        self.shared[into] = np.nan
        self.here.groups[-1].append((into, self.memory[(source[:, None] // 2) + np.arange(8)]))

    def insist_on_banks(self, addresses):
        for group in addresses.reshape(4, 8) // 16 % 8:
            assert len(set(group.tolist())) == 8, "eight lanes hit a bank twice"

    def wait(self, pending: int):
        groups = self.here.groups  # the last one is not committed yet
        while len(groups) - 1 > pending:
            for into, values in groups.pop(0):
                self.shared[into] = values

    def ldmatrix(self, transposed, at, to):
        """Four 8 x 8 matrices, whose rows the lanes name in turn, to lane i's pairs: row i // 4, columns 2 (i % 4)."""
        at = np.broadcast_to(at, 32)
        self.insist_on_banks(at)
        assert (at >= 0).all() and (at + 16 <= 2 * len(self.shared)).all()
        self.loads += 1
        for j, rows in enumerate(self.shared[(at[:, None] // 2) + np.arange(8)].reshape(4, 8, 8)):
            matrix = rows.T if transposed else rows
            for c in range(2):
                to[2 * j + c] = matrix[LANES // 4, LANES % 4 * 2 + c]

    def mma(self, _, acc, a, b, __):
        """m16n8k16, once for each fragment of B."""
        A, row, col = np.empty((16, 16)), LANES // 4, LANES % 4 * 2
        for v in range(8):
            A[row + v // 2 % 2 * 8, col + v // 4 * 8 + v % 2] = a[v]
        for n in range(len(b.values) // 4):
            B = np.empty((16, 8))
            for v in range(4):
                B[col + v // 2 * 8 + v % 2, row] = b[4 * n + v]
            D = A @ B
            assert np.isfinite(D).all(), "what was never copied is multiplied"
            for v in range(4):
                i = n * acc.stride[2] + v
                acc[i] = acc[i] + D[row + v // 2 * 8, col + v % 2]
        self.products += 1


def on_the_host(facts, machine: Machine):
    """The kernel object of sweep_sm80, with `machine` in the place of the DSL."""
    from sparse_collective import sweep_sm80

    tree = ast.parse(inspect.getsource(sweep_sm80))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    space = {"__name__": "sparse_collective.sweep_sm80", "__package__": "sparse_collective"}
    exec(compile(tree, "sweep_sm80", "exec", flags=__future__.annotations.compiler_flag), space)
    kernel = space["SweepSm80"](facts)
    itself = {name: lambda x: x for name in ("Int32", "Int64", "Uint32", "const_expr", "keep")}
    space |= itself | {"range_constexpr": range, "make_ptr": lambda dtype, at, *_, **__: at}
    space |= {name: getattr(machine, name) for name in ("cute", "cutlass", "warp")}
    kernel.copy_vector = machine.copy_vector
    return kernel


class Source:
    """SweepSource and SweptChunks of one group, with NumPy's numbers."""

    def __init__(self, crow, plan, group: int, g):
        self.crow, self.order = crow.numpy(), plan.order.numpy()
        self.slices, self.words = (table[group].numpy() for table in (plan.slices, plan.words))
        self.needed, self.rows, self.group = int(plan.counts[group]), g.rows, group
        self.count = -(-self.needed // g.slices)

    def slice(self, i):
        return self.slices[np.minimum(i, self.needed - 1)].astype(np.int64)

    def word(self, i, segment):
        return int(self.words[min(i, self.count - 1), segment])

    def first_block(self, m, rank, segment):
        return int(self.crow[min((m * 3 + segment) * self.rows, len(self.crow) - 1)])

    def block(self, i):
        return self.order[np.minimum(i, len(self.order) - 1)].astype(np.int64)


def play(mask, block, config, *, k_major=False, n=0, N=None):
    """The kernel's product of one work tile, and the right one; columns that no block needs are NaN."""
    facts = bsr(SPEC, "sm_80", config, block, majors=("k", "k" if k_major else "n", "n"))
    assert unsupported(facts) == ""
    (bm, bk), N = block, N or config.tile_n
    crow, col = cases.mask_to_indices(mask)
    M, K = mask.shape[0] * bm, mask.shape[1] * bk
    plan = sweep_plan(crow, col, (M, K), block, 1, False)
    rng = np.random.default_rng(0)
    values, b = rng.integers(-4, 5, (max(1, len(col)), bm, bk)), rng.integers(-4, 5, (K, N)).astype(float)
    dense = np.zeros((M, K))
    for p, (r, c) in enumerate(mask.nonzero().tolist()):
        dense[r * bm : (r + 1) * bm, c * bk : (c + 1) * bk] = values[p]
    right = dense @ b
    b[~mask.any(0).repeat_interleave(bk).numpy()] = np.nan
    memory = np.concatenate([values.ravel(), (b.T if k_major else b).ravel()])
    machine = Machine(config.warps_m * config.warps_n, 2**18, memory)
    kernel = on_the_host(facts, machine)
    machine.shared = np.full(kernel.smem_bytes // 2, np.nan)
    mA = SimpleNamespace(shape=(bm, bk, len(values)), iterator=SimpleNamespace(toint=lambda: 0))
    base = SimpleNamespace(toint=lambda: values.size * 2)
    mB = SimpleNamespace(shape=(N, K), stride=(K, 1) if k_major else (1, N), iterator=base)
    groups = len(plan.counts)
    result = np.full((groups * 192, config.tile_n), np.nan)
    failures = []

    def run(index: int, m: int):
        machine.here.warp, machine.here.groups = index, [[]]
        try:
            source = Source(crow, plan, m, kernel.geometry)
            acc = [Registers([np.zeros(32) for _ in range(32)]) for _ in range(3)]
            place = (index % config.warps_m, index // config.warps_m)
            kernel.mma(source, source, mA, mB, m, n, acc, 0, place, index)
            for i in np.ndindex(3, 2, 4, 4):  # segment, MMA_M, MMA_N, MMA
                row = m * 192 + i[0] * 64 + place[0] * 32 + i[1] * 16 + LANES // 4 + i[3] // 2 * 8
                result[row, place[1] * 32 + i[2] * 8 + LANES % 4 * 2 + i[3] % 2] = acc[i[0]][i[2] * 8 + i[1] * 4 + i[3]]
        except BaseException as error:
            failures.append(error)
            machine.barrier.abort()

    for m in range(groups):
        threads = [threading.Thread(target=run, args=(i, m)) for i in range(machine.warps)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise next((e for e in failures if not isinstance(e, threading.BrokenBarrierError)), failures[0])
    inside = slice(n * config.tile_n, min(N, (n + 1) * config.tile_n))
    return result[:M, : inside.stop - inside.start], right[:, inside], machine


@pytest.mark.parametrize(
    ("block", "pattern"),
    [(block, name) for block in BLOCKS[:3] for name in cases.PATTERNS] + [(block, "power_law") for block in BLOCKS[3:]],
    ids=lambda x: x if isinstance(x, str) else f"{x[0]}x{x[1]}",
)
def test_patterns(block, pattern):
    mask = cases.PATTERNS[pattern](240 // block[0] + 2, 300 // block[1] + 2)
    found, right, _ = play(mask, block, WIDE)
    assert np.array_equal(found, right)


@pytest.mark.parametrize("config", [WIDE, NARROW, replace(WIDE, stages=3, chunks=3)], ids=str)
@pytest.mark.parametrize("k_major", [False, True])
@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: f"{b[0]}x{b[1]}")
def test_tiles_and_layouts_of_b(block, k_major, config):
    """The second tile of columns, of which only some exist."""
    mask = cases.bernoulli(192 // block[0] + 1, 400 // block[1] + 1, 0.3)
    found, right, _ = play(mask, block, config, k_major=k_major, n=1, N=config.tile_n + 40)
    assert np.array_equal(found, right)


def test_a_warp_reads_no_more_than_it_multiplies():
    """One 16x16 block in a group: a unit of A for the four warps that own it, and 16 rows of B."""
    mask = torch.zeros(12, 9, dtype=torch.bool)
    mask[6, 3] = True
    found, right, machine = play(mask, (16, 16), WIDE)
    assert np.array_equal(found, right)
    assert machine.products == 4 and machine.loads == 4 * (1 + 2)


def test_linear_facts_are_supported():
    assert unsupported(linear(SPEC, "sm_80", WIDE, (16, 16))) == ""
    assert unsupported(linear(SPEC, "sm_80", NARROW, (64, 128))) == ""
