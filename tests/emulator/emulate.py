"""Runs compiled kernels without a GPU: on the CPU, from the PTX that CuTe DSL wrote for them.

    run = emulated(facts)                                   a kernel of a registered family
    run = emulate_entry("sm_90a", entry, fake_arguments)    one of which no family knows yet
    run(a, b, d, None, ..., 1.0, 0.0, 1, 4)   CPU tensors, numbers and None, in the order of the entry, less the stream

`emulator(sms=2, seed=7)` changes the machine inside of a block. What goes wrong raises EmulatorError.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import platformdirs
import torch
from filelock import FileLock

from cute_kernels.runtime.compile import compile_for, ptx_of
from cute_kernels.runtime.keys import host_cpu

from ..compiled import compiled, export_host_code
from . import ptx

HERE = Path(__file__).parent
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-O2", "-march=native", "-fPIC"]


class EmulatorError(RuntimeError):
    """A kernel did what no kernel may do, or waits for ever; the message says where."""


def cache_folder() -> Path:
    """Folder of the compiled machine: CUTE_KERNELS_EMULATOR, or a folder of the user's caches."""
    named = os.environ.get("CUTE_KERNELS_EMULATOR")
    folder = Path(named or platformdirs.user_cache_dir("cute-kernels-emulator", appauthor=False))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[:4])} ... failed:\n{done.stderr[-4000:]}")


@functools.cache
def machine_library() -> Path:
    """The emulator, compiled once for each of its states: some 20 seconds of one core."""
    sources = sorted(HERE.glob("*.cpp"))
    state = [p.read_text() for p in (*sources, *sorted(HERE.glob("*.h")))] + [*FLAGS, COMPILER, host_cpu()]
    built = cache_folder() / f"machine-{hashlib.sha256(repr(state).encode()).hexdigest()[:16]}.so"
    with FileLock(f"{built}.lock"):  # several processes of tests want it at once
        if not built.exists():
            with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
                objects = [str(Path(folder, p.stem + ".o")) for p in sources]
                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    list(pool.map(lambda s, o: _command(COMPILER, *FLAGS, "-c", str(s), "-o", o), sources, objects))
                _command(COMPILER, "-shared", *objects, "-o", f"{folder}/machine.so")
                os.replace(f"{folder}/machine.so", built)
    return built


@functools.cache
def machine() -> ctypes.CDLL:
    library = ctypes.CDLL(str(machine_library()), mode=ctypes.RTLD_GLOBAL)
    library.emu_message.restype = ctypes.c_char_p
    library.emu_steps.restype = library.emu_mmas.restype = ctypes.c_uint64
    library.emu_configure.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_int]
    return library


_SETTINGS: dict[str, Any] = {"sms": 4, "seed": 1, "check_proxies": True, "memory": ()}


@contextlib.contextmanager
def emulator(**settings: Any):
    """Inside the block: `sms` multiprocessors, the `seed` of all that is left to chance, `check_proxies`, and `memory`,
    tensors that kernels may touch besides their arguments."""
    before = dict(_SETTINGS)
    _SETTINGS.update(settings)
    try:
        yield
    finally:
        _SETTINGS.update(before)


# -- tensors ------------------------------------------------------------------------------------------------------


class _DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", _DLDevice), ("ndim", ctypes.c_int), ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]
_ALIVE: dict[int, tuple] = {}


@_Deleter
def _delete(managed) -> None:
    _ALIVE.pop(ctypes.addressof(managed.contents), None)


KINDS = {torch.bfloat16: 4, torch.float16: 2, torch.float32: 2, torch.float64: 2, torch.bool: 6, torch.uint8: 1}
KINDS |= {torch.float8_e4m3fn: 10, torch.float8_e5m2: 12}
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _OnDevice:
    """A CPU tensor that says to be on a GPU."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **_):
        t = self.tensor
        shape, strides = (ctypes.c_int64 * t.dim())(*t.shape), (ctypes.c_int64 * t.dim())(*t.stride())
        kind = KINDS.get(t.dtype, 0)
        inner = _DLTensor(t.data_ptr(), _DLDevice(2, 0), t.dim(), kind, t.element_size() * 8, 1, shape, strides, 0)
        managed = _DLManagedTensor(inner, None, _delete)
        address = ctypes.addressof(managed)
        _ALIVE[address] = (managed, shape, strides, t)
        return _new_capsule(address, b"dltensor", None)


def on_device(tensor: torch.Tensor):
    """The tensor as compiled host code takes it: it claims to be on a GPU, its memory is the CPU's."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(_OnDevice(tensor))


def _span(t: torch.Tensor) -> tuple[int, int]:
    """Addresses from the first to past the last byte of a tensor."""
    if t.numel() == 0:
        return t.data_ptr(), t.data_ptr()
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (reach + 1) * t.element_size()


# -- kernels ------------------------------------------------------------------------------------------------------


def _load(text: str) -> int:
    """The number of a PTX module, whose kernels the machine then knows."""
    number = machine().emu_load(ptx.program(text).encode(), text.encode())
    if number < 0:
        raise NotImplementedError(machine().emu_message().decode())
    return number


def _prepare(module: int, tensors: list[torch.Tensor]) -> None:
    """Before a launch: kernels of this module may touch these tensors alone."""
    tensors = [*tensors, *_SETTINGS["memory"]]
    bounds = [x for t in tensors for x in _span(t)]
    machine().emu_allocations(len(tensors), (ctypes.c_uint64 * len(bounds))(*bounds))
    machine().emu_configure(module, _SETTINGS["sms"], _SETTINGS["seed"], int(_SETTINGS["check_proxies"]))
    _SETTINGS["seed"] += 1


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint32),
    ]  # fmt: skip


def run_ptx(text: str, *tensors: torch.Tensor, grid: int = 1, block: int = 32, shared: int = 0) -> None:
    """Run PTX whose only kernel is named `kernel` and takes the addresses of CPU tensors."""
    _prepare(_load(text), list(tensors))
    config = _LaunchConfig((grid, 1, 1), (block, 1, 1), shared, None, None, 0)
    addresses = [ctypes.c_uint64(t.data_ptr()) for t in tensors]
    arguments = (ctypes.c_void_p * len(tensors))(*(ctypes.addressof(a) for a in addresses))
    if machine()._cudaLaunchKernelEx(ctypes.byref(config), ctypes.c_char_p(b"kernel"), arguments):
        raise EmulatorError(machine().emu_message().decode())


class Emulated:
    """A compiled function whose launches the machine runs; `change` may put other PTX in its kernels' place."""

    def __init__(self, compiled: Any, change: Callable[[str], str] | None = None):
        text = ptx_of(compiled)
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            export_host_code(compiled, Path(folder, "kernel.o"))
            self._load(text if change is None else change(text), Path(folder, "kernel.o"))

    @classmethod
    def of_folder(cls, folder: Path) -> "Emulated":
        """The function in a folder of `compiled.compiled`."""
        self = cls.__new__(cls)
        self._load(Path(folder, "kernel.ptx").read_text(), Path(folder, "kernel.o"))
        return self

    def _load(self, text: str, host_code: Path) -> None:
        import tvm_ffi

        self.ptx = text
        self.number = _load(text)
        weakref.finalize(self, machine().emu_forget, self.number)
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            library, where = f"{folder}/kernel.so", str(machine_library())
            _command(COMPILER, "-shared", str(host_code), where, "-o", library, f"-Wl,-rpath,{Path(where).parent}")
            # The machine comes before whoever has the same names: the CUDA runtime, once a compiled kernel was loaded.
            ctypes.CDLL(library, mode=os.RTLD_DEEPBIND)
            self.module = tvm_ffi.load_module(library)
        self.function = self.module.kernel

    def __call__(self, *arguments: Any) -> None:
        _prepare(self.number, [a for a in _flat(arguments) if isinstance(a, torch.Tensor)])
        try:
            self.function(*map(_argument, arguments))
        except Exception as error:
            if message := machine().emu_message().decode():
                raise EmulatorError(message) from None
            raise error


def _flat(arguments):
    for a in arguments:
        if isinstance(a, (tuple, list)):
            yield from _flat(a)
        else:
            yield a


def _argument(a):
    if isinstance(a, torch.Tensor):
        return on_device(a)
    return tuple(map(_argument, a)) if isinstance(a, (tuple, list)) else a


def emulate_entry(arch: str, entry: Any, arguments: tuple, change: Callable[[str], str] | None = None) -> Emulated:
    """Compile `entry` for the fakes of its arguments; the result is called with CPU tensors in their place.

    `change`: of the PTX, for tests that plant faults in it.
    """
    return Emulated(compile_for(arch, entry, *arguments, keep_cubin=True), change)


@functools.lru_cache(maxsize=256)
def emulated(facts: Any) -> Callable:
    """The kernel of facts of a registered family, as `families.function_for` gives it on a machine with a GPU."""
    with compiled(facts) as folder:
        return Emulated.of_folder(folder)
