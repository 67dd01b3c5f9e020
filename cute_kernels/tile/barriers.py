"""Named barriers: which kernel uses which of the sixteen that a CTA has. Number 0 is __syncthreads.

    kernel          barriers   threads                        for
    product         1, 2       a consumer warpgroup           its store buffers are written, or free again
    product         8, 9       both consumer warpgroups       the order in which ping-pong teams multiply
    forward         1, 2, 3    two consumer warpgroups        the order in which they issue products
    forward         8, 9, 10   a consumer warpgroup           rows past the end of V are zeros
    decode          1          the consumer warpgroup         Q is loaded, or rows past the end of V are zeros

The small-block kernel's store is a product's; it has three consumers, and so barriers 1 to 3.
"""

PRODUCT_STORE, PRODUCT_ORDER = 1, 8  # the first ones
FORWARD_ORDER, FORWARD_OOB = 1, 8
DECODE_CONSUMERS = 1

MOST = 16
USES = {  # kernel -> (first barrier, how many) of each use
    "product": ((PRODUCT_STORE, 3), (PRODUCT_ORDER, 2)),
    "forward": ((FORWARD_ORDER, 3), (FORWARD_OOB, 3)),
    "decode": ((DECODE_CONSUMERS, 1),),
}
