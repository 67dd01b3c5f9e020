"""The kernels-hub package (`python -m hub`): imports under another name, without the optional dependencies."""

import ast
import subprocess
import sys
import tomllib

import pytest

from hub import __main__ as hub

from .sources import PACKAGES

CODE = """
import importlib.util, pathlib, sys

blocked = {"cute_kernels", "sparse_collective", "attention", "platformdirs", "filelock", "rich", "cuda"}

class Blocked:  # the packages under their own names, and what a kernel may not depend on
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

import torch
for name in [name for name in sys.modules if name.partition(".")[0] in blocked]:
    del sys.modules[name]
sys.meta_path.insert(0, Blocked())
spec = importlib.util.spec_from_file_location("kernel_1a2b", sys.argv[1] + "/__init__.py")
kernels = sys.modules["kernel_1a2b"] = importlib.util.module_from_spec(spec)  # as the library `kernels` does
spec.loader.exec_module(kernels)

a, b = torch.randn(64, 48), torch.randn(48, 32)
torch.testing.assert_close(kernels.gemm(a, b, epilogue=torch.sigmoid), torch.sigmoid(a @ b))
W = kernels.sparse_collective.BsrMatrix.from_dense(torch.eye(64).repeat(2, 2), (32, 32))
x = torch.randn(16, 128, requires_grad=True)
kernels.bsr_linear(x, W).sum().backward()
q, k, v = torch.randn(3, 1, 2, 200, 64).unbind()
mask = kernels.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 200, 200)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(kernels.block_sparse_attention(q, k, v, mask), expected)
torch.testing.assert_close(kernels.attention.attention(q, k, v, causal=True), expected)
cu = torch.tensor([0, 200], dtype=torch.int32)
csr = kernels.build_k2q_csr(torch.tensor([0, 1]).int().repeat(1, 200, 1), cu, cu, 128, total_k=200)
q, k, v = q[0].transpose(0, 1), *(t[0, :1].transpose(0, 1) for t in (k, v))
lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 200, "max_seqlen_k": 200}
expected = kernels.attention.attention(q, k, v, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)
torch.testing.assert_close(kernels.sparse_atten_func(q, k, v, *csr, 2, **lengths, causal=True), expected)

from kernel_1a2b.cute_kernels.runtime import families, keys, packages
from kernel_1a2b.cute_kernels.traced import libraries
assert packages.PACKAGES[0] == "kernel_1a2b.cute_kernels" and not keys.OUTSIDE and families.families()
assert all(packages.folder_of(package).is_dir() for package in packages.PACKAGES)
assert len(keys.source_fingerprint()) == 64
assert libraries.library_module(kernels.attention.patterns) and not libraries.library_module(packages.__class__)
assert libraries.library_class(kernels.BlockMask)

blocked -= {"cuda", "filelock"}  # CuTe DSL itself requires cuda-bindings, and torch.compile filelock
compiled = torch.compile(kernels.gemm, backend="eager", fullgraph=True)
torch.testing.assert_close(compiled(a, b), a @ b)
report = kernels.cute_kernels.inspect(kernels.gemm, a.bfloat16(), b.bfloat16(), arch="sm_80")
assert "HMMA" in report.sass and not report.problems
from kernel_1a2b.cute_kernels.runtime.disk_store import Store
with Store(pathlib.Path(sys.argv[2]), 1.0).lock("0" * 64):
    pass
print("right")
"""


@pytest.fixture(name="folder", scope="module")
def folder_fixture(tmp_path_factory):
    out = tmp_path_factory.mktemp("hub") / "package"
    command = [sys.executable, "-m", "hub", str(out), "--repo-id", "someone/cute-kernels"]
    done = subprocess.run(command, cwd=hub.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def test_a_folder_that_exists_is_kept(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hub", str(folder)])
    with pytest.raises(SystemExit, match="2"):
        hub.main()
    assert "exists; choose another folder" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_under_another_name(folder, tmp_path):
    command = [sys.executable, "-c", CODE, str(folder / "torch-ext/cute_kernels"), str(tmp_path / "cache")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "right", done.stdout + done.stderr


def test_layout(folder):
    build = tomllib.loads((folder / "build.toml").read_text())
    assert build["general"]["name"] == "cute-kernels" and build["general"]["backends"] == ["cuda"]
    assert build["general"]["python-depends"] == ["tvm-ffi"] and "torch-noarch" in build
    assert build["general"]["cuda"]["python-depends"] == ["nvidia-cutlass-dsl"]
    assert build["general"]["hub"]["repo-id"] == "someone/cute-kernels"
    assert all((folder / name).is_file() for name in ("flake.nix", "CARD.md", "LICENSE", "tests/test_cute_kernels.py"))


def test_imports(folder):
    """Relative ones, the standard library, torch, and dependencies that the hub allows or that are optional."""
    allowed = {"torch", "cutlass", "tvm_ffi", "cuda", "triton", *sys.stdlib_module_names}  # cuda: CuTe DSL requires it
    optional = {"runtime/disk_store.py": {"filelock"}, "cute_kernels/picture.py": {"matplotlib"}}
    optional["cute_kernels/progress.py"] = {"rich"}
    for path in (folder / "torch-ext").rglob("*.py"):
        optional_here = next((names for end, names in optional.items() if path.as_posix().endswith(end)), set())
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            tops = {module.partition(".")[0] for module in modules}
            assert not tops & {*PACKAGES}, f"{path}: {tops}"
            assert tops <= allowed | optional_here, f"{path}: {tops}"


def test_operators_have_a_namespace_of_their_own():
    text = (
        'NAME = "attention::mask"\nf"sparse_collective::{x}"\ntorch.ops.attention.mask(a[::2])\nattention.attention\n'
    )
    assert hub.rewritten("attention/masks/x.py", text, "k_1") == (
        'NAME = "k_1_attention::mask"\nf"k_1_sparse_collective::{x}"\ntorch.ops.k_1_attention.mask(a[::2])\n'
        "attention.attention\n"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from cute_kernels.tile import (\n    ptx,\n)\n", "from ...cute_kernels.tile import (\n    ptx,\n)\n"),
        ("def f():\n    from attention import ops\n", "def f():\n    from ...attention import ops\n"),
        ("from .. import checks\nimport torch\n", "from .. import checks\nimport torch\n"),
    ],
)
def test_absolute_imports_become_relative(text, expected):
    assert hub.rewritten("attention/masks/x.py", text, "k_1") == expected


def test_imports_that_cannot_be_rewritten():
    with pytest.raises(ValueError, match="x.py:2: write `from cute_kernels.arch import"):
        hub.rewritten("attention/x.py", "import torch\nimport cute_kernels.arch\n", "k_1")
