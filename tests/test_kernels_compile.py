"""Kernels of every family compile for every architecture; none spills or misses its tensor-core instruction.

That is what can be proven about speed without a GPU. Where they are compiled: see `outcome_of` in conftest.py. Some of
the catalogues' kernels are, in which everything that a kernel varies in comes up; with --every-kernel all of them are,
as with `python -m cute_kernels inspect` and the gate of resources.
"""

import pytest

from cute_kernels.arch import ARCHS
from cute_kernels.matmul.family import ProductFamily
from cute_kernels.runtime.families import families, family_of, load_all
from cute_kernels.runtime.parallel import inspect_kernel

load_all()
LIKE_SM_80 = ("sm_86", "sm_89")  # the same kernels, and the same instructions for them
EVERY = 6  # of the kernels for sm_80, so many-th is compiled for each of these in turn, beside each configuration


def features(facts) -> set:
    """What a kernel has of each thing that varies: its spills depend on configuration, blocks and epilogue."""
    if not isinstance(family_of(facts), ProductFamily):
        return {facts}
    cfg, block = facts.config, facts.block
    kind = facts.path, facts.family, cfg.split > 1
    return {
        (kind, "configuration", cfg, facts.epilogue.is_light),
        (kind, "tile", cfg.tile_m, cfg.tile_n, cfg.split, facts.transposed, block and block.bm),
        (kind, "epilogue", facts.epilogue),
        (kind, "blocks", block and (block.bm, block.bk)),
        (kind, "layouts", facts.majors, facts.aligns, facts.transposed),
        (kind, "types", facts.dtype, facts.out_dtype, block and block.index_dtype),
        (kind, "batches", facts.ranks, facts.ordered, block and (block.batch, block.run)),
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


def catalogue(spec) -> list:
    return [facts for family in families() for facts in family.catalogue(spec.name)]


def configuration(facts) -> set:
    return {(facts.family, getattr(facts, "path", ""), getattr(facts, "config", None))}


def selected(spec) -> list:
    if spec.name not in LIKE_SM_80:
        return cover(catalogue(spec), features)
    found = cover(catalogue(spec), configuration)
    rest = [facts for facts in catalogue(spec) if facts not in found]
    return found + rest[LIKE_SM_80.index(spec.name) :: EVERY]


def pytest_generate_tests(metafunc):
    if "facts" in metafunc.fixturenames:
        listed = catalogue if metafunc.config.getoption("every_kernel") else selected
        entries = []
        for spec in ARCHS.values():
            for facts in listed(spec):
                name = f"{spec.target}: {facts.family}: {family_of(facts).title(facts)}"
                entries.append(pytest.param(facts, id=name, marks=getattr(pytest.mark, spec.name)))
        metafunc.parametrize("facts", entries)


@pytest.mark.parametrize("spec", ARCHS.values(), ids=lambda spec: spec.name)
def test_every_configuration_is_selected(spec):
    every, some = catalogue(spec), selected(spec)
    assert set().union(*map(configuration, some)) == set().union(*map(configuration, every))
    assert len(set(some)) == len(some) and len(set(every)) == len(every)
    if spec.name not in LIKE_SM_80:
        assert set().union(*map(features, some)) == set().union(*map(features, every))


@pytest.mark.slow
def test_kernel(facts, outcome_of):
    outcome = outcome_of(inspect_kernel, facts)
    assert not outcome.error
    report = outcome.value
    assert report.problems == ()
    if not isinstance(family_of(facts), ProductFamily):
        return
    # Both paths load operands in the background: with TMA, or with cp.async where a copy has 4 bytes or more. The
    # skinny kernels load them into registers.
    assert report.resources.static_smem + report.dynamic_smem > 0
    if facts.family == "skinny":
        assert report.resources.ldgsts == report.resources.utmaldg == 0
    elif facts.path == "sm_90":
        assert report.resources.utmaldg >= 2
    elif min(facts.aligns[:2]) > 1:
        assert report.resources.ldgsts >= 2
