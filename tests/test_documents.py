"""The documents: README's snippets run, tables show what the result files hold, and links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)#]+)?(?:#([^)]+))?\)")


def anchors(text: str) -> set[str]:
    """The names by which GitHub knows a document's headings."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_readme_snippets_run(capsys):
    """In turn, as one program, on CPU tensors."""
    snippets = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert len(snippets) >= 3
    names = {}
    for snippet in snippets:
        exec(compile(re.sub(r'"cuda" if .*', '"cpu"', snippet), "README.md", "exec"), names)
    assert names["y"].shape == (4, 256, 1024) and names["z"].shape == (1024, 256)
    assert names["routed"].shape == (256, 1024) and names["o"].shape == names["q"].shape
    dense = torch.nn.functional.silu(names["x"].float() @ names["W"].to_dense().float().T)
    torch.testing.assert_close(names["y"].float(), dense, rtol=0.02, atol=0.1)
    assert "cpu" in capsys.readouterr().out


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
    long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith(("|", "!["))]
    assert not long, long[0]
