"""FP8, TF32, FP16 accumulation and 2:4 sparsity on the emulator: each mainloop and schedule of each family, once.

test_emulated has the 16-bit kernels.
"""

import shutil
from dataclasses import replace

import pytest

from cute_kernels.matmul.config import GemmConfig

from .conformance import FAMILIES, GROUPED, case_of, signature_of
from .emulator import emulate
from .emulator.ops import on_emulator
from .gemm_cases import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(emulate.COMPILER) is None, reason="the emulator needs a C++ compiler (CXX)"),
]


def loop_of(facts) -> tuple:
    """Facts that select the code of a kernel's mainloop and schedule."""
    cfg, block = facts.config, facts.block
    if not isinstance(cfg, GemmConfig):  # small-M kernels: an instance for each configuration
        return cfg, block.scaled
    schedule = cfg.split > 1, cfg.consumer_groups, cfg.rings, cfg.cluster > 1
    loop = facts.promotes, facts.takes_turns, facts.a_in_registers, facts.overlaps_store
    return schedule, loop, block and (len(facts.k_blocks) > 1, block.scaled)


def chosen_of(family, op: str, variant: dict, block) -> dict:
    chosen = family.base | variant | {"batch": None, "epilogue": "nothing", "rows": 0, "pattern": "empty_rows"}
    if op == GROUPED:
        chosen |= {"batch": "values", "run": 256, "epilogue": "row bias"}
    return chosen | {"block": block, "columns": 1, "size": (8, 8, 8)}


def kernels() -> list:
    """(family, configuration, op, choice of each axis) for each loop_of, and one of each family in groups."""
    found = {}
    for family in FAMILIES.values():
        ops = [op for op in family.ops if op != "bsr_matmul"]
        configs = sorted(family.configs().items() if not family.plain else (), key=lambda c: c[0].tile_m * c[0].tile_n)
        for config, blocks in configs:  # the smallest tiles first
            for op in ops:
                for variant in family.variants:
                    for block in blocks:
                        chosen = chosen_of(family, op, variant, block)
                        f = signature_of(family, op, chosen)
                        facts = family.facts_of(f, config, family.output_vector(f))
                        if config in family.listed_for(f) and not family.family.unsupported(facts):
                            loop = op if op == GROUPED else loop_of(facts)
                            found.setdefault((family.name, loop), (family, config, op, chosen))
    return [
        pytest.param(*kernel, id=f"{name} {op} {config.short}", marks=getattr(pytest.mark, kernel[0].arch))
        for (name, _), kernel in found.items()
        for _, config, op, _ in [kernel]
    ]


@pytest.mark.parametrize(("family", "config", "op", "chosen"), kernels())
def test_configurations(monkeypatch, family, config, op, chosen):
    """Tiles and K-tiles with tails, or an empty block row; then a single K-tile."""
    family.force(monkeypatch, config)
    rows, columns, depths = 0, 5, (0, 0)
    if isinstance(config, GemmConfig):
        rows, columns = config.tile_m * config.cluster_m - 8, config.tile_n * config.cluster_n + 40
        depths = (3 * config.tile_k + 16, config.tile_k) if config.split == 1 else (2 * config.split * config.tile_k,)
    for seed, depth in enumerate(depths):
        case = case_of(family, op, chosen | {"size": (rows, columns, depth)}, seed)
        if op != "gemm":
            case = replace(case, m=3, k=4 if seed == 0 else 1, n=2 if op == GROUPED else columns, places=None)
        with on_emulator(family.arch, sms=4, seed=seed):
            run(case, "cpu")
