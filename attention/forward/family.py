"""The forward kernels as a family, for tools and tests."""

import itertools
from collections.abc import Iterator
from typing import Any

from cute_kernels.arch import arch_named
from cute_kernels.runtime import inspect
from cute_kernels.runtime.families import Family, Request, register
from cute_kernels.tile.barriers import FORWARD_OOB, FORWARD_ORDER, FORWARD_SCORES

from .arguments import forward_args, values_args
from .config import HALF_SMEM, SCALE_TOKENS, FlashFacts, Float8Facts, GatherFacts, ValuesFacts
from .heuristics import HEAD_DIMS, cannot_convert


class FlashForward(Family):
    """Attention with one query tile per CTA that walks K and V: dense, windows, packed sequences, block masks,
    gathered blocks."""

    name = "flash forward"
    ops = ("attention", "block_sparse_attention")

    def entry(self, facts: FlashFacts):
        if isinstance(facts, Float8Facts):
            from .fp8.kernel import FlashForwardFp8

            return FlashForwardFp8(facts)
        if isinstance(facts, GatherFacts):
            from .gather.boxes import BoxForwardSm90
            from .gather.kernel import GatherForwardSm90

            return BoxForwardSm90(facts) if facts.boxes else GatherForwardSm90(facts)
        if facts.path == "sm_90":
            from .kernel_sm90 import FlashForwardSm90

            return FlashForwardSm90(facts)
        from .kernel_sm80 import FlashForwardSm80

        return FlashForwardSm80(facts)

    def arguments(self, facts: FlashFacts) -> tuple:
        return forward_args(facts)

    def catalogue(self, arch: str, quick: bool = False) -> list[FlashFacts]:
        from . import catalogue  # traces masks, for which torch imports its compiler

        return list(dict.fromkeys(catalogue.configurations(arch_named(arch), quick)))

    def bundle(self, op: str, request: Request) -> Iterator[FlashFacts]:
        from . import catalogue

        for dtype, dim in itertools.product(request.dtypes, request.head_dims):
            yield from catalogue.usual(op, arch_named(request.arch), dtype, dim)

    def unsupported(self, facts: FlashFacts) -> str:
        return float8_unsupported(facts) if isinstance(facts, Float8Facts) else ""

    def tensor_core(self, facts: FlashFacts) -> str:
        if isinstance(facts, Float8Facts):
            return "QGMMA"
        return "HGMMA" if facts.path == "sm_90" else "HMMA"

    def warp_specialised(self, facts: FlashFacts) -> bool:
        return facts.path == "sm_90"

    def named_barriers(self, facts: FlashFacts) -> tuple[str, dict[int, int]] | None:
        if facts.path != "sm_90":
            return None
        groups, sharing = facts.config.groups, int(facts.sharers > 1)
        counts = {FORWARD_ORDER: groups * facts.ordered, FORWARD_SCORES: sharing, FORWARD_OOB: groups * facts.packed}
        return "forward", counts

    def smem_limit(self, facts: FlashFacts) -> int:
        return facts.spec.smem if facts.config.ctas == 1 else HALF_SMEM

    def describe(self, facts: FlashFacts) -> dict[str, str]:
        return describe(facts)

    def judge(self, facts: FlashFacts, cubin: bytes, resources, problems: list[str]) -> list[str]:
        # sm_80 kernels on an H200; see choose.BLOCKS_SM_80.
        if (facts.arch, facts.path) == ("sm_90a", "sm_80") and facts.blocks and resources.stack <= 32:
            problems = [text for text in problems if "stack" not in text and "local memory" not in text]
        found = list(problems)
        if facts.path == "sm_90" and facts.skips_max:
            found += [
                f"{opcode}, which not all warps of the warpgroup reach"
                for opcode in divided(inspect.disassemble(cubin))
            ]
            found += [] if resources.hmma else ["no scores are recomputed"]
        counts = {}
        if facts.path != "sm_90" or isinstance(facts, GatherFacts):
            counts["LDGSTS"] = resources.ldgsts, 6
        if facts.path == "sm_90" and (not isinstance(facts, GatherFacts) or facts.boxes):
            counts["UTMALDG"] = resources.utmaldg, 3
        found += [f"{n} {name}, expected at least {least}" for name, (n, least) in counts.items() if n < least]
        return found


def float8_unsupported(facts: Float8Facts) -> str:
    """Reason why these facts have no FP8 kernel; "" if they have one."""
    if facts.path != "sm_90":
        return (
            f"{facts.dtype} q and k require the sm_90 path (WGMMA), got {facts.spec.name}, path {facts.path}; "
            "dequantize q, k and v, t.to(torch.bfloat16) * scale, or decode (seqused_k) with bfloat16 q and an FP8 KV "
            "cache, which all architectures support"
        )
    if facts.head_dim not in HEAD_DIMS or facts.head_dim_v not in HEAD_DIMS:
        dims = ", ".join(map(str, HEAD_DIMS))
        return f"head_dim and head_dim_v of FP8 attention must be {dims}, got {facts.head_dim} and {facts.head_dim_v}"
    if facts.converts and (reason := cannot_convert(facts)):
        return reason
    if facts.tokens and facts.packed:
        return "scales per block of tokens do not support packed sequences; pass one scale per sequence and head"
    if facts.tokens and facts.config is not None and SCALE_TOKENS % facts.config.tile_n:
        return f"a tile of {facts.config.tile_n} keys spans several scale blocks of {SCALE_TOKENS} tokens"
    return ""


class Values(Family):
    """Conversion or transposition of FP8 V, which runs before FP8 forward attention."""

    name = "FP8 values"
    ops = ("attention", "block_sparse_attention")

    def entry(self, facts: ValuesFacts):
        from .fp8.converted_values import ConvertValues
        from .fp8.transposed_values import TransposeValues

        return TransposeValues(facts) if facts.tile else ConvertValues(facts)

    def arguments(self, facts: ValuesFacts) -> tuple:
        return values_args(facts)

    def catalogue(self, arch: str, quick: bool = False) -> list[ValuesFacts]:
        spec = arch_named(arch)
        if spec.path != "sm_90" or quick:
            return []
        converted = [ValuesFacts(spec.target, dim) for dim in HEAD_DIMS]
        converted += [ValuesFacts(spec.target, dim, 128 if dim < 256 else 64) for dim in HEAD_DIMS]
        cases = itertools.product((96, 192), (False, True))
        return converted + [ValuesFacts(spec.target, 128, tile, packed) for tile, packed in cases]

    def bundle(self, op: str, request: Request) -> Iterator[ValuesFacts]:
        return iter(())  # bundles have kernels with BF16 and FP16 operands

    def describe(self, facts: ValuesFacts) -> dict[str, str]:
        layout = f"tiles of {facts.tile}" + (", packed" if facts.packed else "") if facts.tile else "to fp16"
        return {"path": "sm_90", "problem": f"D {facts.head_dim}", "operands": "float8_e4m3fn", "epilogue": layout}


def short(dtype: str | None) -> str:
    """Short name of a dtype, for tables; "" without one."""
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype or "", dtype or "")


def describe(facts: FlashFacts) -> dict[str, str]:
    """Columns of a table row."""
    switches: dict[str, Any] = {"left": facts.window.left, "right": facts.window.right, "softcap": facts.softcap}
    switches |= {"lse": facts.lse, "packed": facts.packed, f"sinks {short(facts.sinks)}": facts.sinks}
    switches |= {"offsets": facts.offsets}
    features = [text for text, on in switches.items() if on]
    if facts.score:
        features.append(f"score_mod of {len(facts.score.tensors)} tensors" if facts.score.tensors else "score_mod")
    if isinstance(facts, Float8Facts):
        features += [f"v {short(facts.given_v)}"] if facts.given_v != facts.dtype else []
        features += [name for name in ("fast", "q_descale", "k_descale", "v_descale") if getattr(facts, name)]
        features += [f"per {SCALE_TOKENS} tokens"] if facts.tokens else []
        features += ["v converted inside"] if facts.converts else []
    if isinstance(facts, GatherFacts):
        features += [f"gathered blocks of {facts.block_size}{' causal' * facts.causal}"]
    if facts.blocks:
        mask = facts.blocks.mask
        kind = "" if mask is None else f" mask of {len(mask.tensors)} tensors" if mask.tensors else " mask"
        features.append(f"blocks {facts.blocks.block_q}x{facts.blocks.block_k}{kind}")
    problem = f"D {facts.head_dim}" + (f"/{facts.head_dim_v}" if facts.head_dim_v != facts.head_dim else "")
    return {
        "path": facts.path,
        "configuration": str(facts.config),
        "problem": problem,
        "operands": short(facts.dtype) + (f" to {short(facts.out_dtype)}" if facts.out_dtype else ""),
        "epilogue": " ".join(features),
    }


def divided(sass: str) -> list[str]:
    """Warpgroup-wide instructions between the vote that sends some warps to recompute their scores and the mma.sync
    instructions that recompute them."""
    found: list[str] = []
    since: list[str] = []
    for opcode in inspect.instructions(sass):
        if opcode.startswith("VOTE"):
            since = []
        elif opcode.startswith("WARPGROUP"):
            since.append(opcode)
        elif opcode.startswith("HMMA"):
            found += since
            since = []
    return found


FLASH_FORWARD = register(FlashForward())
VALUES = register(Values())
