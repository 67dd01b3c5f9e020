"""Kernel family of FP8 quantization."""

from dataclasses import replace

from ..arch import arch_named
from ..runtime.fake import fake_stream, fake_tensor
from ..runtime.families import Family, register
from ..tile.element import BITS_16
from .config import TOKENS_SERVED, QuantizeFacts, facts_for

WIDE, NARROW = ("bfloat16", "float16", "float32"), ("float8_e4m3fn", "float8_e5m2")


class Quantizing(Family):
    """FP8 quantization kernels."""

    name = "quantize"
    ops = ("quantize",)

    def entry(self, facts: QuantizeFacts):
        from .kernel import Quantize

        return Quantize(facts)

    def arguments(self, facts: QuantizeFacts) -> tuple:
        from cutlass import Int32

        x = fake_tensor(facts.dtype, 2, 1, facts.elements)
        values = scales = amax = None
        if facts.step != "amax":
            values, scales = fake_tensor(facts.out_dtype, 2, 1, facts.elements), fake_tensor("float32", 1, 0, 1)
        if facts.step != "groups":
            amax = fake_tensor("float32", 1, 0, 1)
        return x, values, scales, amax, Int32(1), fake_stream()

    def unsupported(self, facts: QuantizeFacts) -> str:
        spec = arch_named(facts.arch)
        if facts.dtype not in WIDE or facts.out_dtype not in NARROW:
            return f"{facts.dtype} to {facts.out_dtype}: the kernels quantize {', '.join(WIDE)} to FP8"
        if facts.gate and facts.elements != BITS_16.vector:
            return f"a gate of {facts.dtype}: the kernels support bfloat16 and float16"
        if spec.capability < (8, 9):
            return f"{facts.out_dtype}: {spec.name} has no FP8 conversion instruction; sm_89 and sm_90 do"
        return ""

    def judge(self, facts: QuantizeFacts, cubin: bytes, resources, problems: list[str]) -> list[str]:
        """Add a problem if registers allow fewer resident CTAs than the launch assumes."""
        resident = self.entry(facts).resident
        if resident > 1 and resources.registers * 256 * resident > 65_536:
            return [*problems, f"{resources.registers} registers a thread are too many for {resident} CTAs an SM"]
        return problems

    def catalogue(self, arch: str, quick: bool = False) -> list[QuantizeFacts]:
        """All kernels for bfloat16 to E4M3, and one of each kind for other dtypes."""
        target, found = arch_named(arch).target, []
        lengths = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
        for dtype, out_dtype in (("bfloat16", "float8_e4m3fn"), ("float16", "float8_e5m2"), ("float32", NARROW[0])):
            names = target, dtype, out_dtype
            found += [facts_for(*names, "row", columns) for columns in (lengths if dtype == "bfloat16" else (16384,))]
            found += [facts_for(*names, per, 4096) for per in ("1x128", "128x128") if dtype != "float16"]
            found += [QuantizeFacts(*names, step=step) for step in ("amax", "values")]
            if dtype == "bfloat16":
                found += [facts_for(*names, "tokens", columns) for columns in TOKENS_SERVED]
        rows = [facts_for(target, "bfloat16", NARROW[0], "row", columns) for columns in (1024, 14336, 32768)]
        found += [replace(facts, gate="silu") for facts in rows]
        if target == "sm_90a":
            leading = [replace(rows[1], gate="silu", leads=True), facts_for(target, "bfloat16", NARROW[0], "row", 4096)]
            found += [replace(leading[0], follows=True), *(replace(facts, leads=True) for facts in leading)]
        return [f for f in dict.fromkeys(found[:1] if quick else found) if not self.unsupported(f)]

    def describe(self, facts: QuantizeFacts) -> dict[str, str]:
        block = f"{facts.rows}x{facts.columns}" if facts.columns else "rows"
        block += " of tokens" if facts.none != 1 else ""
        held = "" if facts.held else ", read twice"
        held += ", follows" * facts.follows + ", leads" * facts.leads
        return {
            "configuration": f"{facts.lanes} lanes x {facts.vectors} vectors{held}",
            "problem": block if facts.step == "groups" else f"tensor, {facts.step}",
            "epilogue": f"gate({facts.gate})" if facts.gate else "",
            "operands": f"{facts.dtype} > {facts.out_dtype}",
        }


QUANTIZING = register(Quantizing())
