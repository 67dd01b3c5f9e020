"""The decode kernels for selected blocks as a family, for tools and tests."""

from collections.abc import Iterator
from typing import Any

from cute_kernels.arch import ArchSpec, arch_named
from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.runtime.families import Family, register

from ...decode.family import DECODE, early_problems
from ...forward.arguments import scalar_args, sinks_args, tensor_args
from ...forward.heuristics import HEAD_DIMS, WIDE
from .config import SelectedDecodeFacts, pick

BOTH: dict[str, Any] = {"softcap": True, "lse": True}
FP8: dict[str, Any] = {"cache": "float8_e4m3fn", "k_descale": True, "v_descale": True}
# QSA, MSA and NSA, paged; all head dimensions; blocks smaller and larger than pages and tiles; and FP8 caches. Splits
# are a cluster on sm_90, and otherwise combined by a kernel.
CASES: list[tuple[int, dict[str, Any]]] = [
    *((d, {"block_size": 4, "page_size": 64, "cluster": 7, **BOTH}) for d in HEAD_DIMS),
    *((d, {"block_size": 128, "page_size": 64, "cluster": 4}) for d in HEAD_DIMS),
    (128, {"block_size": 1, "page_size": 16, "split": True, "dtype": "float16"}),
    (128, {"block_size": 64, "lse": True, "sinks": "bfloat16"}),
    (128, {"block_size": 64, "cluster": 2, "lse": True, "sinks": "bfloat16"}),
    (128, {"block_size": 16}),
    *((d, {"block_size": 4, "page_size": 64, "cluster": 7, **FP8}) for d in HEAD_DIMS),
    *((d, {"block_size": 128, "page_size": 64, "split": True, **FP8}) for d in HEAD_DIMS),
    (128, {"block_size": 64, "cache": "float8_e5m2", "lse": True}),
]


class SelectedDecode(Family):
    """Attention of query tokens to selected blocks of a KV cache, with split lists; a cluster or a second kernel
    combines them."""

    name = SelectedDecodeFacts.family

    def entry(self, facts: SelectedDecodeFacts):
        from .kernel import SelectedDecode as Kernel

        return Kernel(facts)

    def arguments(self, facts: SelectedDecodeFacts) -> tuple:
        """Fakes of all arguments of kernel.SelectedDecode."""
        from cutlass import Int32

        table = fake_tensor("int32", 2, 1, 1) if facts.page_size else None
        parts = (fake_tensor("float32", 5, 4, 4), fake_tensor("float32", 4, 3, 1)) if facts.split else (None, None)
        scales = (fake_tensor("float32", 2, None, 1) if there else None for there in (facts.k_descale, facts.v_descale))
        cache = fake_tensor("int32", 4, None, 1), fake_tensor("int32", 1, 0, 1), table
        scale_log2, softcap, *_ = scalar_args(facts)
        tensors = *tensor_args(facts), *sinks_args(facts), *cache, *parts, *scales
        return *tensors, scale_log2, softcap, Int32(0), Int32(1), fake_stream()

    def catalogue(self, arch: str, quick: bool = False) -> list[SelectedDecodeFacts]:
        return list(configurations(arch_named(arch), quick))

    def unsupported(self, facts: SelectedDecodeFacts) -> str:
        if WIDE in (facts.head_dim, facts.head_dim_v):
            return f"head_dim {WIDE} is not supported with a KV cache; gather the selected blocks and call attention"
        return ""

    def describe(self, facts: SelectedDecodeFacts) -> dict[str, str]:
        columns = DECODE.describe(facts)
        cluster = f" cluster of {facts.cluster}" if facts.cluster > 1 else ""
        return columns | {"epilogue": f"blocks of {facts.block_size} {columns['epilogue']}{cluster}"}

    def judge(self, facts: SelectedDecodeFacts, cubin: bytes, resources, problems: list[str]) -> list[str]:
        return problems + early_problems(cubin) if facts.early else problems

    def tensor_core(self, facts: SelectedDecodeFacts) -> str:
        return "HMMA"

    def smem_limit(self, facts: SelectedDecodeFacts) -> int:
        return DECODE.smem_limit(facts)


def configurations(spec: ArchSpec, quick: bool = False) -> Iterator[SelectedDecodeFacts]:
    for d, terms in CASES[2:3] if quick else CASES:
        if "cluster" in terms and spec.name != "sm_90":
            terms = {name: value for name, value in terms.items() if name != "cluster"} | {"split": True}
        yield pick(SelectedDecodeFacts(spec.target, "sm_80", None, head_dim=d, head_dim_v=d, seqlens=True, **terms))


SELECTED_DECODE = register(SelectedDecode())
