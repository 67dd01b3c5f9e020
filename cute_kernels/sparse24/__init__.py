"""Products with a left operand of which two of every four neighbours along K are zero (2:4 structured sparsity).

format         Sparse24, the compressed matrix, and prune_2_4
like_tensor    its operators: W @ b, x @ W.t(); torch_functions: torch.matmul, torch.mm, torch.nn.functional.linear
config         which kernels there are, what they ask, what they cost; family registers them
mainloop_sm90  the products by sparse WGMMA, mainloop_sm80 by mma.sp; product is the kernel around them
cutlass        the order of metadata in torch's semi-structured tensors
eager          gemm of a Sparse24
"""

from .family import SPARSE24

__all__ = ["SPARSE24"]
