"""Random products for the fuzz: gemm, bsr_matmul, bsr_linear, bsr_grouped_linear and sddmm in guarded memory.

A `Family` is a signature, which many cases share, so that kernels are few; `run` makes the call of a case.
"""

import itertools
import random

from hypothesis import strategies as st

from ..conformance import FAMILIES, axes_of, signature_of
from ..gemm_calls import OPS
from ..gemm_cases import Case, Signature, in_memory
from ..gemm_cases import run as run
from ..guard_zones import Placement
from ..sparse_collective.sddmm_cases import place_of_blocks

Family = Signature
ALIGNS = [8, 1, 8, 2, 4, 1]  # on the sm_80 path


def families(seed: int = 0, each: int = 16) -> list[Family]:
    """`each` of them for every op and path, drawn once: each axis of the conformance cases goes through its values."""
    draw, found = random.Random(seed), []
    for op, path in itertools.product(OPS, ("sm_90", "sm_80")):
        kernels = FAMILIES[{"gemm": "dense", "sddmm": "sampled"}.get(op, "bsr") + f" {path}"]
        axes = axes_of(kernels, op) | ({"align": ALIGNS} if path == "sm_80" else {})
        turns = {axis: [values[i % len(values)] for i in range(each)] for axis, values in axes.items()}
        for row in turns.values():
            draw.shuffle(row)
        found += [signature_of(kernels, op, {axis: row[i] for axis, row in turns.items()}) for i in range(each)]
    return found


# -- drawing ---------------------------------------------------------------------------------------------------


@st.composite
def placements(draw, shape, align: int, transposed: bool = False):
    """A placement in which all strides but the fastest, and the address, are multiples of `align` elements.

    With `align` below 8 the address is no multiple of more.
    """
    order, pads = in_memory(len(shape), transposed), [0] * len(shape)
    if order:
        fast = order[-1]
        pads[fast] = -max(shape[fast], 1) % align
        if len(order) > 1:
            pads[fast] += align * draw(st.sampled_from([0, 0, 1, 2, 7]))
        for dim in order[1:-1]:
            pads[dim] = draw(st.sampled_from([0, 0, 1, 3]))
    return Placement(order, tuple(pads), align * draw(st.sampled_from([0, 1, 3] if align == 8 else [1, 3])))


def extents(most: int, align: int):
    """1 now and then, else up to `most`; where copies are narrow, odd multiples of `align`. 0: see EMPTY."""
    if align == 8:
        near = st.integers(0, most // 8).flatmap(lambda j: st.integers(1, 17).map(lambda more: 8 * j + more))
        return st.one_of(st.just(1), near, st.integers(1, most))
    return st.integers(0, max(most // (2 * align) - 1, 0)).map(lambda j: (2 * j + 1) * align)


# On the sm_80 path a copy is as wide as the contiguous extent allows: to have few kernels, the widest or the narrowest.
wide_or_odd = st.sampled_from([lambda *n: [8 * max(1, x // 8) for x in n], lambda *n: [x | 1 for x in n]])

# What a case has none of. Drawn apart: with a 0 among the values of each, seven products of ten were empty.
EMPTY = [""] * 16 + ["m", "n", "k", "blocks"]


@st.composite
def cases(draw, family: Family, most: int = 300):
    """`most`: the largest extent of a dense product, about."""
    f = family
    # On the sm_80 path a contiguous extent decides how wide copies are; a row of W's blocks is always wide.
    align = f.align if f.path == "sm_80" else 8
    empty, items = draw(st.sampled_from(EMPTY)), draw(st.integers(1, 3)) if f.batch else 1
    density = 0.0 if empty == "blocks" else draw(st.sampled_from([1.0, 0.5, 0.2]))  # the simplest first
    leading, give_out = None, draw(st.sampled_from([True, True, True, False]))
    lead = (items,) if f.batch and not f.run else ()
    widths = draw(wide_or_odd) if f.path == "sm_80" and align == 8 else lambda *n: n
    if f.op == "gemm":
        m, n, k = widths(*(draw(extents(most, align)) for _ in range(3)))
        m, n, k = (0 if empty == name else extent for name, extent in (("m", m), ("n", n), ("k", k)))
        shapes = (*lead, m, k), (*lead, k, n), (*lead, m, n)
    else:
        m, k = (draw(st.integers(1, max(4, most // side))) for side in f.block)
        if f.run:
            n = draw(st.integers(1, max(2, most // f.run)))
        else:
            (n,) = widths(draw(st.one_of(extents(most, align), st.integers(1, 17) if align == 8 else st.nothing())))
        m, n, k = (0 if empty == name else extent for name, extent in (("m", m), ("n", n), ("k", k)))
        M, K, tokens = m * f.block[0], k * f.block[1], n * max(f.run, 1)
        if f.op == "sddmm":
            a, b = (
                draw(placements(shape, f.align, transposed))
                for shape, transposed in zip(((M, tokens), (tokens, K)), f.majors, strict=False)
            )
            places = a, b, place_of_blocks(f.align_out), Placement()
            give_out, seed = give_out or f.residual, draw(st.integers(0, 2**31))
            return Case(f, m, n, k, items, density, None, places, give_out, seed)
        if f.op == "bsr_matmul":
            shapes = (), (*lead, K, tokens), (*lead, M, tokens)
        else:
            if f.op == "bsr_linear" and not f.batch and align == 8 and draw(st.integers(0, 3)) == 0:
                leading = draw(st.sampled_from([(), (1, n), (2, n), (3, 1), (2, 2, 3)]))
            x = (*lead, tokens) if leading is None else leading
            shapes = (), (*x, K), (*x, M)
    # Folded with the others, a dimension of extent 1 is not the contiguous one, which the sm_90 path asks for.
    transposed = f.majors[0], f.majors[1] and not (leading and leading[-1] == 1), f.majors[2], f.majors[2]
    aligns = f.align, f.align, f.align_out, 1
    places = tuple(
        draw(placements(*each)) for each in zip((*shapes, shapes[2]), aligns, transposed, strict=True)
    )  # fmt: skip
    return Case(f, m, n, k, items, density, leading, places, give_out, draw(st.integers(0, 2**31)))
