"""The forward kernels as a family: what tools and tests know of them."""

import itertools
from collections.abc import Iterator

from cute_kernels.arch import arch_named
from cute_kernels.runtime import inspect
from cute_kernels.runtime.families import Family, Request, register
from cute_kernels.tile.barriers import FORWARD_OOB, FORWARD_ORDER, FORWARD_SCORES

from .arguments import forward_args, values_args
from .choose import HEAD_DIMS, cannot_convert
from .config import HALF_SMEM, SCALE_TOKENS, FlashFacts, Float8Facts, ValuesFacts


class FlashForward(Family):
    """Attention with K and V tiles walked by one query tile a CTA: dense, windows, packed sequences, block masks."""

    name = "flash forward"
    ops = ("attention", "block_sparse_attention")

    def entry(self, facts: FlashFacts):
        if isinstance(facts, Float8Facts):
            from .fp8.kernel import FlashForwardFp8 as FlashForward
        elif facts.path == "sm_90":
            from .kernel_sm90 import FlashForwardSm90 as FlashForward
        else:
            from .kernel_sm80 import FlashForwardSm80 as FlashForward
        return FlashForward(facts)

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
        # Where an H200 runs the sm_80 path; see choose.BLOCKS_SM_80.
        if (facts.arch, facts.path) == ("sm_90a", "sm_80") and facts.blocks and resources.stack <= 32:
            problems = [text for text in problems if "stack" not in text and "local memory" not in text]
        found = list(problems)
        if facts.path == "sm_90" and facts.skips_max:
            found += [f"{opcode}, which not all warps may reach" for opcode in divided(inspect.disassemble(cubin))]
            found += [] if resources.hmma else ["no scores are computed again"]
        loads, least = (resources.utmaldg, 3) if facts.path == "sm_90" else (resources.ldgsts, 6)
        return found if loads >= least else [*found, f"{loads} asynchronous loads, of at least {least}"]


def float8_unsupported(facts: Float8Facts) -> str:
    """Why there is no kernel of 8-bit floats for these facts; "" where there is one."""
    if facts.path != "sm_90":
        return (
            f"q and k of {facts.dtype} are multiplied by sm_90's WGMMA alone, and not on {facts.spec.name}, path "
            f"{facts.path}; give q, k and v in bfloat16, t.to(torch.bfloat16) * scale, or for decoding q in bfloat16 "
            "and k and v of 8 bits (seqused_k), which all architectures read"
        )
    if facts.head_dim not in HEAD_DIMS or facts.head_dim_v not in HEAD_DIMS:
        dims = ", ".join(map(str, HEAD_DIMS))
        return f"head_dim {facts.head_dim} and {facts.head_dim_v} of 8 bits have no kernel; there are {dims}"
    if facts.converts and (reason := cannot_convert(facts)):
        return reason
    if facts.tokens and facts.packed:
        return "packed sequences have no scales of blocks of tokens; give scales of each sequence's heads"
    if facts.tokens and facts.config is not None and SCALE_TOKENS % facts.config.tile_n:
        return f"tiles of {facts.config.tile_n} keys have scales of several blocks of {SCALE_TOKENS} tokens"
    return ""


class Values(Family):
    """V of 8-bit floats, transposed or converted: what runs before forward attention of them."""

    name = "values of 8 bits"
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
        return iter(())  # bundles have kernels of 16-bit operands

    def describe(self, facts: ValuesFacts) -> dict[str, str]:
        more = f"tiles of {facts.tile}" + (", packed" if facts.packed else "") if facts.tile else "to fp16"
        return {"path": "sm_90", "problem": f"D {facts.head_dim}", "operands": "float8_e4m3fn", "epilogue": more}


def short(dtype: str | None) -> str | None:
    """A dtype's name in a table."""
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype, dtype)


def describe(facts: FlashFacts) -> dict[str, str]:
    """The columns of a table."""
    switches = (("left", facts.window.left), ("right", facts.window.right), ("softcap", facts.softcap))
    switches += (("lse", facts.lse), ("packed", facts.packed), (f"sinks {short(facts.sinks)}", facts.sinks))
    switches += (("offsets", facts.offsets),)
    more = [text for text, there in switches if there]
    if facts.score:
        more.append(f"score_mod of {len(facts.score.tensors)} tensors" if facts.score.tensors else "score_mod")
    if isinstance(facts, Float8Facts):
        more += [f"v {short(facts.given_v)}"] if facts.given_v != facts.dtype else []
        more += [name for name in ("fast", "q_descale", "k_descale", "v_descale") if getattr(facts, name)]
        more += [f"per {SCALE_TOKENS} tokens"] if facts.tokens else []
        more += ["v converted inside"] if facts.converts else []
    if facts.blocks:
        mask = facts.blocks.mask
        kind = "" if mask is None else f" mask of {len(mask.tensors)} tensors" if mask.tensors else " mask"
        more.append(f"blocks {facts.blocks.block_q}x{facts.blocks.block_k}{kind}")
    problem = f"D {facts.head_dim}" + (f"/{facts.head_dim_v}" if facts.head_dim_v != facts.head_dim else "")
    return {
        "path": facts.path,
        "configuration": str(facts.config),
        "problem": problem,
        "operands": short(facts.dtype) + (f" to {short(facts.out_dtype)}" if isinstance(facts, Float8Facts) else ""),
        "epilogue": " ".join(more),
    }


def divided(sass: str) -> list[str]:
    """Instructions of a whole warpgroup between the vote that sends some of its warps to compute their scores again,
    and the mma.sync instructions by which they do."""
    found, since = [], []
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
