"""Masks as users of FlexAttention write them: closures over numbers and tensors, and functions that wrap a mask.

`masks(device)` gives the mask_mods by name, of scores (BATCH, HEADS, *lengths(name)).
"""

import functools

import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

BATCH, HEADS = 2, 4
Q, KV = PLAIN = (300, 410)
WIDTH, HEIGHT = 20, 16  # of a picture
OTHERS = {"plain causal": (384, 384), "sliding tiles": (350, 350)} | dict.fromkeys(
    ("natten", "tiled natten", "frames", "block diffusion"), (WIDTH * HEIGHT,) * 2
)


def masks(device) -> dict:
    return windows(device) | documents(device) | pictures() | blocks(device) | tables(device) | wrapped(device)


def lengths(name: str) -> tuple[int, int]:
    return OTHERS.get(name, PLAIN)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def near(size):
    return lambda b, h, q, kv: (q - kv).abs() <= size


def sliding_window(size):
    def window(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= size

    return and_masks(window, causal)


def prefix_lm(prefix):
    def inside(b, h, q_idx, kv_idx):
        return kv_idx < prefix

    return or_masks(inside, causal)


def windows(device, size=100, dilation=3, period=7, width=3, sinks=4, window=60) -> dict:
    length = torch.tensor(KV, device=device)  # a modulus that is read when the kernel runs
    sizes = torch.tensor([8, 32, 128, 300], device=device)
    is_global = torch.arange(KV, device=device) % 97 == 0

    def dilated(b, h, q_idx, kv_idx):
        distance = torch.abs(q_idx - kv_idx)
        return (distance <= size) & (distance % dilation == 0)

    def sink(b, h, q_idx, kv_idx):
        return kv_idx < sinks

    return {
        "noop": noop_mask,
        "plain causal": causal,
        "sliding window": sliding_window(70),
        "symmetric window": near(33),
        "dilated window": dilated,
        "strided": lambda b, h, q, kv: (q - kv) % period < width,
        "strided by a power of two": lambda b, h, q, kv: (q - kv) % 8 < 3,
        "ring": lambda b, h, q, kv: (q - kv) % length <= 40,
        "backwards": lambda b, h, q, kv: (kv - q) % -5 > -3,
        "attention sinks": and_masks(causal, or_masks(sink, lambda b, h, q, kv: q - kv < window)),
        "window by head": lambda b, h, q, kv: (q - kv < sizes[h]) & (q >= kv),
        "global tokens": or_masks(near(20), lambda b, h, q, kv: is_global[q] | is_global[kv]),
    }


def document_ids(offsets):
    counts = offsets[1:] - offsets[:-1]
    return torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32, device=offsets.device), counts)


def within_documents(inner, offsets):
    """A mask of positions inside of documents, for documents one after another."""
    document = document_ids(offsets)

    def packed(b, h, q_idx, kv_idx):
        same = document[q_idx] == document[kv_idx]
        q_inside = q_idx - offsets[document[q_idx]]
        kv_inside = kv_idx - offsets[document[kv_idx]]
        return same & inner(b, h, q_inside, kv_inside)

    return packed


def documents(device) -> dict:
    """And prefixes, lengths and images of items."""
    tensor = functools.partial(torch.tensor, device=device)
    prefix_length = tensor([17, 200], dtype=torch.int32)
    item_lengths = tensor([123, 300])
    valid = torch.arange(KV, device=device) < tensor([[90], [405]])
    ids = torch.arange(KV, device=device) // tensor([[50], [128]])
    offsets, prefix_of = tensor([0, 60, 150, 240, 300, 410]), tensor([0, 0, 0, 3, 3])
    document = document_ids(offsets)
    intervals, image = tensor([[0, 40], [40, 200], [150, 300]]), torch.arange(KV, device=device) // 137

    def shared(b, h, q_idx, kv_idx):
        mine = document[q_idx]
        prefix = prefix_of[mine]
        own = (kv_idx >= offsets[mine]) & (kv_idx <= q_idx)
        before = (mine != prefix) & (kv_idx >= offsets[prefix]) & (kv_idx < offsets[prefix + 1])
        return own | before

    def cross(b, h, q_idx, kv_idx):
        """Text rows that see the columns of an image: intervals (images, 2)."""
        interval = intervals[image[kv_idx]]
        return (q_idx >= interval[0]) & (q_idx < interval[1])

    return {
        "prefix lm": prefix_lm(50),
        "prefix by item": or_masks(lambda b, h, q, kv: kv < prefix_length[b], causal),
        "padding": lambda b, h, q, kv: (q < item_lengths[b]) & (kv < item_lengths[b]),
        "padding table": lambda b, h, q, kv: valid[b, kv],
        "documents": within_documents(noop_mask, tensor([0, 90, 91, 250, 410])),
        "causal documents": within_documents(causal, tensor([0, 64, 200, 410], dtype=torch.int32)),
        "prefix documents": within_documents(prefix_lm(20), tensor([0, 130, 410])),
        "documents of items": lambda b, h, q, kv: (ids[b][q] == ids[b][kv]) & (kv <= q),
        "shared prefixes": shared,
        "images": cross,
    }


def pictures(kernel=5, large=7, tile_w=5, tile_h=4, text=25, prompt=30, frame=58, width=2) -> dict:
    """And films."""
    across, size, pixels = WIDTH // tile_w, tile_w * tile_h, WIDTH * HEIGHT

    def neighbours(place, kernel):
        def mask(b, h, q_idx, kv_idx):
            (q_row, q_col), (kv_row, kv_col) = place(q_idx), place(kv_idx)
            row = q_row.clamp(kernel // 2, HEIGHT - 1 - kernel // 2)
            col = torch.clamp(q_col, kernel // 2, WIDTH - 1 - kernel // 2)
            return ((row - kv_row).abs() <= kernel // 2) & (torch.abs(col - kv_col) <= kernel // 2)

        return mask

    def in_tiles(index):
        tile, inside = index // size, index % size
        return tile // across * tile_h + inside // tile_w, tile % across * tile_w + inside % tile_w

    def near_tile(mine, other, span, count):
        left, right = span // 2, span // 2 + (span % 2 - 1)
        middle = mine.clamp(left, count - 1 - right)
        return (other >= middle - left) & (other <= middle + right)

    def sliding_tiles(b, h, q_idx, kv_idx):
        """Tiles of a picture that see the tiles around, two in each direction; the text after it sees all."""
        (q_row, q_col), (kv_row, kv_col) = ((i // size // across, i // size % across) for i in (q_idx, kv_idx))
        inside = near_tile(q_row, kv_row, 2, HEIGHT // tile_h) & near_tile(q_col, kv_col, 2, across)
        picture, there = (q_idx < pixels) & (kv_idx < pixels), kv_idx < pixels + text
        return (picture & inside) | ((q_idx < pixels) & (kv_idx >= pixels) & there) | ((q_idx >= pixels) & there)

    def frames(b, h, q_idx, kv_idx):
        """Like places of a film's frames, after a prompt: a remainder of negative numbers."""
        q_place, kv_place = (q_idx - prompt) % frame, (kv_idx - prompt) % frame
        return (q_idx < prompt) | (kv_idx < prompt) | (torch.abs(q_place - kv_place) < width * frame // 10)

    return {
        "natten": neighbours(lambda index: (index // WIDTH, index % WIDTH), kernel),
        "tiled natten": neighbours(in_tiles, large),
        "sliding tiles": sliding_tiles,
        "frames": frames,
    }


def blocks(device, clean=160, block=16) -> dict:
    allowed = (torch.rand(BATCH, HEADS, 5, 7, generator=torch.Generator().manual_seed(3)) < 0.5).to(device)

    def block_diffusion(b, h, q_idx, kv_idx):
        q_noised, kv_noised = q_idx < clean, kv_idx < clean
        q_block = torch.where(q_noised, q_idx, q_idx - clean) // block
        kv_block = torch.where(kv_noised, kv_idx, kv_idx - clean) // block
        diagonal = (q_block == kv_block) & (q_noised == kv_noised)
        offset = torch.logical_and(q_block > kv_block, q_noised & ~kv_noised)
        return diagonal | offset | ((q_block >= kv_block) & ~q_noised & ~kv_noised)

    def logical_operations(b, h, q_idx, kv_idx):
        far = torch.logical_not(torch.logical_or(q_idx - kv_idx < 50, kv_idx > q_idx))
        return torch.logical_xor(far, kv_idx % 2 == 0) & torch.where(h % 2 == 0, kv_idx <= q_idx, True)

    return {
        "block diffusion": block_diffusion,
        "logical operations": logical_operations,
        "block table": lambda b, h, q, kv: allowed[b, h, q // 64, kv // 64],
    }


def tables(device, page=32, prompt=270) -> dict:
    """Tensors that are indexed by what other tensors say, by parts of an index, or one dimension at a time."""
    rows, cols = (torch.arange(n, device=device).remainder(5).expand(BATCH, HEADS, n) for n in PLAIN)
    words = torch.randint(-(2**31), 2**31, (Q, 13), generator=torch.Generator().manual_seed(5)).int().to(device)
    place = torch.tensor([[3, -1, 0, 5, 1, -1, 2, 4, -1, 6, -1, 7, -1], [-1, 0, 1, -1, 2, 3, -1] + [-1] * 6])
    place, item_lengths = place.to(device), torch.tensor([250, 111], device=device)
    offsets = torch.tensor([0, 33, 34, 180, 410], device=device)
    sequence = torch.searchsorted(offsets, torch.arange(KV, device=device), right=True) - 1
    ancestor = torch.eye(30, dtype=torch.bool)
    for node in range(1, 30):
        ancestor[node] |= ancestor[(node - 1) // 2]
    ancestor, generator = ancestor.to(device), torch.Generator().manual_seed(7)
    q_score, kv_score = (torch.randn(HEADS, n, generator=generator).to(device, torch.bfloat16) for n in PLAIN)
    threshold = torch.tensor(0.25, device=device)
    lengths_of_blocks = torch.tensor([64, 30, 64, 1, 0, 63, 12], device=device)
    q_tiles, kv_tiles = torch.tensor([2, 0, 3], device=device), torch.tensor([1, 3, 0, 2, 5, 4, 6], device=device)

    def in_sequence(q_side, kv_side):
        """Rows and columns that are tiles of a longer sequence: a tile of either is at one place in it."""

        def mask(b, h, q_idx, kv_idx):
            row = q_tiles[q_idx // q_side] * q_side + q_idx % q_side
            return row >= kv_tiles[kv_idx // kv_side] * kv_side + kv_idx % kv_side

        return mask

    def selected(side):
        """Blocks of columns, of which each row has a list, as bits of words."""

        def mask(b, h, q_idx, kv_idx):
            block = kv_idx // side
            return (words[q_idx, block // 32] >> (block % 32)) & 1 == 1

        return mask

    def paged(b, h, q_idx, kv_idx):
        """Columns of a cache of pages, of which each item has some, in any order."""
        logical = place[b, kv_idx // page] * page + kv_idx % page
        return (logical >= 0) & (logical < item_lengths[b]) & causal(b, h, q_idx, torch.where(logical >= 0, logical, 0))

    def tree(b, h, q_idx, kv_idx):
        """Drafted tokens that see their ancestors, after a prompt that all see."""
        drafted = (q_idx >= prompt) & (kv_idx >= prompt) & (kv_idx < prompt + 30)
        row, col = (q_idx - prompt).clamp(min=0), (kv_idx - prompt).clamp(0, 29)
        return torch.where(kv_idx < prompt, kv_idx <= q_idx, drafted & ancestor[row, col])

    return {
        "two tables one dimension at a time": lambda b, h, q, kv: rows[b][h][q] >= cols[b][h][kv],
        "bits of words": lambda b, h, q, kv: (words[q, kv // 32] >> (kv % 32)) & 1 == 1,
        "selected blocks of 4": selected(4),
        "selected blocks of 16": selected(16),
        "selected blocks of 64": selected(64),
        "blocks of unequal lengths": lambda b, h, q, kv: kv % 64 < lengths_of_blocks[kv // 64],
        "pages": paged,
        "jagged": lambda b, h, q, kv: (kv >= offsets[sequence[q]]) & (kv < offsets[sequence[q] + 1]),
        "tree": tree,
        "tiles of a sequence": in_sequence(128, 128),
        "large and small tiles": in_sequence(256, 64),
        "scores of pairs": lambda b, h, q, kv: q_score[h, q] * kv_score[h, kv] < threshold,
    }


def wrapped(device, size=100) -> dict:
    """Masks of masks, methods and partial functions."""
    offset, inner = torch.tensor(110, device=device), near(11)

    def shifted(inner):
        """Rows of a cache that is longer: the offset is a tensor, as in decoding."""
        return lambda b, h, q, kv: inner(b, h, q + offset, kv)

    def in_groups(b, h, q_idx, kv_idx):
        return (q_idx // size == kv_idx // size) & inner(b, h, q_idx % size, kv_idx % size)

    class Window:
        def __init__(self, size):
            self.size = size

        def mask(self, b, h, q_idx, kv_idx):
            return (q_idx - kv_idx).abs() < self.size

    def within(size, b, h, q_idx, kv_idx):
        return q_idx // size >= kv_idx // size

    methods = and_masks(Window(90).mask, functools.partial(within, 32), or_masks(causal, noop_mask))
    return {
        "shifted": shifted(shifted(and_masks(causal, sliding_window(150)))),
        "groups": in_groups,
        "methods and partials": methods,
    }
