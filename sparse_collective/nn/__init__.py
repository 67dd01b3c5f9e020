"""Layers with block-sparse weights, and which blocks they store. `import sparse_collective.nn` asks for them.

BsrLinear, BsrGroupedLinear     in the place of torch.nn.Linear; one of them for each expert
SwiGLU, BsrMixtureOfExperts     gated feed-forward layers made of them
quantize_                       their weights as 8-bit floats, for inference: Float8BsrLinear, Float8SwiGLU
sparsify_, densify_             swap the linear layers of a model, and back
prune_, change_pattern_         keep the blocks that matter; drop and regrow blocks while training
"""

from .feed_forward import BsrMixtureOfExperts, SwiGLU
from .float8 import Float8BsrLinear, Float8SwiGLU, quantize_
from .grouped import BsrGroupedLinear
from .linear import BsrLinear
from .pattern import Pattern
from .pruning import CubicSchedule, carry_optimizer_state, change_pattern_, cosine_fraction, prune_
from .scores import Blocks, DenseGradients, InputNorms, gradient_block_norms, gradient_times_weight, magnitude
from .sparsify import Change, Report, SparsityConfig, densify_, sparsify_

__all__ = [
    "Blocks",
    "BsrGroupedLinear",
    "BsrLinear",
    "BsrMixtureOfExperts",
    "Change",
    "CubicSchedule",
    "DenseGradients",
    "Float8BsrLinear",
    "Float8SwiGLU",
    "InputNorms",
    "Pattern",
    "Report",
    "SparsityConfig",
    "SwiGLU",
    "carry_optimizer_state",
    "change_pattern_",
    "cosine_fraction",
    "densify_",
    "gradient_block_norms",
    "gradient_times_weight",
    "magnitude",
    "prune_",
    "quantize_",
    "sparsify_",
]
