"""Random products for the fuzz: gemm, bsr_matmul, bsr_linear and bsr_grouped_linear in guarded memory.

A `Family` is a signature, which many cases share, so that kernels are few; `run` makes the call of a case.
"""

import itertools
import random

from hypothesis import strategies as st

from .guard_zones import Placement
from .products import OPS, Case, Signature
from .products import run as run

BLOCKS = ((128, 128), (64, 64), (32, 32), (16, 16), (48, 112), (256, 64), (64, 128))
RUNS = (64, 128, 256)


Family = Signature


def families(seed: int = 0, each: int = 16) -> list[Family]:
    """`each` of them for every op and path, drawn once: dtypes, layouts and epilogues go through all values in turn."""
    draw, found = random.Random(seed), []
    for op, path in itertools.product(OPS, ("sm_90", "sm_80")):

        def turns(*values, count=each):
            """The values again and again, shuffled."""
            row = [values[i % len(values)] for i in range(count)]
            draw.shuffle(row)
            return row

        sparse = op != "gemm"
        linear = op in ("bsr_linear", "bsr_grouped_linear")
        aligns = turns(8) if path == "sm_90" else turns(8, 1, 8, 2, 4, 1)
        batches = turns(None, None, None, "values", "patterns") if sparse else turns(None, None, "both")
        if op == "bsr_grouped_linear":
            batches = turns("values", "patterns")
        for i, (dtype, out, align, align_out, a, b, d, bias, activation, residual, block, batch, index) in enumerate(
            zip(
                turns("bf16", "bf16", "fp16"), turns("same", "same", "fp32"), aligns, turns(8, 8, 1),
                turns(False, True), turns(False, True), turns(False, True, False),
                turns(None, "items" if linear else "col", "row" if not linear else "col"),
                turns(None, "gelu", "relu", "silu"), turns(False, False, True), turns(*BLOCKS), batches,
                turns("int32", "int32", "int64"), strict=True,
            )
        ):  # fmt: skip
            if path == "sm_80" and i % 2:
                align_out = align
            if bias == "items" and batch is None:
                bias = "col"
            found.append(
                Family(
                    op,
                    path,
                    dtype,
                    dtype if out == "same" else out,
                    align,
                    align_out,
                    (a, b, d),
                    bias,
                    activation,
                    residual and not linear,
                    block if sparse else None,
                    batch,
                    RUNS[i % 3] if op == "bsr_grouped_linear" else 0,
                    index,
                )  # fmt: skip
            )
    return found


# -- drawing ---------------------------------------------------------------------------------------------------


def multiple(n: int, of: int) -> int:
    return -(-n // of) * of


@st.composite
def placements(draw, shape, align: int, transposed: bool = False):
    """A placement in which all strides but the fastest, and the address, are multiples of `align` elements.

    With `align` below 8 the address is no multiple of more.
    """
    dims = len(shape)
    order = [*range(dims)]
    if transposed and dims >= 2:
        order[-2:] = order[:-3:-1]
    pads = [0] * dims
    if dims:
        fast = order[-1]
        pads[fast] = multiple(max(shape[fast], 1), align) - max(shape[fast], 1)
        if dims > 1:
            pads[fast] += align * draw(st.sampled_from([0, 0, 1, 2, 7]))
        for dim in order[1:-1]:
            pads[dim] = draw(st.sampled_from([0, 0, 1, 3]))
    before = align * draw(st.sampled_from([0, 1, 3])) if align == 8 else align * draw(st.sampled_from([1, 3]))
    return Placement(tuple(order), tuple(pads), before)


def extents(most: int, align: int):
    """0 and 1 now and then, else up to `most`; where copies are narrow, odd multiples of `align`."""
    if align == 8:
        near = st.integers(0, most // 8).flatmap(lambda j: st.integers(1, 17).map(lambda more: 8 * j + more))
        return st.one_of(st.sampled_from([0, 1]), near, st.integers(1, most))
    return st.one_of(st.just(0), st.integers(0, max(most // (2 * align) - 1, 0)).map(lambda j: (2 * j + 1) * align))


# On the sm_80 path a copy is as wide as the contiguous extent allows: to have few kernels, the widest or the narrowest.
wide_or_odd = st.sampled_from([lambda *n: [8 * (x // 8) for x in n], lambda *n: [x | 1 for x in n]])


@st.composite
def cases(draw, family: Family, most: int = 300):
    """`most`: the largest extent of a dense product, about."""
    f = family
    # On the sm_80 path a contiguous extent decides how wide copies are; a row of W's blocks is always wide.
    align = f.align if f.path == "sm_80" else 8
    items = draw(st.integers(1, 3)) if f.batch else 1
    density = draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    leading, give_out = None, draw(st.sampled_from([True, True, True, False]))
    if f.op == "gemm":
        m, n, k = (draw(extents(most, align)) for _ in range(3))
        if f.path == "sm_80" and align == 8:
            m, n, k = draw(wide_or_odd)(m, n, k)
        lead = (items,) if f.batch else ()
        shapes = (*lead, m, k), (*lead, k, n), (*lead, m, n)
    else:
        bm, bk = f.block
        m, k = (draw(st.integers(0, max(1, most // side))) for side in f.block)
        if f.op == "bsr_grouped_linear":
            n = draw(st.integers(0, max(2, most // f.run)))
            tokens = n * f.run
        else:
            n = draw(st.one_of(extents(most, align), st.integers(0, 17) if align == 8 else st.nothing()))
            if f.path == "sm_80" and align == 8:
                (n,) = draw(wide_or_odd)(n)
            tokens = n
        M, K = m * bm, k * bk
        lead = (items,) if f.batch and f.op != "bsr_grouped_linear" else ()
        if f.op == "bsr_matmul":
            shapes = (), (*lead, K, tokens), (*lead, M, tokens)
        else:
            if f.op == "bsr_linear" and not f.batch and align == 8 and draw(st.integers(0, 3)) == 0:
                leading = draw(st.sampled_from([(), (1, n), (2, n), (3, 1), (2, 2, 3)]))
            x = (*lead, tokens) if leading is None else leading
            shapes = (), (*x, K), (*x, M)
    a, b, out, residual = shapes[0], shapes[1], shapes[2], shapes[2]
    # Folded with the others, a dimension of extent 1 is not the contiguous one, which the sm_90 path asks for.
    transposed = f.majors[1] and not (leading and leading[-1] == 1)
    places = tuple(
        draw(placements(shape, aligned, t))
        for shape, aligned, t in (
            (a, f.align, f.majors[0]),
            (b, f.align, transposed),
            (out, f.align_out, f.majors[2]),
            (residual, 1, f.majors[2]),
        )
    )
    return Case(f, m, n, k, items, density, leading, places, give_out, draw(st.integers(0, 2**31)))
