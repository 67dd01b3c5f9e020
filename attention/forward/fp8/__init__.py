"""FP8 forward attention on sm_90: Q and K of float8_e4m3fn, P and V of FP16, of FP8, or of what V was given in.

The kernel and its mainloop are those of BF16 and FP16 (../kernel_sm90, ../mainloop_sm90). mainloop.py builds them from
an operand for V (values), the descale factors (scales), a softmax policy (softmax) and the conversion of P.
"""
