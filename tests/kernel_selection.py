"""Kernels of the catalogues that tests compile by default: together they have every feature that kernels vary in.

test_kernels_compile compiles them. Tests of what is special to some kernels take theirs from among them where they can
(`one_of_each`): a kernel is compiled once in a run, whichever test asks for it (`outcome_of` in conftest.py).
"""

import functools
import heapq
from collections import Counter
from collections.abc import Callable, Hashable

import torch

from attention.backward.config import BackwardFacts
from attention.forward.config import DecodeFacts, FlashFacts, Float8Facts
from cute_kernels.arch import ARCHS
from cute_kernels.matmul.family import ProductFamily
from cute_kernels.runtime.families import families, family_of, load_all

load_all()
LIKE_SM_80 = ("sm_86", "sm_89")  # the same kernels with the same machine code


def features(facts) -> set:
    """Features of a kernel. Its spills depend on configuration, blocks, mask and epilogue."""
    if isinstance(facts, FlashFacts | BackwardFacts):
        return features_of_attention(facts)
    if not isinstance(family_of(facts), ProductFamily):
        return {facts}
    cfg, block = facts.config, facts.block
    kind = facts.path, facts.family, cfg.split > 1
    return {
        (kind, "configuration", cfg, facts.epilogue.is_light),
        (kind, "rows", cfg.tile_m, cfg.split, facts.transposed, block and block.bm),
        (kind, "columns", cfg.tile_n, cfg.split, facts.transposed),
        (kind, "epilogue", facts.epilogue),
        (kind, "blocks", block and (block.bm, block.bk)),
        (kind, "layouts", facts.majors, facts.aligns, facts.transposed),
        (kind, "types", facts.dtype, facts.out_dtype, block and block.index_dtype),
        (kind, "sums", cfg, facts.promotes, facts.acc_dtype),
        (kind, "batches", facts.ranks, facts.ordered, block and (block.batch, block.run)),
    }


def features_of_attention(facts: FlashFacts | BackwardFacts) -> set:
    """Each head dimension with every configuration and every mask. What a term adds is the same for all of them."""
    blocks, kind = facts.blocks, (facts.path, facts.family)
    dims = facts.head_dim, facts.head_dim_v
    terms = facts.window, facts.softcap, getattr(facts, "lse", None), facts.packed
    terms += facts.offsets, getattr(facts, "grad_dtype", None)
    found = {
        (kind, "configuration", facts.config, dims),
        (kind, "terms", terms, blocks is None),
        (kind, "mask", dims, blocks and (blocks.mask,)),
        (kind, "blocks", blocks and (blocks.block_q, blocks.block_k)),
        (kind, "type", facts.dtype),
    }
    if isinstance(facts, Float8Facts):
        found.add((kind, "scales", facts.q_descale, facts.v_descale, facts.out_dtype))
        found.add((kind, "tokens", facts.tokens and (facts.fast, dims, facts.config.groups)))
        found.add((kind, "converts", facts.converts, facts.fast, dims, facts.config.groups, blocks is None))
    if isinstance(facts, DecodeFacts):
        found |= {
            (kind, "cache", terms, facts.seqlens, facts.page_size, facts.split),
            (kind, "cap", dims, facts.softcap),
            (kind, "8 bits", facts.cache, dims),
            (kind, "scales", facts.cache, facts.k_descale, facts.v_descale),
        }
    return found


def cover(catalogue: list, features) -> list:
    """Some of the catalogue's kernels that have all features among them, those with the most new ones first, and none
    of which each feature is another's, too."""
    of, found = {facts: features(facts) for facts in catalogue}, {}
    missing = set().union(*of.values())
    # A kernel has no more new features later than now: those counted again are the few that may come next.
    heap = [(-len(each), number) for number, each in enumerate(of.values())]
    heapq.heapify(heap)
    kernels = list(of)
    while missing:
        _, number = heapq.heappop(heap)
        new = of[kernels[number]] & missing
        if heap and (-len(new), number) > heap[0]:
            heapq.heappush(heap, (-len(new), number))
        else:
            found[kernels[number]] = of[kernels[number]]
            missing -= new
    count = Counter(feature for of_one in found.values() for feature in of_one)
    for facts, of_one in reversed(list(found.items())):
        if all(count[feature] > 1 for feature in of_one):
            count.subtract(found.pop(facts))
    return list(found)


def catalogue(spec) -> list:
    return [facts for family in families() for facts in family.catalogue(spec.name)]


def configuration(facts) -> set:
    return {(facts.family, getattr(facts, "path", ""), getattr(facts, "config", None))}


def of_float8(facts) -> bool:
    """True for kernels with FP8 instructions, which sm_89 has and other architectures of the sm_80 path lack."""
    dtypes = (getattr(facts, name, None) or "" for name in ("dtype", "out_dtype"))
    return any(dtype.startswith("float8") for dtype in dtypes) or getattr(facts, "cache", None) == "float8_e4m3fn"


def is_other_archs(facts) -> bool:
    """True if another architecture has a kernel of the same source: those of the sm_80 path on newer ones. sm_90
    decodes from FP8 caches by the instructions of sm_89, sm_80 and sm_86 without them."""
    if getattr(facts, "path", "") != "sm_80" or facts.arch == "sm_80":
        return False
    return not of_float8(facts) or (facts.arch == "sm_90a" and getattr(facts, "cache", None) is not None)


def traits(facts) -> set[tuple]:
    """Traits of a kernel that tell its code from others': by default each is met in one kernel that is compiled.

    Where another architecture has kernels of the same source, one of each package does for it.
    """
    if is_other_archs(facts) or (facts.arch in LIKE_SM_80 and (facts.arch == "sm_86" or not of_float8(facts))):
        package = type(family_of(facts)).__module__.partition(".")[0]
        return {("sm_80" if facts.arch in LIKE_SM_80 else facts.arch, package)}
    found = {("width", getattr(torch, getattr(facts, "dtype", "uint8")).itemsize)}
    if isinstance(family_of(facts), ProductFamily):
        cfg = facts.config
        found |= {
            ("mainloop", type(cfg).__name__),
            ("consumers", getattr(cfg, "consumer_groups", 1)),
            ("splits", cfg.split > 1),
            ("rings", getattr(cfg, "rings", 1)),
            ("sums", facts.promotes, facts.acc_dtype),
            ("gated", facts.epilogue.gated),
        }
    elif isinstance(facts, FlashFacts | BackwardFacts):
        found |= {
            ("wide", facts.head_dim > 128),
            ("blocks", facts.blocks is not None),
            ("cache", getattr(facts, "cache", None) is not None),
            ("fast", getattr(facts, "fast", None)),
        }
    return {(facts.arch, facts.family, getattr(facts, "path", ""), *trait) for trait in found}


@functools.cache
def selected(spec) -> list:
    """The first architecture of a path takes all features; others each configuration, sm_86 and sm_89 by turns.

    For FP8, sm_86 has the kernels of sm_80, and sm_89 has its own instructions.
    """
    every = catalogue(spec)
    known = [f for f in every if is_other_archs(f) or spec.name in LIKE_SM_80 and not of_float8(f)]
    turn, turns = (LIKE_SM_80.index(spec.name), len(LIKE_SM_80)) if spec.name in LIKE_SM_80 else (0, 1)
    own = cover([facts for facts in every if facts not in known], configuration if spec.name == "sm_86" else features)
    found = own + cover(known, configuration)[turn::turns]
    return found


@functools.cache
def every_selected() -> frozenset:
    """Selected kernels of all architectures."""
    return frozenset(facts for spec in ARCHS.values() for facts in selected(spec))


def one_of_each(kernels: list, kind: Callable[..., Hashable], facts: Callable = lambda kernel: kernel) -> list:
    """A kernel of each kind(facts), the first one that is selected where there is such a one.

    facts: of an element of `kernels`.
    """
    found = {}
    for kernel in kernels:
        f = facts(kernel)
        known = found.setdefault(kind(f), kernel)
        if f in every_selected() and facts(known) not in every_selected():
            found[kind(f)] = kernel
    return list(found.values())
