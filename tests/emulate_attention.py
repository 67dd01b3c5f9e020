"""Torch in the attention kernels' place: see emulate.py, whose `install` calls this one."""

import math

import torch

import attention.ops as ops
import attention.plan as plan
from attention import decode, runtime
from cute_kernels.arch import ARCHS
from cute_kernels.dtypes import TORCH

LOG2E = plan.LOG2E


class EmulatedFlash:
    """The function that stands for the compiled attention kernel of some facts."""

    def __init__(self, facts):
        self.facts = facts

    def __call__(self, q, k, v, out, lse, counter, scale_log2, softcap, left, right, max_ctas):
        facts = self.facts
        widths = {"q": facts.head_dim, "k": facts.head_dim, "v": facts.head_dim_v, "out": facts.head_dim_v}
        for (name, width), t in zip(widths.items(), (q, k, v, out), strict=True):
            assert t.dim() == 4 and t.shape[3] == width and t.dtype is TORCH[facts.dtype], name
            assert t.data_ptr() % 16 == 0 and t.stride(3) == 1, name
            assert all(stride % 8 == 0 for stride in t.stride()[:3]), f"{name}: strides {t.stride()}"
        assert all(0 <= x < 2**30 and isinstance(x, int) for x in (left, right)) and max_ctas > 0
        assert (counter is not None) == facts.config.dynamic
        rows, columns = q.shape[2], k.shape[2]
        assert left <= columns and right <= rows and min(rows, columns) > 0
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, 1).float() for t in (k, v))
        scores = q.float() @ k.mT
        if facts.softcap:
            scores = 1 - 2 / (1 + torch.exp2(scores * softcap))
        position, column = torch.arange(rows)[:, None] + columns - rows, torch.arange(columns)
        if facts.band.left:
            scores = scores.masked_fill(column < position - left, -math.inf)
        if facts.band.right:
            scores = scores.masked_fill(column > position + right, -math.inf)
        scores = scores * scale_log2
        log2 = (scores / LOG2E).logsumexp(-1, keepdim=True) * LOG2E
        out.copy_(torch.exp2(scores - log2).masked_fill(log2.isneginf(), 0.0) @ v)
        assert (lse is not None) == facts.lse
        if lse is not None:
            assert lse.shape == q.shape[:3] and lse.is_contiguous() and lse.dtype is torch.float32
            lse.copy_(log2[..., 0] / LOG2E)


class EmulatedDecode(EmulatedFlash):
    """The same of the decoding kernel, of calls without lengths and pages: those are test_decode.py's."""

    def __call__(self, q, k, v, out, lse, seqlens, table, parts, part_lses, scale_log2, softcap, left, right, *launch):
        count, ctas = launch
        assert seqlens is None and table is None and (parts is not None) == self.facts.split == (count > 1)
        if parts is not None:
            assert parts.shape == (count, *out.shape) and part_lses.shape == (count, *out.shape[:3])
        super().__call__(q, k, v, out, lse, None, scale_log2, softcap, left, right, ctas)


def install(monkeypatch, arch: str = "sm_90", sms: int = 132) -> None:
    """From here on, CPU calls of attention are planned and launched as on a GPU of `arch`."""
    monkeypatch.setattr(plan, "has_kernel", lambda tensor: True)
    monkeypatch.setattr(plan, "device_arch", lambda index: (ARCHS[arch], sms, ""))
    monkeypatch.setattr(ops, "_PLANS", {})
    monkeypatch.setattr(runtime, "function_for", EmulatedFlash)
    monkeypatch.setattr(decode, "function_for", EmulatedDecode)
