"""Block-sparse matrices and layers over several GPUs, on torch.distributed.

distribute_bsr                        this rank's block rows or columns of a matrix
BsrColwiseParallel, BsrRowwiseParallel   styles for torch.distributed.tensor.parallel.parallelize_module
BsrExpertParallel                     the style that deals the experts of a mixture of experts to ranks
deal_hidden                           which hidden features each rank gets, by stored blocks
full_state_dict                       the state of one process, from all ranks

FSDP2 (fully_shard) and DistributedDataParallel take the layers of sparse_collective.nn as they are.
"""

from .deal import Deal, deal_hidden
from .experts import BsrExpertParallel
from .matrix import distribute_bsr
from .state import full_state_dict
from .styles import BsrColwiseParallel, BsrRowwiseParallel

__all__ = [
    "BsrColwiseParallel",
    "BsrExpertParallel",
    "BsrRowwiseParallel",
    "Deal",
    "deal_hidden",
    "distribute_bsr",
    "full_state_dict",
]
