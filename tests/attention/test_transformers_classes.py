"""Every attention class of the installed transformers: its result is that of "eager", or a clear error.

A class is run in a tiny random model, or alone where none of its models could be built or called. Where that failed,
too, its source is compared: the keywords that it passes on, and its eager function. Such tests are skipped, with the
reason (pytest -rs). The walk takes a minute on one core. `python -m tests.attention.transformers_walk [module ...]`
prints the outcome of each class.
"""

import pytest
import torch

pytest.importorskip("transformers")

from attention.integrations.transformers import attention_function  # noqa: E402

from . import transformers_walk as walk  # noqa: E402
from . import transformers_zoo as zoo  # noqa: E402

# Attention classes that cannot be run or compared, and why.
NOT_COMPARED = {
    "esmfold2.EsmFold2MSAPairWeightedAveraging": "no attention function: the class only mentions it",
    "kosmos2_5.Kosmos2_5VisionAttention": "transformers looks the implementation up by getattr, and always takes eager",
    "qwen2_5_omni.DiTAttention": "has no eager attention",
}
# Classes that are refused for another reason than a keyword in attention_function.REFUSED.
REFUSED = {"deepseek_v4.DeepseekV4Attention", "doge.DogeAttention"}

# Their indexers score rows of padding, which are 0 here and not in "eager": see test_transformers_selected.py.
READ_PADDING = {"minimax_m3_vl.MiniMaxM3VLAttention"}


def is_right(name: str, outcome: walk.Outcome) -> bool:
    keyword = any(why in outcome.detail for why in attention_function.REFUSED.values())
    refused = outcome.verdict == "refused" and (keyword or name in REFUSED)
    padded = name in READ_PADDING and outcome.verdict == "differs" and outcome.detail.endswith("under padding")
    return outcome.verdict == "equal" or refused or padded or name in NOT_COMPARED


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster, for tensors this small
    walk.register()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", zoo.modules())
def test_classes(name):
    outcomes = walk.walk(name)
    assert not {key: o for key, o in outcomes.items() if not is_right(f"{name.split('.')[0]}.{key}", o)}
    by_source = {key: o.detail for key, o in outcomes.items() if o.how == "by source"}
    if by_source:
        pytest.skip(f"compared by source only: {by_source}")


@pytest.mark.parametrize(
    ("name", "model", "keyword"),
    [
        ("inkling2.modeling_inkling2", "Inkling2TextModel", "sinks"),
    ],
)
def test_ignored_keywords_are_found(name, model, keyword, monkeypatch):
    """Models whose results differ if a keyword is ignored: the walk sees it."""
    if name not in zoo.modules():
        pytest.skip("this transformers does not have the model")
    assert {o.verdict for key, o in walk.walk(name).items() if o.how == model} == {"refused"}
    monkeypatch.setattr(attention_function, "REFUSED", {})
    monkeypatch.setattr(attention_function, "HARMLESS", attention_function.HARMLESS | {keyword})
    assert {o.verdict for key, o in walk.walk(name).items() if o.how == model} == {"differs"}
