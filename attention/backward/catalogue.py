"""The catalogue of backward kernels: the facts that ops can request, so that tools and tests need no tensors."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from cute_kernels.arch import ArchSpec

from ..forward.catalogue import ALL_FEATURES, BLOCKSIZES, MASKS, SCORES
from ..forward.config import BlockKind, WindowKind
from ..forward.heuristics import HEAD_DIMS, WIDE
from ..masks.element_mask import ElementMask, for_kernel, trace_mask
from ..masks.mask_mods import AtPositions, Band
from ..selected.blocks import SIDE, SelectedBlocks, mask_of
from .config import BackwardFacts
from .heuristics import pick

BOTH = WindowKind(left=True, right=True)


def configurations(spec: ArchSpec, quick: bool = False) -> Iterator[BackwardFacts]:
    """Facts of each head dimension: plain, with a window and a softcap, and with a block mask, tensors and a softcap.
    One head dimension also has packed sequences and score_mods.

    The architecture that a path is named after has every head dimension; others have ALL_FEATURES and 256.
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
            if path == "sm_90" and dim <= ALL_FEATURES:
                kinds = [BlockKind(128, 128, band) for band in bands()]
                yield from (pick(replace(plain, blocks=kind, deterministic=d)) for kind in kinds for d in (False, True))
            if first or dim in (ALL_FEATURES, 256):
                yield pick(replace(plain, window=BOTH, softcap=True))
                blocks = BlockKind(*BLOCKSIZES[turn % len(BLOCKSIZES)], MASKS["tensors"])
                yield pick(replace(plain, softcap=True, blocks=blocks))
                if path == "sm_90":
                    yield pick(replace(plain, window=WindowKind(right=True), split_heads=True))
            if first and dim == ALL_FEATURES:
                if path == "sm_90":
                    yield from split_kernels(plain)
                    yield from deterministic_kernels(plain)
                yield pick(replace(plain, window=WindowKind(right=True), packed=True))
                yield pick(replace(plain, window=BOTH, softcap=True, packed=True))
                yield pick(replace(plain, window=BOTH, deterministic=True))
                shard = replace(plain, offsets=True, grad_dtype="float32")
                yield pick(replace(shard, window=WindowKind(right=True), deterministic=True))
                yield pick(replace(shard, blocks=BlockKind(128, 128, MASKS["tensors"])))
                scored = replace(plain, score=SCORES["slopes"], score_sums=(0,))
                yield pick(replace(scored, window=WindowKind(right=True)))
                yield pick(replace(scored, score=SCORES["bias"]))
                yield pick(replace(plain, score=SCORES["bias"], window=WindowKind(right=True)))
                yield pick(replace(scored, window=WindowKind(right=True), packed=True))
                yield pick(replace(scored, score=SCORES["bias"].kept_inside, packed=True))
                yield from (pick(replace(plain, blocks=BlockKind(*sides, None))) for sides in BLOCKSIZES)
        yield pick(BackwardFacts(spec.target, path, None, "float16", 192, 128))
    if spec.path == "sm_90":
        yield from selected_kernels(spec)


def split_kernels(plain: BackwardFacts) -> Iterator[BackwardFacts]:
    """Work items of some heads: packed, shards, block masks, score_mods."""
    split, causal = replace(plain, split_heads=True), WindowKind(right=True)
    yield pick(replace(split, window=causal, packed=True))
    yield pick(replace(split, window=causal, softcap=True))
    yield pick(replace(split, window=causal, offsets=True))
    yield pick(replace(split, window=causal, score=SCORES["bias"], score_sums=(0,)))
    yield pick(replace(split, blocks=BlockKind(128, 128, MASKS["tensors"])))
    yield from (pick(replace(split, blocks=BlockKind(*sides, None))) for sides in BLOCKSIZES)
    for band in bands():
        yield pick(replace(split, blocks=BlockKind(128, 128, band)))


def deterministic_kernels(plain: BackwardFacts) -> Iterator[BackwardFacts]:
    """Packed sequences, a bias, a softcap; bands are in the catalogue at each head dimension."""
    plain, causal = replace(plain, deterministic=True), WindowKind(right=True)
    yield pick(replace(plain, window=causal, packed=True))
    yield pick(replace(plain, window=causal, score=SCORES["bias"]))
    yield pick(replace(plain, window=BOTH, softcap=True))


def bands() -> Iterator[ElementMask]:
    """The causal mask, and a window of shards whose tiles extend past the sequence."""
    cpu = torch.device("cpu")
    q_tiles, k_tiles = (torch.zeros(1, dtype=torch.int32, device=cpu) for _ in range(2))
    masks: list[Callable] = [Band(None, 0), AtPositions(Band(100, 0), q_tiles, k_tiles, 128, 1000)]
    yield from (for_kernel(trace_mask(mask, cpu))[0] for mask in masks)


def selected_kernels(spec: ArchSpec) -> Iterator[BackwardFacts]:
    """Selected KV blocks: MSA and NSA, a list per query head, and head dimensions with other mainloops."""
    for dim, dim_v, block_size, packed, shift in (
        (128, 128, 128, 16, 0),
        (128, 128, 64, 16, 0),
        (128, 128, 128, 1, 0),
        (64, 64, 64, 4, 0),
        (192, 128, 64, 16, SIDE),
    ):
        blocks = BlockKind(SIDE, SIDE, selected_mask(block_size, packed, shift))
        plain = BackwardFacts(spec.target, "sm_90", None, "bfloat16", dim, dim_v)
        kernels = replace(plain, blocks=blocks, packed_heads=packed)
        yield pick(replace(kernels, ranges=True))
        if packed > 1 and dim == 128:
            yield pick(replace(kernels, deterministic=True))


def selected_mask(block_size: int, packed: int, shift: int) -> ElementMask:
    """The mask of causal selected KV blocks, of rows that are `packed` heads of each token, with `shift` more keys than
    tokens."""
    indices = torch.zeros(1, SIDE, 1, 1, dtype=torch.int32, device="cpu")
    mask = mask_of(SelectedBlocks(indices, block_size, True, packed), 1, (packed * SIDE, SIDE + shift))
    if mask.mask_mod is None:
        raise AssertionError("selected blocks have a mask_mod")
    return for_kernel(trace_mask(mask.mask_mod, mask.device))[0]


def usual(op: str, spec: ArchSpec, dtype: str, dim: int) -> Iterator[BackwardFacts]:
    """Facts in a bundle: dense and causal attention, batched or packed; block masks without mask_mod. No softcap."""
    if dim == WIDE:  # forward only
        return
    if dim not in HEAD_DIMS:
        raise ValueError(f"head dimension must be one of {', '.join(map(str, HEAD_DIMS))}, got {dim}")
    plain = BackwardFacts(spec.target, spec.path, None, dtype, dim, dim)
    splits = (False, True) if spec.path == "sm_90" else (False,)
    if op == "block_sparse_attention":
        for sides, split in itertools.product(BLOCKSIZES, splits):
            yield pick(replace(plain, blocks=BlockKind(*sides, None), split_heads=split))
        return
    for right, packed in itertools.product((False, True), (False, True)):
        for split in splits if right else (False,):
            yield pick(replace(plain, window=WindowKind(right=right), packed=packed, split_heads=split))
