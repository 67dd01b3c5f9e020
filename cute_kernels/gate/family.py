"""The kernels of a gate, as a family."""

from collections.abc import Iterator

from ..arch import arch_named
from ..functions import ACTIVATIONS
from ..runtime.fake import fake_stream, fake_tensor
from ..runtime.families import Family, Request, register
from ..tile.element import BITS_16
from .config import GateFacts

NAMES = (None, *ACTIVATIONS)


class Gates(Family):
    """h = act(g) * u of z, and the gradient of z."""

    name = "gate"
    ops = ("bsr_gated_linear",)

    def entry(self, facts: GateFacts):
        from .kernel import Gate

        return Gate(facts)

    def arguments(self, facts: GateFacts) -> tuple:
        z, h, dz = (fake_tensor(facts.dtype, 2, 1, BITS_16.vector) for _ in range(3))
        return z, h, dz if facts.gradient else None, fake_stream()

    def unsupported(self, facts: GateFacts) -> str:
        if facts.dtype not in ("bfloat16", "float16"):
            return f"a gate of {facts.dtype}: the kernels support bfloat16 and float16"
        if facts.activation not in NAMES:
            return f"a gate with activation {facts.activation!r}; known are {', '.join(map(repr, NAMES))}"
        return ""

    def catalogue(self, arch: str, quick: bool = False) -> Iterator[GateFacts]:
        if quick:
            return iter([GateFacts(arch_named(arch).target, "bfloat16", "silu", True)])
        return self.bundle("", Request(arch, ("bfloat16", "float16")))

    def bundle(self, op: str, request: Request) -> Iterator[GateFacts]:
        target = arch_named(request.arch).target
        for dtype in request.dtypes:
            for activation in NAMES:
                yield from (GateFacts(target, dtype, activation, gradient) for gradient in (False, True))

    def describe(self, facts: GateFacts) -> dict[str, str]:
        return {
            "configuration": "gradient" if facts.gradient else "forward",
            "operands": facts.dtype,
            "epilogue": f"gate({facts.activation})",
        }


GATES = register(Gates())
