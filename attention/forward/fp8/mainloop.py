"""The sm_90 mainloop of FP8 attention (E4M3): Q and K are FP8; scores, softmax and accumulators are FP32.

By default P and V are FP16. Another kernel converts V first (converted_values), or warps of this one do
(values_inside). The conversion is exact, P has 11 bits, and tensor cores accumulate 16-bit operands in FP32. Q K' takes
half of BF16's time, and P V the same time.

With `fast` P and V are FP8, too. WGMMA takes FP8 operands that are contiguous along K: Q and K are, along D. V must be
contiguous along its keys, so a kernel before this one transposes it (transposed_values), to tiles in shared memory's
layout.

The accumulator layout of S differs from the A layout of FP8 P. Of every 16 columns of a row, lane t of a quad has

    scores     2t, 2t + 1, 8 + 2t, 9 + 2t
    P as A     4t, 4t + 1, 4t + 2, 4t + 3, a register

A sum over the keys does not depend on their order if V has the same order. So the lane's four scores become its
register without a shuffle, and the transposed V has its keys permuted accordingly: place 4t + i of 16 is KEYS[4t + i].

Tensor cores accumulate FP8 operands with about 14 bits of mantissa: scores lose up to about 2^-12 of the sum of |q k|.
The fast accumulation of O, over many keys, loses as much of the sum of |p v|.
"""

from ..config import Float8Facts
from ..mainloop_sm90 import MainloopSm90
from .scales import HeadScales, TokenScales
from .softmax import policy_of
from .values import values_of


def mainloop_of(facts: Float8Facts) -> MainloopSm90:
    """Mainloop of one kernel."""
    scales = (TokenScales if facts.tokens else HeadScales)(facts)
    return MainloopSm90(facts, policy_of(facts), values_of(facts), scales)
