"""Catalogue of the decode kernels; see forward/catalogue.py."""

import itertools
from collections.abc import Iterator
from typing import Any

from cute_kernels.arch import ArchSpec

from ..forward.catalogue import SCORES
from ..forward.config import DecodeFacts, WindowKind
from ..forward.heuristics import HEAD_DIMS, WIDE
from .heuristics import WIDE_FEW, pick

BOTH = WindowKind(left=True, right=True)
ALL: dict[str, Any] = {"seqlens": True, "page_size": 16, "split": True, "lse": True, "softcap": True, "window": BOTH}
GPT_OSS: dict[str, Any] = {"seqlens": True, "page_size": 64, "window": BOTH, "sinks": "bfloat16"}
SM_90_CASES = [
    *((d, d, {"split": True}) for d in HEAD_DIMS),
    *((d, d, ALL) for d in HEAD_DIMS),
    *((d, d, {"seqlens": True, "page_size": 64, "lse": True}) for d in HEAD_DIMS),
    (128, 128, {"window": WindowKind(right=True), "lse": True}),
    (128, 128, {"seqlens": True, "split": True, "lse": True, "window": WindowKind(right=True)}),
    (128, 128, {"seqlens": True, "spans": True, "split": True, "window": BOTH}),
    (192, 128, {"seqlens": True, "page_size": 256, "split": True, "dtype": "float16"}),
    (64, 256, {"seqlens": True, "window": BOTH}),
    *((64, 64, GPT_OSS | {"split": split}) for split in (False, True)),
    (128, 128, ALL | {"split": False, "sinks": "float32"}),
    (128, 128, {"seqlens": True, "lse": True, "out_dtype": "float32"}),
]
# A cache with sequence lengths and split-KV: ALiBi, causal, also paged, and a bias (B, H, Sq, Sk).
SCORED: dict[str, Any] = {"seqlens": True, "split": True, "lse": True, "window": WindowKind(right=True)}
SCORED_CASES = [
    SCORED | {"score": SCORES["slopes"]},
    SCORED | {"score": SCORES["slopes"], "page_size": 64},
    SCORED | {"score": SCORES["bias"], "window": WindowKind()},
]
# With pages and head dimension 256 a few addresses spill.
SM_80_CASES = [
    *((d, d, ALL | {"page_size": 16 if d < 256 else 0}) for d in HEAD_DIMS),
    (128, 128, {"seqlens": True, "split": True, "lse": True}),
    (128, 128, {"seqlens": True, "spans": True, "split": True, "window": BOTH}),
    *((64, 64, GPT_OSS | {"split": split}) for split in (False, True)),
    (128, 128, {"seqlens": True, "lse": True, "out_dtype": "float32"}),
]
# FP8 caches: each head dimension with all features; plain; and other features that change the kernel.
SCALES: dict[str, Any] = {"k_descale": True, "v_descale": True}
E4M3, E5M2 = ({"cache": dtype} for dtype in ("float8_e4m3fn", "float8_e5m2"))
PAGED: dict[str, Any] = {"seqlens": True, "page_size": 64, "split": True}
E5M2_CASES = [
    *((d, d, ALL | SCALES | E5M2) for d in HEAD_DIMS),
    (128, 128, E5M2 | PAGED | SCALES | {"dtype": "float16"}),
]
E4M3_CASES = [
    *((d, d, ALL | SCALES | E4M3) for d in HEAD_DIMS),
    *((d, d, E4M3) for d in HEAD_DIMS),
    *((128, 128, E4M3 | PAGED | extra) for extra in ({}, SCALES, {"dtype": "float16"}, SCALES | {"split": False})),
    (128, 128, E4M3 | SCALES | {"seqlens": True, "spans": True, "split": True, "window": BOTH}),
    (192, 128, E4M3 | SCALES | PAGED | {"page_size": 256}),
    (64, 256, E4M3 | {"seqlens": True, "window": BOTH}),
    (64, 64, E4M3 | GPT_OSS | SCALES),
    (128, 128, E4M3 | SCALES | SCORED | {"score": SCORES["slopes"], "page_size": 64}),
    (128, 128, E4M3 | SCORED | {"score": SCORES["bias"], "window": WindowKind()}),
]


def configurations(spec: ArchSpec, quick: bool = False) -> Iterator[DecodeFacts]:
    """Each head dimension plain, with all features and with pages on sm_90; with all features on the sm_80 path."""
    if quick:
        yield facts_of(spec, spec.path, 128, 128, ALL)
        return
    if spec.path == "sm_90":
        for d, dv, terms in SM_90_CASES:
            yield facts_of(spec, "sm_90", d, dv, terms)
    for d, dv, terms in SM_80_CASES:
        yield facts_of(spec, "sm_80", d, dv, terms)
    if spec.path == spec.name:
        for terms in SCORED_CASES:
            yield facts_of(spec, spec.path, 128, 128, terms)
    for d, dv, terms in (*E5M2_CASES, *E4M3_CASES):
        yield facts_of(spec, "sm_80", d, dv, terms)
    for terms in (ALL | {"page_size": 0}, ALL):
        yield facts_of(spec, "sm_80", WIDE, WIDE, terms, WIDE_FEW)
    yield facts_of(spec, "sm_80", WIDE, WIDE, ALL)
    yield facts_of(spec, "sm_80", WIDE, WIDE, ALL | {"split": False, "sinks": "float32"})


def facts_of(spec: ArchSpec, path: str, d: int, dv: int, terms: dict, *packed_rows: int) -> DecodeFacts:
    return pick(DecodeFacts(spec.target, path, None, head_dim=d, head_dim_v=dv, **terms), *packed_rows)


def usual(spec: ArchSpec, dtype: str, dim: int) -> Iterator[DecodeFacts]:
    """Kernels of a bundle: decode with and without a causal mask, on a whole cache, one with sequence lengths, or a
    paged one."""
    caches = [{}, *({"seqlens": True, "page_size": size} for size in (0, 16, 64, 256))]
    for window, cache, split in itertools.product((WindowKind(), WindowKind(right=True)), caches, (False, True)):
        terms = {"dtype": dtype, "window": window, "split": split, **cache}
        yield facts_of(spec, spec.path, dim, dim, terms)
        if dim == WIDE:
            yield facts_of(spec, spec.path, dim, dim, terms, WIDE_FEW)
