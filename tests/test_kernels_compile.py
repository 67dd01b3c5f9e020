"""Every kernel configuration compiles for every architecture, and none spills or misses its tensor-core instruction.

That is what can be proven about speed without a GPU. Where they are compiled: see `outcome_of` in conftest.py.
"""

import pytest

from cute_kernels.arch import ARCHS
from cute_kernels.catalog import kernel_configurations, name_of
from cute_kernels.runtime.parallel import inspect_kernel


def entries():
    for spec in ARCHS.values():
        for facts in kernel_configurations(spec.name):
            mark = getattr(pytest.mark, spec.name)
            yield pytest.param(facts, id=f"{spec.target}: {name_of(facts)}", marks=mark)


@pytest.mark.slow
@pytest.mark.parametrize("facts", entries())
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
