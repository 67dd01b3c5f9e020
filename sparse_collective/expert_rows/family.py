"""Kernel family of expert rows."""

from cute_kernels.arch import arch_named
from cute_kernels.dtypes import NAMES
from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.runtime.families import Family, register

from .config import FAMILY, VECTOR, RowsFacts


class ExpertRows(Family):
    """Rows of tokens to the layout of experts, and weighted sums of the results."""

    name = FAMILY

    def entry(self, facts: RowsFacts):
        from . import kernel

        steps = {"places": kernel.Places, "combine": kernel.Combine, "values": kernel.Values}
        return steps.get(facts.step, kernel.Dispatch)(facts)

    def arguments(self, facts: RowsFacts) -> tuple:
        from cutlass import Int32, Int64

        def numbers(rank: int = 1, dtype: str = "int64"):
            return fake_tensor(dtype, rank, rank - 1, 1)

        def rows(dtype: str):
            return fake_tensor(dtype, 2, 1, VECTOR)

        step, weighted, local, number = facts.step, facts.weighted, facts.local, Int32(1)
        if step == "places":
            return numbers(2), numbers(), numbers(), numbers(1, "int32"), *[number] * 3, Int64(1), fake_stream()
        if step == "values":
            source = numbers(1, "float32") if local else numbers()
            return source, numbers(), numbers(1, "float32"), fake_stream()
        source = rows(facts.dtype) if local else numbers()
        if step == "combine":
            weights = numbers(2, "float32") if weighted else None
            return source, numbers(), weights, rows(facts.out_dtype), number, fake_stream()
        back = step == "gradient"
        dots = (rows(facts.out_dtype), numbers(1, "float32")) if weighted else (None, None)
        ids = None if back else numbers(1, "int32")
        shared = source, numbers(2), numbers(1, "int32")
        order, weights = (numbers(), numbers(1, "float32") if back else None) if local else (Int64(0), Int64(0))
        return *shared, rows(facts.out_dtype), ids, *dots, order, weights, *[number] * 4, fake_stream()

    def unsupported(self, facts: RowsFacts) -> str:
        unknown = {facts.dtype, facts.out_dtype} - set(NAMES.values())
        return f"expert rows of {', '.join(sorted(unknown))}: use {', '.join(NAMES.values())}" if unknown else ""

    def catalogue(self, arch: str, quick: bool = False) -> list[RowsFacts]:
        target = arch_named(arch).target
        if quick:
            return [RowsFacts(target, "combine", weighted=True)]
        found = [RowsFacts(target, "places")]
        for local in (False, True):
            moves = [("values", "float32", "float32", False)]
            for dtype in NAMES.values():
                moves.append(("dispatch", dtype, dtype, False))
                moves += [(step, dtype, dtype, w) for step in ("gradient", "combine") for w in (False, True)]
            for dtype in ("bfloat16", "float16"):  # under autocast tokens are FP32
                moves += [("gradient", "float32", dtype, weighted) for weighted in (False, True)]
                moves.append(("combine", dtype, "float32", True))
            found += [RowsFacts(target, *move, local) for move in moves]
        return found

    def describe(self, facts: RowsFacts) -> dict[str, str]:
        return {
            "configuration": "weights" if facts.weighted else "-",
            "problem": f"{facts.step}, one rank" if facts.local else facts.step,
            "operands": f"{facts.dtype} to {facts.out_dtype}",
        }  # fmt: skip


EXPERT_ROWS = register(ExpertRows())
