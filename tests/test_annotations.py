"""The types of public arguments agree with the signatures and tables that they describe."""

import inspect
from typing import get_args, get_type_hints

import pytest

from attention import attention, block_sparse_attention
from attention.annotations import AttentionOptions, BlockSparseOptions
from cute_kernels import gemm
from cute_kernels.annotations import Activation, GemmOptions, Path, ScaleKind
from cute_kernels.arch import PATHS
from cute_kernels.fp8.quantize import AXES, BLOCKS
from cute_kernels.functions import ACTIVATIONS
from sparse_collective import bsr_linear, bsr_matmul
from sparse_collective.annotations import LinearOptions, MatmulOptions


@pytest.mark.parametrize(
    "function, options, flag",
    [
        (gemm, GemmOptions, "return_amax"),
        (bsr_matmul, MatmulOptions, "return_amax"),
        (bsr_linear, LinearOptions, "return_amax"),
        (attention, AttentionOptions, "return_lse"),
        (block_sparse_attention, BlockSparseOptions, "return_lse"),
    ],
)
def test_options_are_the_keyword_arguments(function, options, flag):
    parameters = inspect.signature(function).parameters.values()
    keywords = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert keywords.pop(flag) is bool
    assert keywords == get_type_hints(options)


def test_literals_are_the_names_in_the_tables():
    assert get_args(Activation) == tuple(ACTIVATIONS)
    assert get_args(Path) == PATHS
    assert get_args(ScaleKind) == (*AXES, "tokens", *BLOCKS)
