"""Eight elements from global memory straight into four registers."""

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.tile.element import ELEMENT

from .config import VECTOR

WORDS = VECTOR * ELEMENT // 4  # registers of a vector


def load_vector(at: Int64, valid, stream: bool) -> tuple:
    """16 bytes as four registers; zeros where not `valid` (None: always valid). `stream`: keep it out of L1."""
    load = "ld.global.nc" + (".L1::no_allocate" if stream else "") + ".v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];"
    if valid is None:
        return cute.arch.inline_ptx(load, write_only_types=[Int32] * WORDS, read_only_args=[at])
    zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(WORDS))
    text = f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; {zeros} @p {load} }}"
    return cute.arch.inline_ptx(text, write_only_types=[Int32] * WORDS, read_only_args=[at, Int32(valid)])


def load_elements(at: Int64, step: Int64, valid) -> tuple:
    """Eight elements, `step` bytes apart, as four registers; zeros where not `valid` (None: always valid)."""
    lines = [".reg .b16 h<8>;", ".reg .b64 a;", "mov.b64 a, {$r0};"]
    guard = ""
    if valid is not None:
        lines += [".reg .pred p;", "setp.ne.s32 p, {$r2}, 0;"] + [f"mov.b16 h{i}, 0;" for i in range(VECTOR)]
        guard = "@p "
    for i in range(VECTOR):
        lines += [f"{guard}ld.global.nc.b16 h{i}, [a];", "add.s64 a, a, {$r1};"]
    lines += [f"mov.b32 {{$w{i}}}, {{ h{2 * i}, h{2 * i + 1} }};" for i in range(WORDS)]
    args = [at, step] if valid is None else [at, step, Int32(valid)]
    text = "{ " + " ".join(lines) + " }"
    return cute.arch.inline_ptx(text, write_only_types=[Int32] * WORDS, read_only_args=args)
