"""context_parallel_attention: attention of one process's queries, with the keys and values of all that they see."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypedDict, Unpack, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cute_kernels.runtime.torch_compat import without_modes

from .. import checks
from ..masks.mask_mods import position_in
from ..masks.score_mod import WHAT, bound
from ..masks.score_mods import Bias
from ..operands import autocast
from .check import awaits_comparison, compare_call, name_of_score
from .passes import ContextParallelPasses
from .plan import ContextParallelPlan

OP = "context_parallel_attention"


@dataclass(frozen=True, eq=False)
class ScoreAtPositions:
    """A score_mod for rows and columns that are tiles of a longer sequence: it is called with the positions there.

    q_tiles, k_tiles: int32 numbers of the tiles, of `tile` rows or columns, in the whole sequence of `length`.
    """

    score_mod: Callable
    q_tiles: Tensor
    k_tiles: Tensor
    tile: int
    length: int

    def __call__(self, score, b, h, q, kv):
        q, kv = position_in(self.q_tiles, self.tile, q), position_in(self.k_tiles, self.tile, kv)
        last = self.length - 1
        return self.score_mod(score, b, h, q.clamp(max=last), kv.clamp(max=last))


class Call(NamedTuple):
    """Arguments of context_parallel_attention besides the plan."""

    q: Tensor
    k: Tensor
    v: Tensor
    softcap: float | None
    scale: float | None
    return_lse: bool
    deterministic: bool | None
    score_mod: Callable | None
    keep_kv: bool
    reduce_dtype: torch.dtype

    def options(self) -> tuple:
        """All but q, k and v; of score_mod whether there is one."""
        flags = self.return_lse, self.deterministic, self.score_mod is None, self.keep_kv
        return self.softcap, self.scale, *flags, self.reduce_dtype


# plan -> shapes, dtypes and options of its latest call, which was checked; the next layer's are the same
CHECKED: WeakKeyDictionary[ContextParallelPlan, tuple] = WeakKeyDictionary()


class Options(TypedDict, total=False):
    """Keyword arguments of context_parallel_attention besides return_lse."""

    softcap: float | None
    scale: float | None
    deterministic: bool | None
    score_mod: Callable | None
    keep_kv: bool
    reduce_dtype: torch.dtype


@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ContextParallelPlan,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: ContextParallelPlan, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: ContextParallelPlan, *, return_lse: bool, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ContextParallelPlan,
    *,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    score_mod: Callable | None = None,
    keep_kv: bool = False,
    reduce_dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a sequence that several processes share: of this process's queries over all keys that they see.

    Each process calls it with its shards, as plan.shard makes them. Keys and values move as far as the plan's mask
    needs them, once per forward pass, and their gradients back.

    Args:
        q: (B, H, L, D) bfloat16 or float16, L = plan.local_length: the queries of this process.
        k, v: (B, Hkv, L, D) and (B, Hkv, L, Dv): the keys and values of the same tokens.
        plan: see plan_context_parallel. Masks are part of it: causal, windows, packed sequences.
        softcap, scale, return_lse, deterministic: see attention.
        score_mod: see attention; it gets positions in the whole sequence, so a tensor that it indexes by q or kv is
            that of the whole sequence. Tensors that it captures get no gradients.
        reduce_dtype: dtype in which the processes' parts of the gradients of k and v move: torch.float32, or q's dtype,
            which moves half the bytes and rounds each part. The parts are added in float32.
        keep_kv: True to keep the keys and values of other processes for backward, False to move them again. A compiled
            call in one stage keeps them in any case.

    Returns:
        (B, H, L, Dv) with q's dtype, and with return_lse an lse (B, H, L). Rows of padding are 0.

    Differentiable once in q, k and v. All processes must call it, and its backward, in the same order. Shapes, dtypes,
    keep_kv, reduce_dtype, scale, softcap and whether a gradient is required must be the same on all: the first eager
    call with a plan compares them, which synchronizes; later calls do not. Calls that torch.compile traces or a CUDA
    graph captures are not compared, nor those with a plan that was made with check=False.
    torch.compile traces it without graph breaks, and compiles it again if other numbers of tiles move. Under
    torch.autocast q, k and v are cast as by attention.

    Raises:
        TypeError, ValueError: see block_sparse_attention; or L is not that of the plan, or score_mod indexes a tensor
            by q or kv that is shorter than the whole sequence. torch.compile finds that for score_mods.Bias only.
        IndexError: a tensor that score_mod indexes by b or h is too short.
        RuntimeError: a tensor that score_mod captures requires a gradient; or, in the call that is compared, the
            processes' arguments differ, or another process raised one of these errors.

    Example:
        >>> plan = plan_context_parallel(mesh=mesh, length=65536, causal=True)
        >>> q, k, v = (plan.shard(t, dim=2) for t in (q, k, v))
        >>> out = context_parallel_attention(q, k, v, plan)
    """
    if not isinstance(plan, ContextParallelPlan):
        raise TypeError(f"{OP}: plan must be what plan_context_parallel returns, got {type(plan).__name__}")
    call = Call(q, k, v, softcap, scale, return_lse, deterministic, score_mod, keep_kv, reduce_dtype)
    if not is_compiling() and awaits_comparison(plan):
        with without_modes():  # a recomputation of this call, which is not compared, runs the same operations
            compare_call(OP, plan, lambda: _described(call, plan))
    call = _prepared(call, plan)
    options = {"softcap": softcap, "scale": scale, "deterministic": deterministic, "score_mod": call.score_mod}
    out, lse = ContextParallelPasses.apply(call.q, call.k, call.v, plan, options, keep_kv, reduce_dtype)
    return (out, lse) if return_lse else out


def _prepared(call: Call, plan: ContextParallelPlan) -> Call:
    """Check this process's arguments. Returns them with q, k and v cast and a score_mod of the buffer's positions."""
    for name, t in (("q", call.q), ("k", call.k), ("v", call.v)):
        if not isinstance(t, Tensor) or t.dim() != 4 or t.shape[2] != plan.local_length:
            got = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
            raise ValueError(
                f"{OP}: {name} must be (B, H, {plan.local_length}, D), the shard of this process; got {got}; "
                "plan.shard(x, dim=2) makes it"
            )
    q, k, v = autocast(call.q, call.k, call.v)
    call, score_mod = call._replace(q=q, k=k, v=v), call.score_mod
    if is_compiling():
        _check_options(call)  # the op checks tensors
    else:
        seen = *((t.shape, t.dtype, t.device, t.stride(-1)) for t in (q, k, v)), *call.options()
        if CHECKED.get(plan) != seen:
            _check_options(call)
            k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (k, v))  # as it will be moved
            checks.check_qkv(OP, q, k, v)
            checks.check_mask_heads(OP, "the plan's mask", plan.mask, q)
            CHECKED[plan] = seen
    if score_mod is not None:
        _check_score(score_mod, q, plan.length)
        score_mod = ScoreAtPositions(score_mod, *plan.numbers, plan.tile, plan.length)
    return call._replace(score_mod=score_mod)


def _check_options(call: Call) -> None:
    for name, flag in (("return_lse", call.return_lse), ("keep_kv", call.keep_kv)):
        if not isinstance(flag, bool):
            raise TypeError(f"{OP}: {name} must be True or False, got {flag!r}")
    checks.check_deterministic(OP, call.deterministic)
    checks.check_scale(OP, call.scale, call.softcap)
    if call.reduce_dtype not in (torch.float32, call.q.dtype):
        raise TypeError(
            f"{OP}: reduce_dtype must be torch.float32 or q's dtype, {call.q.dtype}, got {call.reduce_dtype!r}"
        )
    if call.score_mod is not None and call.softcap is not None:
        raise ValueError(f"{OP}: score_mod excludes softcap; write c * torch.tanh(score / c) in the score_mod")


def _check_score(score_mod: Callable, q: Tensor, length: int) -> None:
    """Check the tensors that a score_mod captures: without gradients, and as long as the whole sequence."""
    short = ""
    if is_compiling():
        from ..masks.function_text import written  # imports torch's compiler

        wants_gradients = any(t.requires_grad for t in written(score_mod, WHAT)[-1])
        if isinstance(score_mod, Bias) and any(n != 1 and n < length for n in score_mod.bias.shape[2:]):
            short = f"score_mod adds a bias of shape {tuple(score_mod.bias.shape)} to scores of {length} tokens"
    else:
        traced = bound(score_mod, q.device)
        wants_gradients = traced.wants_gradients
        try:
            traced.check(q.shape[0], q.shape[1], (length, length))
        except IndexError as error:
            traced.check(q.shape[0], q.shape[1], (1, 1))  # raises if it is b or h
            short = str(error)
    if wants_gradients:
        raise RuntimeError(f"{OP}: tensors that score_mod captures get no gradients here; detach() them")
    if short:
        raise ValueError(
            f"{OP}: {short}; q and kv are positions in the whole sequence, so capture the tensor of the whole "
            "sequence, or compute the score from positions, as score_mods.Alibi"
        )


def _described(call: Call, plan: ContextParallelPlan) -> dict:
    """Check this process's arguments. Returns those that must be the same in all processes, by name."""
    prepared = _prepared(call, plan)
    tensors = {"q": prepared.q, "k": prepared.k, "v": prepared.v}
    stated: dict = {name: f"{tuple(t.shape)} {t.dtype} ({t.device.type})" for name, t in tensors.items()}
    stated["requires_grad"] = torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values())
    stated |= {name: getattr(call, name) for name in ("reduce_dtype", "keep_kv", "scale", "softcap")}
    return stated | {"score_mod": name_of_score(call.score_mod, call.q.device)}
