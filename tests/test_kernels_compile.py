"""Kernels of every family compile for every architecture; none spills or misses its tensor-core instruction.

That is what can be proven about speed without a GPU. Where they are compiled: see `outcome_of` in conftest.py. Some of
the catalogues' kernels are, in which everything that a kernel varies in comes up; with --every-kernel all of them are,
as with `python -m cute_kernels inspect` and the gate of resources. Kernels whose source is checked for another
architecture are compiled with each configuration.
"""

from dataclasses import replace

import pytest

from cute_kernels.arch import ARCHS
from cute_kernels.matmul.family import ProductFamily
from cute_kernels.runtime.families import family_of

from .compiled import inspect_compiled
from .kernel_selection import LIKE_SM_80, catalogue, configuration, features, is_other_archs, of_float8, selected


def pytest_generate_tests(metafunc):
    if "facts" in metafunc.fixturenames:
        listed = catalogue if metafunc.config.getoption("every_kernel") else selected
        entries = []
        for spec in ARCHS.values():
            for facts in listed(spec):
                name = f"{spec.target}: {facts.family}: {family_of(facts).title(facts)}"
                entries.append(pytest.param(facts, id=name, marks=getattr(pytest.mark, spec.name)))
        metafunc.parametrize("facts", entries)


@pytest.mark.parametrize("names", [("sm_80",), LIKE_SM_80, ("sm_90",)], ids=" ".join)
def test_every_configuration_is_selected(names):
    every, some = ([facts for name in names for facts in listed(ARCHS[name])] for listed in (catalogue, selected))
    assert set().union(*map(configuration, some)) == set().union(*map(configuration, every))
    assert len(set(some)) == len(some) and len(set(every)) == len(every)
    own = [facts for facts in every if names != LIKE_SM_80 and not is_other_archs(facts)]
    assert set().union(*map(features, own)) <= set().union(*map(features, some))


def test_sm_86_and_sm_89_have_the_same_kernels():
    """Except FP8 kernels. So what is compiled for one of them is checked for both."""
    first, second = (
        {replace(facts, arch="") for facts in catalogue(ARCHS[name]) if not of_float8(facts)} for name in LIKE_SM_80
    )
    assert first == second


@pytest.mark.slow
def test_kernel(facts, outcome_of):
    outcome = outcome_of(inspect_compiled, facts)
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
