"""Fake arguments that the backward kernels with gathered KV tiles are compiled with."""

from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.tile.element import element_of

from .config import GatherBackwardFacts


def gather_backward_args(facts: GatherBackwardFacts) -> tuple:
    """Fakes of all arguments of GatherBackwardSm90."""
    import cutlass.cute as cute
    from cutlass import Float32, Int32

    def heads(dtype: str = facts.dtype):
        shape = (*(cute.sym_int32() for _ in range(3)), facts.head_dim)
        return fake_tensor(dtype, 4, 3, element_of(dtype).vector, shape)

    lse = [fake_tensor("float32", 3, 2, 1) for _ in range(1 + facts.lse_gradient)]
    of_rows = (*lse, *[None] * (2 - len(lse)))
    tables = *(fake_tensor("int32", n, n - 1, 1) for n in (4, 3, 4)), Int32(1), Int32(1)
    q, k, v, o, do, dq = (heads() for _ in range(6))
    dk, dv = (heads("float32") for _ in range(2))
    return q, k, v, o, do, *of_rows, dq, dk, dv, tables, Float32(1.0), Float32(1.0), fake_stream()
