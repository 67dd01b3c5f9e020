"""Documents: every code block runs, tables show the content of result files, links lead somewhere, the reference is
complete, the site builds."""

import contextlib
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .ranks import Ranks

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)#]+)?(?:#([^)]+))?\)")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [ROOT / "README.md", ROOT / "docs/getting-started.md", *sorted((ROOT / "docs/howto").glob("*.md"))]
BLOCKS = [(page, i) for page in PAGES for i in range(len(BLOCK.findall(page.read_text())))]

IMPORTS = re.compile(r"\A(?:(?:(?:import|from) .*)?\n)*")  # and blank lines, at the start of a block
BEGINNING = """\
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
mesh = init_device_mesh(device, (dist.get_world_size(),))  # selects this rank's GPU
"""
MODULES = ("cute_kernels", "sparse_collective", "sparse_collective.nn", "sparse_collective.distributed")
MODULES += ("attention", "attention.nn", "attention.distributed")
MODULES += ("attention.integrations.transformers", "attention.integrations.vllm")


def anchors(text: str) -> set[str]:
    """The names by which GitHub knows a document's headings."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.core
@pytest.mark.parametrize(("page", "number"), BLOCKS, ids=lambda x: x.stem if isinstance(x, Path) else str(x))
def test_code_blocks_run(page, number, tmp_path, monkeypatch):
    """Each block alone, as a reader pastes it; without a GPU on CPU tensors. Those of several GPUs run as torchrun
    starts them, in one process and in two, on the CPU."""
    code = BLOCK.findall(page.read_text())[number]
    for library in ("transformers", "diffusers"):
        if re.search(rf"^(from|import) (attention\.integrations\.)?{library}\b", code, re.MULTILINE):
            pytest.importorskip(library)
    if "torch.compile" in code and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    title = f"{page.name}, block {number}"
    if "init_process_group" not in code:
        monkeypatch.chdir(tmp_path)
        exec(compile(code, title, "exec"), {"__name__": "block"})
        return
    # CUDA tensors of an earlier line would all be on the first GPU.
    assert IMPORTS.sub("", code).startswith(BEGINNING), f"{title} does not begin with\n{BEGINNING}"
    for world in (1, 2):
        with contextlib.closing(Ranks(world, group=False)) as ranks:
            ranks.run(f"{__name__}:run_in_a_rank", code, title, str(tmp_path / f"{world}"))


def run_in_a_rank(device, code: str, title: str, folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    exec(compile(code, title, "exec"), {"__name__": "block"})


def test_readme_is_short_and_names_the_commands():
    assert len(README.splitlines()) <= 130
    assert all(command in README for command in ("./run demo", "./run test", "pip install"))


def test_tables_show_the_result_files():
    check = subprocess.run([sys.executable, "docs/tables.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert check.returncode == 0, check.stdout + check.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_lines(path):
    """Links inside the project lead to files and headings; lines are at most 120 wide, but for tables."""
    text = path.read_text()
    for target, anchor in LINK.findall(text):
        if target.startswith("http"):
            continue
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text()), f"{target}#{anchor}"
    long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith(("|", "![", ":::"))]
    assert not long, long[0]


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_in_the_reference(module):
    """By identity: pages may name an object by another module's path."""
    if module.startswith("attention"):
        pytest.importorskip("transformers")
    pages = "".join(path.read_text() for path in (ROOT / "docs/reference").glob("*.md"))
    listed = re.findall(rf"^::: ({module.partition('.')[0]}\.\S+)", pages, re.MULTILINE)
    objects = {id(pkgutil.resolve_name(path)) for path in listed}
    package = importlib.import_module(module)
    missing = {name for name in package.__all__ if id(getattr(package, name)) not in objects}
    assert not missing


@pytest.mark.core
def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site/reference/nn/index.html").exists()
