"""The registry of kernel families: what the cache, the tools and the tests know of kernels without knowing any.

A family is one kind of kernel. Its package registers it when it is imported. To make one: subclass `Family`, give its
facts class a `family` attribute of the same name, and call `register`. The tools (`python -m cute_kernels`) import the
packages that installed distributions name as entry points of the group "cute_kernels.families", and those that the
environment variable CUTE_KERNELS_FAMILIES names, separated by commas.
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
from .packages import PackageError, import_module, is_own

GROUP = "cute_kernels.families"
VARIABLE = "CUTE_KERNELS_FAMILIES"
_REGISTRY: dict[str, "Family"] = {}


@dataclass(frozen=True)
class Request:
    """For which calls a bundle is to have kernels; each family takes of it what concerns it."""

    arch: str
    dtypes: Sequence[str] = ("bfloat16",)
    blocks: Sequence[tuple[int, int]] = ((128, 128), (64, 64), (32, 32))
    index_dtypes: Sequence[str] = ("int32",)
    head_dims: Sequence[int] = (64, 128)


class Family:
    """One kind of kernel. `name` is its name here and the `family` of its facts.

    Facts are what one kernel is compiled from: frozen, picklable, hashable by value, with `arch` (the compiler's
    target), `family`, and a `key()` or a `repr` that is the same in every process. They hold no tensors.
    """

    name: str
    ops: tuple[str, ...] = ()  # the public calls that a bundle has its kernels for

    def entry(self, facts: Any) -> Any:
        """What `cute.compile` takes: an object whose `__call__` is the compiled function."""
        raise NotImplementedError(f"{self.name}: entry")

    def arguments(self, facts: Any) -> tuple:
        """Fakes of all arguments of the entry, with which it is compiled (runtime.fake)."""
        raise NotImplementedError(f"{self.name}: arguments")

    def catalogue(self, arch: str, quick: bool = False) -> Iterable[Any]:
        """The facts that ops can ask for on an architecture, for tools and tests; a few typical ones if `quick`."""
        raise NotImplementedError(f"{self.name}: catalogue")

    def bundle(self, op: str, request: Request) -> Iterable[Any]:
        """The facts of usual calls of one of its `ops`; where it does not say better, its catalogue."""
        facts = self.catalogue(request.arch)
        return [f for f in facts if getattr(f, "index_dtype", None) in (None, *request.index_dtypes)]

    def unsupported(self, facts: Any) -> str:
        """Why no kernel can be built from these facts; "" if one can."""
        return ""

    def tensor_core(self, facts: Any) -> str | None:
        """The instruction that its kernel must contain; None for one without products."""
        return None

    def warp_specialised(self, facts: Any) -> bool:
        """Whether setmaxnreg moves registers from a producer to consumers."""
        return False

    def named_barriers(self, facts: Any) -> tuple[str, dict[int, int]] | None:
        """Its kernel's name in tile.barriers and, by first number, how many it uses; None for one without."""
        return None

    def kernel(self, entry: Any) -> Any:
        """Of one with named barriers: what has a CTA's `threads`, a cluster's CTAs as `cluster`, and `arrivals`."""
        return entry

    def dynamic_smem(self, entry: Any) -> int:
        """Bytes of shared memory that the launch asks for, once compiled."""
        return getattr(entry, "smem_bytes", 0) or 0

    def smem_limit(self, facts: Any) -> int:
        """Bytes of shared memory that a block may have."""
        from ..arch import arch_named

        return arch_named(facts.arch).smem

    def judge(self, facts: Any, cubin: bytes, resources: Any, problems: list[str]) -> list[str]:
        """What is wrong with a compiled kernel, of what inspect.problems found and of what the family knows besides."""
        return problems

    def describe(self, facts: Any) -> dict[str, str]:
        """The facts in words, for one row of a table: path, configuration, problem, operands, epilogue."""
        return {"configuration": str(facts)}

    def title(self, facts: Any) -> str:
        """One line that no other entry of an architecture's catalogue shares."""
        return "; ".join(filter(None, self.describe(facts).values()))

    def compile(self, facts: Any, *, keep_cubin: bool = False) -> Built:
        """Compile the kernel of `facts`, on any machine; its metadata holds the dynamic shared memory."""
        entry = self.entry(facts)
        if used := self.named_barriers(facts):
            name, counts = used
            kernel = self.kernel(entry)
            barriers.check(name, kernel.threads, counts)
            barriers.check_arrivals(name, kernel.threads, kernel.cluster, kernel.arrivals)
        compiled = compile_for(facts.arch, entry, *self.arguments(facts), keep_cubin=keep_cubin)
        return Built(compiled, {"smem": self.dynamic_smem(entry), **self.describe(facts)})


def register(family: Family) -> Family:
    """Add a family; ValueError if another one has its name."""
    if type(_REGISTRY.get(family.name, family)) is not type(family):
        raise ValueError(f"there is a kernel family named {family.name!r} already: {_REGISTRY[family.name]}")
    _REGISTRY[family.name] = family
    module = type(family).__module__
    if not is_own(sys.modules.get(module)):
        keys.OUTSIDE[family.name] = module  # a change of its sources makes other kernels, too
    return family


def families(kind: type = Family) -> list:
    """All families registered so far that are of a kind, in the order of their registration."""
    return [family for family in _REGISTRY.values() if isinstance(family, kind)]


def family_named(name: str) -> Family:
    """A family by its name; ValueError with the known ones if it is not registered."""
    if name not in _REGISTRY:
        raise ValueError(f"no kernel family {name!r}; registered are {', '.join(_REGISTRY)}")
    return _REGISTRY[name]


def family_of(facts: Any) -> Family:
    """The family that facts belong to."""
    return family_named(facts.family)


def unsupported(facts: Any) -> str:
    """Why no kernel can be built from facts of any family; "" if one can. Ops, tools and tests ask this."""
    return family_of(facts).unsupported(facts)


def compile_kernel(facts: Any, *, keep_cubin: bool = False) -> Built:
    """Compile the kernel of facts of any family."""
    return family_of(facts).compile(facts, keep_cubin=keep_cubin)


def function_for(facts: Any):
    """The kernel's function, from memory, a bundle, the disk, or compiled now."""
    return default_cache().get(facts, lambda: compile_kernel(facts))


def known_ops() -> tuple[str, ...]:
    """The public calls that bundles know."""
    return tuple(dict.fromkeys(op for family in families() for op in family.ops))


def bundle_facts(ops: Iterable[str], request: Request) -> list:
    """The facts of usual calls of `ops`, each once; ValueError for an op that bundles do not know."""
    found = {}
    for op in ops:
        if op not in known_ops():
            raise ValueError(f"unknown operation {op!r}; known are {', '.join(known_ops())}")
        for family in families():
            if op in family.ops:
                found |= dict.fromkeys(f for f in family.bundle(op, request) if not family.unsupported(f))
    return list(found)


def load_all() -> None:
    """Import every package that registers families: what installed distributions and the environment name.

    Raises:
        ImportError: one of them cannot be imported; a PackageError if one registers no family, or if another module
            has its name.
    """
    named = {point.value: f"an entry point of {GROUP}" for point in importlib.metadata.entry_points(group=GROUP)}
    named |= {name.strip(): VARIABLE for name in os.environ.get(VARIABLE, "").split(",")}
    for name, source in named.items():
        if not name or name in sys.modules and is_own(sys.modules[name]):
            continue
        before, imported = len(_REGISTRY), name in sys.modules
        module = import_module(name)
        package = name.partition(".")[0]
        if len(_REGISTRY) == before and not imported and package not in _packages():
            raise PackageError(
                f"{name}, named by {source}, registers no kernel family: {getattr(module, '__file__', module)} was "
                "imported. Rename that file if it only shares the name, or call families.register in it"
            )


def _packages() -> set[str]:
    """The packages whose families are registered."""
    return {type(family).__module__.partition(".")[0] for family in families()}
