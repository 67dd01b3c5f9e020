"""Random expressions of integers, floats and bool values, as nested tuples of a function and what it is called with.

Their operations give torch's bits wherever they are computed: IEEE arithmetic, integers that wrap, and no quotient that
C leaves undefined.
"""

import operator

import torch
from hypothesis import strategies as st

from .traced_cases import values

DTYPES = ("int32", "int64", "float32", "bfloat16", "bool")
COUNT = 200
INT_OPS = [operator.add, operator.sub, operator.mul, operator.and_, operator.or_, operator.xor, torch.maximum]
INT_OPS += [torch.minimum, operator.lshift, operator.rshift]
FLOAT_OPS = [operator.add, operator.sub, operator.mul, operator.truediv, torch.maximum, torch.minimum]
BOOL_OPS = [operator.and_, operator.or_, operator.xor, operator.eq, operator.ne, operator.lt, torch.logical_or]
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]
BY = (-8, -7, -3, 2, 3, 7, 8, 64, 100)  # divisors
NUMBERS = (-(2**31), -7, -1, 0, 1, 2, 5, 31, 33, 2**31 - 1)


def leaves(seed: int = 0) -> dict[str, torch.Tensor]:
    """Values for each of DTYPES, special ones among them."""
    generator = torch.Generator().manual_seed(seed)
    return {d: (v := values(d))[torch.randint(len(v), (COUNT,), generator=generator)] for d in DTYPES}


def quotient(x, by):
    return x // by


def remainder(x, by):
    return x % by


def truncated(x, by):
    return torch.div(x, by, rounding_mode="trunc")


def scaled(x, number):
    return x * number


def shifted_by(x, bits):
    return x << bits if bits % 2 else x >> bits


def trees(kinds=("int", "float", "bool")) -> st.SearchStrategy:
    """Expressions of any of these kinds."""
    ints = st.deferred(lambda: st.one_of(int_leaf, int_tree))
    floats = st.deferred(lambda: st.one_of(float_leaf, float_tree))
    bools = st.deferred(lambda: st.one_of(bool_leaf, bool_tree))
    int_leaf, float_leaf, bool_leaf = (
        st.sampled_from(n) for n in (["int32", "int64"], ["float32", "bfloat16"], ["bool"])
    )
    ops = {name: st.sampled_from(n) for name, n in (("int", INT_OPS), ("float", FLOAT_OPS), ("bool", BOOL_OPS))}
    compare, numbers = st.sampled_from(COMPARISONS), st.sampled_from(NUMBERS)
    int_tree = st.one_of(
        st.tuples(ops["int"], ints, ints),
        st.tuples(st.sampled_from([operator.add, operator.sub, operator.mul]), ints, numbers),
        st.tuples(st.sampled_from([quotient, remainder, truncated, torch.fmod]), ints, st.sampled_from(BY)),
        st.tuples(st.just(shifted_by), ints, st.integers(0, 31)),
        st.tuples(st.sampled_from([operator.neg, operator.abs, operator.invert, torch.sign]), ints),
        st.tuples(st.just(torch.where), bools, ints, ints),
        st.tuples(st.sampled_from([torch.Tensor.int, torch.Tensor.long]), st.one_of(ints, bools)),
        st.tuples(st.just(operator.mul), bools, ints),
    )
    float_tree = st.one_of(
        st.tuples(ops["float"], floats, floats),
        st.tuples(st.just(scaled), floats, st.sampled_from([0.5, -2.0, 3])),
        st.tuples(st.sampled_from([operator.neg, operator.abs, torch.floor, torch.round, torch.sqrt]), floats),
        st.tuples(st.sampled_from([torch.Tensor.float, torch.Tensor.bfloat16]), st.one_of(ints, bools, floats)),
        st.tuples(st.just(torch.where), bools, floats, floats),
    )
    bool_tree = st.one_of(
        st.tuples(ops["bool"], bools, bools),
        st.tuples(compare, ints, ints),
        st.tuples(compare, ints, numbers),
        st.tuples(st.sampled_from([operator.invert, torch.logical_not]), bools),
        *([st.tuples(compare, floats, floats), st.tuples(st.just(torch.isnan), floats)] if "float" in kinds else []),
    )
    return st.one_of(*({"int": int_tree, "float": float_tree, "bool": bool_tree}[kind] for kind in kinds))


def compute(tree, *elements):
    """The expression's value; `elements` as DTYPES names them."""
    if isinstance(tree, str):
        return elements[DTYPES.index(tree)]
    if not isinstance(tree, tuple):
        return tree
    return tree[0](*(compute(part, *elements) for part in tree[1:]))
