"""Lists of KV blocks that look like a trained model's, for tests and benchmarks of selected-block attention.

Neighboring query tokens of trained models select mostly the same blocks: in served QSA and MSA models the lists of
tokens t and t + 1 have a Jaccard similarity (common blocks over all blocks of both) of 0.87 to 0.94. Independent random
lists have none of it. A benchmark states the similarity of its lists.
"""

from functools import cache

import torch
from torch import Tensor

SAMPLES = 64  # tokens from which the correlation for a similarity is estimated


def similar_lists(
    tokens: int, blocks: int, top: int, *, groups: int = 1, similarity: float = 0.9, causal: bool = True,
    local: int = 1, initial: int = 1, seed: int = 0, device: torch.device | str = "cpu", stretch: int | None = None,
) -> Tensor:  # fmt: skip
    """Lists of blocks (tokens, groups, top) int32, ascending, padded with -1 where fewer than `top` blocks are visible.

    Each token gives each block a score, which is correlated with that of the token before, and takes the blocks with
    the largest scores.

    Args:
        similarity: the mean Jaccard similarity to aim at; 0: independent lists.
        causal: True if token t sees the blocks up to t * blocks // tokens; False if it sees all.
        local, initial: number of newest visible blocks and of first blocks that every list contains.
        stretch: number of consecutive tokens after which scores start anew. Stretches are drawn side by side, which
            takes as many steps as one of them has tokens. None: all tokens are one stretch.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    rho, kept = correlation(similarity, blocks, min(top, blocks)), min(top, blocks)
    stretch = tokens if stretch is None else stretch
    firsts = torch.arange(0, tokens, stretch, device=device)
    score = torch.randn(len(firsts), groups, blocks, generator=generator, device=device)
    lists = torch.full((len(firsts), stretch, groups, top), -1, dtype=torch.int32, device=device)
    ids = torch.arange(blocks, device=device)
    for t in range(stretch):
        noise = torch.randn(score.shape, generator=generator, device=device)
        score = rho * score + (1 - rho * rho) ** 0.5 * noise
        newest = (firsts + t) * blocks // tokens if causal else firsts * 0 + blocks - 1
        newest = newest.clamp(max=blocks - 1)[:, None, None]  # the last stretch may be shorter
        ranked = score.masked_fill((ids < initial) | (ids > newest - local), float("inf"))
        best = ranked.masked_fill(ids > newest, float("-inf")).topk(kept, sorted=False)
        index = best.indices.masked_fill(best.values == float("-inf"), blocks).sort().values
        lists[:, t, :, :kept] = index.masked_fill(index == blocks, -1)
    return lists.flatten(0, 1)[:tokens]


def mean_similarity(lists: Tensor, samples: int = 1000) -> float:
    """Mean Jaccard similarity of the lists of neighboring tokens in the second half, (tokens, groups, top)."""
    tokens = len(lists)
    token = torch.linspace(tokens // 2, tokens - 2, min(samples, tokens // 2), device="cpu").long().to(lists.device)
    found = []
    for pair in zip(*(lists[t].flatten(0, 1).tolist() for t in (token, token + 1)), strict=True):
        first, second = ({block for block in one if block >= 0} for one in pair)
        found.append(len(first & second) / max(len(first | second), 1))
    return sum(found) / max(len(found), 1)


@cache
def correlation(similarity: float, blocks: int, top: int) -> float:
    """The correlation of neighboring tokens' scores that gives lists this similarity, by bisection on samples."""
    if similarity == 0:
        return 0.0
    generator = torch.Generator(device="cpu").manual_seed(0)
    first, noise = torch.randn(2, SAMPLES, blocks, generator=generator)
    one = _largest(first, top)
    low, high = 0.0, 1.0
    for _ in range(20):
        rho = (low + high) / 2
        two = _largest(rho * first + (1 - rho * rho) ** 0.5 * noise, top)
        common = ((one & two).sum(1) / (one | two).sum(1)).mean()
        low, high = (rho, high) if common < similarity else (low, rho)
    return low


def _largest(score: Tensor, top: int) -> Tensor:
    return torch.zeros_like(score, dtype=torch.bool).scatter_(1, score.topk(top).indices, True)
