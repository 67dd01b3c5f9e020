"""Decode: store rows to the result, or to the partial result of one split."""

import cutlass.cute as cute

from ..forward.config import DecodeFacts
from ..forward.store_o import StorePartial, StoreRows, store_policy


class StoreSplit(StorePartial):
    """Store a split's O and LSE in FP32, to be merged by combine.Combine."""

    def of_tile(self, output: cute.Tensor, tile) -> cute.Tensor:
        """The split's part of O (splits, B, H, Sq, Dv) or LSE (splits, B, H, Sq)."""
        return output[(tile.split, *(None for _ in output.shape[1:]))]


def store_of_split(facts: DecodeFacts) -> StoreRows:
    """The store policy of a decode kernel."""
    return StoreSplit() if facts.split else store_policy(facts)
