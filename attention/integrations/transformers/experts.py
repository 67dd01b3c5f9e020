"""Dense experts of transformers' mixtures of experts, by the grouped GEMM of sparse_collective.

A weight (E, M, K) of dense experts is a batch of block-sparse matrices with one block each, of M x K: the block is the
parameter itself, so nothing is copied or converted. CPU tensors run the op's reference in torch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparse_collective import BsrMatrix, bsr_grouped_linear
from sparse_collective.nn.feed_forward import routed
from sparse_collective.one_block import one_block

GROUP_ROWS = 128  # tokens of a run; a multiple of 64


def dense_experts(weight: Tensor, transposed: bool) -> BsrMatrix:
    """A weight (E, M, K), or with `transposed` (E, K, M), as a batch (E, M, K) of matrices of one block; shares memory.

    Raises:
        ValueError: M or K is no multiple of 16.
    """
    if weight.shape[1] % 16 or weight.shape[2] % 16:
        raise ValueError(
            f'experts_implementation="cute_kernels" needs experts\' weights whose sides are multiples of 16, got '
            f'{tuple(weight.shape)}; use "grouped_mm" or "eager"'
        )
    W = one_block(weight)
    return W.t() if transposed else W


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of an experts module of transformers, with two grouped GEMMs; see transformers' ExpertsInterface.

    Args:
        self: a module that transformers' use_experts_implementation decorates: 3-D parameters, transposed or not, with
            biases, gates and norms of its own.
        hidden_states: (T, H) bfloat16 or float16; on the CPU also float32 and float64.
        top_k_index: (T, k) int64; with expert parallelism numbers of E and more are experts of other processes.
        top_k_weights: (T, k).

    Returns:
        (T, H), summed over a token's experts in FP32.
    """
    transposed, biased = self.is_transposed, self.has_bias
    first = "gate_up_proj" if self.has_gate else "up_proj"

    def layer(x: Tensor, name: str, expert_ids: Tensor) -> Tensor:
        W, bias = dense_experts(getattr(self, name), transposed), getattr(self, f"{name}_bias") if biased else None
        return bsr_grouped_linear(x, W, expert_ids=expert_ids, bias=bias)

    def layers(x: Tensor, expert_ids: Tensor) -> Tensor:
        z = layer(x, first, expert_ids)
        y = layer(self._apply_gate(z) if self.has_gate else self.act_fn(z), "down_proj", expert_ids)
        return self.post_expert_norm(y) if getattr(self, "has_post_expert_norm", False) else y

    parallel = getattr(self, "_is_expert_parallel", False)
    if parallel:  # zeros without a gradient to the router
        top_k_weights = top_k_weights.masked_fill(top_k_index >= self.num_experts, 0.0)
    args = self.num_experts, GROUP_ROWS, layers
    return routed(hidden_states, top_k_index, top_k_weights, *args, elsewhere=parallel)
