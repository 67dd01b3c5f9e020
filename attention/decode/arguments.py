"""Fake arguments that the decode kernels are compiled with."""

from cute_kernels.runtime.fake import fake_stream, fake_tensor

from ..forward.arguments import scalar_args, score_args, sinks_args, tensor_args
from ..forward.config import DecodeFacts


def decode_args(facts: DecodeFacts) -> tuple:
    """Fakes of all arguments of DecodeSm90, DecodeSm80 or DecodeFloat8."""
    from cutlass import Int32

    rank = 2 if facts.spans else 1
    seqlens = fake_tensor("int32", rank, rank - 1, 1) if facts.seqlens else None
    table = fake_tensor("int32", 2, 1, 1) if facts.page_size else None
    parts = (fake_tensor("float32", 5, 4, 4), fake_tensor("float32", 4, 3, 1)) if facts.split else (None, None)
    ctas = (Int32(1),) if facts.path == "sm_90" else ()
    tensors = *tensor_args(facts), *sinks_args(facts), seqlens, table, score_args(facts.score), *parts
    used = (facts.k_descale, facts.v_descale) if facts.cache else ()
    scales = (fake_tensor("float32", 2, None, 1) if there else None for there in used)
    return *tensors, *scales, *scalar_args(facts), Int32(1), *ctas, fake_stream()
