"""Kernel families of attention's backward, for tools and tests."""

from collections.abc import Iterator
from typing import Any

from cute_kernels.arch import arch_named
from cute_kernels.runtime.families import Family, Request, register
from cute_kernels.tile.barriers import (
    BACKWARD_ALL,
    BACKWARD_DQ,
    BACKWARD_DS,
    BACKWARD_FREE,
    BACKWARD_FULL,
    BACKWARD_READ,
)

from ..forward.config import HALF_SMEM
from ..forward.family import short
from .arguments import backward_args, combine_args, convert_args, prepare_args
from .config import AheadConfig, BackwardFacts, CombineFacts, ConvertFacts, PrepareFacts, SharedColumnsConfig
from .heuristics import unsupported

OPS = "attention", "block_sparse_attention"


class FlashBackward(Family):
    """The main kernel: each CTA computes dK and dV of a KV tile, and accumulates into dQ."""

    name = "flash backward"
    ops = OPS

    def entry(self, facts: BackwardFacts):
        if facts.path == "sm_90":
            from .kernel_sm90 import FlashBackwardSm90

            return FlashBackwardSm90(facts)
        from .kernel_sm80 import FlashBackwardSm80

        return FlashBackwardSm80(facts)

    def arguments(self, facts: BackwardFacts) -> tuple:
        return backward_args(facts)

    def catalogue(self, arch: str, quick: bool = False) -> list[BackwardFacts]:
        from . import catalogue  # traces masks, for which torch imports its compiler

        return list(dict.fromkeys(catalogue.configurations(arch_named(arch), quick)))

    def bundle(self, op: str, request: Request) -> Iterator[BackwardFacts]:
        from . import catalogue

        for dtype in request.dtypes:
            for dim in request.head_dims:
                yield from catalogue.usual(op, arch_named(request.arch), dtype, dim)

    def unsupported(self, facts: BackwardFacts) -> str:
        return unsupported(facts) or ""

    def tensor_core(self, facts: BackwardFacts) -> str:
        return "HGMMA" if facts.path == "sm_90" else "HMMA"

    def warp_specialised(self, facts: BackwardFacts) -> bool:
        return facts.path == "sm_90"

    def named_barriers(self, facts: BackwardFacts) -> tuple[str, dict[int, int]] | None:
        if facts.path != "sm_90":
            return None
        config, groups = facts.config, facts.config.groups
        if isinstance(config, SharedColumnsConfig):
            copied = 0 if config.direct else groups
            return "backward, shared columns", {BACKWARD_ALL: 1, BACKWARD_DQ: copied, BACKWARD_READ: groups}
        sums = groups * config.sums
        counts = {BACKWARD_ALL: 1, BACKWARD_FULL: sums, BACKWARD_FREE: sums}
        if isinstance(config, AheadConfig) and config.one_ds:
            counts[BACKWARD_DS] = groups
        return "backward of one" if groups == 1 else "backward", counts

    def smem_limit(self, facts: BackwardFacts) -> int:
        return facts.spec.smem if facts.config.ctas == 1 else HALF_SMEM

    def describe(self, facts: BackwardFacts) -> dict[str, str]:
        switches: dict[str, Any] = {"left": facts.window.left, "right": facts.window.right, "softcap": facts.softcap}
        switches |= {"packed": facts.packed, "in one order": facts.deterministic, "offsets": facts.offsets}
        switches |= {f"to {short(facts.grad_dtype)}": facts.grad_dtype}
        features = [text for text, enabled in switches.items() if enabled]
        if facts.score:
            features.append("score_mod" + f" with {len(facts.score_sums)} gradients" * bool(facts.score_sums))
        if facts.blocks:
            mask = facts.blocks.mask
            kind = "" if mask is None else f" mask of {len(mask.tensors)} tensors" if mask.tensors else " mask"
            if facts.members:
                kind = f" selected blocks of {facts.members.block_size}, {facts.members.packed} rows a token"
            features.append(f"blocks {facts.blocks.block_q}x{facts.blocks.block_k}{kind}")
        if facts.packed_heads > 1:
            features.append(f"{facts.packed_heads} heads in place")
        switches = {"in ranges of rows": facts.ranges, "split heads": facts.split_heads}
        features += [text for text, enabled in switches.items() if enabled]
        return {
            "path": facts.path,
            "configuration": str(facts.config),
            "problem": f"dK, dV D {_dims(facts.head_dim, facts.head_dim_v)}",
            "operands": short(facts.dtype),
            "epilogue": " ".join(features),
        }


class BackwardPrepare(Family):
    """LSE and delta of each row, and zeros for dq_accum and the semaphores of semaphores.py."""

    name = "backward prepare"
    ops = OPS

    def entry(self, facts: PrepareFacts):
        from .prepare import Prepare

        return Prepare(facts)

    def arguments(self, facts: PrepareFacts) -> tuple:
        return prepare_args(facts)

    def catalogue(self, arch: str, quick: bool = False) -> list[PrepareFacts]:
        kernels = FLASH_BACKWARD.catalogue(arch, quick)
        prepares = [prepare_of(facts, lse) for facts in kernels for lse in (False, True)]
        with_sinks = (facts for facts in kernels if facts.packed or facts.head_dim == 64)
        prepares += [prepare_of(facts, facts.packed, "bfloat16") for facts in with_sinks]
        return list(dict.fromkeys(prepares))

    def bundle(self, op: str, request: Request) -> Iterator[PrepareFacts]:
        return (prepare_of(facts, False) for facts in FLASH_BACKWARD.bundle(op, request))

    def describe(self, facts: PrepareFacts) -> dict[str, str]:
        switches: dict[str, Any] = {"of LSE, too": facts.lse_gradient, "packed": facts.packed}
        switches |= {f"sinks {short(facts.sinks)}": facts.sinks, f"{facts.parts} semaphores": facts.parts}
        switches |= {f"{facts.packed_heads} heads in place": facts.packed_heads > 1}
        features = [text for text, enabled in switches.items() if enabled]
        return {
            "configuration": f"rows of {facts.tile_m}",
            "problem": f"delta D {_dims(facts.head_dim, facts.head_dim_v)}",
            "operands": short(facts.dtype),
            "epilogue": " ".join(features),
        }


class BackwardConvert(Family):
    """Scale and round dq_accum to dQ."""

    name = "backward dQ"
    ops = OPS

    def entry(self, facts: ConvertFacts):
        from .convert import Convert

        return Convert(facts)

    def arguments(self, facts: ConvertFacts) -> tuple:
        return convert_args(facts)

    def catalogue(self, arch: str, quick: bool = False) -> list[ConvertFacts]:
        return list(
            dict.fromkeys(convert_of(facts, facts.grad_dtype) for facts in FLASH_BACKWARD.catalogue(arch, quick))
        )

    def bundle(self, op: str, request: Request) -> Iterator[ConvertFacts]:
        return (convert_of(facts, facts.grad_dtype) for facts in FLASH_BACKWARD.bundle(op, request))

    def describe(self, facts: ConvertFacts) -> dict[str, str]:
        return {
            "path": facts.path,
            "configuration": str(facts.config),
            "problem": f"dQ D {facts.head_dim}",
            "operands": short(facts.dtype) + (f" to {short(facts.grad_dtype)}" if facts.grad_dtype else ""),
            "epilogue": "packed" if facts.packed else f"{facts.packed_heads} heads in place" * (facts.packed_heads > 1),
        }


class BackwardCombine(Family):
    """Add the parts of dK and dV that work items of some heads stored."""

    name = "backward combine"
    ops = OPS

    def entry(self, facts: CombineFacts):
        from .combine import CombineKv

        return CombineKv(facts)

    def arguments(self, facts: CombineFacts) -> tuple:
        return combine_args(facts)

    def catalogue(self, arch: str, quick: bool = False) -> list[CombineFacts]:
        kernels = (facts for facts in FLASH_BACKWARD.catalogue(arch, quick) if facts.split_heads)
        return list(dict.fromkeys(combine_of(facts, dtype) for facts in kernels for dtype in (None, "float32")))

    def bundle(self, op: str, request: Request) -> Iterator[CombineFacts]:
        return (combine_of(facts, None) for facts in FLASH_BACKWARD.bundle(op, request) if facts.split_heads)

    def describe(self, facts: CombineFacts) -> dict[str, str]:
        return {
            "configuration": "rows of parts",
            "problem": f"dK, dV D {_dims(facts.head_dim, facts.head_dim_v)}",
            "operands": short(facts.dtype),
            "epilogue": "packed" * facts.packed,
        }


def prepare_of(facts: BackwardFacts, lse_gradient: bool, sinks: str | None = None) -> PrepareFacts:
    """Facts of the prepare kernel that precedes a main kernel."""
    terms = facts.config.tile_m, facts.head_dim, facts.head_dim_v, lse_gradient, facts.packed, sinks
    parts = facts.config.dq_groups if facts.deterministic else 0
    return PrepareFacts(facts.arch, facts.dtype, *terms, parts, facts.packed_heads)


def convert_of(facts: BackwardFacts, dq_dtype: str | None) -> ConvertFacts:
    """Facts of the convert kernel that follows a main kernel, for a dQ of this dtype."""
    terms = facts.config, facts.head_dim, facts.packed, dq_dtype, facts.packed_heads
    return ConvertFacts(facts.arch, facts.path, facts.dtype, *terms)


def combine_of(facts: BackwardFacts, grad_dtype: str | None) -> CombineFacts:
    """Facts of the kernel that adds the parts of a main kernel, to gradients of this dtype."""
    return CombineFacts(facts.arch, grad_dtype or facts.dtype, facts.head_dim, facts.head_dim_v, facts.packed)


def _dims(dim: int, dim_v: int) -> str:
    return f"{dim}/{dim_v}" if dim_v != dim else str(dim)


FLASH_BACKWARD = register(FlashBackward())
register(BackwardPrepare())
register(BackwardConvert())
register(BackwardCombine())
