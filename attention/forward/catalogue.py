"""Catalogue of the forward kernels: the facts that ops can request, so that tools and tests need no tensors."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from cute_kernels.arch import ArchSpec

from ..masks.element_mask import element_mask
from ..masks.mask_mods import And, Band, RowRange
from ..masks.score_mod import bound
from ..masks.score_mods import Alibi, Bias
from .config import BlockKind, FlashFacts, Float8Facts, GatherFacts, WindowKind
from .heuristics import (
    GATHER,
    GATHERED,
    HEAD_DIMS,
    WIDE,
    Extents,
    candidates_sm80,
    candidates_sm90,
    cannot_convert,
    gather_facts,
    head_dims_text,
    pick,
)  # fmt: skip

EXTENTS = Extents(256, 4096, 4096, None, None, 132)

# (window, softcap, lse): plain, causal, and all terms without and with LSE
FEATURES = (
    (WindowKind(), False, False),
    (WindowKind(right=True), False, True),
    (WindowKind(left=True, right=True), True, False),
    (WindowKind(left=True, right=True), True, True),
)
BLOCKSIZES = ((64, 64), (64, 128), (128, 64), (128, 128))
CPU = torch.device("cpu")
ROWS = torch.zeros(1, dtype=torch.int32, device=CPU)


def by_head(b, h, q, kv):
    """A mask_mod that computes with all four positions."""
    return (kv <= q) & (q - kv < 100 * (h + 1)) | (kv < 8 * b)


MASKS = {
    "none": None,
    "function": element_mask(by_head, CPU)[0],
    "tensors": element_mask(And(RowRange(ROWS, ROWS + 1), Band(None, 0, 3)), CPU)[0],
}

SCORES = {
    "slopes": bound(Alibi(torch.zeros(1, device=CPU)), CPU).mod,
    "bias": bound(Bias(torch.zeros(2, 2, 2, 2, device=CPU)), CPU).mod,
}

# Code added for kernels without LSE and for packed sequences is the same for all head dimensions.
ALL_FEATURES = 128


def configurations(spec: ArchSpec, quick: bool = False) -> Iterator[FlashFacts]:
    """On sm_90 and sm_80: the first candidate for each feature set, and the other candidates with LSE. On other GPUs:
    the selected configurations.

    The third feature set, packed sequences with the two middle sets, score functions and FP32 outputs are listed at one
    head dimension; FP32 outputs also at 512.
    """
    if quick:
        yield pick(FlashFacts(spec.target, spec.path, None, window=WindowKind(right=True), lse=True), EXTENTS)
        if spec.path == "sm_90":
            yield gather_facts(FlashFacts(spec.target, spec.path, None, head_dim=256, head_dim_v=256), 4, True)
        return
    for path in ("sm_80", "sm_90") if spec.path == "sm_90" else ("sm_80",):
        for dim in HEAD_DIMS:
            for i, (band, softcap, lse) in enumerate(FEATURES):
                if path != spec.name and i < 3 or i == 2 and dim != ALL_FEATURES:
                    continue
                facts = FlashFacts(spec.target, path, None, "bfloat16", dim, dim, band, softcap, lse)
                for config in candidates(facts, spec)[: None if facts.lse and path == spec.name else 1]:
                    dynamic = path == "sm_90" and (band.left or band.right)
                    yield replace(facts, config=replace(config, dynamic=dynamic))
                if path == spec.name and (i in (0, 3) or dim == ALL_FEATURES):
                    yield pick(replace(facts, packed=True), EXTENTS)
        yield pick(FlashFacts(spec.target, path, None, "float16", 192, 128), EXTENTS)
        if path == spec.name:
            facts = FlashFacts(spec.target, path, None, lse=True)
            yield pick(replace(facts, window=WindowKind(right=True), score=SCORES["slopes"]), EXTENTS)
            yield pick(replace(facts, blocks=BlockKind(128, 128, None), score=SCORES["bias"]), EXTENTS)
            yield pick(replace(facts, window=WindowKind(right=True), score=SCORES["slopes"], offsets=True), EXTENTS)
            yield pick(replace(facts, blocks=BlockKind(128, 128, MASKS["tensors"]), offsets=True), EXTENTS)
            yield pick(replace(facts, window=WindowKind(right=True), offsets=True, out_dtype="float32"), EXTENTS)
            packed = replace(facts, packed=True)
            yield pick(replace(packed, window=WindowKind(right=True), score=SCORES["slopes"]), EXTENTS)
            yield pick(replace(packed, score=SCORES["bias"].kept_inside), EXTENTS)
        yield from sink_kernels(spec, path)
        yield from block_mask_kernels(spec, path)
        yield from head_dim_512(spec, path)
    if spec.path == "sm_90":
        yield from float8_kernels(spec)
        yield from of_tokens(spec)
        yield from gather_kernels(spec)


def gather_kernels(spec: ArchSpec) -> Iterator[GatherFacts]:
    """Gathered KV tiles: each head dimension and block size causal with LSE, as in training; some without, in FP16 and
    with a softcap."""
    for dim, block_size in itertools.product(GATHER, GATHERED):
        if block_size > GATHER[dim][0]:
            continue
        facts = FlashFacts(spec.target, "sm_90", None, "bfloat16", dim, dim, lse=True)
        yield gather_facts(facts, block_size, True)
        if (dim, block_size) in ((64, 4), (128, 64), (256, 4)):
            yield gather_facts(replace(facts, lse=False), block_size, False)
            yield gather_facts(replace(facts, dtype="float16", softcap=True), block_size, True)


def sink_kernels(spec: ArchSpec, path: str) -> Iterator[FlashFacts]:
    """gpt-oss's layers; on a path's first architecture also sinks combined with all terms, packed sequences, block
    masks, and head dimension 512."""
    layer = FlashFacts(spec.target, path, None, "bfloat16", 64, 64, FEATURES[2][0], lse=True, sinks="bfloat16")
    terms = FlashFacts(spec.target, path, None, window=FEATURES[2][0], softcap=True, lse=True, sinks="float32")
    for facts in (layer, terms) if path == spec.name else (layer,):
        for config in candidates(facts, spec):
            yield replace(facts, config=replace(config, dynamic=path == "sm_90"))
    if path == spec.name:
        yield pick(replace(layer, packed=True), EXTENTS)
        yield pick(replace(terms, window=WindowKind(), blocks=BlockKind(128, 128, MASKS["tensors"])), EXTENTS)
        yield pick(replace(terms, head_dim=WIDE, head_dim_v=WIDE), EXTENTS)


def head_dim_512(spec: ArchSpec, path: str) -> Iterator[FlashFacts]:
    """Head dimension 512: packed and with block masks; on a path's first architecture also plain and with all terms."""
    plain = FlashFacts(spec.target, path, None, head_dim=WIDE, head_dim_v=WIDE)
    terms = replace(plain, softcap=True, lse=True)
    if path == spec.name:
        yield pick(plain, EXTENTS)
        for facts in (replace(plain, window=FEATURES[1][0]), replace(terms, window=FEATURES[2][0])):
            facts = pick(facts, EXTENTS)
            yield replace(facts, config=replace(facts.config, dynamic=path == "sm_90"))
        yield pick(replace(terms, out_dtype="float32"), EXTENTS)
    yield pick(replace(terms, window=FEATURES[2][0], packed=True), EXTENTS)
    yield pick(replace(terms, blocks=BlockKind(64, 64, MASKS["tensors"])), EXTENTS)


def float8_kernels(spec: ArchSpec) -> Iterator[Float8Facts]:
    """FP8 kernels with FP8 P and V (`fast`), with FP16 P and V, and with a 16-bit V.

    Every configuration with scales and LSE, plain and causal if it serves both; at one head dimension all terms, packed
    sequences, sinks and other output dtypes; block masks of each shape.
    """
    for fast in (True, False):
        plain = Float8Facts(spec.target, "sm_90", None, fast=fast)
        yield from and_converting(float8_kind(plain))
    for facts in (replace(plain, given_v="bfloat16"), replace(plain, given_v="float16", packed=True)):
        yield pick(facts, EXTENTS)


def and_converting(kernels: Iterator[Float8Facts]) -> Iterator[Float8Facts]:
    """The kernels, each followed by its variant that converts V itself if there is one."""
    for facts in kernels:
        yield facts
        inside = replace(facts, converts=True)
        if not cannot_convert(inside):
            yield inside


def float8_kind(plain: Float8Facts) -> Iterator[Float8Facts]:
    """The kernels of one of the two kinds."""
    scaled = replace(plain, lse=True, q_descale=True, k_descale=True, v_descale=True)
    for dim in HEAD_DIMS:
        facts = replace(scaled, head_dim=dim, head_dim_v=dim)
        yield from plain_and_causal(facts)
        for blocksize in BLOCKSIZES:
            yield pick(replace(facts, softcap=True, blocks=BlockKind(*blocksize, MASKS["tensors"])), EXTENTS)
        yield pick(replace(facts, blocks=BlockKind(128, 128, None)), EXTENTS)
    terms = replace(scaled, window=FEATURES[2][0], softcap=True, sinks="float32", out_dtype="float32")
    for facts in (terms, replace(terms, packed=True), replace(scaled, packed=True), replace(plain, v_descale=True)):
        for config, _ in candidates_sm90(facts, replace(EXTENTS, left=facts.window.left or None)):
            yield replace(facts, config=config)
    yield pick(plain, EXTENTS)
    yield pick(replace(scaled, window=FEATURES[1][0], score=SCORES["slopes"], out_dtype="float16"), EXTENTS)
    yield pick(replace(scaled, head_dim=192), EXTENTS)


def plain_and_causal(facts: Float8Facts) -> Iterator[Float8Facts]:
    """Each configuration that serves calls without a mask, and each that serves causal ones."""
    for band, extents in ((FEATURES[0][0], EXTENTS), (FEATURES[1][0], replace(EXTENTS, right=0))):
        for config, _ in candidates_sm90(facts, extents):
            yield replace(facts, config=config, window=band)


def of_tokens(spec: ArchSpec) -> Iterator[Float8Facts]:
    """FP8 kernels with one scale per block of tokens, fast and not, and kernels with a 16-bit V.

    Every configuration with all scales and LSE, plain and causal; at one head dimension all terms, sinks, score
    functions and each scale alone; block masks.
    """
    for fast in (True, False):
        plain = Float8Facts(spec.target, "sm_90", None, fast=fast, tokens=True)
        yield from and_converting(token_scale_kind(plain))
    yield pick(replace(plain, given_v="bfloat16", v_descale=True, lse=True), EXTENTS)


def token_scale_kind(plain: Float8Facts) -> Iterator[Float8Facts]:
    """The kernels of one of the two kinds."""
    scaled = replace(plain, lse=True, q_descale=True, k_descale=True, v_descale=True)
    for dim in HEAD_DIMS:
        facts = replace(scaled, head_dim=dim, head_dim_v=dim)
        yield from plain_and_causal(facts)
        for block in (64, 128):
            yield pick(replace(facts, softcap=True, blocks=BlockKind(block, block, MASKS["tensors"])), EXTENTS)
        for mask in (None, MASKS["tensors"]):
            yield pick(replace(facts, blocks=BlockKind(128, 128, mask)), EXTENTS)
    terms = replace(scaled, window=FEATURES[2][0], softcap=True, sinks="float32", out_dtype="float32")
    for config, _ in candidates_sm90(terms, replace(EXTENTS, left=True)):
        yield replace(terms, config=config)
    yield pick(replace(scaled, window=FEATURES[1][0], score=SCORES["slopes"], out_dtype="float16"), EXTENTS)
    for name in ("q_descale", "k_descale", "v_descale"):
        scale: dict[str, Any] = {name: True}
        yield pick(replace(plain, **scale), EXTENTS)


def candidates(facts: FlashFacts, spec: ArchSpec) -> list:
    if facts.path == "sm_90":
        return [config for config, _ in candidates_sm90(facts, EXTENTS)]
    return candidates_sm80(spec, facts.head_dim, facts.head_dim_v, facts.lse)


def block_mask_kernels(spec: ArchSpec, path: str) -> Iterator[FlashFacts]:
    """Block masks: all shapes on a path's first architecture, the largest on others.

    Masks with tensors, which cost the most, are listed with every block shape; masks without tensors alternate, each
    with one of the shapes.
    """
    facts = FlashFacts(spec.target, path, None, "bfloat16", softcap=True, lse=True)
    for turn, dim in enumerate(HEAD_DIMS if path == spec.name else (128, 256)):
        facts = replace(facts, head_dim=dim, head_dim_v=dim)
        for blocksize in BLOCKSIZES:
            yield pick(replace(facts, blocks=BlockKind(*blocksize, MASKS["tensors"])), EXTENTS)
        if path == spec.name:
            for block, name in ((64, "function"), (128, "none")) if turn % 2 else ((128, "function"), (64, "none")):
                plain = replace(facts, softcap=False, lse=False)
                yield pick(replace(plain, blocks=BlockKind(block, block, MASKS[name])), EXTENTS)
    for dims in ((192, 128), (64, 256)):
        facts = replace(facts, head_dim=dims[0], head_dim_v=dims[1])
        yield pick(replace(facts, blocks=BlockKind(64, 64, MASKS["tensors"])), EXTENTS)


def usual(op: str, spec: ArchSpec, dtype: str, dim: int) -> Iterator[FlashFacts]:
    """Kernels of a bundle: dense and causal attention, also packed, or block masks without a function; without LSE and
    softcap.

    The configuration depends on shapes, so all configurations are listed. Other windows are compiled on their first
    call.
    """
    if dim not in (*HEAD_DIMS, WIDE):
        raise ValueError(f"head dimension must be {head_dims_text()}, got {dim}")
    plain = FlashFacts(spec.target, spec.path, None, dtype, dim, dim)
    if op == "block_sparse_attention":
        for blocksize in BLOCKSIZES:
            yield pick(replace(plain, blocks=BlockKind(*blocksize, None)), EXTENTS)
        return
    for right, packed in itertools.product((None, 0), (False, True)):
        facts = replace(plain, window=WindowKind(right=right == 0), packed=packed)
        if spec.path != "sm_90":
            yield pick(facts, EXTENTS)
            continue
        for heads in (1, EXTENTS.heads):  # more tiles than SMs are drawn from a counter where they differ
            extents = replace(EXTENTS, heads=heads, rows=64 * heads, right=right)
            yield from (replace(facts, config=config) for config, _ in candidates_sm90(facts, extents))
