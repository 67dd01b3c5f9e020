"""Write the sources of a kernels-hub package: `python -m hub OUT [--name cute-kernels] [--repo-id ORG/NAME]`.

    OUT/build.toml                   for kernel-builder (edition 5): a Python-only kernel of the backend "cuda"
    OUT/flake.nix, OUT/CARD.md
    OUT/torch-ext/cute_kernels/      the packages cute_kernels, sparse_collective and attention, and their public names
    OUT/tests/                       a test for kernel-builder's CI

The hub loads a kernel under a name of its own and beside other versions of it. So absolute imports of the packages
become relative ones, and the namespaces of their torch operators contain a hash of the sources.
"""

import argparse
import ast
import hashlib
import re
import shutil
from pathlib import Path

from cute_kernels import __version__

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cute_kernels", "sparse_collective", "attention")
# The command line and what only it uses, and integrations with libraries that a kernel may not depend on.
LEFT_OUT = ("cute_kernels/__main__.py", "cute_kernels/report_tables.py", "attention/integrations/transformers/")
LEFT_OUT += ("attention/integrations/diffusers.py", "attention/integrations/vllm/", "sparse_collective/nn/lora.py")
NAMES = "|".join(PACKAGES)
NAMESPACES = re.compile(rf"(?<=torch\.ops\.)({NAMES})\b|(?<=[\"'])({NAMES})(?=::)")  # of operators

BUILD = """\
[general]
name = "{name}"
version = 1
edition = 5
license = "bsd-3-clause"
backends = ["cuda"]
python-depends = ["tvm-ffi"]

[general.cuda]
python-depends = ["nvidia-cutlass-dsl"]
{hub}
[torch-noarch]
"""
HUB = """
[general.hub]
repo-id = "{}"
"""
FLAKE = """\
{
  description = "Flake for cute-kernels";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs = { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""
INIT = '''\
"""cute-kernels {version}: block-sparse and dense GEMM and attention for torch, written with CuTe DSL.

The parts are `cute_kernels`, `sparse_collective` and `attention`, as in the package of pip.
"""

from . import attention, cute_kernels, sparse_collective
from .attention import BlockMask, block_sparse_attention, create_block_mask, scaled_dot_product_attention
from .attention import select_blocks, selected_attention
from .attention.integrations.msa import build_k2q_csr, sparse_atten_func
from .cute_kernels import gemm, quantize
from .sparse_collective import BsrMatrix, bsr_linear, bsr_matmul

__version__ = "{version}"
__all__ = [
    "BlockMask", "BsrMatrix", "attention", "block_sparse_attention", "bsr_linear", "bsr_matmul", "build_k2q_csr",
    "create_block_mask", "cute_kernels", "gemm", "quantize", "scaled_dot_product_attention", "select_blocks",
    "selected_attention", "sparse_atten_func", "sparse_collective",
]
'''
TEST = """\
import pytest
import torch

import {module} as kernels


@pytest.mark.kernels_ci
def test_gemm():
    a, b = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    torch.testing.assert_close(kernels.gemm(a, b), a @ b, atol=0.5, rtol=2e-2)
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hub", description=__doc__.partition("\n\n")[0])
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument("--name", default="cute-kernels", help="name of the kernel (default: cute-kernels)")
    parser.add_argument("--repo-id", help="repository on the hub that kernel-builder uploads to, as ORG/NAME")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists; choose another folder or remove it")
    write(args.out, args.name, args.repo_id)
    print(f"wrote {args.out}; build it there with `kernel-builder build`")


def write(out: Path, name: str = "cute-kernels", repo_id: str | None = None) -> None:
    """Write the package to a new folder."""
    module = name.replace("-", "_")
    texts = sources()
    unique = hashlib.sha256("\0".join(f"{path}\0{text}" for path, text in texts.items()).encode()).hexdigest()[:10]
    files = {f"torch-ext/{module}/{path}": rewritten(path, text, f"{module}_{unique}") for path, text in texts.items()}
    files |= {
        f"torch-ext/{module}/__init__.py": INIT.format(version=__version__),
        "build.toml": BUILD.format(name=name, hub=HUB.format(repo_id) if repo_id else ""),
        "flake.nix": FLAKE,
        "tests/__init__.py": "",
        f"tests/test_{module}.py": TEST.format(module=module),
    }
    for path, text in files.items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text(text)
    for file in (ROOT / "hub/CARD.md", ROOT / "LICENSE"):
        shutil.copy(file, out)


def sources() -> dict[str, str]:
    """Path -> text of the modules of the three packages."""
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    named = {path.relative_to(ROOT).as_posix(): path for path in paths}
    return {name: path.read_text() for name, path in named.items() if not name.startswith(LEFT_OUT)}


def rewritten(path: str, text: str, unique: str) -> str:
    """The text of a module with relative imports, and with operators in namespaces that begin with `unique`."""
    dots = "." * (path.count("/") + 1)  # of the package that contains the three packages
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] in PACKAGES for alias in node.names):
            raise ValueError(f"{path}:{node.lineno}: write `from {node.names[0].name} import ...`")
        if isinstance(node, ast.ImportFrom) and not node.level and str(node.module).partition(".")[0] in PACKAGES:
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = line[: node.col_offset] + line[node.col_offset :].replace(
                "from ", f"from {dots}", 1
            )
    return NAMESPACES.sub(lambda name: f"{unique}_{name[0]}", "".join(lines))


if __name__ == "__main__":
    main()
