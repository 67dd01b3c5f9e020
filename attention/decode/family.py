"""The decode kernels as a family, for tools and tests."""

import itertools
import re
from collections.abc import Iterator

from cute_kernels.arch import arch_named
from cute_kernels.runtime import inspect
from cute_kernels.runtime.families import Family, Request, register
from cute_kernels.tile.barriers import DECODE_CONSUMERS

from ..forward.config import DecodeFacts
from ..forward.family import describe
from ..forward.heuristics import WIDE
from .arguments import decode_args

GLOBAL = set("LD LDG LDGSTS ST STG ATOM ATOMG RED REDG UTMALDG UTMASTG UBLKCP UTMAPF UBLKPF CCTL".split())
SM_SMEM, SM_PART_REGISTERS = 233_472, 16_384  # bytes of an SM; registers of each of its four partitions


class Decode(Family):
    """Attention of short Q over long K and V with split-KV; a second kernel combines the splits."""

    name = "decode"
    ops = ("attention",)

    def entry(self, facts: DecodeFacts):
        if facts.cache:
            from .fp8.kernel import DecodeFloat8

            return DecodeFloat8(facts)
        if facts.path == "sm_90":
            from .kernel_sm90 import DecodeSm90

            return DecodeSm90(facts)
        from .kernel_sm80 import DecodeSm80

        return DecodeSm80(facts)

    def arguments(self, facts: DecodeFacts) -> tuple:
        return decode_args(facts)

    def catalogue(self, arch: str, quick: bool = False) -> list[DecodeFacts]:
        from . import catalogue  # traces masks, for which torch imports its compiler

        return list(dict.fromkeys(catalogue.configurations(arch_named(arch), quick)))

    def bundle(self, op: str, request: Request) -> Iterator[DecodeFacts]:
        from . import catalogue

        for dtype, dim in itertools.product(request.dtypes, request.head_dims):
            yield from catalogue.usual(arch_named(request.arch), dtype, dim)

    def unsupported(self, facts: DecodeFacts) -> str:
        if facts.cache and max(facts.head_dim, facts.head_dim_v) == WIDE:
            return f"{facts.cache} k and v are not supported at head_dim {WIDE}; dequantize them, .to(q.dtype) * scale"
        return ""

    def tensor_core(self, facts: DecodeFacts) -> str:
        return "HGMMA" if facts.path == "sm_90" else "HMMA"

    def named_barriers(self, facts: DecodeFacts) -> tuple[str, dict[int, int]] | None:
        return ("decode", {DECODE_CONSUMERS: 1}) if facts.path == "sm_90" else None

    def describe(self, facts: DecodeFacts) -> dict[str, str]:
        columns = describe(facts)
        if facts.cache:
            columns["operands"] += f", cache {facts.cache.removeprefix('float8_')}"
        features = (
            *(name for name in ("k_descale", "v_descale") if getattr(facts, name)),
            f"pages {facts.page_size}" if facts.page_size else "",
            "spans" if facts.spans else "lengths" if facts.seqlens else "",
        )
        words = [columns["epilogue"], *features, "split" if facts.split else ""]
        return columns | {"epilogue": " ".join(filter(None, words))}

    def judge(self, facts: DecodeFacts, cubin: bytes, resources, problems: list[str]) -> list[str]:
        if facts.cache and facts.early:
            return problems + early_problems(cubin)
        if facts.path != "sm_90":
            return problems
        found = problems + early_problems(cubin)
        if resources.utmaldg < 3 * facts.config.tile_n // facts.box:
            found.append(f"{resources.utmaldg} TMA loads, expected at least {3 * facts.config.tile_n // facts.box}")
        if resources.wgmma_waits >= resources.wgmmas / 4:
            found.append(f"{resources.wgmma_waits} waits for {resources.wgmmas} WGMMAs")
        # One of an SM's four partitions has two of a CTA's five warps or, with two CTAs, three.
        warps, registers = 1 + facts.config.ctas, -(-resources.registers // 8) * 8
        if warps * 32 * registers > SM_PART_REGISTERS:
            found.append(f"{registers} registers per thread are too many for {facts.config.ctas} CTAs per SM")
        return found

    def smem_limit(self, facts: DecodeFacts) -> int:
        shared = facts.path == "sm_90" or facts.config.ctas > 1
        return SM_SMEM // facts.config.ctas - 1024 if shared else facts.spec.smem


def early_problems(cubin: bytes) -> list[str]:
    """Violations of programmatic dependent launch: global memory accesses before the wait, or no early launch of the
    next kernel."""
    found = []
    for kernel in re.split(r"(?=\.section\s+\.text)", inspect.disassemble(cubin))[1:]:
        ops = [op.partition(".")[0] for op in inspect.instructions(kernel)]
        before = ops[: ops.index("ACQBULK")] if "ACQBULK" in ops else ops
        if GLOBAL & set(before) or ops.count("ACQBULK") != 1 or not GLOBAL & set(ops) or "PREEXIT" not in ops:
            found.append(f"before ACQBULK: {before}")
    return found


DECODE = register(Decode())
