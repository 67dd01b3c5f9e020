"""The decoding kernels as a family: what tools and tests know of them."""

import itertools
import re
from collections.abc import Iterator

from cute_kernels.arch import arch_named
from cute_kernels.runtime import inspect
from cute_kernels.runtime.families import Family, Request, register
from cute_kernels.tile.barriers import DECODE_CONSUMERS

from ..forward.choose import WIDE
from ..forward.config import DecodeFacts
from ..forward.family import describe
from .arguments import decode_args

GLOBAL = set("LD LDG LDGSTS ST STG ATOM ATOMG RED REDG UTMALDG UTMASTG UBLKCP UTMAPF UBLKPF CCTL".split())
SM_SMEM, SM_PART_REGISTERS = 233_472, 16_384  # bytes of an SM; registers of each of its four parts


class Decode(Family):
    """Attention of few queries over long K and V, whose tiles CTAs share; a second kernel combines their parts."""

    name = "decode"
    ops = ("attention",)

    def entry(self, facts: DecodeFacts):
        if facts.cache:
            from .kernel_float8 import DecodeFloat8 as DecodeKernel
        elif facts.path == "sm_90":
            from .kernel_sm90 import DecodeSm90 as DecodeKernel
        else:
            from .kernel_sm80 import DecodeSm80 as DecodeKernel
        return DecodeKernel(facts)

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
            return f"k and v of {facts.cache} have no kernel at head_dim {WIDE}; dequantise them, .to(q.dtype) * scale"
        return ""

    def tensor_core(self, facts: DecodeFacts) -> str:
        return "HGMMA" if facts.path == "sm_90" else "HMMA"

    def named_barriers(self, facts: DecodeFacts) -> tuple[str, dict[int, int]] | None:
        return ("decode", {DECODE_CONSUMERS: 1}) if facts.path == "sm_90" else None

    def describe(self, facts: DecodeFacts) -> dict[str, str]:
        found = describe(facts)
        if facts.cache:
            found["operands"] += f", cache {facts.cache.removeprefix('float8_')}"
        more = (
            *(name for name in ("k_descale", "v_descale") if getattr(facts, name)),
            f"pages {facts.page_size}" if facts.page_size else "",
            "spans" if facts.spans else "lengths" if facts.seqlens else "",
        )
        words = [found["epilogue"], *more, "split" if facts.split else ""]
        return found | {"epilogue": " ".join(filter(None, words))}

    def judge(self, facts: DecodeFacts, cubin: bytes, resources, problems: list[str]) -> list[str]:
        if facts.cache and facts.early:
            return problems + early_problems(cubin)
        if facts.path != "sm_90":
            return problems
        found = problems + early_problems(cubin)
        if resources.utmaldg < 3 * facts.config.tile_n // facts.box:
            found.append(f"{resources.utmaldg} TMA loads are too few")
        if resources.wgmma_waits >= resources.wgmmas / 4:
            found.append(f"{resources.wgmma_waits} waits for {resources.wgmmas} warpgroup products")
        # Of an SM's four parts one has two of a CTA's five warps or, of two CTAs, three.
        warps, registers = 1 + facts.config.ctas, -(-resources.registers // 8) * 8
        if warps * 32 * registers > SM_PART_REGISTERS:
            found.append(f"{registers} registers a thread are too many for {facts.config.ctas} CTAs an SM")
        return found

    def smem_limit(self, facts: DecodeFacts) -> int:
        shared = facts.path == "sm_90" or facts.config.ctas > 1
        return SM_SMEM // facts.config.ctas - 1024 if shared else facts.spec.smem


def early_problems(cubin: bytes) -> list[str]:
    """Where one of the kernels does not wait for the kernel before it first of all, or does not let the next start."""
    found = []
    for kernel in re.split(r"(?=\.section\s+\.text)", inspect.disassemble(cubin))[1:]:
        ops = [op.partition(".")[0] for op in inspect.instructions(kernel)]
        before = ops[: ops.index("ACQBULK")] if "ACQBULK" in ops else ops
        if GLOBAL & set(before) or ops.count("ACQBULK") != 1 or not GLOBAL & set(ops) or "PREEXIT" not in ops:
            found.append(f"before ACQBULK: {before}")
    return found


DECODE = register(Decode())
