"""Documents: every code block runs, tables show the content of result files, links lead somewhere, the site builds."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)#]+)?(?:#([^)]+))?\)")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [ROOT / "README.md", ROOT / "docs/getting-started.md", *sorted((ROOT / "docs/howto").glob("*.md"))]
BLOCKS = [(page, i) for page in PAGES for i in range(len(BLOCK.findall(page.read_text())))]


def anchors(text: str) -> set[str]:
    """The names by which GitHub knows a document's headings."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.core
@pytest.mark.parametrize(("page", "number"), BLOCKS, ids=lambda x: x.stem if isinstance(x, Path) else str(x))
def test_code_blocks_run(page, number, tmp_path, monkeypatch):
    """Each block alone, as a reader pastes it; without a GPU on CPU tensors."""
    code = BLOCK.findall(page.read_text())[number]
    for library in ("transformers", "diffusers"):
        if re.search(rf"^(from|import) (attention\.integrations\.)?{library}\b", code, re.MULTILINE):
            pytest.importorskip(library)
    if "torch.compile" in code and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"{page.name}, block {number}", "exec"), {"__name__": "block"})


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


@pytest.mark.core
def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site/reference/nn/index.html").exists()
