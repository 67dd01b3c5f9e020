"""Block-sparse matrices and layers over several GPUs, on torch.distributed.

distribute_bsr                        this rank's block rows or columns of a matrix
BsrColwiseParallel, BsrRowwiseParallel   styles for torch.distributed.tensor.parallel.parallelize_module
BsrExpertParallel                     a style that splits the experts of a mixture over ranks
partition_hidden                      which hidden features each rank gets, by stored blocks
full_state_dict, load_full_state_dict the state of one process, from all ranks to rank 0 and back
load_patterns                         the patterns of a checkpoint, before a model is split
register_optimizer_hooks              an optimizer's state that does not depend on the number of ranks

FSDP2 (fully_shard) and DistributedDataParallel take the layers of sparse_collective.nn as they are.
"""

from .checkpoint import full_state_dict, load_full_state_dict, load_patterns, register_optimizer_hooks
from .experts import BsrExpertParallel
from .matrix import distribute_bsr
from .partition import Partition, partition_hidden
from .styles import BsrColwiseParallel, BsrRowwiseParallel

__all__ = [
    "BsrColwiseParallel",
    "BsrExpertParallel",
    "BsrRowwiseParallel",
    "Partition",
    "partition_hidden",
    "distribute_bsr",
    "full_state_dict",
    "load_full_state_dict",
    "load_patterns",
    "register_optimizer_hooks",
]
