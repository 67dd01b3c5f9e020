"""A model of Llama's shape trained on 32k tokens at a time, whose mask is a window, global tokens and documents.

The model is transformers' with random weights, and its tokens are bytes. Candidates differ in its attention alone; each
begins with the same weights and sees the same text.
"""

import gc
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from bench.peers import needs
from bench.peers_attention import FA4, FLEX
from bench.peers_attention_backward import compiled
from bench.rows import reason

from ..long_context import DOCUMENTS
from .model import BYTES
from .runs import SEED, Clock, windows_at

OURS, SDPA, PACKED = "ours", "SDPA, dense mask", f"{FA4}, documents alone"
SAME_MASK = OURS, FLEX, SDPA  # whose losses are to agree


@dataclass(frozen=True)
class LongPlan:
    """What all candidates share."""

    length: int = 32768
    window: int = 1024  # the last keys that each token sees, its own among them
    global_tokens: int = 512  # the first ones, which all see
    layers: int = 8
    dim: int = 4096
    hidden: int = 11008  # of its feed-forward layers
    heads: int = 32
    kv_heads: int = 8
    warmup: int = 3
    timed: int = 5
    slow_steps: int = 3  # of SDPA, which skips nothing
    rate: float = 2e-5  # of AdamW, without a warm-up; at 3e-4 the large model's loss rose

    def starts(self) -> list[int]:
        """Where documents begin, and where the last one ends."""
        return [round(self.length * sum(DOCUMENTS[:i])) for i in range(len(DOCUMENTS) + 1)]


GPU = LongPlan()
CPU = LongPlan(256, 32, 8, layers=2, dim=64, hidden=96, heads=4, kv_heads=2, warmup=1, timed=3, rate=3e-4)


@dataclass
class LongRun:
    """One candidate: a loss for each step, in nats a byte; `error` instead where it cannot run."""

    name: str
    loss: list[float] = field(default_factory=list)
    step_ms: float = math.nan  # median of the timed ones: forward, backward and optimizer
    peak_bytes: int | None = None  # on a GPU
    error: str = ""


def seen_by(plan: LongPlan, device: torch.device) -> Callable:
    """FlexAttention's mask_mod: a token sees its document, the last `window` tokens and the global ones before it."""
    starts = torch.tensor(plan.starts()[1:-1], device=device)
    document = torch.bucketize(torch.arange(plan.length, device=device), starts, right=True).int()

    def seen(b, h, q, kv):
        near = (q - kv < plan.window) | (kv < plan.global_tokens)
        return (kv <= q) & (near | (document[q] == document[kv]))

    return seen


def block_mask(plan: LongPlan, device: torch.device) -> BlockMask:
    """The mask as users hold it."""
    return create_block_mask(seen_by(plan, device), None, None, plan.length, plan.length, device=device)


def dense_mask(plan: LongPlan, device: torch.device) -> Tensor:
    """(1, 1, length, length) bool"""
    at = torch.arange(plan.length, device=device, dtype=torch.int32)
    return seen_by(plan, device)(0, 0, at[:, None], at)[None, None]


# -- attention of the candidates, as transformers calls it ---------------------------------------------------


def by_flex(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scaling: float, **_) -> tuple:
    """FlexAttention, on a GPU compiled."""
    attend = compiled(("long", q.shape, k.shape), False) if q.is_cuda else flex_attention
    return attend(q, k, v, block_mask=mask, scale=scaling, enable_gqa=True).transpose(1, 2).contiguous(), None


def by_packed(plan: LongPlan, device: torch.device) -> Callable:
    """FA4's function of packed sequences: it cannot take the mask, but the documents in it, which is less work."""
    attend = needs("flash_attn.cute.interface", "flash-attn-4").flash_attn_varlen_func
    starts = plan.starts()
    cu = torch.tensor(starts, dtype=torch.int32, device=device)
    longest = max(after - begin for begin, after in zip(starts, starts[1:], strict=False))
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def run(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask, scaling: float, **_) -> tuple:
        rows = (t.transpose(1, 2).squeeze(0) for t in (q, k, v))  # (S, H, D)
        return attend(*rows, **packed, causal=True, softmax_scale=scaling)[0][None], None

    return run


def prepared(name: str, plan: LongPlan, device: torch.device) -> tuple[str, BlockMask | Tensor]:
    """(transformers' name of a candidate's attention, the mask that the model is given)"""
    transformers = needs("transformers", "transformers")
    from attention.integrations.transformers import register

    if name == SDPA:
        return "sdpa", dense_mask(plan, device)
    mask = block_mask(plan, device)
    if name == OURS:
        register()
        return "cute_kernels", mask
    known = "demo_flex" if name == FLEX else "demo_packed"
    transformers.AttentionInterface.register(known, by_flex if name == FLEX else by_packed(plan, device))
    return known, mask


# -- training ------------------------------------------------------------------------------------------------


def new_model(plan: LongPlan, implementation: str, device: torch.device) -> nn.Module:
    """In bf16 on a GPU, in fp32 on a CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=BYTES, hidden_size=plan.dim, intermediate_size=plan.hidden, num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads, num_key_value_heads=plan.kv_heads, head_dim=plan.dim // plan.heads,
        max_position_embeddings=plan.length, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(SEED)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        return LlamaForCausalLM._from_config(config, attn_implementation=implementation, dtype=dtype).train()


def train(name: str, plan: LongPlan, text: Tensor, tell: Callable[[int, float], None]) -> LongRun:
    """One candidate on the device of text (bytes,); tell(step, loss) after each step.

    Raises:
        Exception: ours cannot run. Others' reasons are in LongRun.error.
    """
    run = LongRun(name)
    try:
        steps_of(run, plan, text, tell)
    except Exception as error:
        if name == OURS:
            raise
        run.error = reason(error)
    gc.collect()
    if text.is_cuda:
        torch.cuda.empty_cache()
    return run


def steps_of(run: LongRun, plan: LongPlan, text: Tensor, tell: Callable[[int, float], None]) -> None:
    """Fill in a run."""
    device, gpu = text.device, text.is_cuda
    implementation, mask = prepared(run.name, plan, device)
    model = new_model(plan, implementation, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.rate, fused=gpu)
    warmup, steps = plan.warmup, plan.warmup + plan.timed
    if run.name == SDPA:
        warmup, steps = 1, plan.slow_steps
    order = torch.Generator().manual_seed(SEED)
    starts = torch.randint(len(text) - plan.length, (plan.warmup + plan.timed, 1), generator=order).to(device)
    clock, times = Clock(device), []
    if gpu:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
    for step in range(steps):
        tokens = windows_at(text, starts[step], plan.length + 1).long()  # (1, length + 1)
        clock.mark()
        logits = model(tokens[:, :-1], attention_mask=mask).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[0, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.mark()
        times += clock.read()
        run.loss.append(loss.item())
        tell(step + 1, run.loss[-1])
    run.step_ms = statistics.median(times[warmup:])
    run.peak_bytes = torch.cuda.max_memory_allocated() if gpu else None


def difference(runs: list[LongRun]) -> float:
    """The largest of losses at the same step, over the loss, between ours and the others with the same mask."""
    losses = {run.name: run.loss for run in runs if run.name in SAME_MASK and not run.error}
    pairs = [pair for name in losses if name != OURS for pair in zip(losses[OURS], losses[name], strict=False)]
    return max((abs(a - b) / b for a, b in pairs), default=math.nan)
