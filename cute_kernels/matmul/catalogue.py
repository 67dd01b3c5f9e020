"""The catalogue of GEMM kernels: the facts that ops can request, so that tools and tests need no tensors.

Compiling needs no GPU, so tests check each kernel's registers and instructions on every architecture, and a bundle
carries compiled kernels to other machines.
"""

import functools
import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .. import functions
from ..arch import ArchSpec, arch_named
from ..tile.element import BITS_16, element_of
from .candidates import split_sm90
from .config import EpilogueSpec, GemmFacts
from .epilogue.terms import epilogue_program

SHORT = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def squared_relu(x):
    """A user's own epilogue function, as the documentation of `functions` shows it."""
    return functions.maximum(x, 0.0) * functions.maximum(x, 0.0)


LIGHT = EpilogueSpec(scale=True, activation="relu")


def loaded(bias: str, residual: str) -> EpilogueSpec:
    """The most expensive epilogue. Its activation is gelu, which contains an error function."""
    return EpilogueSpec(bias=bias, bias_dtype="bfloat16", residual=residual, activation="gelu")


COL, ROW, LINEAR = loaded("col", "n"), loaded("row", "n"), loaded("row", "m")


def kept(bias: str) -> EpilogueSpec:
    """The epilogue of a layer in training, which also stores the activation's input."""
    return EpilogueSpec(bias=bias, bias_dtype="bfloat16", activation="gelu", stores_z=True)


@functools.cache
def full() -> EpilogueSpec:
    """All terms. Made when it is asked for: tracing the function imports torch's compiler, which takes seconds."""
    function = epilogue_program("gemm", squared_relu)
    return replace(COL, scale=True, bias_dtype="float32", activation="gelu_tanh", function=function)


def dense(spec: ArchSpec, path: str, config, **changes) -> GemmFacts:
    """gemm(a, b) of contiguous matrices."""
    return GemmFacts(**{"arch": spec.target, "path": path, "config": config, "majors": ("k", "n", "n")} | changes)


def buildable(family, facts: Iterable[GemmFacts]) -> list[GemmFacts]:
    """Without repetitions, and without what no kernel can be built from."""
    return [f for f in dict.fromkeys(facts) if not family.unsupported(f)]


def first(family, make, spec: ArchSpec, path: str, block, **changes) -> list[GemmFacts]:
    """The first of a family's configurations that supports these changes, in a list; an empty one if none does.

    `make` is `dense`, or takes a block shape as well.
    """
    shape = () if block is None else ((block.bm, block.bk),)
    configs = family.candidates(path, block, spec)
    return buildable(family, (make(spec, path, config, *shape, **changes) for config in configs))[:1]


def dense_kernels(family, arch: str, quick: bool) -> list[GemmFacts]:
    """Each configuration plain and with the heaviest epilogue, and the main one in all its variations."""
    spec = arch_named(arch)
    found = first(family, dense, spec, spec.path, None)
    if quick:
        return found
    for config in family.candidates(spec.path, None, spec):
        plain = dense(spec, spec.path, config)
        # The narrowest tiles take only a K-major B.
        majors = ("k", "k" if family.unsupported(plain) else "n", "n")
        epilogues = (EpilogueSpec(), COL, kept("col")) if spec.path == "sm_90" else (EpilogueSpec(), COL)
        found += [dense(spec, spec.path, config, majors=majors, epilogue=e) for e in epilogues]
    found += variations(family, spec, spec.path)
    found += unaligned(family, spec)
    if spec.path != "sm_80":
        found += shared(spec)
        found += first(family, dense, spec, "sm_80", None) + first(family, dense, spec, "sm_80", None, epilogue=COL)
    return buildable(family, found)


def variations(family, spec: ArchSpec, path: str) -> list[GemmFacts]:
    """Dense GEMMs with other operands, outputs and epilogues."""
    fp32: dict[str, Any] = {"out_dtype": "float32", "aligns": (8, 8, 4)}
    changes: list[dict[str, Any]] = [{"majors": (a, b, "n")} for a in "km" for b in "kn"]
    changes += [
        {"majors": ("k", "n", "m")},
        {"dtype": "float16", "out_dtype": "float16"},
        fp32,
        {**fp32, "majors": ("k", "n", "m")},
        {**fp32, "epilogue": full()},
        {"aligns": (8, 8, 1)},
        {"aligns": (8, 8, 1), "epilogue": COL},
        {"aligns": (8, 8, 1), "majors": ("k", "n", "any")},
        {"epilogue": LIGHT},
        {"epilogue": ROW},
        {"epilogue": full()},
        {"epilogue": kept("col")},
        {"epilogue": replace(full(), residual=None, stores_z=True)},
        {"epilogue": kept("col"), "aligns": (8, 8, 1)},
        {"epilogue": loaded("col", "any")},
        {"ranks": (3, 3, 3)},
        {"ranks": (2, 3, 3)},  # one A for the whole batch
    ]
    return [facts for change in changes for facts in first(family, dense, spec, path, None, **change)]


def unaligned(family, spec: ArchSpec) -> list[GemmFacts]:
    """Operands that cp.async takes in narrower copies, or element by element; the sm_80 path's alone."""
    narrow: list[dict[str, Any]] = [{"aligns": (align,) * 3} for align in (1, 2, 4)]
    narrow += [
        {"aligns": (1, 1, 1), "majors": ("m", "k", "n")},
        {"aligns": (1, 1, 1), "majors": ("any", "any", "any")},
        {"aligns": (1, 1, 1), "epilogue": COL},
    ]
    return [facts for change in narrow for facts in first(family, dense, spec, "sm_80", None, **change)]


def shared(spec: ArchSpec) -> list[GemmFacts]:
    """A K shared among the CTAs of a cluster: what its store and exchange meet besides plain and loaded products."""
    fp32: dict[str, Any] = {"out_dtype": "float32", "aligns": (8, 8, 4)}
    changes: list[dict[str, Any]] = [
        {"majors": ("k", "n", "m")},
        fp32,
        {**fp32, "majors": ("k", "n", "m")},
        {"epilogue": full()},
        {"aligns": (8, 8, 1), "epilogue": COL},
        {"ranks": (3, 3, 3)},
    ]
    high, _ = split_sm90(BITS_16.rows[0], spec, BITS_16)
    return [dense(spec, spec.path, config, **change) for config in high for change in changes]


def float8_kernels(family, arch: str, quick: bool) -> list[GemmFacts]:
    """FP8 kernels: each configuration with promoted and fast accumulation, plain and with scales and the most expensive
    epilogue."""
    spec = arch_named(arch)
    if quick or not spec.float8:
        return []
    element = element_of("float8_e4m3fn")
    each: dict[str, Any] = {"scale_m": "row", "scale_n": "column"}
    blocks = EpilogueSpec(scale_m="1x128", scale_n="128x128")
    configs = family.candidates(spec.path, None, spec, element)
    usual: dict[str, Any] = {
        "majors": ("k", "k", "n"),
        "aligns": (element.vector, element.vector, 8),
        "dtype": "float8_e4m3fn",
    }
    fp32: dict[str, Any] = {"out_dtype": "float32", "aligns": (element.vector, element.vector, 4)}
    direct: dict[str, Any] = {"aligns": (element.vector, element.vector, 1)}
    changes: list[dict[str, Any]] = [
        {"dtype": "float8_e5m2"},
        {"epilogue": EpilogueSpec(scale_m="tensor", scale_n="tensor")},
        {"epilogue": EpilogueSpec(**each)},
        {"epilogue": EpilogueSpec(scale_m="row")},
        {"epilogue": EpilogueSpec(scale_n="column")},
        {"epilogue": replace(LIGHT, **each)},
        {"epilogue": replace(full(), **each)},
        {"out_dtype": "float16", "epilogue": replace(ROW, **each)},
        {**fp32, "epilogue": replace(full(), **each)},
        {**fp32, "epilogue": EpilogueSpec(**each), "majors": ("k", "k", "m")},
        {**direct, "epilogue": replace(COL, **each)},
        {"ranks": (3, 3, 3), "epilogue": EpilogueSpec(**each)},
        {"epilogue": EpilogueSpec(scale_m="1x128", scale_n="column")},
        {"epilogue": EpilogueSpec(scale_m="row", scale_n="128x128")},
        {"epilogue": EpilogueSpec(scale_n="128x128")},
        {"dtype": "float8_e5m2", "epilogue": replace(COL, scale_m="1x128", scale_n="128x128")},
        {**fp32, "epilogue": blocks, "ranks": (3, 3, 3)},
        {**direct, "epilogue": blocks},
    ]
    found = []
    for fast in (False, True):
        terms = usual | {"use_fast_accum": fast}
        for config in configs:
            found += [dense(spec, spec.path, config, **terms)]
            found += [dense(spec, spec.path, config, **terms, epilogue=replace(COL, **each))]
            found += [dense(spec, spec.path, config, **terms, epilogue=blocks)]
        for change in changes:
            found += buildable(family, (dense(spec, spec.path, c, **terms | change) for c in configs))[:1]
    return buildable(family, found)


FP16_SUMS: dict[str, Any] = {"dtype": "float16", "out_dtype": "float16", "acc_dtype": "float16"}


def fp16_sums_kernels(family, arch: str, quick: bool) -> list[GemmFacts]:
    """FP16 accumulation: each configuration plain, those for FP16 accumulation alone with the most expensive epilogue,
    and variations of the main one."""
    spec = arch_named(arch)
    if quick:
        return []
    fp32, direct = {"out_dtype": "float32", "aligns": (8, 8, 4)}, {"aligns": (8, 8, 1)}
    changes: list[dict[str, Any]] = [
        {"epilogue": COL},
        {"epilogue": full(), **fp32},
        {"epilogue": kept("col")},
        {"majors": ("m", "k", "m")},
        {"epilogue": COL, **direct},
        {"ranks": (3, 3, 3)},
    ]
    found = []
    for config in family.candidates(spec.path, None, spec):
        plain, usual = dense(spec, spec.path, config), dense(spec, spec.path, config, **FP16_SUMS)
        majors = ("k", "k" if family.unsupported(usual) else "n", "n")
        found.append(replace(usual, majors=majors))
        if family.unsupported(replace(plain, majors=majors)):
            found += [replace(usual, epilogue=epilogue) for epilogue in (COL, full(), kept("col"))]
        elif config.split > 1:
            found.append(replace(usual, epilogue=COL))
    for change in changes:
        found += first(family, dense, spec, spec.path, None, **FP16_SUMS | change)
    return buildable(family, found)


TF32: dict[str, Any] = {"dtype": "float32", "out_dtype": "float32", "majors": ("k", "k", "n"), "aligns": (4, 4, 4)}


def fp32_bias(spec: EpilogueSpec, **more) -> EpilogueSpec:
    """An epilogue whose bias is of fp32, as operands are."""
    return replace(spec, bias_dtype="float32", **more)


def tf32_kernels(family, arch: str, quick: bool) -> list[GemmFacts]:
    """TF32 kernels (FP32 operands): each configuration plain and with the most expensive epilogue, with promoted and
    plain accumulation, and variations of the main one."""
    spec = arch_named(arch)
    if quick:
        return []
    changes: list[dict[str, Any]] = [
        {"out_dtype": "bfloat16", "aligns": (4, 4, 8), "epilogue": fp32_bias(COL)},
        {"out_dtype": "float16", "aligns": (4, 4, 8)},
        {"majors": ("k", "k", "m"), "epilogue": fp32_bias(ROW)},
        {"aligns": (4, 4, 1), "epilogue": fp32_bias(COL)},
        {"aligns": (4, 4, 1), "majors": ("k", "k", "any")},
        {"epilogue": LIGHT},
        {"epilogue": full()},
        {"epilogue": fp32_bias(kept("col"))},
        {"ranks": (3, 3, 3)},
        {"ranks": (2, 3, 3)},
        {"promoted": True, "epilogue": full()},
        {"promoted": True, "epilogue": fp32_bias(kept("col"))},
        {"promoted": True, "aligns": (4, 4, 1), "epilogue": fp32_bias(COL)},
        {"promoted": True, "majors": ("k", "k", "m"), "ranks": (3, 3, 3)},
    ]
    configs, found = family.candidates(spec.path, None, spec, element_of("float32")), []
    for config, promoted in itertools.product(configs, (False, True)):
        given = TF32 | {"promoted": promoted}
        found += [dense(spec, spec.path, config, **given, epilogue=e) for e in (EpilogueSpec(), fp32_bias(COL))]
    for change in changes:
        found += buildable(family, (dense(spec, spec.path, config, **TF32 | change) for config in configs))[:1]
    if spec.path != "sm_80":
        configs = family.candidates("sm_80", None, spec, element_of("float32"))
        for epilogue in (EpilogueSpec(), fp32_bias(COL)):
            found += buildable(family, (dense(spec, "sm_80", c, **TF32, epilogue=epilogue) for c in configs))[:1]
    return buildable(family, found)


def narrow_kernels(family, arch: str, quick: bool) -> list[GemmFacts]:
    """Kernels with an FP8 output: each configuration for FP8 operands, plain and with scale_out and amax, and
    variations of the main ones."""
    spec = arch_named(arch)
    if quick or not spec.float8:
        return []
    element = element_of("float8_e4m3fn")
    usual: dict[str, Any] = {"majors": ("k", "k", "n"), "aligns": (element.vector,) * 3}
    usual |= dict.fromkeys(("dtype", "out_dtype"), "float8_e4m3fn")
    wide = usual | {"dtype": "bfloat16", "aligns": (8, 8, element.vector)}
    each: dict[str, Any] = {"scale_m": "row", "scale_n": "column", "scale_out": True, "amax": True}
    heavy = replace(COL, residual=None, **each)
    changes: list[dict[str, Any]] = [
        {"epilogue": replace(LIGHT, **each), "majors": ("k", "k", "m")},
        {"epilogue": replace(full(), residual=None, **each), "majors": ("k", "k", "m")},
        {"epilogue": heavy, "aligns": (element.vector, element.vector, 1)},
        {"epilogue": EpilogueSpec(scale_out=True), "use_fast_accum": True, "out_dtype": "float8_e5m2"},
        {"epilogue": replace(heavy, scale_m="1x128", scale_n="128x128"), "ranks": (3, 3, 3)},
        wide | {"epilogue": replace(heavy, scale_m=None, scale_n=None)},
        wide | {"epilogue": EpilogueSpec(scale_out=True, amax=True), "majors": ("k", "n", "m")},
    ]
    configs, found = family.candidates(spec.path, None, spec, element), []
    for config in configs:
        found += [dense(spec, spec.path, config, **usual, epilogue=e) for e in (EpilogueSpec(), heavy)]
    for change in changes:
        given = usual | change
        of = configs if given["dtype"] == usual["dtype"] else family.candidates(spec.path, None, spec)
        found += buildable(family, (dense(spec, spec.path, config, **given) for config in of))[:1]
    return buildable(family, found)


def epilogues_of(bias: str, dtype: str) -> list[EpilogueSpec]:
    """None, a bias, and a bias with each activation."""
    with_bias = EpilogueSpec(bias=bias, bias_dtype=dtype)
    return [
        EpilogueSpec(),
        with_bias,
        *(replace(with_bias, activation=name) for name in functions.ACTIVATIONS),
    ]


def gates() -> list[EpilogueSpec]:
    """A gate with each activation."""
    return [EpilogueSpec(activation=name, gated=True) for name in (None, *functions.ACTIVATIONS)]


# -- in words -------------------------------------------------------------------------------------------------


def describe(facts: GemmFacts) -> dict[str, str]:
    """The columns of a table."""
    return {
        "path": facts.path,
        "configuration": facts.config.short,
        "problem": block_text(facts),
        "operands": operands_text(facts),
        "epilogue": epilogue_text(facts.epilogue),
    }


def block_text(facts: GemmFacts) -> str:
    return f"{facts.block.bm}x{facts.block.bk}" if facts.block else "dense"


def operands_text(facts: GemmFacts) -> str:
    """Majors and types; then what differs from aligned matrices with 32-bit indices."""
    types = SHORT[facts.dtype] + (f">{SHORT[facts.out_dtype]}" if facts.out_dtype != facts.dtype else "")
    text = f"{','.join(facts.majors)} {types}"
    vector = facts.element.vector
    aligned = (vector, vector, element_of(facts.out_dtype).vector)
    if facts.aligns != aligned:
        text += " align " + ",".join(map(str, facts.aligns))
    if facts.ranks[1:] != (2, 2):
        text += " rank " + ",".join(map(str, facts.ranks))
    if facts.block and facts.block.index_dtype != "int32":
        text += f" {facts.block.index_dtype}"
    if facts.block and facts.block.batch:
        text += f" batch of {facts.block.batch}" + (f" runs of {facts.block.run}" if facts.block.run else "")
    text += " scaled" if facts.block and facts.block.scaled else ""
    text += " fast" if facts.use_fast_accum else ""
    text += " chained" if facts.chained else ""
    text += f" source {facts.source.tile_m}x{facts.source.tile_k}" if facts.source is not None else ""
    text += " promoted" if facts.promoted else ""
    text += f" sums {SHORT[facts.acc_dtype]}" if facts.acc_dtype != "float32" else ""
    return text + (" ordered" if facts.ordered else "") + (" linear" if facts.transposed else "")


def epilogue_text(spec: EpilogueSpec) -> str:
    """The terms in their order; "" for none."""
    terms = [f"{name}({each})" for name, each in (("s_a", spec.scale_m), ("s_b", spec.scale_n)) if each]
    terms += ["alpha"] if spec.scale else []
    terms += [f"{spec.bias}{'s' if spec.bias_items else ''}({SHORT[spec.bias_dtype]})"] if spec.bias_dtype else []
    terms += [f"residual({spec.residual})"] if spec.residual else []
    terms += ["z"] if spec.stores_z else []
    terms += [spec.activation] if spec.activation else []
    terms += ["function"] if spec.function else []
    terms += ["gated"] if spec.gated else []
    terms += ["amax"] if spec.amax else []
    terms += ["s_out"] if spec.scale_out else []
    return "+".join(terms)
