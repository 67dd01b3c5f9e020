"""mkdocs hooks: publish the figures of result files, and link source files by name alone."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "bench/results/nvidia-h200"


def slugify(title: str, separator: str) -> str:
    """The name by which GitHub knows a heading, so that links work there and on the site."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)


def on_files(files, config):
    for path in sorted((ROOT / RESULTS).glob("*.png")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, **_):
    """Figures are files of the site; other files of the repository are named, not linked."""
    markdown = re.sub(rf"\]\((\.\./)+{RESULTS}/(\w[\w-]*\.png)\)", r"](results/\2)", markdown)
    return re.sub(
        r"\[([^\]]+)\]\((?:\.\./)+(?:bench|cute_kernels|sparse_collective|attention|demo|examples|tests)\b[^)]*\)",
        r"\1",
        markdown,
    )
