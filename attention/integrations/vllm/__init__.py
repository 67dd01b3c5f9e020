"""Attention of vLLM's and vllm-omni's models with the kernels of `attention`.

vLLM calls `register` in each of its processes, by the entry point group vllm.general_plugins of this package:

    vllm serve MODEL --attention-backend CUSTOM

vllm-omni finds `sparse_attention` by the group vllm_omni.sparse_attn, under the name cute_kernels.

Neither library is a dependency, and neither runs on the machines that test this package. The tests use stand-ins of
the interfaces of vLLM 0.33.0 and of vllm-omni's main branch (after 0.30.0), from which this code was written.
"""

import warnings

from .omni import sparse_attention

__all__ = ["register", "sparse_attention"]


def register() -> None:
    """Register the attention backend "CUSTOM" with vLLM. vLLM calls it; VLLM_PLUGINS selects which plugins it loads.

    The backend serves decoder and encoder layers of BF16 and FP16 models on GPUs of compute capability 8.0 to 9.0:
    paged KV caches, also FP8, chunked prefill, prefix caching, sliding windows, softcap, sinks and head dimensions 64,
    96, 128, 192, 256 and 512. See attention.integrations.vllm.backend for how a batch is computed.

    A backend "CUSTOM" that another plugin has registered stays, and a vLLM without this registry is not changed; a
    warning says so. vLLM runs plugins at each start, whatever backend it uses.

    Example:
        >>> from vllm import LLM
        >>> LLM(model, attention_backend="CUSTOM")
    """
    path = f"{__name__}.backend.CuteKernelsBackend"
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        custom = AttentionBackendEnum.CUSTOM
        other = custom.is_overridden() and custom.get_path() != path
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"cute_kernels registers no attention backend with this version of vLLM ({error}); it requires the "
            "interface of vLLM 0.33",
            stacklevel=2,
        )
        return
    if other:
        warnings.warn(
            f"vLLM's attention backend CUSTOM is {custom.get_path()}, not that of cute_kernels; "
            "set VLLM_PLUGINS=cute_kernels to load this plugin alone",
            stacklevel=2,
        )
        return
    register_backend(custom, path)
