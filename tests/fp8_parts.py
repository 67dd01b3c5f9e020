"""What tensor cores may err in products of 8-bit floats."""

import pytest
import torch

from cute_kernels.runtime.families import family_of

from .kernel_selection import one_of_each

KEPT = 2.0**-13  # of the largest of what tensor cores add at once, the least that they keep
TERMS = 33  # that are added at once: the products of 32 of K, and the sum before


def some(kernels: list, facts=lambda kernel: kernel) -> list:
    """A kernel of each kind: those that differ in more are compiled by test_kernels_compile, and run on a GPU.

    facts: of an element of `kernels`.
    """

    def kind(f) -> tuple:
        cfg, e = f.config, f.epilogue
        loop = f.path, f.promotes, f.takes_turns, f.a_in_registers, cfg.split > 1, cfg.consumer_groups, cfg.rings
        blocks = f.block and (f.block.bm >= 128, f.block.bk % 128, f.block.scaled)
        return loop, blocks, f.dtype, f.out_dtype, e.scale_m, e.scale_n, e.is_light

    return one_of_each(kernels, kind, facts)


def compiled(kernels: list) -> list:
    """Parameters of a test that compiles (architecture, facts)."""
    marks = [getattr(pytest.mark, arch) for arch, _ in kernels]
    ids = [f"{arch}: {family_of(facts).title(facts)}" for arch, facts in kernels]
    return [pytest.param(f, id=i, marks=m) for (_, f), i, m in zip(kernels, ids, marks, strict=True)]


def assert_as_tensor_cores(ours, exact, a, b, *, fast: bool = False, alpha: float = 1.0, alone: bool = False) -> None:
    """`ours` differs from `exact`, its fp64 truth, by what tensor cores may drop of a @ b, and by one rounding.

    Of each term of a sum they may drop KEPT times the largest. A sum is made of as many steps as there are 32 of K, and
    one that is not promoted holds all sums before. Derivatives of activations are below 1.2.

    Args:
        a, b: (..., M, K) and (..., K, N), dequantised.
        fast: whether sums stay in the tensor cores.
        alpha: what the product is multiplied by.
        alone: whether the result is the product and nothing else; then its norm is compared, too.
    """
    a, b = a.float().abs(), b.float().abs()
    K, eps = a.shape[-1], torch.finfo(ours.dtype).eps
    magnitudes = torch.matmul(a, b)
    rows = [(a[..., m, :, None] * b).amax(-2) for m in range(a.shape[-2] if K else 0)]
    largest = torch.stack(rows, -2) if rows else 0.0
    steps = K / 32 + 1
    dropped = 1.2 * KEPT * abs(alpha) * (steps * TERMS * largest + (steps if fast else 5) * magnitudes)
    wrong = ~((ours.double() - exact).abs() <= dropped + eps * exact.abs() + 1e-6)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements, {wrong.nonzero()[:4].tolist()}"
    if alone:
        off = (ours.double() - exact).norm() / (exact.norm() + 1e-30)
        assert off < 1e-3 + eps, off
