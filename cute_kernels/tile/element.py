"""How wide an element is."""

ELEMENT = 2  # bytes of bf16 and fp16, the operands of all kernels so far: what device code is written for
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
