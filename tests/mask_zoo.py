"""Masks as users of FlexAttention write them: closures over numbers and tensors, and functions that wrap a mask.

Each entry of ZOO is (lengths, make): make(device) gives the mask_mod of scores (BATCH, HEADS, *lengths).
"""

import functools

import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

BATCH, HEADS = 2, 4
PLAIN, CANVAS = (300, 410), (320, 320)
ZOO = {}


def zoo(lengths=PLAIN):
    """Register a function of the device that makes a mask."""

    def register(make):
        ZOO[make.__name__.replace("_", " ")] = lengths, make
        return make

    return register


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


@zoo()
def noop(device):
    return noop_mask


@zoo((384, 384))
def plain_causal(device):
    return causal


# ---------------------------------------------------------------------- windows


@zoo()
def sliding_window(device, size=70):
    def window(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= size

    return and_masks(window, causal)


@zoo()
def symmetric_window(device, size=33):
    return lambda b, h, q, kv: (q - kv).abs() <= size


@zoo()
def dilated_window(device, size=100, dilation=3):
    def dilated(b, h, q_idx, kv_idx):
        distance = torch.abs(q_idx - kv_idx)
        return (distance <= size) & (distance % dilation == 0)

    return dilated


@zoo()
def strided(device, period=7, width=3):
    return lambda b, h, q, kv: (q - kv) % period < width


@zoo()
def strided_by_a_power_of_two(device):
    return lambda b, h, q, kv: (q - kv) % 8 < 3


@zoo()
def ring(device, width=40):
    length = torch.tensor(410, device=device)  # a modulus that is read when the kernel runs
    return lambda b, h, q, kv: (q - kv) % length <= width


@zoo()
def backwards(device):
    return lambda b, h, q, kv: (kv - q) % -5 > -3


@zoo()
def attention_sinks(device, sinks=4, window=60):
    def sink(b, h, q_idx, kv_idx):
        return kv_idx < sinks

    return and_masks(causal, or_masks(sink, lambda b, h, q, kv: q - kv < window))


@zoo()
def window_by_head(device):
    sizes = torch.tensor([8, 32, 128, 300], device=device)

    def window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx < sizes[h]) & (q_idx >= kv_idx)

    return window


@zoo()
def global_tokens(device):
    is_global = torch.arange(410, device=device) % 97 == 0

    def window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= 20

    return or_masks(window, lambda b, h, q, kv: is_global[q] | is_global[kv])


# ---------------------------------------------------------------------- prefixes, lengths, documents


@zoo()
def prefix_lm(device, prefix=50):
    def inside(b, h, q_idx, kv_idx):
        return kv_idx < prefix

    return or_masks(inside, causal)


@zoo()
def prefix_by_item(device):
    prefix_length = torch.tensor([17, 200], dtype=torch.int32, device=device)

    def inside(b, h, q_idx, kv_idx):
        return kv_idx < prefix_length[b]

    return or_masks(inside, causal)


@zoo()
def padding(device):
    lengths = torch.tensor([123, 300], device=device)
    return lambda b, h, q, kv: (q < lengths[b]) & (kv < lengths[b])


@zoo()
def padding_table(device):
    valid = torch.arange(410, device=device) < torch.tensor([[90], [405]], device=device)
    return lambda b, h, q, kv: valid[b, kv]


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


@zoo()
def documents(device):
    return within_documents(noop_mask, torch.tensor([0, 90, 91, 250, 410], device=device))


@zoo()
def causal_documents(device):
    return within_documents(causal, torch.tensor([0, 64, 200, 410], dtype=torch.int32, device=device))


@zoo()
def prefix_documents(device):
    return within_documents(prefix_lm(device, 20), torch.tensor([0, 130, 410], device=device))


@zoo()
def documents_of_items(device):
    ids = torch.arange(410, device=device) // torch.tensor([[50], [128]], device=device)
    return lambda b, h, q, kv: (ids[b][q] == ids[b][kv]) & (kv <= q)


@zoo()
def shared_prefixes(device):
    offsets = torch.tensor([0, 60, 150, 240, 300, 410], device=device)
    prefix_of = torch.tensor([0, 0, 0, 3, 3], device=device)
    document = document_ids(offsets)

    def shared(b, h, q_idx, kv_idx):
        mine = document[q_idx]
        prefix = prefix_of[mine]
        own = (kv_idx >= offsets[mine]) & (kv_idx <= q_idx)
        before = (mine != prefix) & (kv_idx >= offsets[prefix]) & (kv_idx < offsets[prefix + 1])
        return own | before

    return shared


@zoo()
def images(device):
    """Text rows that see the columns of an image: intervals (images, 2)."""
    intervals = torch.tensor([[0, 40], [40, 200], [150, 300]], device=device)
    image = torch.arange(410, device=device) // 137

    def cross(b, h, q_idx, kv_idx):
        interval = intervals[image[kv_idx]]
        return (q_idx >= interval[0]) & (q_idx < interval[1])

    return cross


# ---------------------------------------------------------------------- pictures and films


@zoo(CANVAS)
def natten(device, width=20, height=16, kernel=5):
    def place(index):
        return index // width, index % width

    def neighbours(b, h, q_idx, kv_idx):
        q_row, q_col = place(q_idx)
        kv_row, kv_col = place(kv_idx)
        row = q_row.clamp(kernel // 2, height - 1 - kernel // 2)
        col = q_col.clamp(kernel // 2, width - 1 - kernel // 2)
        return ((row - kv_row).abs() <= kernel // 2) & ((col - kv_col).abs() <= kernel // 2)

    return neighbours


@zoo(CANVAS)
def tiled_natten(device, width=20, height=16, kernel=7, tile_w=5, tile_h=4):
    across, size = width // tile_w, tile_w * tile_h

    def place(index):
        tile, inside = index // size, index % size
        return tile // across * tile_h + inside // tile_w, tile % across * tile_w + inside % tile_w

    def neighbours(b, h, q_idx, kv_idx):
        (q_row, q_col), (kv_row, kv_col) = place(q_idx), place(kv_idx)
        row = torch.clamp(q_row, kernel // 2, height - 1 - kernel // 2)
        col = torch.clamp(q_col, kernel // 2, width - 1 - kernel // 2)
        return (torch.abs(row - kv_row) <= kernel // 2) & (torch.abs(col - kv_col) <= kernel // 2)

    return neighbours


@zoo((350, 350))
def sliding_tiles(device, canvas=(16, 20), kernel=(8, 10), tile=(4, 5), text=25):
    """Tiles of a picture that see the tiles around; the text after it sees all."""
    tiles = [n // t for n, t in zip(canvas, tile, strict=True)]
    spans = [n // t for n, t in zip(kernel, tile, strict=True)]
    size, pixels = tile[0] * tile[1], canvas[0] * canvas[1]

    def place(index):
        number = index // size
        return number // tiles[1], number % tiles[1]

    def near(mine, other, span, count):
        left, right = span // 2, span // 2 + (span % 2 - 1)
        middle = mine.clamp(left, count - 1 - right)
        return (other >= middle - left) & (other <= middle + right)

    def sta(b, h, q_idx, kv_idx):
        (q_row, q_col), (kv_row, kv_col) = place(q_idx), place(kv_idx)
        inside = near(q_row, kv_row, spans[0], tiles[0]) & near(q_col, kv_col, spans[1], tiles[1])
        picture, there = (q_idx < pixels) & (kv_idx < pixels), kv_idx < pixels + text
        return (picture & inside) | ((q_idx < pixels) & (kv_idx >= pixels) & there) | ((q_idx >= pixels) & there)

    return sta


@zoo(CANVAS)
def frames(device, prompt=30, frame=58, width=2):
    """Rows and columns at like places of the frames of a film, after a prompt: a remainder of negative numbers."""

    def temporal(b, h, q_idx, kv_idx):
        q_place, kv_place = (q_idx - prompt) % frame, (kv_idx - prompt) % frame
        return (q_idx < prompt) | (kv_idx < prompt) | (torch.abs(q_place - kv_place) < width * frame // 10)

    return temporal


# ---------------------------------------------------------------------- blocks and tables


@zoo(CANVAS)
def block_diffusion(device, clean=160, block=16):
    def mask(b, h, q_idx, kv_idx):
        q_noised, kv_noised = q_idx < clean, kv_idx < clean
        q_block = torch.where(q_noised, q_idx, q_idx - clean) // block
        kv_block = torch.where(kv_noised, kv_idx, kv_idx - clean) // block
        diagonal = (q_block == kv_block) & (q_noised == kv_noised)
        offset = torch.logical_and(q_block > kv_block, q_noised & ~kv_noised)
        return diagonal | offset | ((q_block >= kv_block) & ~q_noised & ~kv_noised)

    return mask


@zoo()
def logical_operations(device):
    def mask(b, h, q_idx, kv_idx):
        far = torch.logical_not(torch.logical_or(q_idx - kv_idx < 50, kv_idx > q_idx))
        return torch.logical_xor(far, kv_idx % 2 == 0) & torch.where(h % 2 == 0, kv_idx <= q_idx, True)

    return mask


@zoo()
def block_table(device):
    generator = torch.Generator().manual_seed(3)
    allowed = (torch.rand(BATCH, HEADS, 5, 7, generator=generator) < 0.5).to(device)
    return lambda b, h, q, kv: allowed[b, h, q // 64, kv // 64]


@zoo()
def two_tables_one_dimension_at_a_time(device):
    rows, cols = (torch.arange(n, device=device).remainder(5).expand(BATCH, HEADS, n) for n in PLAIN)
    return lambda b, h, q, kv: rows[b][h][q] >= cols[b][h][kv]


@zoo()
def bits_of_words(device):
    """A bit for each column, 32 to a word."""
    words = torch.randint(-(2**31), 2**31, (300, 13), generator=torch.Generator().manual_seed(5)).int().to(device)
    return lambda b, h, q, kv: (words[q, kv // 32] >> (kv % 32)) & 1 == 1


@zoo()
def pages(device, page=32):
    """Columns of a cache of pages, of which each item has some, in any order: (page -> its place in the item or -1)."""
    place = torch.tensor([[3, -1, 0, 5, 1, -1, 2, 4, -1, 6, -1, 7, -1], [-1, 0, 1, -1, 2, 3, -1] + [-1] * 6])
    place, lengths = place.to(device), torch.tensor([250, 111], device=device)

    def paged(b, h, q_idx, kv_idx):
        logical = place[b, kv_idx // page] * page + kv_idx % page
        return (logical >= 0) & (logical < lengths[b]) & causal(b, h, q_idx, torch.where(logical >= 0, logical, 0))

    return paged


@zoo()
def jagged(device):
    """Rows of items of different lengths, one after another, by offsets that each row looks up."""
    offsets = torch.tensor([0, 33, 34, 180, 410], device=device)
    sequence = torch.searchsorted(offsets, torch.arange(410, device=device), right=True) - 1
    return lambda b, h, q, kv: (kv >= offsets[sequence[q]]) & (kv < offsets[sequence[q] + 1])


@zoo()
def tree(device):
    """Drafted tokens that see their ancestors, after a prompt that all see."""
    ancestor = torch.eye(30, dtype=torch.bool)
    for node in range(1, 30):
        ancestor[node] |= ancestor[(node - 1) // 2]
    ancestor, prompt = ancestor.to(device), 270

    def mask(b, h, q_idx, kv_idx):
        drafted = (q_idx >= prompt) & (kv_idx >= prompt) & (kv_idx < prompt + 30)
        row, col = (q_idx - prompt).clamp(min=0), (kv_idx - prompt).clamp(0, 29)
        return torch.where(kv_idx < prompt, kv_idx <= q_idx, drafted & ancestor[row, col])

    return mask


@zoo()
def scores_of_pairs(device):
    """Floating-point tables and a captured threshold."""
    generator = torch.Generator().manual_seed(7)
    q_score, kv_score = (torch.randn(HEADS, n, generator=generator).to(device, torch.bfloat16) for n in PLAIN)
    threshold = torch.tensor(0.25, device=device)
    return lambda b, h, q, kv: q_score[h, q] * kv_score[h, kv] < threshold


# ---------------------------------------------------------------------- masks of masks


@zoo()
def shifted(device):
    """Rows of a cache that is longer: the offset is a tensor, as in decoding."""
    offset = torch.tensor(110, device=device)

    def wrap(inner):
        def mask(b, h, q_idx, kv_idx):
            return inner(b, h, q_idx + offset, kv_idx)

        return mask

    return wrap(wrap(and_masks(causal, sliding_window(device, 150))))


@zoo()
def groups(device, size=100):
    """A mask inside of each group of rows and columns."""
    inner = symmetric_window(device, 11)

    def grouped(b, h, q_idx, kv_idx):
        return (q_idx // size == kv_idx // size) & inner(b, h, q_idx % size, kv_idx % size)

    return grouped


@zoo()
def methods_and_partials(device):
    class Window:
        def __init__(self, size):
            self.size = size

        def mask(self, b, h, q_idx, kv_idx):
            return (q_idx - kv_idx).abs() < self.size

    def within(size, b, h, q_idx, kv_idx):
        return q_idx // size >= kv_idx // size

    return and_masks(Window(90).mask, functools.partial(within, 32), or_masks(causal, noop_mask))
