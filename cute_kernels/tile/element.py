"""How wide an element of an operand is."""

ELEMENT = 2  # bytes of bf16 and fp16, the operands of all kernels so far
