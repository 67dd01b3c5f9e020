"""Attention of transformers' models with the kernels of `attention`.

    from attention.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, attn_implementation="cute_kernels")

Supported without changes: prefill and decode with dynamic, static and sliding caches, left and right padding, packed
batches, sliding-window layers, softcap, bidirectional encoders, grouped-query attention, training without dropout.
Layers that select KV blocks or keys (MiniMax-M3, Qwen4-Exp, DeepSeek-V3.2) call `selected_attention`. `set_block_mask`
sets a custom block mask for layers, `context_parallel` runs a model on a sequence that several processes share.
Unsupported features raise an error, see `attend`.

`experts_implementation="cute_kernels"` runs the dense experts of mixtures of experts by our grouped GEMM.
from_pretrained and save_pretrained also know models with block-sparse and FP8 layers: see `BlockSparseConfig` and
`prepare_saving`.

Requires transformers 5 (`pip install 'cute-kernels[transformers]'`).
"""

from .attention_function import attend
from .block_masks import set_block_mask
from .checkpoints import BlockSparseConfig, prepare_saving, register_checkpoints
from .distributed import context_parallel
from .experts import experts_forward
from .masks import make_mask

__all__ = ["BlockSparseConfig", "context_parallel", "prepare_saving", "register", "set_block_mask"]


RESERVED = (
    "flash", "sdpa", "flex_attention", "eager", "grouped_mm", "batched_mm", "deepgemm", "sonicmoe", "|", "/", ":",
)  # fmt: skip


def register(name: str = "cute_kernels") -> None:
    """Register `attn_implementation=name` and `experts_implementation=name` with transformers.

    Both are arguments of from_pretrained and from_config; models also have set_attn_implementation and
    set_experts_implementation. Registers an attention function and its mask function, an experts function, and
    checkpoints of models with block-sparse layers (BlockSparseConfig, quant_method "cute_kernels"), for the whole
    process. Repeated calls have no effect.

    Raises:
        ValueError: the name is empty or contains a word or separator that transformers reserves.
    """
    import transformers
    from transformers.integrations.moe import ExpertsInterface

    if any(part in name for part in RESERVED) or not name:
        raise ValueError(
            "name must not be empty or contain a word or separator that transformers reserves "
            f"({', '.join(RESERVED)}), got {name!r}; use 'cute_kernels'"
        )
    transformers.AttentionInterface.register(name, attend)
    transformers.AttentionMaskInterface.register(name, make_mask)
    ExpertsInterface.register(name, experts_forward)
    register_checkpoints()
