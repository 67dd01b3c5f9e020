"""Every kernel configuration compiles for every architecture, and none spills or misses its tensor-core instruction.

That is what can be proven about speed without a GPU. Where they are compiled: see `outcome_of` in conftest.py.
"""

from dataclasses import replace

import pytest

from cute_kernels.arch import ARCHS
from cute_kernels.matmul.catalogue import kernel_configurations, name_of
from cute_kernels.runtime.parallel import inspect_kernel

TURNS = ("sm_86", "sm_89")


def selected(spec):
    """An architecture's kernels.

    sm_80, sm_86 and sm_89 have the same ones, and the same instructions for them. So each configuration is compiled for
    all three with each block shape and either form, without and with a heavy epilogue as far as it has them; what
    varies one of them further (other operands, other epilogues, batches) for sm_80 and for one of the others, in turn.
    """
    facts = kernel_configurations(spec.name)
    if spec.name not in TURNS:
        return facts
    seen, further = set(), []
    for each in facts:
        block = each.block and (each.block.bm, each.block.bk)
        combination = each.config, block, each.transposed, each.epilogue.is_light
        further += [each] if combination in seen else []
        seen.add(combination)
    elsewhere = set(further[TURNS.index(spec.name) :: len(TURNS)])
    return [each for each in facts if each not in elsewhere]


def entries():
    for spec in ARCHS.values():
        for facts in selected(spec):
            mark = getattr(pytest.mark, spec.name)
            yield pytest.param(facts, id=f"{spec.target}: {name_of(facts)}", marks=mark)


def test_what_takes_turns_is_left_out_nowhere():
    every, *turns = ({replace(f, arch="") for f in selected(ARCHS[name])} for name in ("sm_80", *TURNS))
    assert set.union(*turns) == every
    for spec in ARCHS.values():
        configs = {(f.config, f.block and f.block.bm) for f in kernel_configurations(spec.name)}
        assert {(f.config, f.block and f.block.bm) for f in selected(spec)} == configs


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
