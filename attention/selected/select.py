"""select_blocks: the KV blocks with the largest scores of an indexer, as lists for selected_attention."""

from typing import Literal

from torch import Tensor
from torch.compiler import is_compiling

from .checks import check_block_size
from .top_blocks import lists_of

OP = "select_blocks"


def select_blocks(
    q_index: Tensor,
    k_index: Tensor,
    top: int,
    block_size: int,
    *,
    causal: bool = False,
    local: int = 0,
    initial: int = 0,
    pool: Literal["mean", "max"] = "mean",
    activation: Literal["relu"] | None = None,
    groups: int | None = None,
) -> Tensor:
    """Select the `top` KV blocks with the largest scores for each query token.

    The score of a token and a block is the sum over the indexer's heads of activation(q_index @ k_index.T), with
    k_index averaged over the block (pool="mean"), or its maximum over the keys of the block (pool="max"). Averages are
    computed in FP32 and rounded to k_index's dtype. Products are accumulated and added in FP32, and scores are FP32.
    On a GPU 16-bit operands are multiplied by tensor cores; without an activation the sum of the heads is rounded to
    two 16-bit numbers, so that its relative error is 2^-17 in BF16.

    | model | heads of q_index, k_index | arguments |
    | --- | --- | --- |
    | QSA | 4, 1 | block_size=4, pool="mean", activation="relu", local=1 |
    | MSA | Hkv, 1 or Hkv | block_size=128, pool="max", groups=Hkv, local=1 |

    Args:
        q_index: (B, heads, Sq, D), floating point.
        k_index: (B, 1 or groups, Sk, D), of q_index's dtype.
        top: length of the lists.
        block_size: tokens of a KV block: 1, 4, 16, 64 or 128.
        causal: True if row i, at position p = i + Sk - Sq, selects among blocks with a key up to p. With pool="max"
            later keys do not count. With pool="mean" blocks that end after p, whose average contains later keys, are
            selected by `local` only.
        local, initial: number of newest visible blocks, and of first blocks, that are always selected. They count in
            `top`.
        activation: "relu", or None for the scores as they are.
        groups: number of lists per token; heads of q_index are split into so many groups of consecutive heads, each
            with its own scores. None: one list, for all heads.

    Returns:
        (B, Sq, top) int32, or (B, Sq, groups, top): ascending blocks, padded with -1 where a token has fewer. Of equal
        scores the first block is selected, so results are identical on every run. NaN counts as the largest score, as
        in torch.topk, and a block whose scores have a NaN among them has NaN as their maximum, sum or average.

    Does not synchronize, and can be captured in a CUDA graph. The result has no gradient. GPUs need up to 512 MB of
    memory for the scores. Lists of more than 8,192 blocks (sm_86, sm_89: 4,096) are selected by torch.topk.

    Raises:
        TypeError, ValueError: an argument has an unsupported type, dtype, shape or value.

    Example:
        q_index = torch.randn(1, 4, 1024, 128, device="cuda", dtype=torch.bfloat16)
        k_index = torch.randn(1, 1, 1024, 128, device="cuda", dtype=torch.bfloat16)
        indices = select_blocks(q_index, k_index, 64, 4, causal=True, local=1, activation="relu")  # (1, 1024, 64)
    """
    _check(q_index, k_index, top, block_size, causal, local, initial, pool, activation, groups)
    terms = top, block_size, causal, local, initial, pool, activation, groups or 1
    if is_compiling() or q_index.is_meta:
        from .select_op import select_blocks as lists  # imports torch's compiler, which takes seconds
    else:
        lists = lists_of
    found = lists(q_index.detach(), k_index.detach(), *terms)
    return found if groups is not None else found.squeeze(2)


def _check(q_index, k_index, top, block_size, causal, local, initial, pool, activation, groups) -> None:
    for name, tensor in (("q_index", q_index), ("k_index", k_index)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{OP}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4 or not tensor.is_floating_point():
            raise ValueError(
                f"{OP}: {name} must be a floating-point (batch, heads, length, head_dim), got {tuple(tensor.shape)} "
                f"{tensor.dtype}"
            )
    if k_index.device != q_index.device:
        raise ValueError(f"{OP}: k_index is on {k_index.device}, q_index on {q_index.device}; move one with .to()")
    if k_index.dtype != q_index.dtype:
        raise TypeError(f"{OP}: k_index is {k_index.dtype} but q_index is {q_index.dtype}; cast one of them")
    for name, value, least in (("top", top, 1), ("local", local, 0), ("initial", initial, 0), ("groups", groups, 1)):
        if value is None and name == "groups":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{OP}: {name} must be an int of at least {least}, got {value!r}")
    if local + initial > top:
        raise ValueError(f"{OP}: local + initial must be at most top, got {local} + {initial} and {top}")
    check_block_size(block_size, OP)
    if not isinstance(causal, bool):
        raise TypeError(f"{OP}: causal must be True or False, got {causal!r}")
    if pool not in ("mean", "max"):
        raise ValueError(f'{OP}: pool must be "mean" or "max", got {pool!r}')
    if activation not in (None, "relu"):
        raise ValueError(f'{OP}: activation must be "relu" or None, got {activation!r}')
    (batch, heads, _, width), lists = q_index.shape, groups or 1
    if heads < 1 or heads % lists or k_index.shape[1] not in (1, lists):
        raise ValueError(
            f"{OP}: the heads of q_index must be at least 1 and a multiple of groups ({lists}), and those of k_index 1 "
            f"or groups; got {heads} and {k_index.shape[1]}"
        )
    if k_index.shape[0] != batch or k_index.shape[3] != width:
        raise ValueError(
            f"{OP}: q_index {tuple(q_index.shape)} and k_index {tuple(k_index.shape)} must have the same batch "
            "size and head_dim"
        )
