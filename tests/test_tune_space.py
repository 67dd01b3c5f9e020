"""The tuner's problems and genomes: lines of text are the ops' own problems, and whatever is legal compiles."""

import dataclasses
import functools
import random

import pytest

from bench.tune import fitness
from bench.tune.problems import STANDARD, parse
from bench.tune.space import Candidate, Space
from cute_kernels import explain
from cute_kernels.arch import ARCHS, PATHS
from cute_kernels.matmul import candidates
from cute_kernels.matmul.choose import choose
from cute_kernels.runtime.families import unsupported
from cute_kernels.runtime.parallel import inspect_kernel

from . import emulate
from .sass import attempt

SPEC, SMS = ARCHS["sm_90"], 132
TEXTS = (
    "gemm 4096x4096x4096 NN bf16",
    "gemm 512x4096x1024 TT bf16>fp32 bias",
    "gemm 8192x8192x8192 NT fp16 bias+residual+gelu",
    "bsr_matmul 8192x8192x8192 128x128 12.5%",
    "bsr_matmul 8192x8192x8192 32x32 12.5%",
    "bsr_linear 8192x8192x8288 512x112 16/74 bias+gelu",
)


def space(text=TEXTS[0], path="sm_90", arch="sm_90"):
    return Space(parse(text).as_planned(), path, ARCHS[arch], SMS)


class Listed(Space):
    """A space whose kernels are enumerated once: of 300,000 genomes that takes ten seconds.

    And of the genes for a pipeline's depth, the store's ring and the lag only with the heuristics' own values and the
    last; what a search draws and mutates has all values.
    """

    FEWER = ("stages", "ring", "lag")

    @functools.cached_property
    def listed(self):
        every, known = self.genes, [self.encode(config) for config in self.known]
        used = [{genome[i] for genome in known} | {gene.values[-1]} for i, gene in enumerate(every)]
        self.genes = tuple(
            gene._replace(values=tuple(sorted(own))) if gene.name in self.FEWER else gene
            for gene, own in zip(every, used, strict=True)
        )
        found = list(super().kernels())
        self.genes = every
        return found

    def kernels(self):
        return iter(self.listed)


@functools.cache
def listed(text, path):
    return Listed(parse(text).as_planned(), path, SPEC, SMS)


SPACES = [
    pytest.param(text, path, id=f"{path} {text}", marks=getattr(pytest.mark, path)) for text in TEXTS for path in PATHS
]


# -- problems ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", (*STANDARD, *TEXTS))
def test_a_line_and_its_problem_say_the_same(text):
    assert parse(parse(text).text) == parse(text)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "begin with one of"),
        ("conv 1x2x3", "begin with one of"),
        ("gemm 4096x4096", "is not MxNxK"),
        ("gemm 0x8x8", "zero"),
        ("gemm 8x8x8 NX", "'NX' is no layout"),
        ("gemm 8x8x8 128x128 50%", "block shape"),
        ("bsr_matmul 128x128x128 64x64", "block shape"),
        ("bsr_matmul 128x128x128 48x64 50%", "do not divide"),
        ("bsr_matmul 128x128x128 64x64 0%", "above 0"),
        ("bsr_matmul 128x128x128 64x64 101%", "at most 100"),
        ("bsr_matmul 128x128x128 64x64 50% NT", "only gemm has a layout"),
        ("bsr_linear 128x128x128 64x64 50% residual", "no residual"),
        ("gemm 8x8x8 gelu+relu", "'relu'"),
    ],
)
def test_what_is_no_problem_is_refused_with_the_word(text, word):
    with pytest.raises(ValueError, match=word):
        parse(text)


SMALL = (
    "gemm 256x384x512 NN bf16",
    "gemm 256x384x512 TT fp16>fp32 bias+residual+gelu",
    "gemm 256x384x512 NT bf16 bias+gelu_tanh",
    "bsr_matmul 256x384x512 64x64 50% bias+residual+relu",
    "bsr_linear 256x384x512 128x64 25% bias+silu",
    "bsr_linear 256x384x448 128x112 2/4 fp16>fp32",
)


@pytest.mark.parametrize("text", SMALL)
def test_a_problem_is_what_the_ops_plan_and_its_launch_is_theirs(text, emulated):
    problem = parse(text)
    data = fitness.operands(problem, "cpu")
    plan = explain(data.op, *data.args, **data.kwargs)
    facts, group, ctas, _ = choose(problem.as_planned(), SPEC, SMS, None)
    assert plan.facts == facts and (plan.group, plan.max_ctas) == (group, ctas)
    data.out.fill_(float("nan"))
    fitness.launcher(plan, data)(plan.function, Candidate(facts, group, ctas))
    assert (data.out.double() - data.truth).abs().max() <= data.bound
    assert data.bound < 0.05 * data.truth.abs().max()


@pytest.mark.parametrize("cluster", [1, 2])
def test_a_sweep_is_launched_with_the_plan_of_its_pattern(cluster, emulated):
    problem = parse("bsr_matmul 256x384x512 16x16 30% bias+relu")
    data = fitness.operands(problem, "cpu")
    plan = explain(data.op, *data.args, **data.kwargs)
    config = next(c for c in candidates.sweeps(SPEC) if c.cluster_m == cluster)
    facts = dataclasses.replace(plan.facts, config=config)
    data.out.fill_(float("nan"))
    fitness.launcher(plan, data)(emulate.Emulated(facts), Candidate(facts, 2, SMS))
    assert (data.out.double() - data.truth).abs().max() <= data.bound


def test_pairs_are_launched_with_the_plan_of_their_pattern(emulated):
    problem = parse("bsr_matmul 320x384x512 64x64 30% bias+relu")
    data = fitness.operands(problem, "cpu")
    plan = explain(data.op, *data.args, **data.kwargs)
    facts = dataclasses.replace(plan.facts, config=candidates.pairs(SPEC)[0])
    data.out.fill_(float("nan"))
    fitness.launcher(plan, data)(emulate.Emulated(facts), Candidate(facts, 2, SMS))
    assert (data.out.double() - data.truth).abs().max() <= data.bound


# -- genomes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "path"), SPACES)
def test_every_enumerated_genome_is_legal_and_another_kernel(text, path):
    here = listed(text, path)
    facts = [here.candidate(genome).facts for genome in here.kernels()]
    assert len(set(facts)) == len(facts) > 20
    assert all(unsupported(f) == "" for f in facts)
    assert {f.config for f in facts} >= set(here.known)


@pytest.mark.parametrize(("text", "path"), SPACES)
def test_a_search_step_makes_legal_genomes_only(text, path):
    here, rng = listed(text, path), random.Random(0)
    genomes = here.seeds(8) + [here.random(rng) for _ in range(8)]
    for _ in range(60):
        one, other = rng.choice(genomes), rng.choice(genomes)
        mutant = here.mutate(one, rng)
        assert here.legal(mutant) and mutant != one
        child = here.crossover(one, other, rng)
        assert here.legal(child)
        found = here.candidate(child)
        assert unsupported(found.facts) == "" and found.group >= 1 and 1 <= found.ctas <= SMS


@pytest.mark.parametrize(("text", "path"), SPACES)
def test_seeds_begin_with_the_heuristics_own(text, path):
    here = listed(text, path)
    seeds = [here.candidate(genome) for genome in here.seeds(24)]
    assert [seed.facts.config for seed in seeds[: len(here.known)]] == here.known
    assert len(set(seeds)) == len(seeds) > len(here.known)
    facts, group, ctas, _ = choose(here.problem, SPEC, SMS, path)
    assert any((seed.facts, seed.group, seed.ctas) == (facts, group, ctas) for seed in seeds)


def test_measured_ceilings_move_the_model():
    here = space()
    wide, square = (next(c for c in here.known if (c.tile_m, c.tile_n) == tile) for tile in ((128, 64), (128, 256)))
    fed = {"l2_tbs": 100.0, "tensor_tflops": 800.0}
    starved = {"l2_tbs": 2.0, "tensor_tflops": 800.0}
    assert here.clocks(wide, fed) < here.clocks(wide) < here.clocks(wide, starved)
    assert here.clocks(square, starved) < here.clocks(wide, starved)


def test_a_new_gene_needs_no_other_change(monkeypatch):
    from bench.tune import space as module
    from bench.tune.space import Gene

    made = module.genes_of
    monkeypatch.setattr(module, "genes_of", lambda *args: (*made(*args), Gene("split", ("parts",), (1, 2))))
    here, rng = space(), random.Random(0)
    assert here.genes[-1].name == "split"
    assert {here.random(rng)[-1] for _ in range(20)} == {1, 2}
    assert here.legal(here.mutate(here.random(rng), rng))


def test_an_illegal_genome_says_why():
    here = space()
    names = [gene.name for gene in here.genes]
    genome = list(here.encode(here.known[0]))
    genome[names.index("tile_m")], genome[names.index("tile_n")] = 256, 256
    assert not here.legal(tuple(genome))
    with pytest.raises(ValueError, match="256 accumulators a thread|512 accumulators a thread"):
        here.candidate(tuple(genome))


@pytest.mark.slow
@pytest.mark.parametrize("path", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in PATHS])
def test_a_random_dozen_compiles(path):
    rng, facts = random.Random(7), []
    for text in TEXTS:
        here = space(text, path)
        facts += [here.candidate(here.random(rng)).facts for _ in range(2)]
    outcomes = [attempt(inspect_kernel, each) for each in facts]
    assert [outcome.error for outcome in outcomes] == [""] * 12
    # What the predicate does not promise is that nothing spills; the builder rejects those.
    problems = [problem for outcome in outcomes for problem in outcome.value.problems]
    assert all("stack frame" in text or "local memory" in text or "serialised" in text for text in problems)
