"""What the tests of kept masks share: the masks that users hold, writes to them, and a count of conversions."""

import torch

from attention import BlockMask, block_sparse_attention, torch_op
from sparse_collective.bsr import BsrMatrix

from . import attention_parts
from .reference import normal

N = 384  # rows and columns of the scores, three blocks of 128
FIRST = ~torch.eye(3, dtype=torch.bool)
SECOND = FIRST.roll(1, 1)  # as many in each row
FORMS = ["flex", "bool", "bsr", "torch bsr"]
LISTS = ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"]


def qkv(device="cpu", Sq=N, Sk=N):
    return attention_parts.qkv(Sq, Sk, heads=4, device=device)


def held(form: str, blocks=FIRST, device="cpu"):
    """The blocks as what a user holds."""
    if form == "flex":
        return BlockMask.from_blocks(blocks.to(device)).to_flex()
    if form == "bool":
        return blocks.to(device).clone()
    W = BsrMatrix.from_dense(normal(N, N, device=device), (128, 128), mask=blocks.to(device))
    return W if form == "bsr" else W.to_torch()


def write(form: str, mask, blocks=SECOND) -> None:
    """Change it in place."""
    with torch.no_grad():
        other = held(form, blocks, parts(form, mask)[0].device)
        for old, new in zip(parts(form, mask), parts(form, other), strict=True):
            old.copy_(new)


def parts(form: str, mask) -> list[torch.Tensor]:
    if form == "flex":
        return [getattr(mask, name) for name in LISTS]
    if form == "bool":
        return [mask]
    return [mask.col_indices] if form == "bsr" else [mask.col_indices()]


def right(call, mask, blocks, run=block_sparse_attention) -> bool:
    device = call[0].device
    return torch.equal(run(*call, mask), block_sparse_attention(*call, BlockMask.from_blocks(blocks.to(device))))


def spied_conversions(monkeypatch) -> list:
    """Grows by one with each conversion, whichever way it goes: all make new tables or a new BlockMask of lists."""
    made, depth = [], []

    def spied(owner, name):
        real = getattr(owner, name)

        def spy(*args, **kwargs):
            made.extend([name] * (not depth))
            depth.append(name)
            try:
                return real(*args, **kwargs)
            finally:
                depth.pop()

        monkeypatch.setattr(owner, name, staticmethod(spy) if owner is BlockMask else spy)

    for name in ("from_flex", "from_blocks", "from_bsr"):
        spied(BlockMask, name)
    spied(torch_op.convert, "tables_of_flex")
    return made


def count(made: list, call, *args, **terms) -> int:
    before = len(made)
    call(*args, **terms)
    return len(made) - before
