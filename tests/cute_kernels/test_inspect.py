"""Reading a cubin, and the problems reported for a kernel."""

from dataclasses import replace

import pytest

from cute_kernels.matmul.family import DENSE
from cute_kernels.runtime import inspect
from cute_kernels.runtime.compile import compile_for, cubin_of
from cute_kernels.runtime.families import compile_kernel
from tests import sass
from tests.cute_kernels import tiny_kernels
from tests.cute_kernels.tiny_kernels import ARCHS


def cubin(arch, fn):
    return cubin_of(compile_for(arch, fn, *tiny_kernels.fake_arguments(), keep_cubin=True))


@pytest.mark.parametrize("arch", ARCHS)
def test_small_kernel_costs_nothing_to_speak_of(arch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = inspect.resources(cubin(arch, tiny_kernels.add), arch)
    assert 0 < found.registers < 32 and 10 < found.instructions < 40
    assert (found.stack, found.stl, found.ldl, found.static_smem) == (0, 0, 0, 0)
    assert (found.opcodes["LDG"], found.opcodes["STG"], found.opcodes["FADD"]) == (2, 1, 1)
    assert not list(tmp_path.iterdir()), "the compiler left files in the working folder"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])  # from sm_90 on the section holds the system's share too
def test_static_shared_memory_is_the_kernels_own(arch):
    found = inspect.resources(cubin(arch, tiny_kernels.reverse), arch)
    assert found.static_smem == tiny_kernels.THREADS * 4 and found.bar == 1


@pytest.mark.parametrize("arch", ["sm_86", "sm_90a"])
def test_spills_are_found(arch):
    found = inspect.resources(cubin(arch, tiny_kernels.spill), arch)
    assert found.registers <= 64 and min(found.stack, found.stl, found.ldl) > 0
    on_stack, in_memory = complaints(found, tensor_core="LDG")
    assert "stack frame" in on_stack and "local memory" in in_memory


def complaints(resources, **changes):
    wanted = {"tensor_core": "HGMMA", "dynamic_smem": 0, "smem_limit": 1024, "warp_specialised": False}
    return inspect.problems(resources, **(wanted | changes))


def good(**changes):
    """The resources of a sound warp-specialised kernel."""
    counts = dict.fromkeys(inspect._COUNTED, 0) | {"hgmma": 8, "usetmaxreg": 2}
    fields = {"registers": 168, "stack": 0, "static_smem": 0, "wgmma_waits": 2, "instructions": 1000}
    sound = inspect.Resources(arch="sm_90a", opcodes={"HGMMA": 8}, **fields, **counts)
    return replace(sound, **changes)


@pytest.mark.parametrize(
    ("changes", "wanted", "word"),
    [
        ({"stack": 8}, {}, "stack"),
        ({"stl": 1}, {}, "STL"),
        ({"ldl": 1}, {}, "LDL"),
        ({"static_smem": 1000}, {"dynamic_smem": 25}, "1025 bytes of shared memory"),
        ({}, {"tensor_core": "HMMA"}, "no HMMA"),
        ({"usetmaxreg": 1}, {"warp_specialised": True}, "USETMAXREG"),
        ({"wgmma_waits": 8}, {}, "serialized"),
        ({"wgmma_waits": 4, "opcodes": {"QGMMA": 4}}, {"tensor_core": "QGMMA"}, "serialized"),
    ],
)
def test_each_problem_is_named(changes, wanted, word):
    (reason,) = complaints(good(**changes), **wanted)
    assert word in reason
    if word == "serialized":
        assert complaints(good(**changes), overlaps_wgmmas=False, **wanted) == []
    assert complaints(good(static_smem=24), dynamic_smem=1000, warp_specialised=True) == []


def test_opcodes_are_read_past_predicates_and_uniform_registers():
    sass = """
	.section	.text.kernel,"ax",@progbits
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 EXIT ;
        /*0020*/              @!UP1 UTMALDG.3D [UR8], [UR4], desc[UR16] ;
        /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*1fff0*/                  HGMMA.64x256x16.F32.BF16 R24, gdesc[UR24], R24, gsb0 ;
.L_x_0:
        /*20000*/                  BRA `(.L_x_0);
"""
    read = list(inspect.instructions(sass))
    # Modifiers are cut where lower case begins; only the base opcode is counted.
    assert [opcode.split(".")[0] for opcode in read] == ["LDC", "EXIT", "UTMALDG", "WARPGROUP", "HGMMA", "BRA"]
    assert "WARPGROUP.DEPBAR.LE" in read


def test_the_commit_of_an_empty_group_is_no_product():
    sass = """
        /*0010*/                   QGMMA.64x32x32.F32.E4M3.E4M3 R24, gdesc[UR16], R24, gsb0 ;
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0 ;
        /*0040*/                   HGMMA.64x8x16.F32 R24, gdesc[UR4], R24, !UPT ;
"""
    read = [opcode.split(".")[0] for opcode in inspect.instructions(sass)]
    assert read == ["QGMMA", "WARPGROUP", "WARPGROUP", "HGMMA"]


@pytest.mark.parametrize("arch", ["sm_86", "sm_90a"])
def test_kernels_read_from_memory_are_what_nvdisasm_says(arch, monkeypatch):
    """The quick reading of tests/sass.py, of a kernel of which a part was met before, and of one met as a whole."""
    dense = DENSE.catalogue(arch, quick=True)[0]
    cubins = [cubin(arch, tiny_kernels.spill), cubin_of(compile_kernel(dense, keep_cubin=True).compiled)]
    asked = []
    monkeypatch.setattr(sass, "_known", {})
    monkeypatch.setattr(sass, "nvdisasm", lambda data: asked.append(data) or disassemble(data))
    disassemble = inspect.disassemble
    told = [inspect.resources(data, arch) for data in cubins]
    monkeypatch.setattr(inspect, "disassemble", sass.disassemble)
    for _ in range(2):
        read = [inspect.resources(data, arch) for data in cubins]
        assert read == told and [r.opcodes for r in read] == [r.opcodes for r in told]
    assert told[0].stl > 0 and (arch != "sm_90a" or told[1].wgmma_waits > 0)
    assert set(asked) <= set(cubins) and len(asked) == len(set(asked)), "once each, and never again"
    known = next(bits for _, bits in sass._known)
    sass._known[cubins[0][48:52], known] = "ANOTHER"
    with pytest.raises(AssertionError, match="ANOTHER"):
        sass._learn(cubins[0][48:52], sass.code_of(cubins[0]), disassemble(cubins[0]))


def test_what_is_no_cubin_of_the_architecture_is_refused():
    with pytest.raises(ValueError, match=r"compiled for sm_80, not for sm_90a"):
        inspect.resources(cubin("sm_80", tiny_kernels.add), "sm_90a")
    for data in (b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(58)):
        with pytest.raises(ValueError, match="not a cubin"):
            inspect.resources(data, "sm_80")


def test_a_missing_disassembler_says_what_to_install(monkeypatch):
    def no_files(package):
        raise inspect.importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(inspect.importlib.metadata, "files", no_files)
    monkeypatch.setenv("PATH", "")
    inspect.find_nvdisasm.cache_clear()
    try:
        with pytest.raises(inspect.MissingDisassembler, match="pip install 'nvidia-cuda-nvdisasm"):
            inspect.find_nvdisasm()
    finally:
        inspect.find_nvdisasm.cache_clear()
