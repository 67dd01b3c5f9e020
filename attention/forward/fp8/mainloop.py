"""The sm_90 mainloop of FP8 attention (e4m3): Q and K of FP8; scores, softmax and accumulators in FP32.

By default P and V are FP16. Another kernel converts V before (converted_values), or warps of this one do
(values_inside). That is exact, P has 11 bits, and tensor cores accumulate 16-bit products in FP32. Scores take half of
BF16's time, and P V all of it.

With `fast` P and V are FP8, too. WGMMA takes FP8 operands that are contiguous along K: Q and K are, along D. V must be
contiguous along its keys, so a kernel before this one transposes it (transposed_values), to tiles as shared memory has
them.

A thread's scores are not where FP8 P must be. Of every 16 columns of a row, lane t of a quad has

    scores     2t, 2t + 1, 8 + 2t, 9 + 2t
    P as A     4t, 4t + 1, 4t + 2, 4t + 3, a register

Sums over the keys do not depend on their order, if V has the same. So the lane's four scores become its register as
they are, and the transposed V has its keys in that order: place 4t + i of 16 is KEYS[4t + i].

Tensor cores add FP8 products up with some 14 bits of mantissa: scores lose up to some 2^-12 of the sum of |q k|. So do
fast sums of O, which are long, of the sum of |p v|.
"""

from ..config import Float8Facts
from ..mainloop_sm90 import MainloopSm90
from .scales import HeadScales, TokenScales
from .softmax import policy_of
from .values import values_of


def mainloop_of(facts: Float8Facts) -> MainloopSm90:
    """The mainloop of one kernel."""
    scales = (TokenScales if facts.tokens else HeadScales)(facts)
    return MainloopSm90(facts, policy_of(facts), values_of(facts), scales)
