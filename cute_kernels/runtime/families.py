"""The registry of kernel families, the interface of kernels to the cache, the tools and the tests.

A family is one kind of kernel, registered when its package is imported. To define one, subclass `Family`, give its
facts class a `family` attribute of the same name, and call `register`. The tools (`python -m cute_kernels`) import the
project's packages, those that installed distributions declare as entry points of the group "cute_kernels.families", and
those in the environment variable CUTE_KERNELS_FAMILIES, separated by commas.
"""

import importlib.metadata
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..tile import barriers
from . import keys
from .cache import Built, default_cache
from .compile import compile_for
from .device import collected
from .packages import PACKAGES, PackageError, folder_of, import_module, is_own, top_of

GROUP = "cute_kernels.families"
VARIABLE = "CUTE_KERNELS_FAMILIES"
_REGISTRY: dict[str, "Family"] = {}


@dataclass(frozen=True)
class Request:
    """The calls that a bundle should have kernels for; each family reads the fields that concern it."""

    arch: str
    dtypes: Sequence[str] = ("bfloat16",)
    blocks: Sequence[tuple[int, int]] = ((128, 128), (64, 64), (32, 32))
    index_dtypes: Sequence[str] = ("int32",)
    head_dims: Sequence[int] = (64, 128)


class Family:
    """One kind of kernel. `name` is its name in the registry and the `family` of its facts.

    Facts are the parameters of one kernel: frozen, picklable, hashable by value, with `arch` (the compiler's target),
    `family`, and a `key()` or a `repr` that is stable across processes. They hold no tensors.
    """

    name: str
    ops: tuple[str, ...] = ()  # public ops whose kernels a bundle contains

    def entry(self, facts: Any) -> Any:
        """The argument of `cute.compile`: an object whose `__call__` is the compiled function."""
        raise NotImplementedError(f"{self.name}: entry")

    def arguments(self, facts: Any) -> tuple:
        """Fake arguments that the entry is compiled with (runtime.fake)."""
        raise NotImplementedError(f"{self.name}: arguments")

    def catalogue(self, arch: str, quick: bool = False) -> Iterable[Any]:
        """Facts that ops can request on an architecture, for tools and tests; a few typical ones if `quick`."""
        raise NotImplementedError(f"{self.name}: catalogue")

    def bundle(self, op: str, request: Request) -> Iterable[Any]:
        """Facts of common calls of one of its `ops`; by default the catalogue."""
        facts = self.catalogue(request.arch)
        return [f for f in facts if getattr(f, "index_dtype", None) in (None, *request.index_dtypes)]

    def unsupported(self, facts: Any) -> str:
        """The reason why these facts are not supported, or ""."""
        return ""

    def tensor_core(self, facts: Any) -> str | None:
        """The tensor-core instruction that the kernel must contain, or None."""
        return None

    def warp_specialised(self, facts: Any) -> bool:
        """True if setmaxnreg moves registers from a producer to consumers."""
        return False

    def overlaps_wgmmas(self, facts: Any) -> bool:
        """True if WGMMAs, if any, are issued before earlier ones have finished; they are serialized otherwise."""
        return True

    def named_barriers(self, facts: Any) -> tuple[str, dict[int, int]] | None:
        """(kernel name in tile.barriers, first barrier -> count), or None without named barriers."""
        return None

    def kernel(self, entry: Any) -> Any:
        """For a kernel with named barriers: the object with `threads` per CTA, CTAs per `cluster`, and `arrivals`."""
        return entry

    def dynamic_smem(self, entry: Any) -> int:
        """Bytes of dynamic shared memory of the launch; known after compilation."""
        return getattr(entry, "smem_bytes", 0) or 0

    def smem_limit(self, facts: Any) -> int:
        """Maximal bytes of shared memory per CTA."""
        from ..arch import arch_named

        return arch_named(facts.arch).smem

    def judge(self, facts: Any, cubin: bytes, resources: Any, problems: list[str]) -> list[str]:
        """Problems of a compiled kernel: those found by inspect.problems, adjusted by the family."""
        return problems

    def describe(self, facts: Any) -> dict[str, str]:
        """Description of facts as the cells of a table row: path, configuration, problem, operands, epilogue."""
        return {"configuration": str(facts)}

    def title(self, facts: Any) -> str:
        """One line of text, unique in an architecture's catalogue."""
        return "; ".join(filter(None, self.describe(facts).values()))

    def compile(self, facts: Any, *, keep_cubin: bool = False) -> Built:
        """Compile the kernel of `facts` on any machine; the metadata holds the dynamic shared memory."""
        entry = self.entry(facts)
        if used := self.named_barriers(facts):
            name, counts = used
            kernel = self.kernel(entry)
            barriers.check(name, kernel.threads, counts)
            barriers.check_arrivals(name, kernel.threads, kernel.cluster, kernel.arrivals)
        compiled = compile_for(facts.arch, entry, *self.arguments(facts), keep_cubin=keep_cubin)
        return Built(compiled, {"smem": self.dynamic_smem(entry), **self.describe(facts)})


def register(family: Family) -> Family:
    """Register a family; raises ValueError if its name is taken."""
    if type(_REGISTRY.get(family.name, family)) is not type(family):
        raise ValueError(f"a kernel family named {family.name!r} is already registered: {_REGISTRY[family.name]}")
    _REGISTRY[family.name] = family
    module = type(family).__module__
    if not is_own(sys.modules.get(module)):
        keys.OUTSIDE[family.name] = module  # its sources are part of the cache key
    return family


def families(kind: type = Family) -> list:
    """All registered families of a kind, in registration order."""
    return [family for family in _REGISTRY.values() if isinstance(family, kind)]


def family_named(name: str) -> Family:
    """Look up a family by name; raises ValueError if it is not registered."""
    if name not in _REGISTRY:
        raise ValueError(f"unknown kernel family {name!r}; registered are {', '.join(_REGISTRY)}")
    return _REGISTRY[name]


def family_of(facts: Any) -> Any:
    """The family that facts belong to, a Family of a class that depends on them."""
    return family_named(facts.family)


def unsupported(facts: Any) -> str:
    """The reason why facts of any family are not supported, or "". Used by ops, tools and tests."""
    return family_of(facts).unsupported(facts)


def compile_kernel(facts: Any, *, keep_cubin: bool = False) -> Built:
    """Compile the kernel with these facts, of any family."""
    return family_of(facts).compile(facts, keep_cubin=keep_cubin)


def function_for(facts: Any):
    """The kernel's function, from memory, a bundle or the disk, or compiled now."""
    if (noted := collected()) is not None:
        return noted.function(facts)
    return default_cache().get(facts, lambda: compile_kernel(facts))


def known_ops() -> tuple[str, ...]:
    """Public ops that bundles support."""
    return tuple(dict.fromkeys(op for family in families() for op in family.ops))


def bundle_facts(ops: Iterable[str], request: Request) -> list:
    """Facts of common calls of `ops`, without duplicates; raises ValueError for an unknown op."""
    found: dict[Any, None] = {}
    for op in ops:
        if op not in known_ops():
            raise ValueError(f"unknown operation {op!r}; known are {', '.join(known_ops())}")
        for family in families():
            if op in family.ops:
                found |= dict.fromkeys(f for f in family.bundle(op, request) if not family.unsupported(f))
    return list(found)


def load_all() -> None:
    """Import all packages that register families: the project's own, also where they are not installed but run from
    their sources, and those that installed distributions and the environment declare.

    Raises:
        ImportError: a package cannot be imported. PackageError if one registers no family, or if another module has
            its name.
    """
    named = {name: "this project" for name in PACKAGES if folder_of(name) is not None}
    named |= {point.value: f"an entry point of {GROUP}" for point in importlib.metadata.entry_points(group=GROUP)}
    named |= {name.strip(): VARIABLE for name in os.environ.get(VARIABLE, "").split(",")}
    for name, source in named.items():
        if not name or name in sys.modules and is_own(sys.modules[name]):
            continue
        before, imported = len(_REGISTRY), name in sys.modules
        module = import_module(name)
        package = top_of(name)
        if len(_REGISTRY) == before and not imported and package not in _packages():
            raise PackageError(
                f"{name}, named by {source}, registers no kernel family: {getattr(module, '__file__', module)} was "
                "imported. Rename that file if it only shares the name, or call families.register in it"
            )


def _packages() -> set[str]:
    """Packages whose families are registered."""
    return {top_of(type(family).__module__) for family in families()}
