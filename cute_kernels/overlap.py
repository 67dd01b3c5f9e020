"""Exact test for shared memory between strided tensors."""

from torch import Tensor

MOST_STEPS = 10_000  # limit of the search; tensors that need more count as overlapping


def extent(t: Tensor) -> int:
    """Bytes from the first to the last element of a tensor, gaps included; 0 for a tensor without elements."""
    if not t.numel():
        return 0
    return (1 + sum(s * (n - 1) for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size()


def overlap(a: Tensor, b: Tensor) -> bool:
    """True if an element of a and an element of b share a byte.

    Interleaved views, such as the left and the right half of a matrix's columns, do not overlap.
    """
    away = b.data_ptr() - a.data_ptr()
    if not (a.numel() and b.numel() and -extent(b) < away < extent(a)):
        return False
    # Byte i of a is byte j of b if sum(stride x) + i = away + sum(stride y) + j. With y and j counted from their ends,
    # all terms have one sign: their sum must be `away` plus b's extent less 1.
    terms: dict[int, int] = {}  # stride in bytes -> largest factor
    for t in (a, b):
        size = t.element_size()
        for stride, most in ((1, size - 1), *((s * size, n - 1) for n, s in zip(t.shape, t.stride(), strict=True))):
            if stride and most:
                terms[stride] = terms.get(stride, 0) + most
    return _reaches(sorted(terms.items(), reverse=True), away + extent(b) - 1)


def _reaches(terms: list[tuple[int, int]], total: int) -> bool:
    """True if total is a sum of stride * factor, each factor from 0 to its largest."""
    rest = [0]  # largest sum of the terms from i on
    for stride, most in reversed(terms):
        rest.insert(0, rest[0] + stride * most)
    pending = [(0, total)]
    seen: set[tuple[int, int]] = set()
    while pending:
        i, left = pending.pop()
        if not 0 <= left <= rest[i] or (i, left) in seen:
            continue
        if left in (0, rest[i]) or len(seen) > MOST_STEPS:
            return True
        seen.add((i, left))
        stride, most = terms[i]
        least = max(0, -((rest[i + 1] - left) // stride))
        pending.extend((i + 1, left - stride * factor) for factor in range(least, min(most, left // stride) + 1))
    return False
