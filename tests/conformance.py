"""Every family of GEMM kernels, and the cases that show what its kernels must do; see gemm_cases.py for a case.

Each family is combined with an `Arithmetic` (operand types and accumulation), a path, and split-K or no split-K. The
cases of an op are all pairs of values of its axes.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import combinations, product
from typing import Any

from cute_kernels import dispatch as dense_ops
from cute_kernels.arch import ARCHS
from cute_kernels.dtypes import NAMES_OF_OPERANDS
from cute_kernels.matmul.config import BlockFacts, EpilogueSpec, GemmConfig, GemmFacts
from cute_kernels.matmul.epilogue.terms import epilogue_program
from cute_kernels.matmul.family import ProductFamily
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.runtime.families import families, load_all
from cute_kernels.sparse24 import dispatch as structured_ops
from cute_kernels.tile.element import element_of
from sparse_collective import dispatch as sparse_ops
from sparse_collective.sddmm_kernel import dispatch as sampled_ops

from .gemm_calls import LINEAR, OPS
from .gemm_cases import DTYPES, Case, Signature, leaky, make, place, run
from .guard_zones import Placement
from .sparse_collective.sddmm_cases import place_of_blocks

__all__ = ["DTYPES", "FAMILIES", "FEW", "OPS", "Case", "Signature", "axes_of", "case_of", "cases_of", "make", "run"]

ALL_BLOCKS = ((128, 128), (64, 64), (16, 16), (32, 64), (64, 256), (256, 64), (48, 112), (512, 112), (16, 48), (80, 16))
GROUPED = "bsr_grouped_linear"
SPARSE = ("bsr_matmul", "bsr_linear", GROUPED)
FEW = (1, 2, 5, 8, 9, 16, 37)


# Scales of a and b, and of W and b or x
SCALES = [(None, None), ("tensor", "tensor"), ("row", "column"), ("row", None), (None, "column")]
BLOCK_SCALES = [("1x128", "128x128"), ("row", "128x128"), ("1x128", "column")]
SPARSE_SCALES = [(None, None), ("tensor", "tensor"), ("block", "column"), ("tensor", "column"), ("block", "tensor")]


@dataclass(frozen=True, eq=False)
class Arithmetic:
    """Types of operands and results, and the options of a call that select how tensor cores accumulate.

    variants: options for which `large_cases` tries each configuration.
    """

    name: str
    types: tuple[tuple[str, str], ...]
    axes: dict = field(default_factory=dict)
    variants: tuple[dict, ...] = ({},)
    arch: str = ""  # "sm_89" if the sm_80 path needs it
    vector: int = 8  # elements of 16 bytes

    @property
    def element(self):
        return element_of(NAMES_OF_OPERANDS[DTYPES[self.types[0][0]]])


TYPES = (("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32"), ("fp16", "fp32"), ("bf16", "fp16"), ("fp16", "bf16"))
FP8 = ("e4m3", "e5m2")
FP8_TYPES = (("e4m3", "bf16"), ("e5m2", "bf16"), ("e4m3", "fp16"), ("e4m3", "fp32"), ("e4m3", "e4m3"), ("e4m3", "e5m2"))
ARITHMETICS = (
    Arithmetic("", TYPES),
    Arithmetic(
        "FP8",
        FP8_TYPES,
        {"accumulation": [None, "fast"], "amax": [False, True]},
        ({"scales": BLOCK_SCALES[0]}, {"scales": SCALES[2]}, {"scales": SCALES[1], "accumulation": "fast"}),
        "sm_89",
        16,
    ),
    Arithmetic("to FP8", (("bf16", "e4m3"), ("fp16", "e5m2")), {"amax": [False, True]}, ({}, {"amax": True}), "sm_89"),
    Arithmetic(
        "TF32",
        (("fp32", "fp32"), ("fp32", "bf16"), ("fp32", "fp16")),
        {"precision": ["tf32", "3xtf32"]},
        ({"precision": "tf32"}, {"precision": "3xtf32"}),
        vector=4,
    ),
    Arithmetic(
        "FP16 accumulation",
        (("fp16", "fp16"), ("fp16", "bf16"), ("fp16", "fp32")),
        {"accumulation": ["fp16"]},
        ({"accumulation": "fp16"},),
    ),
)


@cache
def program_of_leaky():
    return epilogue_program("gemm", leaky)


@dataclass(frozen=True)
class Kernels:
    """Kernels of a registered GEMM family for an arithmetic on a path, those with split-K or the others."""

    family: ProductFamily
    path: str
    split: bool
    arithmetic: Arithmetic = ARITHMETICS[0]

    @property
    def name(self) -> str:
        kind = f" {self.arithmetic.name}" if self.arithmetic.name else ""
        return f"{self.family.name}{kind}{' split K' if self.split else ''} {self.path}"

    @property
    def plain(self) -> bool:
        """True for 16-bit operands and results, FP32 accumulators and a dense or block-sparse A."""
        return not self.arithmetic.name and not self.family.structured

    @property
    def arch(self) -> str:
        """Architecture whose kernels these are: sm_90, unless it has none on this path."""
        return self.arithmetic.arch if self.path == "sm_80" and self.arithmetic.arch else "sm_90"

    @property
    def sampled(self) -> bool:
        """True for SDDMM."""
        return self.family.ops == ("sddmm",)

    @property
    def sparse_operand(self) -> bool:
        """True if A is block-sparse, for 2:4 sparse families too, which have no `ops`."""
        return not self.sampled and self.family.serves(BlockFacts(64, 64, "int32"))

    @cache  # noqa: B019 (they are few, and live as long as the module)
    def listed(self, block: tuple[int, int] | None, scaled: bool = False, parts: int = 1) -> tuple:
        """Configurations that are tried for such blocks; None is a dense A. `parts`: of TF32 in each block, along K."""
        facts = None
        if block is not None:
            bm, bk = block[0], block[1] * parts
            facts = BlockFacts(bm, bk, "int32", operand="d" if self.sampled else "a", scaled=scaled)
        serves = self.family.serves(facts) or self.family.structured and facts is None and not self.sparse_operand
        if not serves:
            return ()
        found = self.family.candidates(self.path, facts, ARCHS[self.arch], self.arithmetic.element)
        return tuple(config for config in found if (config.split > 1) == self.split)

    @cached_property
    def blocks(self) -> tuple:
        if not self.sampled and not self.sparse_operand:
            return ()
        plain = signature_of(self, "sddmm" if self.sampled else "bsr_matmul", self.base)
        return tuple(block for block in ALL_BLOCKS if self.takes(replace(plain, block=block)))

    @property
    def base(self) -> dict:
        """The simplest value of each axis."""
        return PLAIN | {"types": self.arithmetic.types[0]} | self.arithmetic.variants[-1]

    @cached_property
    def ops(self) -> tuple[str, ...]:
        """Ops that it supports in some call."""
        if self.sampled:
            return ("sddmm",) if self.blocks else ()
        runs = [signature_of(self, "bsr_grouped_linear", self.base | {"block": b, "run": 256}) for b in self.blocks]
        grouped = any(self.takes(f) for f in runs)
        dense = not self.sparse_operand and self.takes(signature_of(self, "gemm", self.base))
        grouped = grouped and self.arithmetic.name not in ("TF32", "to FP8")
        return (("gemm",) if dense else ()) + (SPARSE[: 2 + grouped] if self.blocks else ())

    @property
    def columns(self) -> tuple[int, ...]:
        return FEW if self.family.name == "skinny" else (264, 8, 1, 130)

    def owns(self, facts) -> bool:
        return (facts.path, facts.family) == (self.path, self.family.name) and (facts.config.split > 1) == self.split

    def facts_of(self, f: Signature, config, align_out: int = 1) -> GemmFacts:
        """The kernel of a call with this configuration; copied operands are contiguous along K."""
        linear, batch, sampled, vector = f.op in LINEAR, f.batch if f.block else None, f.op == "sddmm", f.vector
        bias = f.bias and ("col" if f.bias == "col" and not linear else "row")
        d = "nm"[linear != f.majors[2]]
        of_a, of_b = f.scales
        wide = "float32" if f.dtype == "fp32" else "bfloat16"
        parts = 3 if f.precision == "3xtf32" else 1
        block = f.block and BlockFacts(
            f.block[0], f.block[1] * parts, f.index, batch, f.run, "d" if sampled else "a", f.view, of_a == "block"
        )
        return GemmFacts(
            arch=ARCHS[self.arch].target,
            path=self.path,
            config=config,
            dtype=NAMES_OF_OPERANDS[DTYPES[f.dtype]],
            out_dtype=NAMES_OF_OPERANDS[DTYPES[f.out_dtype]],
            majors=("m" if f.view else "k", "n" if vector == 8 else "k", "n" if self.plain else d),
            aligns=(vector, vector, 16 // DTYPES[f.out_dtype].itemsize if sampled else align_out),
            transposed=linear,
            block=block,
            epilogue=EpilogueSpec(
                scale=f.scaled,
                bias=bias,
                bias_dtype=bias and wide,
                bias_items=f.bias == "items",
                residual="n" if f.residual else None,
                activation=f.activation,
                function=program_of_leaky() if f.function else None,
                scale_m=None if of_a == "block" else of_a,
                scale_n=of_b,
                scale_out=f.amax,
                amax=f.amax,
            ),
            use_fast_accum=f.accumulation == "fast",
            acc_dtype="float16" if f.accumulation == "fp16" else "float32",
            promoted=parts > 1,
        )

    @cache  # noqa: B019 (they are few, and live as long as the module)
    def takes(self, f: Signature) -> bool:
        """True if some configuration supports it. The output counts as stored element by element, which is hardest,
        except that of sddmm, which is contiguous, or copied."""
        if f.accumulation == "fast" and {"block", "1x128", "128x128"} & {*f.scales}:
            return False
        return any(not self.family.unsupported(self.facts_of(f, config)) for config in self.listed_for(f))

    def listed_for(self, f: Signature) -> tuple:
        return self.listed(f.block, f.scales[0] == "block", 3 if f.precision == "3xtf32" else 1)

    def force(self, monkeypatch, config=None) -> None:
        """Restrict the ops to these kernels, or to one configuration, from here on."""
        for family in families(ProductFamily):

            def listed(path, *given, family=family, found=family.candidates):
                if (family, path) != (self.family, self.path):
                    return []
                return [c for c in found(path, *given) if (c.split > 1) == self.split and config in (None, c)]

            monkeypatch.setattr(family, "candidates", listed)
        for ops in (dense_ops, sparse_ops, sampled_ops, structured_ops):
            monkeypatch.setattr(ops, "_PLANS", PlanCache())

    def configs(self) -> dict[Any, list[tuple[int, int] | None]]:
        """Every configuration, with the blocks that it is listed for; None for a dense A.

        A list of candidates that other arithmetics share may hold some that this one does not support.
        """
        found = {}
        for block in (None, *self.blocks):
            for scaled in (False, True) if self.arithmetic.name == "FP8" and block else (False,):
                for config in self.listed(block, scaled):
                    fp16_only = for_fp16_accumulation(config) and self.arithmetic.name != "FP16 accumulation"
                    if not fp16_only and (self.plain or self.supports(config, block)):
                        blocks = found.setdefault(config, [])
                        blocks += [] if block in blocks else [block]
        return found

    def supports(self, config, block) -> bool:
        """True if some call without a bias, with an aligned output, is supported with this configuration."""
        for variant, op in product(self.variants, self.ops):
            f = signature_of(self, op, self.base | variant | {"block": block, "run": 256 * (op == GROUPED)})
            facts = self.facts_of(f, config, self.output_vector(f))
            if config in self.listed_for(f) and not self.family.unsupported(facts):
                return True
        return False

    @staticmethod
    def output_vector(f: Signature) -> int:
        return 16 // DTYPES[f.out_dtype].itemsize

    @property
    def variants(self) -> list[dict]:
        """The arithmetic's variants; a 2:4 sparse A has no block scales."""
        dense = not self.sparse_operand and self.family.structured
        return [v for v in self.arithmetic.variants if not (dense and v.get("scales") == BLOCK_SCALES[0])]


def for_fp16_accumulation(config) -> bool:
    """True if a thread has more accumulators than it has registers for in FP32."""
    return type(config) is GemmConfig and config.tile_m * config.tile_n > 192 * 128 * config.warps_m * config.warps_n


PLAIN = {"types": ("bf16", "bf16"), "epilogue": "nothing", "transposed": (False,) * 3, "out": "aligned", "align": 8}
PLAIN |= {"batch": "values"}
OPTIONS = ("accumulation", "precision", "scales", "amax")  # axes of an Arithmetic


# -- cases of a family -----------------------------------------------------------------------------------------

SIZES = [(200, 264, 136), (1, 264, 128), (256, 1, 1000), (8, 8, 8), (128, 127, 1), (136, 248, 0), (72, 520, 200)]
SIZES += [(520, 72, 456)]
ADDED = ("added to", "added to, unaligned")  # what becomes of out, of sddmm alone
EPILOGUES = {
    "nothing": {},
    "relu": {"activation": "relu", "scaled": True},
    "column bias": {"bias": "col", "activation": "gelu"},
    "row bias": {"bias": "row", "bias_dtype": "fp32", "activation": "silu"},
    "residual": {"residual": True, "scaled": True, "activation": "gelu_tanh"},
    "residual and row bias": {"residual": True, "bias": "row", "activation": "gelu"},
    "function": {"function": True},
    "all": {
        "bias": "col", "bias_dtype": "fp32", "activation": "gelu", "residual": True, "scaled": True, "function": True
    },
}  # fmt: skip


def axes_of(family: Kernels, op: str) -> dict[str, list]:
    """The axes that cases vary in, each with its values; fewer of them except for plain kernels."""
    arithmetic, plain, structured = family.arithmetic, family.plain, family.family.structured
    both = (False, True)
    axes = {
        "types": [types for types in arithmetic.types if types[1] not in FP8 or not (structured or op == GROUPED)],
        "epilogue": [*EPILOGUES] if plain else ["nothing", "relu", "column bias", "residual and row bias", "all"],
        "transposed": [*product(both, both, both)] if plain else [*product((False,), both, both)],
        "out": ["aligned", "wide", "unaligned", "its own"] if plain else ["aligned", "unaligned", "its own"],
        "align": [max(8, arithmetic.vector)] if family.path == "sm_90" or not plain else [8, 2, 1],
        **arithmetic.axes,
    }
    if arithmetic.name == "FP8":
        axes |= {"amax": [False]} if structured or op == GROUPED else {}
        axes["scales"] = SPARSE_SCALES if op != "gemm" else SCALES if structured else SCALES + BLOCK_SCALES
    if op == "gemm":
        # In a Sparse24 K is a multiple of 4; FP8 on sm_89 needs one of 8
        sizes = [(m, n, max(8, -(-k // 8) * 8)) for m, n, k in SIZES] if structured else SIZES
        if not plain and not structured:
            axes["transposed"] += [(True, False, True), (True, True, False)]
        return axes | {"size": sizes, "batch": [None] if structured else [None, "both"]}
    if op == "sddmm":  # a batch always in groups; the result is contiguous
        axes["transposed"] = [*product(both, both, (False,))]
        axes |= {"epilogue": ["nothing"], "out": ["aligned", "unaligned", "its own", *ADDED]}
    grouped = op == GROUPED
    axes |= {
        "block": [*family.blocks] if plain else [*family.blocks[:3], *family.blocks[-1:]],
        "pattern": ["bernoulli", "power_law", "banded", "empty_rows", "one_full_row", "no_blocks", "all_blocks"],
        "rows": [0, 1, "one"],
        "columns": [1, 6] if grouped else [*family.columns],
        "batch": ["values", "patterns"] if grouped else [None, "values", "patterns"],
        "index": ["int32", "int64"],
    }
    if not plain:
        axes |= {"pattern": ["power_law", "empty_rows", "no_blocks"], "rows": [0], "index": ["int32"]}
    if grouped or op == "sddmm":
        axes["run"] = [64, 128, 192, 256] if plain else [64, 128, 256]
    return axes if op == "sddmm" or not plain else axes | {"view": [False, True]}


def signature_of(family: Kernels, op: str, chosen: dict) -> Signature:
    """The epilogue consists of the terms of the chosen one that the op has."""
    terms = {"residual": chosen["out"] in ADDED} if op == "sddmm" else dict(EPILOGUES[chosen["epilogue"]])
    batch = chosen["batch"]
    if op != "gemm":
        terms.pop("scaled", None)
    if op in LINEAR or chosen["types"][1] in FP8:
        terms.pop("residual", None)
    if terms.get("bias") == "row" and op != "gemm":
        terms["bias"] = "items" if batch else "row" if op == "bsr_matmul" else "col"
    run = 0 if op == "sddmm" and batch is None else chosen.get("run", 64 if op == "sddmm" else 0)
    options = {name: chosen[name] for name in OPTIONS if name in chosen}
    options["amax"] = options.get("amax", False) and chosen["types"][1] in FP8
    if op != "gemm" and "scales" in options:  # `variants` are those of gemm
        of_a, of_b = options["scales"]
        of_a = {"1x128": "block", "row": "tensor"}.get(of_a, of_a)
        options["scales"] = of_a, "column" if of_b == "128x128" else of_b
    align_out = 1 if "unaligned" in chosen["out"] else max(8, family.arithmetic.vector)
    return Signature(
        op, family.path, *chosen["types"], chosen["align"], align_out, chosen["transposed"], block=chosen.get("block"),
        batch=batch, run=run, index=chosen.get("index", "int32"), view=chosen.get("view", False),
        structured=family.family.structured, **terms, **options,
    )  # fmt: skip


def case_of(family: Kernels, op: str, chosen: dict, seed: int) -> Case:
    f, items = signature_of(family, op, chosen), 3 if chosen["batch"] else 1
    a_t, b_t, out_t = f.majors
    lead = (items,) if f.batch and not f.run else ()
    if op == "gemm":
        m, n, k = chosen["size"]
        shapes = (*lead, m, k), (*lead, k, n), (*lead, m, n)
    else:
        bm, bk = f.block
        m = 1 if chosen["rows"] == "one" else max(3, min(26, 416 // bm)) + chosen["rows"]
        n, k = chosen["columns"], max(4, min(20, 450 // bk))
        tokens = n * max(f.run, 1)
        matmul = op == "bsr_matmul"
        shapes = (1, 1), (*lead, *((k * bk, tokens) if matmul else (tokens, k * bk)))
        shapes += ((*lead, *((m * bm, tokens) if matmul else (tokens, m * bm))),)
    if op == "sddmm":
        n = 1 + n % 6 if f.run else n
        tokens = n * max(f.run, 1)
        a, b = (place(*each, False) for each in (((m * bm, tokens), f.align, a_t), ((tokens, k * bk), f.align, b_t)))
        places = a, b, place_of_blocks(f.align_out), Placement()
        return Case(f, m, n, k, items, 0.5, None, places, chosen["out"] != "its own", seed, chosen.get("pattern"))
    wide = chosen["out"] == "wide"
    places = (
        place(shapes[0], f.align, a_t, wide), place(shapes[1], f.align, b_t, wide),
        place(shapes[2], f.align_out, out_t, wide or f.align_out == 1), place(shapes[2], 1, a_t, wide),
    )  # fmt: skip
    return Case(f, m, n, k, items, 0.5, None, places, chosen["out"] != "its own", seed, chosen.get("pattern"))


def all_pairs(axes: dict[str, list], takes: Callable[[dict], bool]) -> list[dict]:
    """Few choices of a value from each axis, in which any two values that go together are met together."""
    draw = random.Random(0)
    open_pairs = {
        ((x, i), (y, j)) for x, y in combinations(axes, 2) for i in range(len(axes[x])) for j in range(len(axes[y]))
    }
    found = []
    while open_pairs:
        wanted, best, most = min(open_pairs), None, 0
        for _ in range(20):
            numbers = {axis: draw.randrange(len(values)) for axis, values in axes.items()} | dict(wanted)
            met = open_pairs & set(combinations(numbers.items(), 2))
            if len(met) > most and takes({axis: axes[axis][i] for axis, i in numbers.items()}):
                best, most, met_by_best = numbers, len(met), met
        if best is None:  # what does not go together
            open_pairs.remove(wanted)
            continue
        open_pairs -= met_by_best
        found.append({axis: axes[axis][i] for axis, i in best.items()})
    return found


def cases_of(family: Kernels, op: str) -> list[Case]:
    """All pairs of the values of any two axes; the same cases in every run."""
    choices = all_pairs(axes_of(family, op), lambda chosen: family.takes(signature_of(family, op, chosen)))
    return [case_of(family, op, chosen, seed) for seed, chosen in enumerate(choices)]


load_all()
FAMILIES = {
    kernels.name: kernels
    for family in families(ProductFamily)
    for arithmetic in ARITHMETICS
    for path in ("sm_80", "sm_90")
    for split in (False, True)
    if (kernels := Kernels(family, path, split, arithmetic)).ops
}


LARGE = (
    ("bsr_matmul", 8200, {}), ("bsr_linear", 3000, {}), ("bsr_matmul", 1032, {"pattern": "empty_rows"}),
    ("bsr_linear", 3000, {"batch": "values"}), ("bsr_linear", 3000, {"view": True}),
)  # fmt: skip
SAMPLED_LARGE = (
    ("sddmm", 3000, {}), ("sddmm", 1032, {"pattern": "empty_rows", "out": "added to"}),
    ("sddmm", 5, {"batch": "values", "run": 128}), ("sddmm", 5, {"batch": "patterns", "run": 64}),
    ("sddmm", 1032, {"types": ("bf16", "fp32"), "out": "added to"}),
)  # fmt: skip


def large_cases(family: Kernels, block: tuple[int, int] | None, device: str) -> list[Case]:
    """For one configuration: on a GPU several tiles per cluster, so that rings and phases continue between them."""
    gpu, plain, found = device == "cuda", family.plain, []
    for variant, b_t in product(family.variants, (False, True) if plain or gpu else (False,)):
        chosen = PLAIN | {"types": family.arithmetic.types[0], "epilogue": "relu", "batch": None} | variant
        chosen["transposed"] = (False, b_t, False)
        if block is None:
            sizes = [(776, 1160, 456), (8, 1160, 72), (1536, 4104, 520)] if gpu else [(136, 264, 200), (8, 264, 72)]
            found += [case_of(family, "gemm", chosen | {"size": size}, 1) for size in (*sizes, (136, 8, 8))]
            if not family.family.structured:
                found.append(case_of(family, "gemm", chosen | {"size": (264, 136, 200), "batch": "both"}, 2))
            continue
        chosen |= {"block": block, "rows": 0, "pattern": "power_law"}
        for op, columns, more in SAMPLED_LARGE if family.sampled else LARGE if plain or gpu else LARGE[:2]:
            if more.get("view") and not plain:
                continue
            if not gpu or family.columns is FEW:
                columns = min(columns, 16)
            case = case_of(family, op, chosen | {"columns": columns} | more, 3)
            found.append(replace(case, m=max(3, 2600 // block[0]), k=max(4, 1600 // block[1])) if gpu else case)
    return found
