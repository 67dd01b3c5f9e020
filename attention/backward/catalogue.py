"""Which kernels of backward there are: the facts that ops can ask for, so that tools and tests need no tensors."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from cute_kernels.arch import ArchSpec

from ..forward.catalogue import ALL_FEATURES, BLOCKSIZES, MASKS, SCORES
from ..forward.choose import HEAD_DIMS, WIDE
from ..forward.config import BlockKind, WindowKind
from .choose import pick
from .config import BackwardFacts

BOTH = WindowKind(left=True, right=True)


def configurations(spec: ArchSpec, quick: bool = False) -> Iterator[BackwardFacts]:
    """Each head dimension plain, and with a window and a cap; packed, and with a score_mod, at one; block masks with
    tensors and a cap.

    On a path's first architecture every head dimension, on others the largest two and the one with all features.
    """
    if quick:
        yield pick(BackwardFacts(spec.target, spec.path, None, window=WindowKind(right=True)))
        return
    for path in ("sm_80", "sm_90") if spec.path == "sm_90" else ("sm_80",):
        first = path == spec.name
        for turn, dim in enumerate(HEAD_DIMS):
            plain = BackwardFacts(spec.target, path, None, "bfloat16", dim, dim)
            if first:
                yield pick(plain)
            if first or dim in (ALL_FEATURES, 256):
                yield pick(replace(plain, window=BOTH, softcap=True))
                blocks = BlockKind(*BLOCKSIZES[turn % len(BLOCKSIZES)], MASKS["tensors"])
                yield pick(replace(plain, softcap=True, blocks=blocks))
            if first and dim == ALL_FEATURES:
                yield pick(replace(plain, window=WindowKind(right=True), packed=True))
                yield pick(replace(plain, window=BOTH, softcap=True, packed=True))
                yield pick(replace(plain, window=BOTH, deterministic=True))
                shard = replace(plain, offsets=True, grad_dtype="float32")
                yield pick(replace(shard, window=WindowKind(right=True)))
                yield pick(replace(shard, blocks=BlockKind(128, 128, MASKS["tensors"])))
                scored = replace(plain, score=SCORES["slopes"], score_sums=(0,))
                yield pick(replace(scored, window=WindowKind(right=True)))
                yield pick(replace(scored, score=SCORES["bias"]))
                yield pick(replace(scored, window=WindowKind(right=True), packed=True))
                yield pick(replace(scored, score=SCORES["bias"].kept_inside, packed=True))
                yield from (pick(replace(plain, blocks=BlockKind(*sides, None))) for sides in BLOCKSIZES)
        yield pick(BackwardFacts(spec.target, path, None, "float16", 192, 128))


def usual(op: str, spec: ArchSpec, dtype: str, dim: int) -> Iterator[BackwardFacts]:
    """What a bundle has: dense and causal attention, packed too, or masks without a function; without a cap."""
    if dim == WIDE:  # forward only
        return
    if dim not in HEAD_DIMS:
        raise ValueError(f"head dimension {dim} has no kernel; there are {', '.join(map(str, HEAD_DIMS))}")
    plain = BackwardFacts(spec.target, spec.path, None, dtype, dim, dim)
    if op == "block_sparse_attention":
        for sides in BLOCKSIZES:
            yield pick(replace(plain, blocks=BlockKind(*sides, None)))
        return
    for right, packed in itertools.product((False, True), (False, True)):
        yield pick(replace(plain, window=WindowKind(right=right), packed=packed))
