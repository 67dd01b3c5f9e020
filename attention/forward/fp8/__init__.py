"""FP8 forward attention on sm_90: Q and K are float8_e4m3fn; P and V are FP16, FP8, or the dtype of a 16-bit V.

The kernel and its mainloop are those of BF16 and FP16 (../kernel_sm90, ../mainloop_sm90). mainloop.py builds them from
an operand for V (values), the dequantization scales (scales), a softmax policy (softmax) and the conversion of P.
"""
