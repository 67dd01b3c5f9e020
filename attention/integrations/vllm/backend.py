"""The attention backend of vLLM: its declaration, the metadata of a batch, and the computation in a layer.

vLLM packs the queries of all requests into (tokens, heads, head_dim) and moves requests with one query to the front.
Keys and values are in pages, (pages, KV heads, page_size, 2 * head_dim), k and v in one row. A batch is computed in up
to three parts:

    decodes    one query each: one call with page_table, split-KV; the only part in CUDA graphs
    extends    several queries and tokens in the cache (chunked prefill, prefix caching): one call per request, which
               reads its pages in place; from an FP8 cache k and v of the request are dequantized first
    prefills   no tokens in the cache: one call of packed sequences, on the new k and v

Written for vLLM 0.33.0 and tested with a stand-in of its interface (tests/attention/vllm_stand_in.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm._custom_ops import reshape_and_cache_flash
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from attention import attention
from attention.forward.heuristics import HEAD_DIMS, WIDE
from cute_kernels.arch import ARCHS

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class CuteKernelsBackend(AttentionBackend):
    """The declaration: the layers and GPUs that vLLM may select the backend for."""

    supported_dtypes = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", *FP8]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # the member of AttentionBackendEnum

    @staticmethod
    def get_impl_cls() -> type[CuteKernelsImpl]:
        return CuteKernelsImpl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list:
        return [16, 32, 64, 128, 256, 512, 1024]  # powers of two

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [*HEAD_DIMS, WIDE]

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        return f"sm_{capability.major}{capability.minor}" in ARCHS

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, *ENCODERS)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_combination(cls, head_size, dtype, kv_cache_dtype, *others, **named) -> str | None:
        if head_size == WIDE and kv_cache_dtype in FP8:
            return f"head dimension {WIDE} with an FP8 KV cache"
        return None


@dataclass
class Metadata(AttentionMetadata):
    """A batch.

    Attributes:
        tokens: number of query tokens.
        starts: first query token of each request, and `tokens`; on the host.
        decodes, fresh: requests before `decodes` have one query; those from `fresh` on have no tokens in the cache.
        query_start_loc: (requests + 1,) int32.
        seq_lens: (requests,) int32, tokens of each request with those of this batch.
        lengths: seq_lens on the host, from `decodes` on; exact for these requests.
        block_table: (requests, pages) int32.
        causal: False for encoders.
    """

    tokens: int
    starts: list[int]
    decodes: int
    fresh: int
    query_start_loc: Tensor
    seq_lens: Tensor
    lengths: list[int]
    block_table: Tensor
    causal: bool

    @property
    def requests(self) -> int:
        return len(self.starts) - 1


class Builder(AttentionMetadataBuilder[Metadata]):
    """Builds the metadata of a batch, without synchronizing."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata, fast_build: bool = False) -> Metadata:
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError(
                "vLLM's attention backend of cute_kernels: causal must be the same for all requests"
            )
        requests, tokens = common.num_reqs, common.num_actual_tokens
        decodes = split_decodes_and_prefills(common, decode_threshold=self.reorder_batch_threshold)[0]
        starts, lengths, fresh = [0] * (requests + 1), [], requests
        if decodes < requests:
            starts = common.query_start_loc_cpu[: requests + 1].tolist()
            known = common.seq_lens_cpu_upper_bound
            lengths = (common.seq_lens.cpu() if known is None else known)[decodes:requests].tolist()
            while fresh > decodes and lengths[fresh - 1 - decodes] == starts[fresh] - starts[fresh - 1]:
                fresh -= 1
        return Metadata(
            tokens, starts, decodes, fresh, common.query_start_loc[: requests + 1], common.seq_lens[:requests], lengths,
            common.block_table_tensor[:requests], common.causal,
        )  # fmt: skip


class CuteKernelsImpl(AttentionImpl):
    """Attention of one layer."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, alibi_slopes=None,
        sliding_window: int | None = None, kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        if alibi_slopes is not None:
            raise NotImplementedError(
                "vLLM's attention backend of cute_kernels does not support alibi_slopes; use FLASH_ATTN or TRITON_ATTN"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.float8 = FP8.get(kv_cache_dtype)
        self.shares_cache = kv_sharing_target_layer_name is not None
        self.left = None if sliding_window is None else sliding_window - 1
        self.options: dict[str, Any] = {"scale": self.scale, "softcap": logits_soft_cap or None, "sinks": sinks}

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ) -> Tensor:
        """Write attention of query (tokens, H, D) to output (tokens, H, D).

        Args:
            key, value: (tokens, Hkv, D) of the tokens of this batch, which are in the cache, too.
            kv_cache: (pages, Hkv, page_size, 2 * D), k and v in one row; uint8 for an FP8 cache.
            attn_metadata: None in vLLM's profiling run.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("vLLM's attention backend of cute_kernels does not quantize its output")
        batch: Metadata = attn_metadata
        if batch is None:
            return output.fill_(0)
        options = self.options | {"causal": batch.causal, "window_size": self._window(batch.causal)}
        if self.attn_type in ENCODERS:
            self._packed(query, key, value, output, batch, 0, options)
            return output
        k, v = kv_cache.split(self.head_size, -1)
        if self.float8 is not None:
            k, v = k.view(self.float8), v.view(self.float8)
        fresh = batch.requests if self.shares_cache else batch.fresh
        if batch.decodes:
            self._decode(layer, query, k, v, output, batch, options)
        for request in range(batch.decodes, fresh):
            self._extend(layer, query, k, v, output, batch, request, options)
        if fresh < batch.requests:
            self._packed(query, key, value, output, batch, fresh, options)
        return output

    def _window(self, causal: bool) -> tuple | None:
        return None if self.left is None else (self.left, 0 if causal else self.left)

    def _decode(self, layer, query, k, v, output, batch: Metadata, options) -> None:
        """Requests with one query, the first rows of query."""
        n = batch.decodes
        if self.float8 is not None:
            options = options | {"k_descale": layer._k_scale.reshape(-1), "v_descale": layer._v_scale.reshape(-1)}
        attention(
            query[:n, :, None], k, v, seqused_k=batch.seq_lens[:n], page_table=batch.block_table[:n],
            out=output[:n, :, None], **options,
        )  # fmt: skip

    def _extend(self, layer, query, k, v, output, batch: Metadata, request: int, options) -> None:
        """One request with several queries and tokens in the cache."""
        rows, one = slice(*batch.starts[request : request + 2]), slice(request, request + 1)
        q, out = (t[rows].transpose(0, 1)[None] for t in (query, output))  # (1, H, queries, D)
        if self.float8 is None:
            attention(q, k, v, seqused_k=batch.seq_lens[one], page_table=batch.block_table[one], out=out, **options)
            return
        length = batch.lengths[request - batch.decodes]
        pages = batch.block_table[request, : -(-length // k.shape[2])]
        scales = layer._k_scale, layer._v_scale
        k, v = (
            (t[pages].transpose(0, 1).flatten(1, 2)[None, :, :length].float() * s.reshape(-1, 1, 1)).to(q.dtype)
            for t, s in zip((k, v), scales, strict=True)
        )
        attention(q, k, v, out=out, **options)

    def _packed(self, query, key, value, output, batch: Metadata, first: int, options) -> None:
        """Requests from `first` on, by their own tokens alone."""
        rows = slice(batch.starts[first], batch.tokens)
        starts = batch.query_start_loc[first:] - batch.starts[first]
        q, k, v, out = (t[rows] for t in (query, key, value, output))
        attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, out=out, **options)

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Write k and v of this batch's tokens to their slots in the cache."""
        if self.attn_type in ENCODERS:
            return
        k, v = kv_cache.transpose(1, 2).split(self.head_size, -1)  # (pages, page_size, Hkv, D)
        reshape_and_cache_flash(key, value, k, v, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale)
