"""Named barriers: which kernel uses which of the sixteen that a CTA has. Number 0 is __syncthreads.

    kernel          barriers   threads                        for
    product         1, 2       a consumer warpgroup           its store buffers are written, or free again
    product         8, 9       both consumer warpgroups       the order in which ping-pong consumer groups multiply
    forward         1, 2, 3    two consumer warpgroups        the order in which they issue products
    forward         8, 9, 10   a consumer warpgroup           rows past the end of V are zeros
    decode          1          the consumer warpgroup         Q is loaded, or rows past the end of V are zeros

The small-block kernel's store is a product's; it has three consumers, and so barriers 1 to 3.
"""

PRODUCT_STORE, PRODUCT_ORDER = 1, 8  # the first ones
FORWARD_ORDER, FORWARD_OOB = 1, 8
DECODE_CONSUMERS = 1

MOST = 16
WARP, WARPGROUP = 32, 128
USES = {  # kernel -> (first barrier, how many at most, threads that meet at each) of each use
    "product": ((PRODUCT_STORE, 3, WARPGROUP), (PRODUCT_ORDER, 2, 2 * WARPGROUP)),
    "forward": ((FORWARD_ORDER, 3, 2 * WARPGROUP), (FORWARD_OOB, 3, WARPGROUP)),
    "decode": ((DECODE_CONSUMERS, 1, WARPGROUP),),
}


def check(kernel: str, cta_threads: int, counts: dict[int, int]) -> None:
    """ValueError unless a CTA of so many threads can meet at these barriers of a kernel: first number -> how many.

    A kernel's host side asks this before it compiles: a wrong count is a hang, and nothing else tells.
    """
    if unknown := counts.keys() - {first for first, *_ in USES[kernel]}:
        raise ValueError(f"{kernel}: barriers from {min(unknown)} on are not in the table")
    numbers = [0]  # __syncthreads
    for first, most, threads in USES[kernel]:
        count = counts.get(first, 0)
        if count > most:
            raise ValueError(f"{kernel}: {count} barriers from {first} on, of {most} in the table")
        if count and (threads % WARP or not 0 < threads <= cta_threads):
            raise ValueError(
                f"{kernel}: {threads} threads meet at barrier {first}; it takes whole warps, of a CTA's {cta_threads} "
                "threads"
            )
        numbers += range(first, first + count)
    if len(set(numbers)) < len(numbers) or max(numbers) >= MOST:
        raise ValueError(f"{kernel}: barriers {numbers[1:]}; each is one of 1 to {MOST - 1}, for one use")
