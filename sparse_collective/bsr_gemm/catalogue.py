"""The catalogue of block-sparse GEMM kernels; see cute_kernels.matmul.catalogue."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cute_kernels.arch import ArchSpec, arch_named
from cute_kernels.matmul.candidates import split_sm90
from cute_kernels.matmul.catalogue import (
    COL,
    FP16_SUMS,
    LIGHT,
    LINEAR,
    ROW,
    TF32,
    buildable,
    dense,
    first,
    fp32_bias,
    full,
    kept,
)
from cute_kernels.matmul.config import BlockFacts, EpilogueSpec, GemmFacts
from cute_kernels.tile.element import BITS_16, element_of

from .dependent_launch import may_follow

# One block shape for each way that blocks meet tiles: as high as a tile, several tiles high (256, 512), half a tile
# (64), a fraction of one (48, 32, 16); several K-tiles wide (256), a last K-tile of 48 (112), narrow K-tiles.
GATED = EpilogueSpec(activation="silu", gated=True)
BLOCKS = ((128, 128), (128, 64), (256, 64), (64, 64), (512, 112), (32, 32), (16, 16), (48, 112), (64, 256))


def bsr(spec: ArchSpec, path: str, config, block: tuple[int, int], **changes) -> GemmFacts:
    """bsr_matmul(W, b) of a contiguous b."""
    more = {name: changes.pop(name) for name in ("batch", "run", "permuted", "scaled") if name in changes}
    index = BlockFacts(*block, changes.pop("index_dtype", "int32"), **more)
    return dense(spec, path, config, **{"block": index, "ranks": (3, 2, 2)} | changes)


def linear(spec: ArchSpec, path: str, config, block: tuple[int, int], **changes) -> GemmFacts:
    """bsr_linear(x, W) of a contiguous x."""
    return bsr(spec, path, config, block, **{"majors": ("k", "k", "m"), "transposed": True} | changes)


def main(family, make, spec: ArchSpec, path: str, block: tuple[int, int], **changes) -> list[GemmFacts]:
    """The first of the family's configurations for a block shape that supports these changes, in a list."""
    return first(family, make, spec, path, BlockFacts(*block, "int32"), **changes)


def bsr_kernels(family, arch: str, quick: bool) -> list[GemmFacts]:
    """Each configuration plain; those of 128x128 blocks, which all blocks of that height share, loaded as well."""
    spec = arch_named(arch)
    path = spec.path
    found = main(family, bsr, spec, path, (128, 128)) + main(family, linear, spec, path, (512, 112), epilogue=LINEAR)
    if quick:
        return found
    for block in BLOCKS:
        for config in family.candidates(path, BlockFacts(*block, "int32"), spec):
            found.append(bsr(spec, path, config, block))
            if block == (128, 128):
                found.append(linear(spec, path, config, block, epilogue=LINEAR))
                if path == "sm_90":
                    found.append(linear(spec, path, config, block, epilogue=kept("row")))
                    found.append(linear(spec, path, config, block, epilogue=GATED, ordered=True))
    found += variations(family, spec, path)
    found += unaligned(family, spec)
    found += batches(family, spec, path)
    found += transposed_views(family, spec, path)
    if path != "sm_80":
        for config in split_sm90(BITS_16.rows[0], spec, BITS_16)[0]:
            found.append(linear(spec, path, config, (512, 112), epilogue=LINEAR))
            found.append(bsr(spec, path, config, (128, 128), ordered=True, index_dtype="int64"))
        for make in (bsr, linear):
            found += main(family, make, spec, path, (512, 112), ranks=(3, 3, 3))
        for block in ((128, 128), (512, 112), (32, 32)):
            found += main(family, bsr, spec, "sm_80", block)
        found += batches(family, spec, "sm_80")[:6]
    return buildable(family, found)


def variations(family, spec: ArchSpec, path: str) -> list[GemmFacts]:
    """GEMMs with 128x128 blocks and other operands, outputs and epilogues."""
    fp32: dict[str, Any] = {"out_dtype": "float32", "aligns": (8, 8, 4)}
    matmul: list[dict[str, Any]] = [
        {"majors": ("k", "k", "n")},
        {"dtype": "float16", "out_dtype": "float16"},
        fp32,
        {"index_dtype": "int64"},
        {"ordered": True},
        {"ranks": (3, 3, 3)},
        {"aligns": (8, 8, 1)},
        {"epilogue": LIGHT},
        {"epilogue": COL},
        {"epilogue": ROW},
        {"epilogue": full()},
    ]
    layer: list[dict[str, Any]] = [
        {},
        {"majors": ("k", "n", "m")},
        {"aligns": (8, 8, 1)},
        {"epilogue": LIGHT},
        {**fp32, "epilogue": LINEAR},
    ]
    layer += [{"epilogue": kept("row")}, {"epilogue": kept("row"), "aligns": (8, 8, 1)}]
    layer += [{"epilogue": GATED, "aligns": (8, 8, 1)}, {"epilogue": GATED, **fp32}]
    found = [facts for change in matmul for facts in main(family, bsr, spec, path, (128, 128), **change)]
    found += [facts for change in layer for facts in main(family, linear, spec, path, (128, 128), **change)]
    found += [facts for block in ((256, 64), (64, 64)) for facts in main(family, bsr, spec, path, block, ordered=True)]
    for epilogue in (LINEAR, kept("row")):
        found += main(family, linear, spec, path, (32, 32), epilogue=epilogue)
    return found + main(family, linear, spec, path, (256, 128), epilogue=GATED)


def transposed_views(family, spec: ArchSpec, path: str) -> list[GemmFacts]:
    """GEMMs with W.t(), as in gradients of layers: x @ W, whose rows are W's columns."""
    view = {"permuted": True, "majors": ("m", "k", "m")}
    found = []
    for block in BLOCKS:
        for config in family.candidates(path, BlockFacts(*block, "int32", permuted=True), spec):
            found.append(linear(spec, path, config, block, **view))
    found += main(family, linear, spec, path, (128, 128), **view, epilogue=LINEAR)
    found += main(family, linear, spec, path, (128, 128), **view, ordered=True, index_dtype="int64")
    found += main(family, linear, spec, path, (64, 64), **view, batch="values", ranks=(4, 3, 3))
    found += main(family, linear, spec, path, (64, 64), **view, batch="patterns", ranks=(3, 2, 2), run=128)
    matmul = view | {"majors": ("m", "n", "n")}
    return found + main(family, bsr, spec, path, (128, 128), **matmul)


def batches(family, spec: ArchSpec, path: str) -> list[GemmFacts]:
    """Batches of block-sparse matrices in both forms, and grouped products."""
    values, patterns = {"batch": "values", "ranks": (4, 3, 3)}, {"batch": "patterns", "ranks": (3, 3, 3)}
    layer = replace(LINEAR, residual=None, bias_items=True)
    found = []
    for form in (values, patterns):
        found += main(family, bsr, spec, path, (128, 128), **form)
        found += main(family, linear, spec, path, (128, 128), **form, epilogue=replace(LINEAR, bias_items=True))
        for block in ((128, 128), (64, 64)):
            grouped = form | {"ranks": (form["ranks"][0], 2, 2), "run": 128}
            found += main(family, linear, spec, path, block, **grouped, epilogue=layer)
    found += main(family, bsr, spec, path, (128, 128), batch="values", ranks=(4, 2, 3), ordered=True)
    found += main(family, bsr, spec, path, (128, 128), batch="patterns", ranks=(3, 2, 3), index_dtype="int64")
    found += main(family, bsr, spec, path, (128, 128), **values, epilogue=replace(ROW, bias_items=True))
    found += main(family, bsr, spec, path, (128, 128), **patterns, epilogue=full())
    for block in ((32, 32), (512, 112)):
        found += main(family, bsr, spec, path, block, batch="patterns", ranks=(3, 2, 3))
    for block in ((128, 128), (64, 64), (256, 64), (32, 32)):
        for config in family.candidates(path, BlockFacts(*block, "int32", run=256), spec):
            found.append(linear(spec, path, config, block, batch="patterns", run=256, epilogue=layer))
    found += main(family, linear, spec, path, (128, 128), batch="values", ranks=(4, 2, 2), run=256, ordered=True)
    return buildable(family, found)


def unaligned(family, spec: ArchSpec) -> list[GemmFacts]:
    """Operands that cp.async takes in narrower copies, or element by element; the sm_80 path's alone."""
    sparse: list[dict[str, Any]] = [{"aligns": (8, align, align)} for align in (1, 4)]
    sparse += [{"aligns": (8, 1, 8), "majors": ("k", "any", "n")}]
    found = [facts for change in sparse for facts in main(family, bsr, spec, "sm_80", (128, 128), **change)]
    return found + main(family, linear, spec, "sm_80", (128, 128), aligns=(8, 1, 1), epilogue=LINEAR)


def float8_kernels(family, arch: str, quick: bool) -> list[GemmFacts]:
    """FP8 kernels: each configuration for square blocks with a scale each, and variations of the main one."""
    spec = arch_named(arch)
    if quick or not spec.float8:
        return []
    element = element_of("float8_e4m3fn")
    usual: dict[str, Any] = {"dtype": "float8_e4m3fn", "aligns": (element.vector, element.vector, 8)}
    fp32: dict[str, Any] = {"out_dtype": "float32", "aligns": (element.vector, element.vector, 4)}
    tokens, one = EpilogueSpec(scale_n="column"), EpilogueSpec(scale_m="tensor", scale_n="column")
    loaded = replace(LINEAR, residual=None, scale_n="column")
    gated = replace(GATED, scale_n="column")
    changes: list[dict[str, Any]] = [
        {"epilogue": EpilogueSpec()},
        {"epilogue": EpilogueSpec(), "scaled": True},
        {"epilogue": EpilogueSpec(activation="relu"), "scaled": True},
        {"epilogue": one},
        {"epilogue": one, "use_fast_accum": True},
        {"epilogue": replace(loaded, scale_m="tensor"), "use_fast_accum": True},
        {"epilogue": loaded, "scaled": True},
        {"epilogue": tokens, "scaled": True, "ordered": True},
        {"epilogue": tokens, "scaled": True, "dtype": "float8_e5m2", "out_dtype": "float16"},
        {**fp32, "epilogue": tokens, "scaled": True},
        {"epilogue": tokens, "scaled": True, "batch": "values", "ranks": (4, 3, 3)},
    ]
    gates: list[dict[str, Any]] = [
        {"epilogue": gated, "scaled": True, "ordered": True},
        {"epilogue": replace(GATED, scale_m="tensor", scale_n="tensor")},
        {"epilogue": replace(gated, activation="gelu"), "scaled": True, "dtype": "float8_e5m2", "out_dtype": "float16"},
        {**fp32, "epilogue": gated, "scaled": True},
    ]
    found = []
    for block in ((128, 128), (64, 64), (128, 64), (256, 128), (128, 256), (512, 224), (32, 32)):
        configs = family.candidates(spec.path, BlockFacts(*block, "int32"), spec, element)
        made = [linear(spec, spec.path, c, block, **usual, epilogue=tokens, scaled=True) for c in configs]
        some = buildable(family, made)[:1] + [facts for facts in made if facts.config.tile_n == 32]
        found += made if block in ((128, 128), (64, 64)) else some
        if block in ((128, 128), (64, 64)):
            found += [replace(facts, chained=True) for facts in made if may_follow(facts)]
        for change in changes if block in ((128, 128), (64, 64)) else ():
            made = [linear(spec, spec.path, config, block, **usual | change) for config in configs]
            found += buildable(family, made)[:1]
        if block == (128, 128):
            found += [linear(spec, spec.path, c, block, **usual, epilogue=gated, scaled=True) for c in configs]
        for change in gates if block in ((128, 128), (256, 128)) else ():
            made = [linear(spec, spec.path, config, block, **usual | change) for config in configs]
            found += buildable(family, made)[: 1 if block == (128, 128) else 2]
        terms = usual | {"majors": ("k", "k", "n"), "scaled": True, "epilogue": replace(COL, scale_n="column")}
        found += buildable(family, (bsr(spec, spec.path, config, block, **terms) for config in configs))[:1]
    return buildable(family, found) + grouped_float8(family, spec)


def fp16_sums_kernels(family, arch: str, quick: bool) -> list[GemmFacts]:
    """FP16 accumulation: configurations for it alone, and the main one for some blocks."""
    spec = arch_named(arch)
    if quick:
        return []
    found = []
    for block in ((128, 128), (256, 64)):  # their own clusters
        for config in family.candidates(spec.path, BlockFacts(*block, "int32"), spec):
            if family.unsupported(linear(spec, spec.path, config, block)):
                terms = EpilogueSpec(), LINEAR
                found += [linear(spec, spec.path, config, block, **FP16_SUMS, epilogue=e) for e in terms]
    for block in ((128, 128), (64, 64), (512, 112), (32, 32)):
        found += main(family, bsr, spec, spec.path, block, **FP16_SUMS)
    changes: list[dict[str, Any]] = [{"epilogue": LINEAR, "ordered": True}, {"epilogue": kept("row")}]
    for change in (*changes, {"batch": "patterns", "ranks": (3, 2, 2), "run": 128}):
        found += main(family, linear, spec, spec.path, (128, 128), **FP16_SUMS | change)
    return buildable(family, found)


def narrow_kernels(family, arch: str, quick: bool) -> list[GemmFacts]:
    """FP8 outputs: each configuration for square blocks as a layer, and variations of the main one."""
    spec = arch_named(arch)
    if quick or not spec.float8:
        return []
    element = element_of("float8_e4m3fn")
    usual: dict[str, Any] = {"aligns": (element.vector,) * 3} | dict.fromkeys(("dtype", "out_dtype"), "float8_e4m3fn")
    terms: dict[str, Any] = {"scale_out": True, "amax": True}
    loaded = replace(LINEAR, residual=None, scale_n="column", **terms)
    wide = usual | {"dtype": "bfloat16", "aligns": (8, 8, element.vector)}
    found = []
    for block in ((128, 128), (64, 64)):
        configs = family.candidates(spec.path, BlockFacts(*block, "int32", scaled=True), spec, element)
        found += [linear(spec, spec.path, c, block, **usual, epilogue=loaded, scaled=True) for c in configs]
        matmul: dict[str, Any] = {
            "majors": ("k", "k", "n"),
            "epilogue": EpilogueSpec(scale_n="column", **terms),
            "scaled": True,
        }
        found += buildable(family, (bsr(spec, spec.path, c, block, **usual, **matmul) for c in configs))[:1]
        one = {"epilogue": EpilogueSpec(scale_m="tensor", scale_n="tensor", **terms), "use_fast_accum": True}
        found += buildable(family, (linear(spec, spec.path, c, block, **usual | one) for c in configs))[:1]
        configs = family.candidates(spec.path, BlockFacts(*block, "int32"), spec)
        made = (linear(spec, spec.path, c, block, **wide, epilogue=replace(loaded, scale_n=None)) for c in configs)
        found += buildable(family, made)[:1]
    return buildable(family, found)


def grouped_float8(family, spec: ArchSpec) -> list[GemmFacts]:
    """Grouped FP8 GEMMs: each configuration for long groups, and variations of the main one for others."""
    element = element_of("float8_e4m3fn")
    usual: dict[str, Any] = {"dtype": "float8_e4m3fn", "aligns": (element.vector, element.vector, 8)}
    values, patterns = {"batch": "values", "ranks": (4, 2, 2)}, {"batch": "patterns", "ranks": (3, 2, 2)}
    tokens = {"epilogue": EpilogueSpec(scale_n="column"), "scaled": True}
    loaded = replace(LINEAR, residual=None, bias_items=True, scale_n="column")
    changes: list[dict[str, Any]] = [
        values | tokens | {"run": 64},
        patterns | tokens | {"run": 128},
        values | tokens | {"run": 256, "ordered": True},
        patterns | tokens | {"run": 256, "dtype": "float8_e5m2", "index_dtype": "int64"},
        patterns | {"run": 256, "epilogue": EpilogueSpec(scale_m="tensor", scale_n="tensor")},
        patterns | {"run": 256, "epilogue": replace(loaded, scale_m="tensor"), "use_fast_accum": True},
        values | {"run": 128, "epilogue": replace(loaded, scale_m="tensor"), "use_fast_accum": True},
    ]
    found = []
    for block in ((128, 128), (64, 64), (128, 64)):
        every = patterns | {"run": 256, "epilogue": loaded, "scaled": True}
        for change in (every, *changes):
            configs = family.candidates(spec.path, BlockFacts(*block, "int32", run=change["run"]), spec, element)
            made = buildable(family, [linear(spec, spec.path, c, block, **usual | change) for c in configs])
            found += made if change is every else made[:1]
    return found


# Blocks whose values are fp32, and those of 16x16 and 512x112 in three parts, side by side. Others' loops are the same.
SPLIT_BLOCKS = ((16, 48), (512, 336))
TF32_BLOCKS = ((128, 128), (64, 64), (512, 112), (16, 16), *SPLIT_BLOCKS)


def tf32_kernels(family, arch: str, quick: bool) -> list[GemmFacts]:
    """TF32 kernels (FP32 operands): each configuration as a layer, with promoted and plain accumulation, those for
    128x128 blocks also with the most expensive epilogue, and variations of the main one."""
    spec = arch_named(arch)
    if quick:
        return []
    element, layer, found = element_of("float32"), TF32 | {"majors": ("k", "k", "m")}, []
    for block in TF32_BLOCKS:
        configs = family.candidates(spec.path, BlockFacts(*block, "int32"), spec, element)
        for config, promoted in itertools.product(configs, (False, True)):
            facts = linear(spec, spec.path, config, block, **layer, promoted=promoted)
            found += [facts] if promoted or block not in SPLIT_BLOCKS else []
            if block == (128, 128):
                found.append(replace(facts, epilogue=fp32_bias(LINEAR, residual=None)))
    changes: list[dict[str, Any]] = [
        {"ordered": True},
        {"index_dtype": "int64"},
        {"epilogue": full()},
        {"epilogue": fp32_bias(COL), "aligns": (4, 4, 1)},
        {"out_dtype": "bfloat16", "aligns": (4, 4, 8), "epilogue": fp32_bias(COL)},
        {"batch": "values", "ranks": (4, 3, 3)},
        {"batch": "patterns", "ranks": (3, 3, 3)},
        {"promoted": True, "ordered": True, "epilogue": full()},
        {"promoted": True, "epilogue": fp32_bias(COL), "aligns": (4, 4, 1)},
        {"promoted": True, "batch": "values", "ranks": (4, 3, 3)},
    ]
    configs = family.candidates(spec.path, BlockFacts(128, 128, "int32"), spec, element)
    for change in changes:
        found += buildable(family, (bsr(spec, spec.path, c, (128, 128), **TF32 | change) for c in configs))[:1]
    if spec.path != "sm_80":
        configs = family.candidates("sm_80", BlockFacts(128, 128, "int32"), spec, element)
        found += buildable(family, (linear(spec, "sm_80", c, (128, 128), **layer) for c in configs))[:1]
    return buildable(family, found)


def small_blocks_kernels(family, arch: str) -> list[GemmFacts]:
    """Each configuration plain, as a layer and with what its epilogue bears; blocks of every kind."""
    return buildable(family, _small_blocks(family, arch_named(arch)))


def _small_blocks(family, spec: ArchSpec) -> Iterator[GemmFacts]:
    configs = family.candidates(spec.path, BlockFacts(16, 16, "int32"), spec)
    if not configs:
        return
    loaded_layer = replace(LINEAR, residual=None)
    for block in ((16, 16), (32, 32), (64, 64), (16, 128), (64, 32)):
        for config in configs[: 5 if block == (16, 16) else 1]:
            yield bsr(spec, spec.path, config, block)
            yield linear(spec, spec.path, config, block)
            yield linear(spec, spec.path, config, block, epilogue=loaded_layer)
            yield linear(spec, spec.path, config, block, epilogue=kept("row"))
            yield bsr(spec, spec.path, config, block, epilogue=COL)
    config, _, narrow, *_ = configs  # 256 columns, and 128
    yield bsr(spec, spec.path, config, (32, 32), batch="values", ranks=(4, 3, 3))
    for each, epilogue in ((config, replace(loaded_layer, bias_items=True)), (narrow, LINEAR)):
        yield linear(spec, spec.path, each, (16, 16), batch="values", ranks=(4, 2, 3), epilogue=epilogue)
    change: dict[str, Any]
    for change in ({"index_dtype": "int64"}, {"ranks": (3, 3, 3)}, {"dtype": "float16", "out_dtype": "float16"}):
        yield bsr(spec, spec.path, config, (32, 32), **change)
    for change in ({"out_dtype": "float32", "aligns": (8, 8, 4)}, {"aligns": (8, 8, 1)}, {"epilogue": full()}):
        yield bsr(spec, spec.path, narrow, (32, 32), **change)
    view, matmul = ({"permuted": True, "majors": majors} for majors in (("m", "k", "m"), ("m", "n", "n")))
    for block in ((16, 16), (32, 32), (64, 64)):
        for each in (config, narrow):
            yield linear(spec, spec.path, each, block, **view)
            yield bsr(spec, spec.path, each, block, **matmul)
    yield linear(spec, spec.path, config, (16, 128), **view, epilogue=loaded_layer)
    yield bsr(spec, spec.path, config, (32, 32), **matmul, batch="values", ranks=(4, 3, 3))


def skinny_kernels(family, arch: str) -> list[GemmFacts]:
    """Each configuration with every epilogue; B in vectors and element by element; batches, runs."""
    spec = arch_named(arch)
    found = list(_skinny(family, spec, spec.path))
    if spec.path != "sm_80":
        strides = {"majors": ("k", "any", "any"), "aligns": (8, 1, 1)}
        configs = family.candidates("sm_80", BlockFacts(128, 128, "int32"), spec)
        found += [linear(spec, "sm_80", config, (128, 128), **strides, epilogue=LINEAR) for config in configs]
    for block in BLOCKS:
        for config in family.candidates(spec.path, BlockFacts(*block, "int32"), spec):
            found.append(bsr(spec, spec.path, config, block))
            if block == (128, 128):
                found.append(linear(spec, spec.path, config, block, epilogue=LINEAR))
    return buildable(family, found)


def skinny_float8_kernels(family, arch: str) -> list[GemmFacts]:
    """FP8 kernels: each configuration for blocks of which lanes load 16, 8 and 4 bytes, with scales of each kind."""
    spec = arch_named(arch)
    paths = dict.fromkeys((spec.path, "sm_80"))
    return buildable(family, [facts for path in paths for facts in _skinny_float8(family, spec, path)])


def _skinny_float8(family, spec: ArchSpec, path: str) -> Iterator[GemmFacts]:
    element = element_of("float8_e4m3fn")
    usual: dict[str, Any] = {"dtype": "float8_e4m3fn", "aligns": (element.vector, element.vector, 8)}
    tokens, one = EpilogueSpec(scale_n="column"), EpilogueSpec(scale_m="tensor", scale_n="tensor")
    loaded = replace(LINEAR, residual=None, scale_n="column")
    heavy = {**usual, "majors": ("k", "k", "n"), "epilogue": replace(full(), scale_n="column"), "scaled": True}
    if path != spec.path:  # the same kernels, for whoever asks for the path
        config, *_ = family.candidates(path, BlockFacts(128, 128, "int32", scaled=True), spec, element)
        yield linear(spec, path, config, (128, 128), **usual, epilogue=tokens, scaled=True)
        return
    for block in ((128, 128), (64, 64), (512, 224), (64, 256), (32, 32), (16, 16), (48, 112)):
        for config in family.candidates(path, BlockFacts(*block, "int32"), spec, element):
            yield linear(spec, path, config, block, **usual, epilogue=one)
        for config in family.candidates(path, BlockFacts(*block, "int32", scaled=True), spec, element):
            yield (facts := linear(spec, path, config, block, **usual, epilogue=tokens, scaled=True))
            if block in ((128, 128), (64, 64), (32, 32), (16, 16)) and may_follow(facts):
                yield replace(facts, chained=True)
            if block in ((128, 128), (16, 16), (32, 32)):
                yield linear(spec, path, config, block, **usual, epilogue=loaded, scaled=True)
                yield bsr(spec, path, config, block, **heavy)
    for scaled in (False, True):
        for config in family.candidates(path, BlockFacts(128, 128, "int32", scaled=scaled), spec, element):
            more = usual | {"scaled": scaled, "dtype": "float8_e5m2"}
            yield linear(spec, path, config, (128, 128), **more, epilogue=tokens)
            runs = {"batch": "patterns", "run": 64, "ranks": (3, 2, 2)}
            yield linear(spec, path, config, (128, 128), **more, **runs, epilogue=replace(loaded, bias_items=True))
            more |= {"batch": "patterns", "ranks": (3, 3, 3), "index_dtype": "int64", "majors": ("k", "k", "n")}
            yield bsr(spec, path, config, (128, 128), **more, epilogue=replace(full(), scale_n="column"))


def _skinny(family, spec: ArchSpec, path: str) -> Iterator[GemmFacts]:
    wide, narrow, uneven = (128, 128), (16, 16), (512, 112)
    items = replace(LINEAR, bias_items=True)
    for config in family.candidates(path, BlockFacts(*wide, "int32"), spec):
        yield linear(spec, path, config, wide)
        yield linear(spec, path, config, narrow, epilogue=LINEAR)
        yield linear(spec, path, config, wide, epilogue=kept("row"))
        yield bsr(spec, path, config, uneven, epilogue=full())
        yield linear(spec, path, config, wide, majors=("k", "any", "any"), aligns=(8, 1, 1), epilogue=LINEAR)
        yield bsr(spec, path, config, uneven, batch="patterns", ranks=(3, 3, 3), index_dtype="int64", epilogue=full())
        runs = {"batch": "patterns", "run": 64, "ranks": (3, 2, 2)}
        yield linear(spec, path, config, wide, **runs, epilogue=replace(items, residual=None))
