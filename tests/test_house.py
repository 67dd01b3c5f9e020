"""The house stands as docs/architecture.md says: which way imports go, and how long functions are."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from cute_kernels.tile import barriers

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cute_kernels", "sparse_collective", "attention")  # each may import those before it
KNOW_NO_KERNEL = ("cute_kernels.runtime", "cute_kernels.tile")
LONGEST = 120  # lines of a function
FILES = {path: ast.parse(path.read_text()) for name in (*PACKAGES, "bench") for path in (ROOT / name).rglob("*.py")}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports() -> dict[str, set[str]]:
    """module -> the modules that its file imports, also inside functions."""
    modules = {module_of(path) for path in FILES}
    graph = {}
    for path, tree in FILES.items():
        name = module_of(path)
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*parts, *filter(None, [node.module])])
                found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in modules else base for a in node.names}
        graph[name] = (found & modules) - {name}
    return graph


GRAPH = imports()


EDGES = [(module, other) for module, found in GRAPH.items() for other in found]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_nothing_above_it(package):
    above = PACKAGES[PACKAGES.index(package) + 1 :] + ("bench",)
    assert not [edge for edge in EDGES if edge[0].split(".")[0] == package and edge[1].split(".")[0] in above]


@pytest.mark.parametrize("package", KNOW_NO_KERNEL)
def test_the_ground_knows_no_kernel(package):
    assert not [edge for edge in EDGES if edge[0].startswith(package) and edge[1].startswith("cute_kernels.matmul")]


def test_no_module_imports_itself_by_way_of_others():
    try:
        list(TopologicalSorter(GRAPH).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_functions_can_be_seen_at_once():
    long = [
        f"{path.relative_to(ROOT)}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno - node.lineno >= LONGEST
    ]
    assert not long


@pytest.mark.parametrize("kernel", barriers.USES)
def test_named_barriers_of_a_kernel_are_not_shared(kernel):
    numbers = [first + i for first, count in barriers.USES[kernel] for i in range(count)]
    assert len(set(numbers)) == len(numbers) and 0 < min(numbers) <= max(numbers) < barriers.MOST
