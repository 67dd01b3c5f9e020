"""BsrExperts: the experts of another library's mixture of experts, with block-sparse weights."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cute_kernels.annotations import Activation
from cute_kernels.functions import ACTIVATIONS

from .. import checks as arguments
from ..bsr import BsrMatrix
from .config import SparsityConfig, density_of
from .feed_forward import routed
from .grouped import BsrGroupedLinear
from .module import block_grid
from .pruning.scores import Blocks, InputNorms
from .recognize import activation_of, numbers
from .report import Change, size_of
from .swap import expert_parameters

__all__ = ["BsrExperts", "ExpertsModules", "experts_in", "swap_experts"]

NAMES = ("gate_up_proj", "down_proj")  # 3-D parameters (E, 2 I, H) and (E, H, I), as transformers names them
DIM, HIDDEN, TOKENS = 6, 4, 16  # of the small copy that is called
ExpertsModules = dict[nn.Module, tuple[Activation | None, str]]


class BsrExperts(nn.Module):
    """Experts with block-sparse weights that replace an experts module of transformers; all run in two kernels.

    For each token, y is the sum of weight * down[e](activation(g) * u) over its experts e, where g and u are the halves
    of gate_up[e](x). Tokens are sorted by expert, and each expert's tokens are padded to whole runs. The host reads
    nothing of the routing.

    Args:
        gate_up: BsrGroupedLinear(E, H, 2 I): the rows of the gate, then those of up.
        down: BsrGroupedLinear(E, I, H).
        activation: of the gate: None, "relu", "gelu", "gelu_tanh" or "silu".
        group_rows: tokens per run, a multiple of 64. Larger runs are faster if experts get many tokens, and pad more.

    Forward takes (hidden_states, top_k_index, top_k_weights), as transformers calls it: (T, H), (T, k) int64 in [0, E)
    and (T, k) of any floating-point dtype. It returns (T, H) in the dtype of hidden_states.

    Raises:
        ValueError: the layers do not fit each other, or an argument is out of range.

    Example:
        gate_up = BsrGroupedLinear(8, 1024, 2 * 4096, density=0.25)
        experts = BsrExperts(gate_up, BsrGroupedLinear(8, 4096, 1024, density=0.25))
    """

    def __init__(
        self,
        gate_up: BsrGroupedLinear,
        down: BsrGroupedLinear,
        activation: Activation | None = "silu",
        group_rows: int = 128,
    ) -> None:
        super().__init__()
        mine = gate_up.items, gate_up.out_features, gate_up.in_features
        if mine != (down.items, 2 * down.in_features, down.out_features):
            theirs = down.items, down.out_features, down.in_features
            raise ValueError(f"BsrExperts: gate_up is {mine} and down {theirs}; they must be (E, 2 I, H) and (E, H, I)")
        if activation is not None and activation not in ACTIVATIONS:
            raise ValueError(f"BsrExperts: activation {activation!r}; use None or one of {', '.join(ACTIVATIONS)}")
        if operator.index(group_rows) < 64 or group_rows % 64:
            raise ValueError(f"BsrExperts: group_rows is {group_rows}; use a positive multiple of 64")
        self.activation: Activation | None = activation
        self.num_experts, self.group_rows = gate_up.matrix_shape[0], group_rows
        self.gate_up, self.down = gate_up, down

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return routed(hidden_states, top_k_index, top_k_weights, self.num_experts, self.group_rows, self._layers)

    def _layers(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        return self.down(self._hidden(x, expert_ids), expert_ids=expert_ids)

    def _hidden(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        both = self.gate_up(x, expert_ids=expert_ids)
        if hasattr(type(self.gate_up), "check_next") and both.shape[-1] != self.gate_up.out_features:
            raise ValueError(
                "BsrExperts: gate_up is split over ranks, which then hold rows of the gate or of up; use "
                "sparse_collective.distributed.BsrExpertParallel"
            )
        g, u = both.chunk(2, dim=-1)
        return (g if self.activation is None else ACTIVATIONS[self.activation](g)) * u

    def extra_repr(self) -> str:
        return f"experts={self.num_experts}, activation={self.activation!r}, group_rows={self.group_rows}"


def experts_in(model: nn.Module) -> ExpertsModules:
    """The modules of a model with 3-D parameters: (activation, ""), or (None, the reason why BsrExperts is not the
    same)."""
    paths = dict.fromkeys(name.rpartition(".")[0] for name, *_ in expert_parameters(model))
    modules = [model.get_submodule(path) for path in paths]
    return {m: (None, "it is the model itself") if m is model else experts_activation(m) for m in modules}


def swap_experts(
    names: Mapping[nn.Module, list[str]], experts: ExpertsModules, config: SparsityConfig, owners: Counter
) -> tuple[dict[nn.Module, nn.Module], list[Change]]:
    """Make a BsrExperts of each module that has names here: (module -> BsrExperts, changes)."""
    made: dict[nn.Module, nn.Module] = {}
    changes = []
    for module, paths in names.items():
        weights = [module.get_parameter(name) for name in NAMES]
        densities = [density_of("sparsify_", config, [f"{path}.{name}" for path in paths]) for name in NAMES]
        if densities == [None, None] or experts[module][1]:
            continue
        if why := why_not_experts(module, config, densities, owners):
            for name, w in zip(NAMES, weights, strict=True):
                changes.append(Change(f"{paths[0]}.{name}", tuple(w.shape), w.numel(), w.numel(), skipped=why))
            continue
        gate_up, down = (grouped_of(w, config, density or 0.0) for w, density in zip(weights, densities, strict=True))
        made[module] = BsrExperts(gate_up, down, experts[module][0]).train(module.training)
        for w, name, layer, now in zip(weights, NAMES, (gate_up, down), ("gate_up", "down"), strict=True):
            blocks, note = len(w) * math.prod(layer.grid), f"{name} of {type(module).__name__}"
            changes.append(
                Change(f"{paths[0]}.{now}", tuple(w.shape), w.numel(), size_of(layer), layer.nnz, blocks, note=note)
            )
    return made, changes


def experts_activation(module: nn.Module) -> tuple[Activation | None, str]:
    """(activation, "") if BsrExperts computes the same as a module with 3-D parameters, or (None, reason)."""
    gate_up, down = (module._parameters.get(name) for name in NAMES)
    if gate_up is None or down is None or gate_up.dim() != 3 or down.dim() != 3:
        return None, f"{type(module).__name__} has no 3-D parameters gate_up_proj and down_proj"
    experts, rows, dim = gate_up.shape
    if tuple(down.shape) != (experts, dim, rows // 2):
        shapes = f"{tuple(gate_up.shape)} and {tuple(down.shape)}"
        return None, f"gate_up_proj and down_proj are {shapes}, not (E, 2 I, H) and (E, H, I)"
    parts = {
        "gate_up_proj": nn.Parameter(numbers(experts, 2 * HIDDEN, DIM)),
        "down_proj": nn.Parameter(numbers(experts, DIM, HIDDEN, scale=0.5)),
    }
    sizes = {"hidden_dim": DIM, "hidden_size": DIM, "intermediate_dim": HIDDEN, "intermediate_size": HIDDEN}
    choices = min(2, experts)
    x, weights = numbers(TOKENS, DIM, ascending=True), numbers(TOKENS, choices, scale=0.9)
    index = (torch.arange(TOKENS, device="cpu")[:, None] * 3 + torch.arange(choices, device="cpu")) % experts

    def formula(act):
        z = torch.einsum("tjmk,tk->tjm", parts["gate_up_proj"][index], x)
        hidden = act(z[..., :HIDDEN]) * z[..., HIDDEN:]
        return (torch.einsum("tjmk,tjk->tjm", parts["down_proj"][index], hidden) * weights[..., None]).sum(1)

    with torch.no_grad():
        return activation_of(module, parts, sizes, (x, index, weights), formula)


def why_not_experts(module: nn.Module, config: SparsityConfig, densities: list[float | None], owners: Counter) -> str:
    """The reason why the parameters of a module cannot become BsrGroupedLinear, or ""."""
    if None in densities:
        return f"patterns of config.density fit only one of {' and '.join(NAMES)}"
    if isinstance(config.scores, InputNorms):
        return "InputNorms sees the inputs of nn.Linear only; use another score, or leave experts out by filter_fn"
    for name in NAMES:
        weight = module.get_parameter(name)
        if type(weight.data) is not Tensor:
            return f"{name} is a {type(weight.data).__name__}"
        if owners[id(weight)] > 1:
            return f"shares {name} with another module"
        try:
            arguments.check_dtypes(weight.dtype, torch.int32, weight.device)
            block_grid(weight.shape[2], weight.shape[1], config.blocksize)
        except (TypeError, ValueError) as error:
            return f"of {name} {error}"
    return ""


def grouped_of(weight: nn.Parameter, config: SparsityConfig, density: float) -> BsrGroupedLinear:
    """The layer with the blocks of a weight (E, M, K) that a config chooses, equally many of each expert; copies."""
    experts, rows, cols = weight.shape
    grid = block_grid(cols, rows, config.blocksize)
    if weight.is_meta:
        share = config.stored(grid, density) / max(1, grid[0] * grid[1])
        layer = BsrGroupedLinear(
            experts, cols, rows, False, config.blocksize, one_pattern=False, density=share, device="meta",
            dtype=weight.dtype,
        )  # fmt: skip
    else:
        matrices = []
        for i, dense in enumerate(weight.detach()):
            linear = nn.Linear(cols, rows, False, device="meta")
            linear.weight = nn.Parameter(dense, requires_grad=False)
            linear.weight.grad = None if weight.grad is None else weight.grad[i]
            scores = Blocks.of(linear, config.blocksize).score(config.scores).view(grid)
            matrices.append(BsrMatrix.from_dense(dense, config.blocksize, mask=config.mask(scores, density)))
        layer = BsrGroupedLinear.from_bsr(BsrMatrix.stack(matrices))
    layer.values.requires_grad_(weight.requires_grad)
    return layer
