"""GEMM with a 2:4 sparse A: at least two of every four neighbors along K are zero (structured sparsity).

format         Sparse24, the compressed matrix, and prune_2_4
like_tensor    its operators: W @ b, x @ W.t(); torch_functions: torch.matmul, torch.mm, torch.nn.functional.linear
config         configurations, their legality and cost; family registers the kernels
issue_sm90     sparse WGMMA, mainloop_sm80 mma.sp; product is the kernel around them
cutlass        the order of metadata in torch's semi-structured tensors
eager          gemm of a Sparse24
"""

from .family import SPARSE24

__all__ = ["SPARSE24"]
