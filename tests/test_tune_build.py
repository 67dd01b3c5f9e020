"""The tuner's builder: one compilation gives object and verdict; what spills or does not compile is rejected.

And the command on top of it, with torch in the kernels' place.
"""

import argparse
import functools
import subprocess
import sys

import pytest
import torch
from rich.progress import Progress

from bench.tune import build, command, fitness
from bench.tune.build import ELF, SASS, Builder, compile_candidate, problems_of, write_candidates
from cute_kernels import tuned
from cute_kernels.arch import ARCHS
from cute_kernels.matmul.choose import choose
from cute_kernels.matmul.config import GemmConfig, GemmFacts
from cute_kernels.runtime import inspect
from cute_kernels.runtime.bundle import Bundle, BundleError
from cute_kernels.runtime.compile import cubin_of, load_bytes
from cute_kernels.runtime.families import compile_kernel, unsupported

from . import emulate

pytestmark = pytest.mark.sm_90

SOUND = GemmFacts("sm_90a", "sm_90", GemmConfig(64, 64, 64, 4, 1, 1, teams=2), majors=("k", "n", "n"))
# 256 accumulators a thread, past the predicate: the compiler has 240 registers.
SPILLS = GemmFacts("sm_90a", "sm_90", GemmConfig(256, 256, 64, 2, 2, 1, ring=1), majors=("k", "n", "n"))
# 24 columns are no whole stmatrix.
BREAKS = GemmFacts("sm_90a", "sm_90", GemmConfig(64, 24, 64, 3, 1, 1, teams=2), majors=("k", "n", "n"))


def test_the_predicate_would_have_refused_both():
    assert "256 accumulators" in unsupported(SPILLS)
    assert "24 columns" in unsupported(BREAKS)
    assert unsupported(SOUND) == ""


def test_one_compilation_gives_the_object_and_its_verdict(monkeypatch):
    compilations = []

    def counted(facts, **options):
        compilations.append(facts)
        return compile_kernel(facts, **options)

    monkeypatch.setattr(build, "compile_kernel", counted)
    made = compile_candidate((SOUND, "ck_sound"))
    assert compilations == [SOUND]
    assert made.problems == () and made.checked == SASS
    assert made.metadata["path"] == "sm_90" and made.metadata["smem"] > 0
    assert callable(load_bytes(made.data, "ck_sound"))


def without_nvdisasm(monkeypatch):
    def missing():
        raise inspect.MissingDisassembler("nvdisasm was not found")

    monkeypatch.setattr(inspect, "find_nvdisasm", missing)


def test_a_spill_shows_without_a_disassembler_too(monkeypatch):
    built = compile_kernel(SPILLS, keep_cubin=True)
    cubin, smem = cubin_of(built.compiled), built.metadata["smem"]
    found, checked = problems_of(cubin, SPILLS, smem)
    assert checked == SASS and "stack frame" in found[0] and any("serialised" in text for text in found)
    without_nvdisasm(monkeypatch)
    found, checked = problems_of(cubin, SPILLS, smem)
    assert checked == ELF and len(found) == 1 and "stack frame" in found[0]
    found, _ = problems_of(cubin, SPILLS, 300_000)
    assert "bytes of shared memory" in found[1]


@pytest.mark.slow
def test_only_sound_candidates_come_back_and_into_a_bundle(tmp_path):
    with Builder(2) as builder:
        functions = builder.functions([SOUND, SPILLS, BREAKS, SOUND])
        assert list(functions) == [SOUND] and callable(functions[SOUND])
        assert "stack frame" in builder.reasons[SPILLS]
        assert builder.reasons[BREAKS] and "stack frame" not in builder.reasons[BREAKS]
        assert (builder.counts.compiled, builder.counts.rejected) == (3, 2)
        assert builder.checked == {SASS}
        assert builder.functions([SPILLS, SOUND]) == functions
        assert builder.counts.compiled == 3, "nothing is compiled twice"

    done = []
    with Builder(2) as builder:
        assert write_candidates(tmp_path, [SOUND, SPILLS], builder, lambda: done.append(1)) == 1
    assert len(done) == 1 and len(Bundle(tmp_path).entries) == 1

    with Builder(1, tmp_path) as builder:
        assert callable(builder.functions([SOUND])[SOUND])
        assert (builder.counts.from_bundle, builder.counts.compiled) == (1, 0)


def test_a_folder_that_is_no_bundle_is_refused(tmp_path):
    with pytest.raises(BundleError):
        Builder(1, tmp_path)


class Emulating(Builder):
    """Torch in the kernels' place; every third kernel computes something else."""

    def functions(self, wanted):
        made = {}
        for number, facts in enumerate(dict.fromkeys(wanted)):
            self.counts.compiled += 1
            made[facts] = emulate.Emulated(facts) if number % 3 else Wrong(facts)
        return made


class Wrong(emulate.Emulated):
    def __call__(self, *args):
        super().__call__(*args)
        args[2][0, 0] += 100


def test_a_problem_is_tuned_end_to_end_with_torch_in_the_kernels_place(emulated, monkeypatch, tmp_path):
    """All but the clock and the compiler: search, checks of results, races, final, the kept entry, what ops do then."""
    spec = ARCHS["sm_90"]
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path))
    tuned.forget()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card")
    monkeypatch.setattr(command, "device_arch", lambda index: (spec, 132, "Card"))
    monkeypatch.setattr(fitness, "operands", functools.partial(fitness.operands, device="cpu"))
    raced = []

    def timer(self, named, warm_s=0.0):
        def time(names, rounds):
            raced.append(len(names))
            everybody = named | {"incumbent": self.incumbent}
            return {name: [100.0 + everybody[name].facts.config.stages] * rounds for name in names}

        return time

    monkeypatch.setattr(fitness.Fitness, "timer", timer)
    parser = argparse.ArgumentParser()
    command.add_command(parser.add_subparsers())
    args = parser.parse_args(["tune", "--problem", "gemm 64x128x256 NN bf16", "--first", "12", "--budget", "3s"])
    (problem,) = args.problem
    with Emulating(1) as builder, Progress(disable=True) as bar:
        row, pick = command.tune_one(args, problem, builder, {}, bar)
    assert "stages 2 " in row.tuned and row.tuned_us == 102.0 < row.heuristic_us and row.rejected > 0
    assert row.kept == (row.ratio <= 0.99) and row.tried >= 12 and max(raced) > 5
    assert row.stopped in ("budget spent", "5 generations without gain")
    command.keep("user", row, pick)
    facts, group, ctas, notes = choose(problem.as_planned(), spec, 132, None, "Card")
    assert (facts.config, group, ctas) == (pick.config, pick.group, pick.ctas) and "tuned: 102.0 µs" in notes[0]
    tuned.forget()


def test_the_guard_of_a_hang_ends_the_process():
    code = "import time; from bench.tune.fitness import watched\nwith watched('this one', 0.2): time.sleep(30)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "this one" in done.stderr


def test_without_a_gpu_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    parser = argparse.ArgumentParser()
    command.add_command(parser.add_subparsers())
    args = parser.parse_args(["tune", "--standard"])
    assert args.run(args) == 1 and "no CUDA GPU" in capsys.readouterr().err
    args = parser.parse_args(["tune"])
    assert args.run(args) == 2
    with pytest.raises(SystemExit):
        parser.parse_args(["tune", "--problem", "gemm 3x4"])
    assert "is not MxNxK" in capsys.readouterr().err
