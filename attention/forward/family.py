"""The forward kernels as a family: what tools and tests know of them."""

import itertools
from collections.abc import Iterator

from cute_kernels.arch import arch_named
from cute_kernels.runtime import inspect
from cute_kernels.runtime.families import Family, Request, register
from cute_kernels.tile.barriers import FORWARD_OOB, FORWARD_ORDER, FORWARD_SCORES

from .arguments import forward_args
from .config import FlashFacts

HALF = 233472 // 2 - 1024  # of sm_90's shared memory: what a block may have if two share an SM


class FlashForward(Family):
    """Attention with K and V tiles walked by one query tile a CTA: dense, windows, packed sequences, block masks."""

    name = "flash forward"
    ops = ("attention", "block_sparse_attention")

    def entry(self, facts: FlashFacts):
        if facts.path == "sm_90":
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

    def tensor_core(self, facts: FlashFacts) -> str:
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
        return facts.spec.smem if facts.config.ctas == 1 else HALF

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


def short(dtype: str | None) -> str | None:
    """A dtype's name in a table."""
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype, dtype)


def describe(facts: FlashFacts) -> dict[str, str]:
    """The columns of a table."""
    switches = (("left", facts.window.left), ("right", facts.window.right), ("softcap", facts.softcap))
    switches += (("lse", facts.lse), ("packed", facts.packed), (f"sinks {short(facts.sinks)}", facts.sinks))
    more = [text for text, there in switches if there]
    if facts.score:
        more.append(f"score_mod of {len(facts.score.tensors)} tensors" if facts.score.tensors else "score_mod")
    if facts.blocks:
        mask = facts.blocks.mask
        kind = "" if mask is None else f" mask of {len(mask.tensors)} tensors" if mask.tensors else " mask"
        more.append(f"blocks {facts.blocks.block_q}x{facts.blocks.block_k}{kind}")
    problem = f"D {facts.head_dim}" + (f"/{facts.head_dim_v}" if facts.head_dim_v != facts.head_dim else "")
    return {
        "path": facts.path,
        "configuration": str(facts.config),
        "problem": problem,
        "operands": short(facts.dtype),
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
