"""Attention of transformers' models with the kernels of `attention`.

    from attention.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, attn_implementation="cute_kernels")

Supported without changes: prefill and decode with dynamic, static and sliding caches, left and right padding, packed
batches, sliding-window layers, softcap, bidirectional encoders, grouped-query attention, training without dropout.
`set_block_mask` sets a custom block mask for layers. Unsupported features raise an error, see `attend`.

from_pretrained and save_pretrained also know models with block-sparse and FP8 layers: see `BlockSparseConfig` and
`prepare_saving`.

Requires transformers 5 (`pip install 'cute-kernels[transformers]'`).
"""

from .attention_function import attend
from .block_masks import set_block_mask
from .checkpoints import BlockSparseConfig, prepare_saving, register_checkpoints
from .masks import make_mask

__all__ = ["BlockSparseConfig", "prepare_saving", "register", "set_block_mask"]


def register(name: str = "cute_kernels") -> None:
    """Register `attn_implementation=name` with transformers: in from_pretrained, from_config, set_attn_implementation.

    Registers an attention function and its mask function under one name, for the whole process, and checkpoints of
    models with block-sparse layers (BlockSparseConfig, quant_method "cute_kernels"). Repeated calls have no effect.

    Raises:
        ValueError: the name is empty or contains a word or separator that transformers reserves.
    """
    import transformers

    if any(part in name for part in ("flash", "sdpa", "flex_attention", "eager", "|", "/", ":")) or not name:
        raise ValueError(
            "name must not be empty or contain a word or separator that transformers reserves (flash, sdpa, "
            f"flex_attention, eager, |, /, :), got {name!r}; use 'cute_kernels'"
        )
    transformers.AttentionInterface.register(name, attend)
    transformers.AttentionMaskInterface.register(name, make_mask)
    register_checkpoints()
