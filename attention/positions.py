"""Positions of a call's queries and keys in a longer sequence, of which q, k and v are shards."""

from .arguments import AttentionArgs
from .masks.block_lists import MOST

Offsets = tuple[int, int] | None  # (q_offset, k_offset)


def check_offsets(op: str, q_offset: int | None, k_offset: int | None, rows: int, columns: int) -> Offsets:
    """Return (q_offset, k_offset), of which one that is None counts as 0, or None if neither is given.

    Raises:
        TypeError: an offset is no int.
        ValueError: an offset is negative, or a position exceeds the limit of the kernels.
    """
    if q_offset is None and k_offset is None:
        return None
    offsets: list[int] = []
    for name, offset, length in (("q_offset", q_offset, rows), ("k_offset", k_offset, columns)):
        offset = 0 if offset is None else offset
        if not isinstance(offset, int) or isinstance(offset, bool):
            raise TypeError(f"{op}: {name} must be an int or None, got {type(offset).__name__}; call int() or .item()")
        if not 0 <= offset <= MOST - length:
            raise ValueError(
                f"{op}: {name} must be in [0, {MOST - length}] for a length of {length}, got {offset}; "
                "if all positions are large, subtract the same number from both offsets"
            )
        offsets.append(offset)
    return offsets[0], offsets[1]


def lengths_at(lengths: tuple[int, int], offsets: Offsets) -> tuple[int, int]:
    """One more than the last positions of so many rows and columns."""
    return lengths if offsets is None else (lengths[0] + offsets[0], lengths[1] + offsets[1])


def refuse_offsets(args: AttentionArgs, form: str, op: str = "attention") -> None:
    """Raise a TypeError if an offset is given together with arguments that have no kernel with offsets."""
    if args.q_offset is not None or args.k_offset is not None:
        raise TypeError(
            f"{op}: q_offset and k_offset are not supported with {form}; they work with (B, H, S, D) tensors, causal, "
            "window_size, score_mod, and the block masks of block_sparse_attention"
        )
