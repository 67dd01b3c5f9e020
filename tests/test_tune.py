"""The tuner: problems, candidates and what they compile to; and a whole run with torch in the kernels' place."""

import argparse
import dataclasses
import functools
import json
import random
import subprocess
import sys

import pytest
import torch
from rich.progress import Progress

from bench import record
from bench.tune import build, command, fitness
from bench.tune.build import Builder
from bench.tune.problems import STANDARD, parse
from bench.tune.space import Candidate, Space
from cute_kernels import tuned
from cute_kernels.arch import ARCHS, PATHS
from cute_kernels.matmul.choose import choose
from cute_kernels.matmul.config import BlockFacts, GemmConfig, GemmFacts
from cute_kernels.runtime.families import unsupported
from cute_kernels.runtime.parallel import inspect_kernel
from sparse_collective.families import ROW_PAIRS, SMALL_BLOCKS

from . import emulate
from .sass import attempt

SPEC, SMS = ARCHS["sm_90"], 132
SMALL = SMALL_BLOCKS.candidates("sm_90", BlockFacts(16, 16, "int32"), SPEC)  # in clusters of 2, of 1, ...
PAIRS = ROW_PAIRS.candidates("sm_90", BlockFacts(64, 64, "int32"), SPEC)
TEXTS = (
    "gemm 4096x4096x4096 NN bf16",
    "gemm 512x4096x1024 TT bf16>fp32 bias",
    "gemm 8192x8192x8192 NT fp16 bias+residual+gelu",
    "bsr_matmul 8192x8192x8192 128x128 12.5%",
    "bsr_matmul 8192x8192x8192 32x32 12.5%",
    "bsr_linear 8192x8192x8288 512x112 16/74 bias+gelu",
)
ON_PATHS = [pytest.param(path, marks=getattr(pytest.mark, path)) for path in PATHS]


def space(text, path):
    return Space(parse(text).as_planned(), path, SPEC, SMS)


# -- problems ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", (*STANDARD, *TEXTS))
def test_known_problems_are_parsed(text):
    assert parse(text).text == text and choose(parse(text).as_planned(), SPEC, SMS, None)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "is not OP MxNxK"),
        ("conv 1x2x3", "is not OP MxNxK"),
        ("gemm 4096x4096", "is not OP MxNxK"),
        ("gemm 0x8x8", "zero"),
        ("gemm 8x8x8 NX", "is not OP"),
        ("gemm 8x8x8 128x128 50%", "block shape"),
        ("bsr_matmul 128x128x128", "block shape"),
        ("bsr_matmul 128x128x128 48x64 50%", "do not divide"),
        ("bsr_matmul 128x128x128 0x64 50%", "zero"),
        ("bsr_matmul 128x128x128 64x64 0%", "above 0"),
        ("bsr_matmul 128x128x128 64x64 101%", "at most 100"),
        ("bsr_matmul 128x128x128 64x64 1/0", "no density"),
        ("bsr_matmul 128x128x128 NT 64x64 50%", "only gemm has a layout"),
        ("bsr_linear 128x128x128 64x64 50% residual", "no residual"),
        ("gemm 8x8x8 gelu+relu", "once"),
        ("gemm 8x8x8 tanh", "tanh is no epilogue term"),
    ],
)
def test_what_is_no_problem_is_refused_with_the_reason(text, word):
    with pytest.raises(ValueError, match=word):
        parse(text)


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("gemm 256x384x512 NN bf16", None),
        ("gemm 256x384x512 TT fp16>fp32 bias+residual+gelu", None),
        ("gemm 256x384x512 NT bf16 bias+gelu_tanh", None),
        ("bsr_matmul 256x384x512 64x64 50% bias+residual+relu", None),
        ("bsr_linear 256x384x512 128x64 25% bias+silu", None),
        ("bsr_linear 256x384x448 128x112 2/4 fp16>fp32", None),
        ("bsr_matmul 256x384x512 16x16 30% bias+relu", SMALL[1]),
        ("bsr_matmul 256x384x512 16x16 30% bias+relu", SMALL[0]),
        ("bsr_matmul 320x384x512 64x64 30% bias+relu", PAIRS[0]),
    ],
)
def test_a_problem_is_what_the_ops_plan_and_its_launch_is_theirs(text, config, emulated):
    """With a configuration of tables, those of the pattern."""
    problem = parse(text)
    call, truth = fitness.operands(problem, "cpu")
    plan = call.plan()
    candidate, function = Candidate(*choose(problem.as_planned(), SPEC, SMS, None)[:3]), plan.function
    if config is None:
        assert (plan.facts, plan.group, plan.max_ctas) == (candidate.facts, candidate.group, candidate.ctas)
    else:
        candidate = Candidate(dataclasses.replace(plan.facts, config=config), 2, SMS)
        function = emulate.Emulated(candidate.facts)
    call.out.fill_(float("nan"))
    fitness.launcher(plan, call)(function, candidate)
    assert (call.out.double() - truth.exact).abs().max() <= truth.bound < 0.05 * truth.exact.abs().max()


# -- candidates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ON_PATHS)
@pytest.mark.parametrize("text", TEXTS)
def test_seeds_begin_with_the_librarys_own_and_what_varies_is_legal(text, path):
    here, rng = space(text, path), random.Random(0)
    seeds = here.seeds(24, rng)
    assert seeds[: len(here.known)] == here.known and len(here.known) < len(set(seeds)) == len(seeds) <= 24
    assert Candidate(*choose(here.problem, SPEC, SMS, path)[:3]) in here.known
    found = set()
    for _ in range(150):
        one = here.vary(rng.choice(seeds), rng.choice([None, *seeds]), rng)
        assert unsupported(one.facts) == "" and one.group >= 1 and 1 <= one.ctas <= SMS
        found.add(one)
    assert len(found) > 60, "variations are many"
    for field in ("tile_m", "tile_n", "stages"):
        assert len({getattr(one.facts.config, field) for one in found}) > 1


def test_a_new_field_of_a_configuration_needs_no_change(monkeypatch):
    """Another type of configuration: what it has is varied, but its flags."""
    here, rng = space(TEXTS[0], "sm_90"), random.Random(0)

    @dataclasses.dataclass(frozen=True)
    class Config:
        tile: int
        depth: int = 2
        flag: bool = False

    class Other(Config):
        """A family of its own."""

    facts = here.known[0].facts
    monkeypatch.setattr(here, "clocks", lambda candidate: 1.0)

    def make(config):
        legal = config.tile % 8 == 0 and config.depth < 9
        return Candidate(dataclasses.replace(facts, config=config), 1, 1) if legal else None

    monkeypatch.setattr(here, "candidate", make)
    monkeypatch.setattr(here, "_launch", lambda one, rng: one)
    here._values.clear()
    here.known = [make(Config(64)), make(Config(128, 4)), make(Other(128, 4))]
    pool = list(here.known)
    _, depth, flag = dataclasses.fields(Config)
    assert here.values(depth, Other(64)) == here.values(flag, Config(64)) == []
    for _ in range(200):
        pool.append(here.vary(rng.choice(pool), rng.choice([None, *pool]), rng))
    configs = {candidate.facts.config for candidate in pool}
    assert {64, 96, 128} <= {c.tile for c in configs} and {2, 3, 4} <= {c.depth for c in configs}
    assert "tile=96" in str(next(c for c in pool if c.facts.config.tile == 96))


@pytest.mark.slow
@pytest.mark.parametrize("path", ON_PATHS)
def test_random_variants_compile(path):
    """One of each problem."""
    rng, facts = random.Random(7), []
    for text in TEXTS:
        here = space(text, path)
        facts.append(here.vary(rng.choice(here.known), None, rng).facts)
    outcomes = [attempt(inspect_kernel, each) for each in facts]
    assert [outcome.error for outcome in outcomes] == [""] * len(TEXTS)
    # What the predicate does not promise is that nothing spills; the builder rejects those.
    problems = [problem for outcome in outcomes for problem in outcome.value.problems]
    assert all("stack frame" in text or "local memory" in text or "serialised" in text for text in problems)


# -- compiling --------------------------------------------------------------------------------------------------

SOUND = GemmFacts("sm_90a", "sm_90", GemmConfig(64, 64, 64, 4, 1, 1, consumer_groups=2), majors=("k", "n", "n"))
# 256 accumulators a thread, past the predicate: the compiler has 240 registers.
SPILLS = GemmFacts("sm_90a", "sm_90", GemmConfig(256, 256, 64, 2, 2, 1, ring=1), majors=("k", "n", "n"))
# 24 columns are no whole stmatrix.
BREAKS = GemmFacts("sm_90a", "sm_90", GemmConfig(64, 24, 64, 3, 1, 1, consumer_groups=2), majors=("k", "n", "n"))


@pytest.mark.slow
@pytest.mark.sm_90
def test_only_sound_candidates_come_back_and_nothing_is_compiled_twice():
    assert "256 registers of accumulators" in unsupported(SPILLS) and "24 columns" in unsupported(BREAKS)
    builder = Builder(2)
    try:
        functions = builder.functions([SOUND, SPILLS, BREAKS, SOUND])
        assert list(functions) == [SOUND] and callable(functions[SOUND])
        assert "stack frame" in builder.reasons[SPILLS]
        assert builder.reasons[BREAKS] and "stack frame" not in builder.reasons[BREAKS]
        assert builder.functions([SPILLS, SOUND]) == functions and builder.compiled == 3
    finally:
        builder.close()


# -- the command ------------------------------------------------------------------------------------------------


class Wrong(emulate.Emulated):
    def __call__(self, *args):
        super().__call__(*args)
        args[2][0, 0] += 100


class Emulating(Builder):
    """Torch in the kernels' place; every third kernel computes something else."""

    def functions(self, wanted):
        wanted = list(dict.fromkeys(wanted))
        self.compiled += len(wanted)
        self.codes |= dict.fromkeys(wanted, "0" * 16)
        return {facts: emulate.Emulated(facts) if n % 3 else Wrong(facts) for n, facts in enumerate(wanted)}


def arguments(*given):
    parser = argparse.ArgumentParser()
    command.add_command(parser.add_subparsers())
    return parser.parse_args(["tune", *given])


@pytest.fixture
def on_cpu(emulated, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(fitness, "operands", functools.partial(fitness.operands, device="cpu"))


def test_a_problem_is_tuned_end_to_end_with_torch_in_the_kernels_place(on_cpu, monkeypatch, tmp_path, capsys):
    """All but the clock and the compiler: search, checks of results, races, final, the kept entry, what ops do then."""
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path))
    tuned.forget()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(command, "device_arch", lambda index: (SPEC, SMS, "Card"))
    monkeypatch.setattr(command.ceilings, "measure", lambda rounds: {"copy_tbs": 4.0})
    monkeypatch.setattr(record, "environment", lambda: {"card": "Card"})
    raced = []

    def timer(self, named, warm_s=0.0):
        def time(names, rounds):
            raced.append(len(names))
            everybody = named | {"incumbent": self.incumbent}
            return {name: [100.0 + everybody[name].facts.config.stages] * rounds for name in names}

        return time

    monkeypatch.setattr(fitness.Fitness, "timer", timer)
    given = ["--problem", "gemm 64x128x256 NN bf16", "--first", "12", "--budget", "3s", "--out", str(tmp_path)]
    args = arguments(*given)
    (problem,) = args.problem
    with Progress(disable=True) as bar:
        assert command.tune_all(args, [problem], Emulating(1), bar) == 0
    data = json.loads((tmp_path / "card" / "tune.json").read_text())
    (row,) = data["rows"]
    assert row["tuned_us"] <= 103.0 < row["heuristic_us"] and row["rejected"] > 0
    assert row["kept"] == (row["ratio"] <= 0.99) and row["tried"] >= 12 and max(raced) > 5
    assert row["stopped"] in ("budget spent", "5 generations without gain", "nothing new to try")
    facts, _, _, notes = choose(problem.as_planned(), SPEC, SMS, None, "Card")
    assert f"stages={facts.config.stages} " in row["tuned"] and f"tuned: {row['tuned_us']} µs" in notes[0]
    assert "kept" in capsys.readouterr().out
    tuned.forget()


def test_a_result_that_changes_between_runs_is_rejected(on_cpu):
    problem = parse("gemm 64x128x256 NN bf16")
    scored = fitness.Fitness(problem, Space(problem.as_planned(), "sm_90", SPEC, SMS), Builder(1))
    calls = []

    def unsteady(*args):
        emulate.Emulated(scored.incumbent.facts)(*args)
        calls.append(1)
        args[2][0, 0] *= 1 + 2**-7 * (len(calls) == 3)

    assert scored.wrong(scored.incumbent, unsteady) == "run 3 differs from the first"


def test_the_guard_of_a_hang_ends_the_process():
    code = "import time; from bench.tune.fitness import watched\nwith watched('this one', 0.2): time.sleep(30)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "this one" in done.stderr


def test_without_a_gpu_or_a_disassembler_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = arguments("--standard")
    assert args.run(args) == 1 and "no CUDA GPU" in capsys.readouterr().err
    args = arguments()
    assert args.run(args) == 2
    with pytest.raises(SystemExit):
        arguments("--problem", "gemm 3x4")
    assert "is not OP MxNxK" in capsys.readouterr().err

    def missing():
        raise build.inspect.MissingDisassembler("nvdisasm was not found")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(build.inspect, "find_nvdisasm", missing)
    args = arguments("--standard")
    assert args.run(args) == 1 and "nvdisasm" in capsys.readouterr().err
