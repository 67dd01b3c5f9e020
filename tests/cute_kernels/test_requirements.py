"""GPUs that have kernels, and the errors if the compiler is missing."""

import subprocess
import sys

import pytest

from cute_kernels.arch import ARCHS, PATHS, arch_named, arch_of
from cute_kernels.runtime.compile import MissingCompiler, import_cutlass


def test_architectures():
    named = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 7): "sm_80", (8, 9): "sm_89", (9, 0): "sm_90"}
    assert {capability: arch_of(capability).name for capability in named} == named
    assert arch_named("sm_90a") is arch_named("sm_90") is ARCHS["sm_90"]
    assert ARCHS["sm_86"].smem == ARCHS["sm_89"].smem == 101_376
    assert all(spec.path in PATHS for spec in ARCHS.values())


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (6, 1), (10, 0), (12, 0), (8, 8)])
def test_gpus_without_kernels(capability):
    reason = "no kernels for compute capability .*; supported are 8.0, 8.6, 8.7, 8.9 and 9.0"
    if capability < (8, 0):
        reason = rf"{capability[0]}\.{capability[1]} is below 8.0: the kernels require cp.async"
    with pytest.raises(RuntimeError, match=reason):
        arch_of(capability)
    with pytest.raises(ValueError, match="unknown architecture 'sm_75'; known are sm_80, sm_86, sm_89, sm_90"):
        arch_named("sm_75")


# A missing compiler


@pytest.mark.parametrize("package", ["cutlass", "tvm_ffi"])
def test_missing_package(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingCompiler, match=f"'{package}' was not found.*pip install 'nvidia-cutlass-dsl") as error:
        import_cutlass()
    assert error.value.name == package


def test_another_missing_package_is_not_called_the_compiler(monkeypatch):
    """A package that the compiler itself lacks is named."""

    def find(*args, **kwargs):
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    with monkeypatch.context() as inside, pytest.raises(ModuleNotFoundError) as error:
        inside.setattr("builtins.__import__", find)
        import_cutlass()
    assert error.type is ModuleNotFoundError and error.value.name == "numpy"


WITHOUT_COMPILER = """
import sys
sys.modules["cutlass"] = None
import torch
import sparse_collective
from cute_kernels import gemm
assert "sparse_collective.nn" not in sys.modules
print(gemm(torch.ones(2, 3).bfloat16(), torch.ones(3, 2).bfloat16()).sum().item())
"""


def test_cpu_tensors_need_no_compiler_and_products_no_layers():
    run = subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stdout.strip() == "12.0", run.stderr[-500:]
