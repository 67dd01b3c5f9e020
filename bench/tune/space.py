"""The search space of one problem on one path: genes, and which combinations of their values are legal.

A *genome* is a tuple with one value for each gene. A gene says what it sets: fields of GemmConfig, or of the launch
("group", "ctas"). Everything else follows from that, so a field that is new in GemmConfig needs a line in `genes_of`.
What is legal is legality.unsupported's business alone.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from random import Random
from typing import NamedTuple

from cute_kernels.arch import ARCHS, ArchSpec
from cute_kernels.matmul import candidates
from cute_kernels.matmul import cost as heuristics
from cute_kernels.matmul.choose import candidates_for, facts_for
from cute_kernels.matmul.config import GemmConfig, GemmFacts
from cute_kernels.matmul.problem import Problem
from cute_kernels.runtime.families import unsupported

CONFIG_FIELDS = {field.name for field in fields(GemmConfig)}
ATTEMPTS = 200  # at a legal genome, before a search step falls back on a known one
TENSOR_MACS = heuristics.MACS_PER_CLOCK

Genome = tuple


class Gene(NamedTuple):
    """One thing to vary. Several fields take tuples of values."""

    name: str
    fields: tuple[str, ...]
    values: tuple


@dataclass(frozen=True)
class Candidate:
    """What a genome stands for: a kernel, the width of its raster panels in cluster tiles, and the most CTAs."""

    facts: GemmFacts
    group: int
    ctas: int

    def __str__(self) -> str:
        cfg = self.facts.config
        ring = f" ring {cfg.ring}x{cfg.store_row}" if self.facts.path == "sm_90" else ""
        return f"{self.facts.path} {cfg}{ring} panels of {self.group} on {self.ctas} CTAs"


def genes_of(problem: Problem, path: str, known: list[GemmConfig]) -> tuple[Gene, ...]:
    """The genes, each with at least the values that the configurations in `known` have."""
    block = problem.block
    high = block.bm if block else 256
    wide = block.bk if block else 128
    if path == "sm_90":
        rows, columns, depths = (64, 128, 192, 256), (32, 64, 96, 128, 160, 192, 224, 256), (16, 32, 64, 128)
        tile = [
            # two consumer warpgroups: cooperative along M or N, or two ping-pong teams; a sweep has its own three
            # and a product of few columns its warps
            Gene(
                "consumers",
                ("warps_m", "warps_n", "teams", "sweep", "chunks", "pairs", "few"),
                tuple((*split, False, 2, False, False) for split in ((2, 1, 1), (1, 2, 1), (1, 1, 2))),
            ),
            Gene(
                "cluster",
                ("cluster_m", "cluster_n", "split", "atomic"),
                tuple((*shape, False) for shape in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 4))),
            ),
            Gene("ring", ("ring", "store_row"), ((1, 128), (2, 128), (3, 128), (4, 128), (2, 64), (3, 64))),
            Gene("lag", ("lag",), (0, 1, 2)),
        ]
        stages = (2, 3, 4, 5, 6, 7, 8, 10)
    else:
        rows, columns, depths = (16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (16, 32, 64, 128)
        splits = tuple(itertools.product((1, 2, 4), (1, 2, 4, 8), (False,)))  # a product of few columns has its own
        tile = [Gene("consumers", ("warps_m", "warps_n", "few"), splits)]
        stages = (3, 4, 5, 6)
    # A tile much higher or deeper than the block would multiply padding; a dense product gains nothing from 16 or 32.
    rows = [n for n in rows if n < 2 * max(high, rows[0])]
    depths = [n for n in depths if n < 2 * wide and (block or n >= 32)]
    launch = [Gene("group", ("group",), (0, 1, 2, 4, 8, 16, 32))]  # 0: what the heuristics choose for this tile
    if path == "sm_90" and block:
        launch.append(Gene("ctas", ("ctas",), ("panel", "all")))  # panel: heuristics.grid_limit
    genes = [
        Gene("tile_m", ("tile_m",), tuple(rows)),
        Gene("tile_n", ("tile_n",), columns),
        Gene("tile_k", ("tile_k",), tuple(depths)),
        Gene("stages", ("stages",), stages),  # at most so many: as many as shared memory holds
        *tile,
    ]
    return tuple(_with_values_of(gene, known) for gene in genes) + tuple(launch)


def _with_values_of(gene: Gene, known: list[GemmConfig]) -> Gene:
    values = set(gene.values) | {_value_of(gene, config) for config in known}
    return gene._replace(values=tuple(sorted(values)))


def _value_of(gene: Gene, config: GemmConfig):
    values = tuple(getattr(config, name) for name in gene.fields)
    return values if len(values) > 1 else values[0]


class Space:
    """The genomes of a problem on a path of an architecture with `sms` multiprocessors."""

    def __init__(self, problem: Problem, path: str, spec: ArchSpec, sms: int):
        self.problem, self.path, self.sms = problem, path, sms
        self.spec = spec
        self.known = [
            config
            for config in candidates_for(path, problem, spec)
            if not unsupported(facts_for(problem, path, spec, config)) and self.clocks(config) < math.inf
        ]
        self.genes = genes_of(problem, path, self.known)

    # -- what a genome means ----------------------------------------------------------------------------------

    def decode(self, genome: Genome) -> tuple[Candidate | None, str]:
        """The candidate that a genome stands for, or None and the reason why no kernel can be built."""
        settings: dict = {}
        for gene, value in zip(self.genes, genome, strict=True):
            settings.update(zip(gene.fields, value if len(gene.fields) > 1 else (value,), strict=True))
        config = GemmConfig(**{name: settings[name] for name in settings.keys() & CONFIG_FIELDS})
        facts = facts_for(self.problem, self.path, self.spec, config)
        spec = ARCHS["sm_90"] if self.path == "sm_90" else self.spec
        config = candidates.with_stages(config, spec, facts.store_bytes, most=config.stages)
        facts = replace(facts, config=config)
        if reason := unsupported(facts):
            return None, reason
        extents, block = self.problem.extents, self.problem.block
        panels = -(-extents.N // (config.tile_n * config.cluster_n))
        group = settings["group"] or heuristics.raster_group(config, extents, block)
        group = group if settings["group"] == 0 else min(group, panels)
        ctas = self.sms
        if settings.get("ctas", "panel") == "panel":
            ctas = heuristics.grid_limit(config, extents, block, group, self.sms)
        return Candidate(facts, group, ctas), ""

    def candidate(self, genome: Genome) -> Candidate:
        """The candidate of a legal genome; ValueError with the reason for any other."""
        found, reason = self.decode(genome)
        if found is None:
            raise ValueError(reason)
        return found

    key = candidate  # genomes that stand for the same candidate are one to a search

    def legal(self, genome: Genome) -> bool:
        return self.decode(genome)[0] is not None

    def encode(self, config: GemmConfig) -> Genome:
        """The genome of one of the heuristics' configurations, launched as the heuristics do."""
        return tuple(
            _value_of(gene, config) if set(gene.fields) <= CONFIG_FIELDS else gene.values[0] for gene in self.genes
        )

    # -- enumeration ------------------------------------------------------------------------------------------

    def kernels(self) -> Iterator[Genome]:
        """One genome for each kernel there is, launched as the heuristics do."""
        seen = set()
        choices = [gene.values if set(gene.fields) <= CONFIG_FIELDS else gene.values[:1] for gene in self.genes]
        for genome in itertools.product(*choices):
            found, _ = self.decode(genome)
            if found is not None and found.facts.config not in seen:
                seen.add(found.facts.config)
                yield genome

    def seeds(self, count: int, ceilings: dict[str, float] | None = None) -> list[Genome]:
        """Where a search begins: the heuristics' candidates, then the cost model's best, `count` in all.

        The model knows neither the K-tile, nor the pipeline's depth, nor the store's ring, so one kernel stands for all
        of a tile: with the heuristics' K-tile and the deepest pipeline. `ceilings` are those of
        bench.ceilings.measure, where they were measured: TB/s and TFLOP/s.
        """
        found = [self.encode(config) for config in self.known]
        best: dict[GemmConfig, tuple] = {}
        usual = candidates.tile_k_of(self.problem.block)
        for genome in self.kernels():
            config = self.candidate(genome).facts.config
            shape = replace(config, tile_k=usual, stages=1, ring=1)
            rank = (self.clocks(config, ceilings), config.tile_k != usual, -config.stages, -config.ring)
            if shape not in best or rank < best[shape][0]:
                best[shape] = (rank, genome)
        found += [genome for _, genome in sorted(best.values())]
        unique = {self.candidate(genome): genome for genome in reversed(found)}
        return [genome for genome in found if unique[self.candidate(genome)] is genome][:count]

    def clocks(self, config: GemmConfig, ceilings: dict[str, float] | None = None) -> float:
        """heuristics.cost, with L2's feed as measured against the tensor cores' rate."""
        p, rates = self.problem, ceilings or {}
        feed = heuristics.L2_BYTES_PER_CLOCK
        if rates.get("l2_tbs") and rates.get("tensor_tflops"):
            clock = rates["tensor_tflops"] / (2 * TENSOR_MACS * self.sms)  # THz that the tensor cores' rate amounts to
            feed = rates["l2_tbs"] / (self.sms * clock)
        shape = p.extents, p.block, p.kept
        return heuristics.cost(config, *shape, self.sms, p.epilogue.is_light, feed, p.shares, p.majors[1] == "k")

    # -- what a search does -----------------------------------------------------------------------------------

    def random(self, rng: Random) -> Genome:
        """A legal genome."""
        for _ in range(ATTEMPTS):
            genome = tuple(rng.choice(gene.values) for gene in self.genes)
            if self.legal(genome):
                return genome
        return self.encode(rng.choice(self.known))

    def mutate(self, genome: Genome, rng: Random) -> Genome:
        """A legal genome with one or two genes changed, half the time to a neighbouring value."""
        varied = [i for i, gene in enumerate(self.genes) if len(gene.values) > 1]
        for _ in range(ATTEMPTS):
            changed = list(genome)
            for i in rng.sample(varied, min(len(varied), rng.choice((1, 1, 2)))):
                values = self.genes[i].values
                at = values.index(genome[i])
                near = [values[j] for j in (at - 1, at + 1) if 0 <= j < len(values)]
                others = [value for value in values if value != genome[i]]
                changed[i] = rng.choice(near if rng.random() < 0.5 else others)
            if self.legal(tuple(changed)):
                return tuple(changed)
        return self.random(rng)

    def crossover(self, one: Genome, other: Genome, rng: Random) -> Genome:
        """A legal genome with each gene from either parent; a mutation of the first where no mixture is legal."""
        for _ in range(ATTEMPTS):
            mixed = tuple(rng.choice(pair) for pair in zip(one, other, strict=True))
            if self.legal(mixed):
                return mixed
        return self.mutate(one, rng)
