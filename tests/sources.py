"""The modules of the packages, and what each imports; which of them changed since a commit."""

import ast
import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cute_kernels", "sparse_collective", "attention")  # each may import those before it


@functools.cache
def files() -> dict[Path, ast.Module]:
    """The parsed modules. Only tests that need them call this: each process of pytest imports this file."""
    return {path: ast.parse(path.read_text()) for name in (*PACKAGES, "bench") for path in (ROOT / name).rglob("*.py")}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports() -> dict[str, set[str]]:
    """module -> the modules that its file imports, also inside functions."""
    modules = {module_of(path) for path in files()}
    graph = {}
    for path, tree in files().items():
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


@functools.cache
def closure(module: str) -> frozenset[str]:
    """The module and all modules that it imports, directly or through others."""
    found, todo = set(), [module]
    while todo:
        if (name := todo.pop()) not in found:
            found.add(name)
            todo += imports().get(name, ())
    return frozenset(found)


def changed_since(commit: str) -> set[str] | None:
    """Modules whose files differ from those of a commit; None if git does not know it, as in a shallow clone."""
    command = ["git", "-C", str(ROOT), "diff", "--name-only", "-z", commit, "--"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return None
    paths = (ROOT / name for name in done.stdout.split("\0") if name.endswith(".py"))
    return {module_of(path) for path in paths}
