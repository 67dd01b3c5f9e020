"""The house stands as docs/architecture.md says: which way imports go, and how long functions are."""

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import SimpleNamespace

import pytest

from cute_kernels.runtime.families import Family, families, load_all
from cute_kernels.tile import barriers
from cute_kernels.tile.barriers import Arrivals

from .sources import PACKAGES, ROOT, files, imports, module_of

KNOW_NO_KERNEL = ("cute_kernels.runtime", "cute_kernels.tile")
LONGEST = 120  # lines of a function
SCRIPTS = {
    path.name
    for name in (*PACKAGES, "bench", "demo", "docs", "examples", "tests")
    for path in (ROOT / name).rglob("*.py")
}


def edges() -> list[tuple[str, str]]:
    return [(module, other) for module, found in imports().items() for other in found]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_nothing_above_it(package):
    above = PACKAGES[PACKAGES.index(package) + 1 :] + ("bench",)
    assert not [edge for edge in edges() if edge[0].split(".")[0] == package and edge[1].split(".")[0] in above]


def test_attention_does_not_import_its_integrations():
    folder = "attention.integrations"
    assert not [e for e in edges() if e[1].startswith(folder) and e[0].startswith("attention") and folder not in e[0]]


@pytest.mark.parametrize("package", KNOW_NO_KERNEL)
def test_the_ground_knows_no_kernel(package):
    assert not [edge for edge in edges() if edge[0].startswith(package) and edge[1].startswith("cute_kernels.matmul")]


def test_no_module_imports_itself_by_way_of_others():
    try:
        list(TopologicalSorter(imports()).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_functions_can_be_seen_at_once():
    long = [
        f"{path.relative_to(ROOT)}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path, tree in files().items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno - node.lineno >= LONGEST
    ]
    assert not long


def test_files_that_are_named_exist():
    """In comments and docstrings, as "see tables.py"."""
    named = {(path, name) for path in files() for name in re.findall(r"\w+\.py\b", path.read_text())}
    assert not [f"{path.relative_to(ROOT)}: {name}" for path, name in named if name not in SCRIPTS]


PUBLIC = {"_check", "_check_is_size", "_assert"}  # documented in spite of their names
# Of torch's objects, whatever the name they are held by
PRIVATE = re.compile(r"_schema|_i_will_not_complain_if_bc_breaks_VariableTracker|_functorch\w*|_dynamo|_inductor")


def private_torch_names(tree: ast.Module) -> list[str]:
    """Private APIs of torch that a module names: in imports, in attribute chains of what it imports, by getattr."""
    private, imported = [], {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                imported[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else ""
                private += [alias.name] if is_private(alias.name) else []
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                private += [f"{node.module}.{alias.name}"] if is_private(f"{node.module}.{alias.name}") else []
    for node in ast.walk(tree):
        attribute = node.attr if isinstance(node, ast.Attribute) else None
        base = node.value if attribute else None
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            attribute, base = getattr(node.args[1], "value", None), node.args[0]
        if not isinstance(attribute, str):
            continue
        parts = [attribute]
        while isinstance(base, ast.Attribute):
            parts, base = [base.attr, *parts], base.value
        root = base.id if isinstance(base, ast.Name) and base.id in imported else None
        name = ".".join([imported[root] or root, *parts] if root else [attribute])
        if (root and is_private(name)) or PRIVATE.fullmatch(attribute):
            private.append(name)
    return private


def is_private(name: str) -> bool:
    first, *parts = name.split(".")
    return first == "torch" and any(p.startswith("_") and not p.startswith("__") and p not in PUBLIC for p in parts)


def test_private_torch_apis_are_in_one_folder():
    users = {
        (str(path.relative_to(ROOT)), name)
        for path, tree in files().items()
        if path.relative_to(ROOT).parts[0] != "bench"
        for name in private_torch_names(tree)
    }
    assert not {user for user in users if not user[0].startswith("cute_kernels/runtime/torch_compat/")}
    assert len(users) > 10


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch\ntorch._C._dynamo", "torch._C._dynamo"),
        ("import torch._dynamo as d", "torch._dynamo"),
        ("from torch.utils import _pytree", "torch.utils._pytree"),
        (
            "from torch.nn.modules import module as m\nm._has_any_global_hook()",
            "torch.nn.modules.module._has_any_global_hook",
        ),
        ("import torch\ngetattr(torch, '_foreach_copy_', None)", "torch._foreach_copy_"),
        ("def f(op): return op._schema.arguments", "_schema"),
    ],
)
def test_private_torch_apis_are_found(text, name):
    assert name in private_torch_names(ast.parse(text))


FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros"}


def test_tensors_name_their_device():
    """A user's torch.device context or torch.set_default_device chooses it otherwise."""
    found = []
    for path, tree in files().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or path.is_relative_to(ROOT / "bench") or "testing" in path.parts:
                continue
            if ast.unparse(node.func) in {f"torch.{name}" for name in FACTORIES}:
                # **kind may have a device
                if not any(keyword.arg in ("device", None) for keyword in node.keywords):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    (default,) = found  # create_block_mask asks for the default device
    assert default.startswith("attention/masks/block_mask.py:")


def test_inline_ptx_is_in_one_file():
    users = {path.relative_to(ROOT) for path in files() if re.search(r"\binline_(asm|ptx)\b", path.read_text())}
    assert users == {Path("cute_kernels/tile/ptx.py")}


@pytest.mark.parametrize("kernel", barriers.USES)
def test_named_barriers_of_a_kernel_are_not_shared(kernel):
    numbers = [first + i for first, count, _ in barriers.USES[kernel] for i in range(count)]
    assert len(set(numbers)) == len(numbers) and 0 < min(numbers) <= max(numbers) < barriers.MOST


@pytest.mark.parametrize(
    ("uses", "threads", "counts", "message"),
    [
        (((1, 2, 128),), 256, {1: 3}, "3 barriers from 1 on; the table has 2"),
        (((1, 2, 128),), 256, {2: 1}, "from 2 on are not in the table"),
        (((1, 2, 256),), 160, {1: 1}, "256 threads arrive at barrier 1; .* at most the CTA's 160"),
        (((1, 2, 48),), 256, {1: 1}, "48 threads arrive at barrier 1; it must be whole warps"),
        (((1, 3, 128), (3, 2, 128)), 256, {1: 3, 3: 1}, "each is one of 1 to 15, for one use"),
        (((15, 2, 128),), 256, {15: 2}, "each is one of 1 to 15, for one use"),
        (((0, 1, 128),), 256, {0: 1}, "each is one of 1 to 15, for one use"),
    ],
)
def test_counts_that_would_hang(monkeypatch, uses, threads, counts, message):
    monkeypatch.setitem(barriers.USES, "toy", uses)
    with pytest.raises(ValueError, match=f"toy: .*{message}"):
        barriers.check("toy", threads, counts)


@pytest.mark.parametrize(
    ("arrivals", "message"),
    [
        (Arrivals(1, 12), "12 warps release a stage, in 1 consumer groups; the CTA has 8 consumer warps"),
        (Arrivals(1, 8, groups=2), "8 warps release a stage, in 2 consumer groups; the CTA has 8 consumer warps"),
        (Arrivals(5, 8), "5 warps fill a stage; the CTA has 4 producer warps"),
        (Arrivals(1, 8, threads=4), "4 threads of a warp arrive; it must be 1 or 32"),
        (Arrivals(1, 8, sharers=3), "3 CTAs release a stage; the cluster has 2"),
        (Arrivals(1, 8, others=4), "4 other warps read a stage; 3 of 4 producer warps do not fill it"),
    ],
)
def test_arrivals_that_would_hang(arrivals, message):
    with pytest.raises(ValueError, match=f"product: pipeline AB: {message}"):
        barriers.check_arrivals("product", 384, 2, {"AB": arrivals})


def test_arrivals_are_checked_before_a_kernel_is_compiled():
    class Toy(Family):
        def named_barriers(self, facts):
            return "decode", {barriers.DECODE_CONSUMERS: 1}

        def entry(self, facts):
            return SimpleNamespace(threads=160, cluster=1, arrivals={"K, V": Arrivals(1, 8)})

    with pytest.raises(ValueError, match="the CTA has 4 consumer warps"):
        Toy().compile(None)


def test_every_kernel_says_which_barriers_it_uses():
    """And who arrives at its mbarriers. All kernels of the sm_90 path do but those of few columns, whose warps meet at
    __syncthreads alone."""
    load_all()
    for family in families():
        for facts in family.catalogue("sm_90"):
            used = family.named_barriers(facts)
            specialised = family.warp_specialised(facts) or (family.name == "decode" and facts.path == "sm_90")
            assert (used is not None) == specialised, family.title(facts)
            if used:
                kernel = family.kernel(family.entry(facts))
                barriers.check(used[0], kernel.threads, used[1])
                barriers.check_arrivals(used[0], kernel.threads, kernel.cluster, kernel.arrivals)


def test_mypy_excludes_kernel_files_alone():
    """A file that mypy does not check imports the DSL at module level, or the kernel that it extends."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    excluded = {path for path in files() if re.search(settings["exclude"], path.relative_to(ROOT).as_posix())}
    kernels = {module_of(path) for path in excluded}
    for path in excluded:
        roots = {name for node in files()[path].body for name in names_imported(node)}
        assert roots & {"cuda", "cutlass"} or imports()[module_of(path)] & kernels, path


def test_what_plans_a_call_does_not_import_the_dsl():
    """Kernels from a bundle then run without the second that CuTe DSL's import takes."""
    found = sorted(module_of(path) for path in files() if re.fullmatch(r"dispatch|gradients|torch_op|ops", path.stem))
    code = f"import sys, {', '.join(found)}; print([name for name in sys.modules if name.startswith('cutlass')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert len(found) > 20 and done.stdout.strip() == "[]"


def names_imported(node: ast.stmt) -> list[str]:
    """The top-level packages that a statement imports by absolute names."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    return [node.module.partition(".")[0]] if isinstance(node, ast.ImportFrom) and node.module else []


CLAUSE = re.compile(r"(What|Whether|How|Where|Which|Who|Whose|Of|That|Those|Why)\b")
BANNED = re.compile(
    r"\b(8-bit floats?|nobody|somebody|promoted sums?|short sums|fast sums|sampled products?)\b", re.IGNORECASE
)


def docstrings(folder: str) -> list[tuple[str, str]]:
    """(file, docstring)"""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    found = []
    for path in (ROOT / folder).rglob("*.py"):
        nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))
        found += [(str(path.relative_to(ROOT)), ast.get_docstring(node) or "") for node in nodes]
    return found


@pytest.mark.parametrize("folder", (*PACKAGES, "tests"))
def test_docstrings_begin_with_a_verb_or_a_noun(folder):
    found = [f"{file}: {text.splitlines()[0]}" for file, text in docstrings(folder) if CLAUSE.match(text)]
    assert not found


@pytest.mark.parametrize("package", PACKAGES)
def test_paragraphs_of_docstrings_are_filled(package):
    """No long line is followed by a single word and more text: the word belongs to the next line."""
    torn = []
    for file, text in docstrings(package):
        lines = text.splitlines()
        for line, word, after in zip(lines, lines[1:], lines[2:], strict=False):
            if len(line) > 90 and re.fullmatch(" *[a-z]+", word) and after.strip():
                torn.append(f"{file}: {word.strip()} {after.strip()}")
    assert not torn


@pytest.mark.parametrize("folder", (*PACKAGES, "tests"))
def test_code_uses_the_terms_of_the_field(folder):
    """FP8, promoted accumulation and SDDMM have one name each; sentences name the thread or kernel that acts."""
    paths = [path for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if BANNED.search(line)
    ]
    assert not found
