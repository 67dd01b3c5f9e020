"""A stand-in of the parts of vLLM 0.33.0 that the attention backend meets, written from its published interface."""

import enum
import sys
import types
from dataclasses import dataclass

import torch


class AttentionBackend:
    @classmethod
    def supports_head_size(cls, head_size):
        return head_size in cls.get_supported_head_sizes()

    @classmethod
    def supports_kv_cache_dtype(cls, dtype):
        return dtype in cls.supported_kv_cache_dtypes


class AttentionImpl:
    pass


class AttentionMetadata:
    pass


class AttentionMetadataBuilder:
    def __class_getitem__(cls, metadata):
        return cls

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = (
            kv_cache_spec, layer_names, vllm_config, device,
        )  # fmt: skip


class AttentionCGSupport(enum.Enum):
    UNIFORM_SINGLE_TOKEN_DECODE = 1


class AttentionType(str, enum.Enum):  # noqa: UP042 (as vLLM has it)
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


@dataclass
class CommonAttentionMetadata:
    """vLLM's, with the fields that the builder reads."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    seq_lens_cpu_upper_bound: torch.Tensor | None = None


def split_decodes_and_prefills(common, decode_threshold=1):
    """(decodes, prefills, decode tokens, prefill tokens) of a batch whose decodes come first."""
    lengths = common.query_start_loc_cpu.diff()[: common.num_reqs].tolist()
    decodes = next((i for i, n in enumerate(lengths) if n > decode_threshold), common.num_reqs)
    tokens = sum(lengths[:decodes])
    return decodes, common.num_reqs - decodes, tokens, common.num_actual_tokens - tokens


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    """Write k and v (tokens, Hkv, D) to slots of caches (pages, page_size, Hkv, D); FP8 caches are uint8."""
    slots, size = slot_mapping.long(), key_cache.shape[1]
    for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        new = new[: len(slots)]
        if kv_cache_dtype.startswith("fp8"):
            narrow = torch.float8_e5m2 if kv_cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn
            new = (new.float() / scale).to(narrow).view(torch.uint8)
        cache[slots // size, slots % size] = new


class AttentionBackendEnum(enum.Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    def is_overridden(self):
        return self in OVERRIDES

    def get_path(self):
        return OVERRIDES.get(self, self.value)


OVERRIDES: dict = {}


def register_backend(backend, class_path=None):
    OVERRIDES[backend] = class_path
    return lambda x: x


MODULES = {
    "vllm": (),
    "vllm._custom_ops": (reshape_and_cache_flash,),
    "vllm.v1": (),
    "vllm.v1.attention": (),
    "vllm.v1.attention.backend": (
        AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder, AttentionType,
    ),
    "vllm.v1.attention.backends": (),
    "vllm.v1.attention.backends.utils": (split_decodes_and_prefills,),
    "vllm.v1.attention.backends.registry": (AttentionBackendEnum, register_backend),
}  # fmt: skip


def install(monkeypatch) -> None:
    """Make `import vllm` find the stand-in."""
    OVERRIDES.clear()
    for name, members in MODULES.items():
        module = types.ModuleType(name)
        module.__dict__.update({member.__name__: member for member in members})
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "attention.integrations.vllm.backend", raising=False)
