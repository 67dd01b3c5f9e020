"""Attention of transformers' models by the kernels of `attention`.

    from attention.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, attn_implementation="cute_kernels")

What models do with their attention works unchanged: prefill and decoding with dynamic, static and sliding caches, left
and right padding, packed batches, sliding-window layers, softcap, bidirectional encoders, grouped heads, training
without dropout. `set_block_mask` gives layers a block mask of your own. What cannot be computed raises, see `attend`.

Needs transformers 5 (`pip install 'cute-kernels[transformers]'`).
"""

from .attention_function import attend
from .block_masks import set_block_mask
from .masks import make_mask

__all__ = ["register", "set_block_mask"]


def register(name: str = "cute_kernels") -> None:
    """Make `attn_implementation=name` known to transformers: in from_pretrained, from_config, set_attn_implementation.

    Registers an attention function and the mask function that it needs, under one name, for the whole process. More
    calls change nothing.

    Raises:
        ValueError: transformers treats the name in a way of its own.
    """
    import transformers

    if any(part in name for part in ("flash", "sdpa", "flex_attention", "eager", "|", "/", ":")) or not name:
        raise ValueError(f"transformers treats implementations with names like {name!r} in its own way; choose another")
    transformers.AttentionInterface.register(name, attend)
    transformers.AttentionMaskInterface.register(name, make_mask)
