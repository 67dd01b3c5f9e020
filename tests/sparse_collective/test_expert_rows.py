"""Kernels that move the rows of a mixture of experts, on the emulator and on GPUs; all ranks' buffers on one device."""

import contextlib

import pytest
import torch

from cute_kernels.testing.reference import poisoned
from sparse_collective.expert_rows import dispatch
from sparse_collective.nn.feed_forward import combined, sorted_choices

from ..attention.test_selected_tables import WHERE

GROUP_ROWS = 16
CASES = {  # tokens of each rank, experts of a rank, k, columns
    "two ranks": ([23, 40], 2, 2, 72),
    "one rank has none": ([0, 37, 5], 3, 3, 520),
    "one rank": ([30], 5, 1, 8),
    "experts without tokens": ([3, 1], 17, 2, 1096),
}
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "autocast": (torch.float32, torch.bfloat16),
}


class Simulated:
    """The ranks of a call, one after another: what each has published, and the layouts as torch fills them."""

    def __init__(self, tokens, each, k, columns, dtype, device):
        generator = torch.Generator().manual_seed(1)
        self.each, self.k, self.ranks, experts = each, k, len(tokens), len(tokens) * each
        self.tokens, self.most, self.device = tokens, max(tokens), device
        self.choices = [torch.randint(experts, (n, k), generator=generator) for n in tokens]
        sorted_keys, self.orders = zip(*(sorted_choices(c, experts) for c in self.choices), strict=True)
        numbers = torch.arange(experts + 2)
        self.table = torch.stack([torch.searchsorted(keys.long(), numbers) for keys in sorted_keys])
        self.x = [torch.randn(n, columns, generator=generator).to(dtype) for n in tokens]
        self.weights = [torch.rand(n, k, generator=generator) for n in tokens]
        self.layouts = [self.layout_of(rank) for rank in range(self.ranks)]

    def layout_of(self, rank):
        """(rank, choice) in each row of the layout of a rank's experts, None in padding."""
        rows = []
        for e in range(rank * self.each, (rank + 1) * self.each):
            for r, line in enumerate(self.table.tolist()):
                rows += [(r, int(choice)) for choice in self.orders[r][line[e] : line[e + 1]]]
            rows += [None] * (-len(rows) % GROUP_ROWS)
        return rows

    def filled(self, rank, values):
        """(rows, ...) values[r][choice] in the rows of a layout, and zeros."""
        zero = torch.zeros_like(torch.cat(values)[0])
        rows = [zero if row is None else values[row[0]][row[1]] for row in self.layouts[rank]]
        return torch.stack(rows) if rows else zero.new_empty(0, *zero.shape)

    def per_choice(self, values):
        """(T * k, ...) for each rank, of (T, ...)."""
        return [v.repeat_interleave(self.k, 0) for v in values]

    def published(self, x):
        """Buffers of all ranks: x, order and weights; and the bytes at which the latter begin."""
        order_at = self.most * x[0].shape[1] * x[0].element_size()
        weights_at = order_at + self.most * self.k * 8
        buffers = []
        for parts in zip(x, self.orders, self.weights, strict=True):
            buffer = torch.full((weights_at + self.most * self.k * 4,), 0xFF, dtype=torch.uint8)
            for at, part in zip((0, order_at, weights_at), parts, strict=True):
                raw = part.contiguous().flatten().view(torch.uint8)
                buffer[at : at + len(raw)] = raw
            buffers.append(buffer)
        return buffers, order_at, weights_at

    def shared(self, tensors):
        """The tensors on the device, and their addresses."""
        tensors = [t.to(self.device) for t in tensors]
        return tensors, torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64).to(self.device)


@contextlib.contextmanager
def place_of(where, memory=()):
    """Run kernels there; they may read `memory`."""
    from ..emulator.ops import on_emulator

    with contextlib.nullcontext() if where == "cuda" else on_emulator(where, sms=2, memory=tuple(memory)):
        yield


def places_of(where, ranks):
    """Places and segments of all ranks."""
    with place_of(where):
        return [
            dispatch.places_of(ranks.table.to(ranks.device), order.to(ranks.device), rank, ranks.k, GROUP_ROWS)
            for rank, order in enumerate(ranks.orders)
        ]


def made(where, name, dtype=torch.bfloat16):
    tokens, each, k, columns = CASES[name]
    return Simulated(tokens, each, k, columns, dtype, "cuda" if where == "cuda" else "cpu")


@pytest.mark.parametrize("name", CASES)
@WHERE
def test_places(where, name):
    ranks = made(where, name)
    found = places_of(where, ranks)
    for owner, rows in enumerate(ranks.layouts):
        for row, choice in enumerate(rows):
            if choice is not None:
                assert found[choice[0]][0][choice[1]].item() == (owner << 32) + row
        assert found[owner][1].firsts[-1] == len(rows)


@pytest.mark.parametrize("name", CASES)
@WHERE
def test_no_segments_if_a_rank_has_too_many_tokens(where, name):
    """Nothing is read of ranks then, and the layout is padding; places are those of any layout."""
    ranks = made(where, name)
    right = places_of(where, ranks)
    for tokens in (ranks.most, ranks.most - 1):
        for rank, order in enumerate(ranks.orders):
            with place_of(where):
                places, segments = dispatch.places_of(
                    ranks.table.to(ranks.device), order.to(ranks.device), rank, ranks.k, GROUP_ROWS, tokens
                )
                nowhere = torch.zeros(ranks.ranks, dtype=torch.int64, device=ranks.device)
                if tokens < ranks.most:
                    out, ids = dispatch.to_layout(nowhere, segments, 2 * GROUP_ROWS, 8, torch.bfloat16, 0)
                    assert not out.any() and (ids == ranks.each).all() and not segments.firsts.any()
                else:
                    assert torch.equal(segments.firsts, right[rank][1].firsts)
            assert torch.equal(places, right[rank][0])


@WHERE
def test_choices_of_no_expert(where):
    """They have no place, and add nothing."""
    ranks = made(where, "one rank")
    choices = torch.tensor([[0, 5], [-1, 4], [2, 2]])
    keys, order = sorted_choices(choices, 5)
    table = torch.searchsorted(keys.long(), torch.arange(7))[None].to(ranks.device)
    layout = torch.randn(5 * GROUP_ROWS, 8).bfloat16().to(ranks.device)
    pointers = torch.tensor([layout.data_ptr()]).to(ranks.device)
    with place_of(where, [layout]):
        places, _ = dispatch.places_of(table, order.to(ranks.device), 0, 2, GROUP_ROWS)
        out = dispatch.from_layouts(pointers, places, None, layout.dtype, layout.new_empty(3, 8), 2)
    assert places.tolist() == [0, -1, -1, 2 * GROUP_ROWS, GROUP_ROWS, GROUP_ROWS + 1]
    assert torch.equal(out[0], layout[0]) and torch.equal(out[1], layout[2 * GROUP_ROWS])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", CASES)
@WHERE
def test_tokens_to_layouts(where, name, dtype):
    """Bitwise, and zeros in padding."""
    ranks = made(where, name, DTYPES[dtype][0])
    buffers, order_at, _ = ranks.published(ranks.x)
    buffers, pointers = ranks.shared(buffers)
    for rank, (_, segments) in enumerate(places_of(where, ranks)):
        rows, columns = len(ranks.layouts[rank]), ranks.x[0].shape[1]
        with place_of(where, buffers):
            out, ids = dispatch.to_layout(pointers, segments, rows, columns, ranks.x[0].dtype, order_at)
        assert torch.equal(out.cpu(), ranks.filled(rank, ranks.per_choice(ranks.x)))
        runs = ranks.filled(rank, [c.flatten() for c in ranks.choices])[::GROUP_ROWS] - rank * ranks.each
        assert ids.tolist() == runs.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
@WHERE
def test_sums_of_layouts(where, name, dtype):
    """Bitwise those of nn.feed_forward.combined, and without weights those of torch."""
    wide, narrow = DTYPES[dtype]
    ranks = made(where, name, wide)
    columns = ranks.x[0].shape[1]
    layouts, pointers = ranks.shared([torch.randn(len(rows), columns).to(narrow) for rows in ranks.layouts])
    for rank, (places, _) in enumerate(places_of(where, ranks)):
        rows = torch.empty(ranks.tokens[rank] * ranks.k, columns, dtype=narrow)
        for layout, numbers in zip(layouts, ranks.layouts, strict=True):
            for row, choice in enumerate(numbers):
                if choice is not None and choice[0] == rank:
                    rows[choice[1]] = layout[row]
        rows, weights = rows.unflatten(0, (-1, ranks.k)).to(ranks.device), ranks.weights[rank].to(ranks.device)
        for given in (weights, None):
            out = poisoned(ranks.tokens[rank], columns, dtype=wide).to(ranks.device)
            with place_of(where, layouts):
                dispatch.from_layouts(pointers, places, given, narrow, out, ranks.k)
            with torch.no_grad():
                right = combined(rows, torch.ones_like(weights) if given is None else given, wide)
            torch.testing.assert_close(out, right, rtol=0 if where == "cuda" else 1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
@WHERE
def test_gradients(where, name, dtype):
    """Gradients of layouts are rounded once; those of weights come back to their choices."""
    wide, narrow = DTYPES[dtype]
    ranks = made(where, name, wide)
    buffers, order_at, weights_at = ranks.published(ranks.x)
    buffers, pointers = ranks.shared(buffers)
    found, columns = places_of(where, ranks), ranks.x[0].shape[1]
    products = [
        (x[:, None].float() * w[..., None]).to(narrow).flatten(0, 1)
        for x, w in zip(ranks.x, ranks.weights, strict=True)
    ]
    dots, true_dots = [], [torch.zeros(n * ranks.k, dtype=torch.float64) for n in ranks.tokens]
    for rank, (_, segments) in enumerate(found):
        rows = len(ranks.layouts[rank])
        y = torch.randn(rows, columns).to(narrow).to(ranks.device)
        dots.append(torch.full((max(rows, 1),), torch.nan, device=ranks.device))
        with place_of(where, buffers):
            for result, values in ((y, dots[-1][:rows]), (None, None)):
                out = poisoned(rows, columns, dtype=narrow).to(ranks.device)
                dispatch.gradient_of_layout(pointers, segments, wide, order_at, weights_at, out, result, values)
                assert torch.equal(out.cpu(), ranks.filled(rank, products))
        for row, choice in enumerate(ranks.layouts[rank]):
            if choice is not None:
                token = ranks.x[choice[0]][choice[1] // ranks.k].double()
                true_dots[choice[0]][choice[1]] = token @ y[row].cpu().double()
    pointers = torch.tensor([t.data_ptr() for t in dots]).to(ranks.device)
    for (places, _), right in zip(found, true_dots, strict=True):
        with place_of(where, dots):
            out = dispatch.values_of(pointers, places)
        torch.testing.assert_close(out.cpu().double(), right, rtol=1e-4, atol=1e-3)
