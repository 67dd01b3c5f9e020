"""Every family of products, and the cases that show what its kernels must do: see gemm_cases.py for a case."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations
from typing import Any

from cute_kernels import dispatch as dense_ops
from cute_kernels.arch import ARCHS
from cute_kernels.dtypes import NAMES
from cute_kernels.matmul.config import BlockFacts, EpilogueSpec, GemmConfig, GemmFacts
from cute_kernels.matmul.epilogue.terms import epilogue_program
from cute_kernels.matmul.family import ProductFamily
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.runtime.families import families, load_all
from sparse_collective import dispatch as sparse_ops
from sparse_collective.sddmm_kernel import dispatch as sampled_ops

from .gemm_cases import DTYPES, LINEAR, OPS, Case, Signature, in_memory, leaky, make, run
from .guard_zones import Placement
from .sparse_collective.sddmm_cases import place_of_blocks

__all__ = ["DTYPES", "FAMILIES", "FEW", "OPS", "Case", "Signature", "axes_of", "case_of", "cases_of", "make", "run"]

ALL_BLOCKS = ((128, 128), (64, 64), (16, 16), (32, 64), (64, 256), (256, 64), (48, 112), (512, 112), (16, 48), (80, 16))
SPARSE = ("bsr_matmul", "bsr_linear", "bsr_grouped_linear")
FEW = (1, 2, 5, 8, 9, 16, 37)
SPEC = ARCHS["sm_90"]


@cache
def program_of_leaky():
    return epilogue_program("gemm", leaky)


@dataclass(frozen=True)
class Kernels:
    """Those of a registered family of products on a path; of its configurations those that split K, or the others."""

    family: ProductFamily
    path: str
    split: bool

    @property
    def name(self) -> str:
        return f"{self.family.name}{' split K' if self.split else ''} {self.path}"

    @property
    def sampled(self) -> bool:
        """Whether these are of sddmm."""
        return self.family.ops == ("sddmm",)

    def listed(self, block: tuple[int, int] | None) -> list:
        """The configurations that are tried for such blocks; None is a dense product."""
        facts = None if block is None else BlockFacts(*block, "int32", operand="d" if self.sampled else "a")
        found = self.family.candidates(self.path, facts, SPEC) if self.family.serves(facts) else []
        return [config for config in found if (config.split > 1) == self.split]

    @cached_property
    def blocks(self) -> tuple:
        plain = signature_of(self, "sddmm" if self.sampled else "bsr_matmul", PLAIN)
        return tuple(block for block in ALL_BLOCKS if self.takes(replace(plain, block=block)))

    @cached_property
    def ops(self) -> tuple[str, ...]:
        """Those of which it takes some call."""
        if self.sampled:
            return ("sddmm",) if self.blocks else ()
        runs = [signature_of(self, "bsr_grouped_linear", PLAIN | {"block": block, "run": 256}) for block in self.blocks]
        grouped = any(self.takes(f) for f in runs)
        return (("gemm",) if self.listed(None) else ()) + (SPARSE[: 2 + grouped] if self.blocks else ())

    @property
    def columns(self) -> tuple[int, ...]:
        return FEW if self.family.name == "skinny" else (264, 8, 1, 130)

    def owns(self, facts) -> bool:
        return (facts.path, facts.family) == (self.path, self.family.name) and (facts.config.split > 1) == self.split

    def takes(self, f: Signature) -> bool:
        """Whether some configuration supports it; out is taken to be stored element by element, which is hardest.

        That of sddmm never is: it is contiguous, or copied.
        """
        linear, batch, sampled = f.op in LINEAR, f.batch if f.block else None, f.op == "sddmm"
        bias = f.bias and ("col" if f.bias == "col" and not linear else "row")
        facts = GemmFacts(
            arch=SPEC.target,
            path=self.path,
            config=None,
            dtype=NAMES[DTYPES[f.dtype]],
            out_dtype=NAMES[DTYPES[f.out_dtype]],
            majors=("m" if f.view else "k", "n", "n"),
            aligns=(8, 8, 16 // DTYPES[f.out_dtype].itemsize if sampled else 1),
            transposed=linear,
            block=f.block and BlockFacts(*f.block, f.index, batch, f.run, "d" if sampled else "a", f.view),
            epilogue=EpilogueSpec(
                scale=f.scaled,
                bias=bias,
                bias_dtype=bias and "bfloat16",
                bias_items=f.bias == "items",
                residual="n" if f.residual else None,
                activation=f.activation,
                function=program_of_leaky() if f.function else None,
            ),
        )
        return any(not self.family.unsupported(replace(facts, config=config)) for config in self.listed(f.block))

    def force(self, monkeypatch, config=None) -> None:
        """From here on, the ops choose among these kernels, or have this configuration alone."""
        for family in families(ProductFamily):

            def listed(path, *given, family=family, found=family.candidates):
                if (family, path) != (self.family, self.path):
                    return []
                return [c for c in found(path, *given) if (c.split > 1) == self.split and config in (None, c)]

            monkeypatch.setattr(family, "candidates", listed)
        for ops in (dense_ops, sparse_ops, sampled_ops):
            monkeypatch.setattr(ops, "_PLANS", PlanCache())

    def configs(self) -> dict[Any, list[tuple[int, int] | None]]:
        """Every configuration, with the blocks that it is listed for; None for a dense product."""
        found = {}
        for block in (None, *self.blocks):
            for config in self.listed(block):
                if not for_fp16_sums(config):  # test_fp16_sums
                    found.setdefault(config, []).append(block)
        return found


def for_fp16_sums(config) -> bool:
    """Whether a thread has more sums than it has registers for in fp32."""
    return type(config) is GemmConfig and config.tile_m * config.tile_n > 192 * 128 * config.warps_m * config.warps_n


PLAIN = {"types": ("bf16", "bf16"), "epilogue": "nothing", "transposed": (False,) * 3, "out": "aligned", "align": 8}
PLAIN |= {"batch": "values"}


# -- cases of a family -----------------------------------------------------------------------------------------

TYPES = [("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32"), ("fp16", "fp32"), ("bf16", "fp16"), ("fp16", "bf16")]
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
    """What varies from case to case, each with its values."""
    axes = {
        "types": TYPES,
        "epilogue": [*EPILOGUES],
        "transposed": [(a, b, out) for a in (False, True) for b in (False, True) for out in (False, True)],
        "out": ["aligned", "wide", "unaligned", "its own"],
        "align": [8] if family.path == "sm_90" else [8, 2, 1],
    }
    if op == "gemm":
        return axes | {"size": SIZES, "batch": [None, "both"]}
    if op == "sddmm":  # of a batch always by runs; the result is contiguous
        axes["transposed"] = [(a, b, False) for a in (False, True) for b in (False, True)]
        axes |= {"epilogue": ["nothing"], "out": ["aligned", "unaligned", "its own", *ADDED]}
    grouped = op == "bsr_grouped_linear"
    axes |= {
        "block": [*family.blocks],
        "pattern": ["bernoulli", "power_law", "banded", "empty_rows", "one_full_row", "no_blocks", "all_blocks"],
        "rows": [0, 1, "one"],
        "columns": [1, 6] if grouped else [*family.columns],
        "batch": ["values", "patterns"] if grouped else [None, "values", "patterns"],
        "index": ["int32", "int64"],
    }
    if grouped or op == "sddmm":
        axes["run"] = [64, 128, 192, 256]
    return axes if op == "sddmm" else axes | {"view": [False, True]}


def signature_of(family: Kernels, op: str, chosen: dict) -> Signature:
    """The epilogue is what the op has of the chosen one."""
    terms = {"residual": chosen["out"] in ADDED} if op == "sddmm" else dict(EPILOGUES[chosen["epilogue"]])
    batch = chosen["batch"]
    if op != "gemm":
        terms.pop("scaled", None)
    if op in LINEAR:
        terms.pop("residual", None)
    if terms.get("bias") == "row" and op != "gemm":
        terms["bias"] = "items" if batch else "row" if op == "bsr_matmul" else "col"
    run = 0 if op == "sddmm" and batch is None else chosen.get("run", 64 if op == "sddmm" else 0)
    return Signature(
        op, family.path, *chosen["types"], chosen["align"], 1 if "unaligned" in chosen["out"] else 8,
        chosen["transposed"], block=chosen.get("block"), batch=batch, run=run, index=chosen.get("index", "int32"),
        view=chosen.get("view", False), **terms,
    )  # fmt: skip


def place(shape, align: int, transposed: bool, wide: bool) -> Placement:
    """Strides and address are multiples of `align` elements; if `wide`, rows lie further apart than they are long."""
    order, pads = in_memory(len(shape), transposed), [0] * len(shape)
    pads[order[-1]] = -max(shape[order[-1]], 1) % align + (align if wide else 0)
    return Placement(order, tuple(pads), 3 * align if wide or align < 8 else 0)


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
    if not family.structured  # whose A is another kind of matrix: test_sparse24, test_bsr24
    for path in ("sm_80", "sm_90")
    for kernels in (Kernels(family, path, False), Kernels(family, path, True))
    if kernels.ops
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
    """For one configuration: on a GPU several tiles for each cluster, so that rings and phases go on between them."""
    chosen = {"types": TYPES[0], "epilogue": "relu", "out": "aligned", "align": 8, "batch": None}
    gpu, found = device == "cuda", []
    for b_t in (False, True):
        chosen["transposed"] = (False, b_t, False)
        if block is None:
            sizes = [(776, 1160, 456), (8, 1160, 72), (1536, 4104, 520)] if gpu else [(136, 264, 200), (8, 264, 72)]
            found += [case_of(family, "gemm", chosen | {"size": size}, 1) for size in (*sizes, (136, 8, 8))]
            found.append(case_of(family, "gemm", chosen | {"size": (264, 136, 200), "batch": "both"}, 2))
            continue
        chosen |= {"block": block, "rows": 0, "pattern": "power_law"}
        for op, columns, more in SAMPLED_LARGE if family.sampled else LARGE:
            if not gpu or family.columns is FEW:
                columns = min(columns, 16)
            case = case_of(family, op, chosen | {"columns": columns} | more, 3)
            found.append(replace(case, m=max(3, 2600 // block[0]), k=max(4, 1600 // block[1])) if gpu else case)
    return found
