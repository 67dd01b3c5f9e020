"""Kernels compile for every architecture, and none spills or misses its tensor-core instruction.

That is what can be proven about speed without a GPU. Where they are compiled: see `outcome_of` in conftest.py. Some of
the catalogue's kernels are, in which everything that a kernel varies in comes up; with --every-kernel all of them are,
as with `python -m cute_kernels inspect` and the gate of resources.
"""

import pytest

from cute_kernels.arch import ARCHS
from cute_kernels.catalog import kernel_configurations, name_of
from cute_kernels.runtime.parallel import inspect_kernel

LIKE_SM_80 = ("sm_86", "sm_89")  # the same kernels, and the same instructions for them
EVERY = 6  # of the kernels for sm_80, so many-th is compiled for each of these in turn, beside each configuration


def features(facts) -> set:
    """What a kernel has of each thing that varies: its spills depend on configuration, blocks and epilogue."""
    cfg, block = facts.config, facts.block
    shape = block and (block.bm, block.bk)
    kind = facts.path, cfg.few, cfg.sweep, cfg.pairs, cfg.split > 1, block is None
    tile = cfg.tile_m, cfg.tile_n, cfg.warps_m, cfg.teams, cfg.split
    return {
        ("configuration", facts.path, cfg, facts.epilogue.is_light, block is None),
        ("tile", kind, tile, facts.transposed, block and block.bm),
        ("epilogue", kind, facts.epilogue),
        ("blocks", kind, shape),
        ("layouts", kind, facts.majors, facts.aligns, facts.transposed),
        ("types", kind, facts.dtype, facts.out_dtype, block and block.index_dtype),
        ("batches", kind, facts.ranks, facts.ordered, block and (block.batch, block.run)),
    }


def cover(catalogue: list, features) -> list:
    """Some of the catalogue's kernels that have all features among them, those with the most new ones first."""
    of = {facts: features(facts) for facts in catalogue}
    missing, found = set().union(*of.values()), []
    while missing:
        best = max(of, key=lambda facts: len(of[facts] & missing))
        found.append(best)
        missing -= of.pop(best)
    return found


def selected(spec) -> list:
    catalogue = kernel_configurations(spec.name)
    if spec.name not in LIKE_SM_80:
        return cover(catalogue, features)
    found = cover(catalogue, lambda facts: {(facts.path, facts.config)})
    rest = [facts for facts in catalogue if facts not in found]
    return found + rest[LIKE_SM_80.index(spec.name) :: EVERY]


def pytest_generate_tests(metafunc):
    if "facts" in metafunc.fixturenames:
        every = metafunc.config.getoption("every_kernel")
        entries = [
            pytest.param(f, id=f"{spec.target}: {name_of(f)}", marks=getattr(pytest.mark, spec.name))
            for spec in ARCHS.values()
            for f in (kernel_configurations(spec.name) if every else selected(spec))
        ]
        metafunc.parametrize("facts", entries)


@pytest.mark.parametrize("spec", ARCHS.values(), ids=lambda spec: spec.name)
def test_every_configuration_is_selected(spec):
    catalogue, some = kernel_configurations(spec.name), selected(spec)
    assert {f.config for f in some} == {f.config for f in catalogue} and len(set(some)) == len(some)
    if spec.name not in LIKE_SM_80:
        assert set().union(*map(features, some)) == set().union(*map(features, catalogue))


@pytest.mark.slow
def test_kernel(facts, outcome_of):
    outcome = outcome_of(inspect_kernel, facts)
    assert not outcome.error
    report = outcome.value
    assert report.problems == ()
    assert report.resources.static_smem + report.dynamic_smem > 0, "the mainloop's ring lies in shared memory"
    # Both paths load operands in the background: with TMA, or with cp.async where a copy has 4 bytes or more. The one
    # for few columns loads them into registers.
    if facts.block and facts.config.few:
        assert report.resources.ldgsts == report.resources.utmaldg == 0
    elif facts.path == "sm_90":
        assert report.resources.utmaldg >= 2
    elif min(facts.aligns[:2]) > 1:
        assert report.resources.ldgsts >= 2
