"""Block-sparse layers, and functions that prune, quantize and report a model's layers. Imported on request:
`import sparse_collective.nn`.

BsrLinear, BsrGroupedLinear     replace torch.nn.Linear, and the linear layers of experts
GatedBsrLinear                  activation(gate(x)) * up(x), with both weights in one; GatedLinear is its dense form
SwiGLU, BsrMixtureOfExperts     gated feed-forward layers made of them
BsrExperts                      experts for another router, such as those of transformers' models
quantize_                       quantize weights to FP8 for inference: Float8BsrLinear, Float8SwiGLU
mask_2_4_, prune_2_4_           train with 2:4 masks; then store 2:4 weights: Bsr24Linear, Sparse24Linear
sparsify_, densify_             replace the linear layers of a model, and the reverse
sparsity                        the block-sparse layers of a model, as a table, in notebooks and as a chart
prune_, change_pattern_         keep the blocks of highest score; drop and regrow blocks while training
"""

from ..pattern import Pattern
from .config import SparsityConfig
from .experts import BsrExperts
from .feed_forward import BsrMixtureOfExperts, SwiGLU
from .fp8 import Float8BsrLinear, Float8SwiGLU
from .gated import GatedBsrLinear, GatedLinear
from .grouped import BsrGroupedLinear
from .linear import BsrLinear
from .pruning.pattern import CubicSchedule, carry_optimizer_state, change_pattern_, cosine_fraction, prune_
from .pruning.prune24 import Masked24BsrLinear, Masked24Linear, Sparse24Config, mask_2_4_, prune_2_4_
from .pruning.scores import Blocks, DenseGradients, InputNorms, gradient_block_norms, gradient_times_weight, magnitude
from .report import Change, Report, sparsity
from .sparsify import densify_, sparsify_
from .structured import Bsr24Linear, Sparse24Linear
from .to_fp8 import Float8Config, quantize_

__all__ = [
    "Blocks",
    "Bsr24Linear",
    "BsrExperts",
    "BsrGroupedLinear",
    "BsrLinear",
    "BsrMixtureOfExperts",
    "Change",
    "CubicSchedule",
    "DenseGradients",
    "Float8BsrLinear",
    "Float8Config",
    "Float8SwiGLU",
    "GatedBsrLinear",
    "GatedLinear",
    "InputNorms",
    "Masked24BsrLinear",
    "Masked24Linear",
    "Pattern",
    "Report",
    "Sparse24Config",
    "Sparse24Linear",
    "SparsityConfig",
    "SwiGLU",
    "carry_optimizer_state",
    "change_pattern_",
    "cosine_fraction",
    "densify_",
    "gradient_block_norms",
    "gradient_times_weight",
    "magnitude",
    "mask_2_4_",
    "prune_",
    "prune_2_4_",
    "quantize_",
    "sparsify_",
    "sparsity",
]
