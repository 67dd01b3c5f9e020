"""Base of layers with a block-sparse weight: the weight's three tensors, their checks, moves and state."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from cute_kernels.annotations import Activation
from cute_kernels.functions import ACTIVATIONS
from cute_kernels.runtime.torch_compat import is_dtensor

from .. import checks as arguments
from ..alignment import aligned
from ..bsr import BsrMatrix
from ..pattern import Pattern, pattern_of
from .indices import drawn_indices, given_indices, owned
from .parametrized import Parametrizable, name_of_values
from .shards import check_same, hash_of

__all__ = ["BsrModule", "block_grid"]

TENSORS = ("crow_indices", "col_indices", "values")
LOST = (
    "the indices of this layer are no pattern ({}); after to_empty() or a write to them, call load_state_dict() or "
    "reset_parameters()"
)


def block_grid(in_features: int, out_features: int, blocksize: Sequence[int]) -> tuple[int, int]:
    """(block rows, block columns) of a weight (out_features, in_features).

    Raises:
        ValueError: a side of a block is unsupported, or does not divide its features.
    """
    bm, bk = blocksize = arguments.pair(blocksize, "blocksize")
    arguments.block_grid((0, 0), blocksize)
    for name, extent, side in (("out_features", out_features, bm), ("in_features", in_features, bk)):
        if extent < 0 or extent % side:
            raise ValueError(f"{name} is {extent}, no multiple of {side}; pad it to {-(-extent // side) * side}")
    return out_features // bm, in_features // bk


def dims_without(mesh: Any, other: Any) -> list[int]:
    """Dimensions of a DeviceMesh that another one, sliced from the same, does not have."""
    return [i for i, name in enumerate(mesh.mesh_dim_names) if name not in other.mesh_dim_names]


class BsrModule(Parametrizable):
    """A weight of stored blocks as a module: one parameter, two index buffers. For BsrLinear and BsrGroupedLinear.

    values: parameter (nnz, bm, bk); with items of one pattern (L, nnz, bm, bk). torch.nn.utils.parametrize supports it:
        a function of the stored blocks, of the same shape.
    crow_indices, col_indices: int32 buffers, see BsrMatrix. They change through sparse_collective.nn.pruning and
        load_state_dict alone, which check them; kernels trust them.

    One BsrMatrix is kept for as long as these tensors are the same objects, and with it all that kernels know of the
    pattern. Changes in place, as pruning makes them, reach it.
    """

    in_features: int
    out_features: int
    blocksize: tuple[int, int]
    items: int | None  # weights of this shape; None: one
    activation: Activation | None
    crow_indices: Tensor
    col_indices: Tensor
    values: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        blocksize: Sequence[int],
        *,
        items: int | None = None,
        one_pattern: bool = True,
        density: float | None = None,
        mask: Tensor | None = None,
        indices: tuple[Tensor, Tensor] | None = None,
        activation: Activation | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if sum(x is not None for x in (density, mask, indices)) != 1:
            raise ValueError(f"{name}: give exactly one of density, mask and indices")
        if activation is not None and activation not in ACTIVATIONS:
            raise ValueError(f"{name}: activation {activation!r}; use None or one of {', '.join(ACTIVATIONS)}")
        rows, cols = block_grid(in_features, out_features, blocksize)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        self.in_features, self.out_features = in_features, out_features
        bm, bk = blocksize
        self.blocksize, self.items, self.activation = (bm, bk), items, activation
        device = torch.get_default_device() if device is None else torch.device(device)
        arguments.check_dtypes(dtype, torch.int32, device)
        patterns = items if items is not None and not one_pattern else None  # None: one, which items share
        if density is not None:
            arguments.check_density(density)
            crow, col = drawn_indices(patterns, rows, cols, round(density * rows * cols), device)
        else:
            crow, col = given_indices(
                name, mask=mask, indices=indices, patterns=patterns, grid=(rows, cols), blocksize=self.blocksize
            )
        self._random, self._kept_pattern = density is not None, None
        self._shard_mesh, self._compared = None, False
        if device.type == "meta" and not self._random:
            self._kept_pattern = crow.cpu(), col.cpu()  # for reset_parameters, where to_empty has left nothing
        self.register_buffer("crow_indices", owned(crow.to(device)))
        self.register_buffer("col_indices", owned(col.to(device)))
        lead = (items,) if items is not None and one_pattern else ()
        self.values = nn.Parameter(torch.empty(*lead, len(col), *self.blocksize, device=device, dtype=dtype))
        self._weight: BsrMatrix | None = None
        self._dtype: torch.dtype | None = None  # that `values` had then; .to() changes it in place
        self._checked = False

    # The weight

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """(M, K), or (L, M, K)."""
        shape = self.out_features, self.in_features
        return shape if self.items is None else (self.items, *shape)

    @property
    def _pattern_shape(self) -> tuple[int, ...]:
        """(M, K), or (L, M, K) of items with a pattern each."""
        return self.matrix_shape if self.crow_indices.dim() == 2 else (self.out_features, self.in_features)

    @property
    def nnz(self) -> int:
        """Stored blocks: of the pattern that items share, or of all items."""
        return self.col_indices.shape[0]

    @property
    def grid(self) -> tuple[int, int]:
        """(M / bm, K / bk)"""
        return self.out_features // self.blocksize[0], self.in_features // self.blocksize[1]

    @property
    def density(self) -> float:
        """Stored blocks over all blocks; 0.0 where there are none."""
        patterns = self.crow_indices.shape[0] if self.crow_indices.dim() == 2 else 1
        return self.nnz / max(1, patterns * math.prod(self.grid))

    @property
    def pattern(self) -> Pattern:
        """The indices as they are now, sharing memory; clone() it before a step that changes them."""
        return pattern_of(self.crow_indices, self.col_indices, self._pattern_shape, self.blocksize, check=False)

    @property
    def weight(self) -> BsrMatrix:
        """The weight, sharing `values` and the indices; the same object as long as they are the same.

        Raises:
            ValueError: the indices are no pattern, as after to_empty().
        """
        if torch.compiler.is_compiling():
            return self._traced(self.values)
        kept: Any = self._weight
        buffers = self._buffers
        values = self._parameters.get("values")  # without Module.__getattr__, 0.5 us a call
        if values is None:  # a parametrized one is an attribute of another kind
            values = self.values
        fits = (
            kept is not None
            and kept.crow_indices is buffers["crow_indices"]
            and kept.col_indices is buffers["col_indices"]
        )
        if fits and kept.stored is values and self._dtype is values.dtype:
            return kept
        if is_dtensor(values):
            raise RuntimeError(
                f"values of this {type(self).__name__} are sharded; call the module that fully_shard was applied to, "
                "or unshard() it first"
            )
        if self._shard_mesh is not None and not self._compared:
            self.compare_patterns()
        if not fits or kept.stored.shape != values.shape:
            kept = self._learn(values.detach())
            self._weight = kept
        matrix = kept.with_values(values)
        if type(values) is nn.Parameter:  # and not what a transformation puts in its place for one call
            self._weight, self._dtype = matrix, values.dtype
        return matrix

    def _traced(self, values: Tensor) -> BsrMatrix:
        """`weight` in a graph of torch.compile; its op looks up the pattern's cached tables by the index tensors."""
        indices = self.crow_indices, self.col_indices
        pattern = Pattern(*indices, self._pattern_shape, self.blocksize, caches=False)
        return BsrMatrix._of(pattern, indices, values, None, self.matrix_shape, not self._checked)

    def compare_patterns(self, dims: list[int] | None = None) -> None:
        """Compare the pattern with that of the other ranks that hold shards of `values`. Synchronizes.

        Args:
            dims: the mesh's dimensions along which it is the same; None: all.

        Raises:
            RuntimeError: it differs.
        """
        hashed = functools.partial(hash_of, self.crow_indices, self.col_indices)
        check_same(
            type(self).__name__, "the pattern", hashed, self._shard_mesh,
            "seed all ranks alike before the model is made, or load one state before fully_shard", dims,
        )  # fmt: skip
        self._compared = True

    def _matrix(self, values: Tensor, check: bool) -> BsrMatrix:
        return BsrMatrix(self.crow_indices, self.col_indices, values, self.matrix_shape, check=check)

    def _learn(self, values: Tensor) -> BsrMatrix:
        """A matrix of the indices as they are, checked. Synchronizes."""
        if self.crow_indices.is_meta:
            return self._matrix(values, check=False)
        matrix = self._matrix(values, check=True)
        try:
            matrix.check_indices()
        except ValueError as error:
            self._checked = False
            raise ValueError(LOST.format(error)) from None
        self._checked = True
        return matrix

    def _adopt(self) -> None:
        """Look at new index tensors as soon as they are there, so that no call has to, nor a compiled graph.

        Wrong ones raise when they are used.
        """
        self._weight, self._checked, self._compared = None, False, False
        crow = self.crow_indices
        if type(crow) is not Tensor or crow.is_meta or self.col_indices.is_meta:
            return
        values = self.values.detach()
        if type(values) is not Tensor or values.is_meta:  # shards: a matrix without memory, to keep the plans with
            lead = self.matrix_shape[:-2] if crow.dim() == 1 else ()
            shape = *lead, self.nnz, *self.blocksize  # of a tensor-parallel layer, what this rank holds
            values = torch.empty(shape, dtype=values.dtype, device=crow.device)
            values.untyped_storage().resize_(0)
        try:
            self._weight = self._learn(values)
        except (TypeError, ValueError):
            self._weight = None

    def _pattern_changed(self, even: bool) -> None:
        """After a write to the indices in place: nothing is checked, planned or compiled again.

        What kernels know of the pattern notices the write; `even` says whether block rows hold equally many now.
        """
        if self._weight is not None:
            self._weight.pattern.trust(even)

    def _hold(self, W: BsrMatrix, bias: Tensor | None) -> Self:
        """Copies of a matrix of this layer's shape and of a bias, in the place of those on the meta device."""
        self.crow_indices, self.col_indices = W.crow_indices.int().clone(), W.col_indices.int().clone()
        self.values = nn.Parameter(W.values.detach().clone())
        if bias is not None:
            bias = nn.Parameter(bias.detach().to(W.device, W.dtype, copy=True))
            self.register_parameter("bias", bias)
        self._kept_pattern = None
        self._adopt()
        return self

    # Values

    def reset_parameters(self) -> None:
        """New values, as __init__ makes them; and a pattern, where to_empty() has left none.

        Raises:
            ValueError: the pattern is lost, and it was neither drawn at random nor given on the meta device.
        """
        if self.crow_indices.is_meta:
            return
        if not self._checked:
            self._adopt()
        if not self._checked:
            self._restore_pattern()
        # nn.Linear's bound, 1 / sqrt(in_features), for the in_features * density inputs that an output has.
        bound = 1 / math.sqrt(self.in_features * self.density) if self.nnz and self.in_features else 0.0
        with torch.no_grad():
            values: Any = self.values.uniform_(-bound, bound)
            if is_parametrized(self, "values"):
                self.values = values  # by the parametrization's right_inverse
            if (bias := getattr(self, "bias", None)) is not None:
                bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
                bias.uniform_(-bound, bound)

    def _restore_pattern(self) -> None:
        crow, col = self.crow_indices, self.col_indices
        if self._kept_pattern is not None:
            found = self._kept_pattern
        elif self._random:
            patterns = crow.shape[0] if crow.dim() == 2 else None
            found = drawn_indices(patterns, *self.grid, len(col) // (patterns or 1), crow.device)
        else:
            raise ValueError(LOST.format("they were given, and are not kept"))
        crow.copy_(found[0])
        col.copy_(found[1])
        self._adopt()

    def _apply(self, fn: Callable, recurse: bool = True) -> BsrModule:
        before = self.crow_indices, self.col_indices
        super()._apply(fn, recurse)
        same = all(a is b for a, b in zip(before, (self.crow_indices, self.col_indices), strict=True))
        if not same or not self._checked:
            self._adopt()
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "values" and is_dtensor(value) and self._shard_mesh is None and not hasattr(self, "place"):
            check_blocks(self, value)
        super().__setattr__(name, value)
        if name != "values":
            return
        before: Any = self._shard_mesh
        place: Any = self.__dict__.get("place")
        whole = place.mesh if before is None and place is not None else before  # a copy has no _shard_mesh yet
        unknown = before is not None and not self._compared and not self.crow_indices.is_meta
        if is_dtensor(value):  # as fully_shard sets it, also after each use
            mesh = value.device_mesh
            if unknown and before.ndim > mesh.ndim:  # fully_shard gathered what is tensor parallel
                self.compare_patterns(dims_without(before, mesh))
            self.__dict__["_shard_mesh"] = mesh
            # What fully_shard has just split is compared now; fake indices, and those on the meta device, when values
            # are first gathered.
            split = whole is None or mesh.ndim > whole.ndim
            if split and not self._compared and type(self.crow_indices) is Tensor and not self.crow_indices.is_meta:
                self.compare_patterns(None if whole is None else dims_without(mesh, whole))
        elif unknown:
            self.compare_patterns()  # here, as fully_shard gathers outside of what torch.compile traces

    def __delattr__(self, name: str) -> None:
        if name in TENSORS[:2]:  # so does register_parametrization
            raise TypeError(f"{name} of a {type(self).__name__} cannot be deleted or parametrized; parametrize values")
        super().__delattr__(name)

    # State

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_weight": None, "_shard_mesh": None}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._adopt()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Also of a pattern with another number of blocks: values and col_indices are resized to it."""
        names = {name: prefix + name for name in TENSORS}
        names["values"] = prefix + name_of_values(self)
        found = {name: state_dict.get(key) for name, key in names.items()}
        if found["values"] is None and is_parametrized(self, "values"):  # several originals
            found["values"] = self.values.detach()
        given = [name for name, t in found.items() if t is not None]
        if given:
            if len(given) < len(TENSORS):
                error = f"the state has {', '.join(given)} alone; a weight is {', '.join(TENSORS)}"
            else:
                error = self._fit(found, local_metadata.get("assign_to_params_buffers", False))
            if error:
                error_msgs.append(f"{prefix[:-1] or type(self).__name__}: {error}")
                return
            state_dict.update({key: found[name] for name, key in names.items() if key in state_dict})
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if given:
            self._random, self._kept_pattern = False, None
            self._adopt()

    def _fit(self, found: dict[str, Any], assign: bool) -> str:
        """Make room for a state's weight; what is wrong with it, or ""."""
        if error := misfit(self, found):
            return error
        values = found["values"]
        if assign and type(values) is Tensor and not values.is_meta:
            found["values"] = aligned(values.contiguous())  # of a mapped file; a product would copy them
        if values.shape != self.values.shape:
            if (name := name_of_values(self)) != "values":
                return f"{values.shape[-3]} blocks do not fit the {self.nnz} of this layer, whose values are of {name}"
            if type(self.values.data) is not Tensor:
                return (
                    f"{values.shape[-3]} blocks do not fit the {self.nnz} of this layer, whose values are a "
                    f"{type(self.values.data).__name__}, which cannot be resized; load before it is sharded, "
                    "or for a distributed checkpoint call sparse_collective.distributed.load_patterns before"
                )
            self._resize(values.shape[-3])
        return ""

    def _resize(self, nnz: int) -> None:
        """Room for so many blocks, without contents. `values` stays the same Parameter, without a gradient."""
        *lead, _, bm, bk = self.values.shape
        self.values.grad = None
        put_data(self.values, self.values.data.new_empty(*lead, nnz, bm, bk))
        self.col_indices = self.col_indices.new_empty(nnz)

    def extra_repr(self) -> str:
        patterns = self.crow_indices.shape[0] if self.crow_indices.dim() == 2 else 1
        facts = "" if self.items is None else f"items={self.items}, "
        facts += f"in_features={self.in_features}, out_features={self.out_features}, "
        facts += f"bias={getattr(self, 'bias', None) is not None}, blocksize={self.blocksize}, "
        facts += f"density={self.density:.4g}, blocks={self.nnz} of {patterns * math.prod(self.grid)}"
        return facts if self.activation is None else f"{facts}, activation={self.activation!r}"


def check_blocks(layer: BsrModule, values: Any) -> None:
    """ValueError if fully_shard is to train a layer without blocks, which its backward pass cannot."""
    if values.requires_grad and not values.numel():
        raise ValueError(
            f"fully_shard: this {type(layer).__name__} stores no block, and FSDP2 reduces no empty gradients; "
            "store one block, or call layer.values.requires_grad_(False) before"
        )


def misfit(layer: Any, found: dict[str, Any]) -> str:
    """The reason why a state's weight does not fit a layer, or ""; the number of blocks may differ.

    Args:
        layer: a BsrModule, or a layer that has as much of one: blocksize, items, pattern and the three tensors.
        found: by name, among others, the three tensors; their indices become int32 ones.
    """
    crow, col, values = (found[name] for name in TENSORS)
    if crow.shape != layer.crow_indices.shape:
        mine = tuple(layer.crow_indices.shape)
        return f"crow_indices has shape {tuple(crow.shape)}, the layer's {mine}: another number of block rows"
    if values.dim() != layer.values.dim() or values.shape[-2:] != layer.values.shape[-2:]:
        return f"values has shape {tuple(values.shape)}, the layer has blocks of {layer.blocksize}"
    if values.shape[:-3] != layer.values.shape[:-3]:
        return f"values has shape {tuple(values.shape)}, the layer has {layer.items} items"
    if col.dim() != 1 or values.shape[-3] != len(col):
        return f"col_indices has shape {tuple(col.shape)} for {values.shape[-3]} blocks"
    for name, t in (("crow_indices", crow), ("col_indices", col)):
        if t.dtype not in arguments.INDEX_DTYPES:
            return f"{name} is {t.dtype}, no int32 or int64"
        found[name] = owned(t.int().contiguous())
    if type(crow) is not Tensor or crow.is_meta or col.is_meta:
        return ""
    pattern = Pattern(found["crow_indices"].to(col.device), found["col_indices"], layer.pattern.shape, layer.blocksize)
    return pattern.error()


def put_data(parameter: nn.Parameter, data: Tensor) -> None:
    """Other data in the same Parameter, of another shape; its gradient must be None.

    As long as a graph of an earlier step lives, autograd expects gradients of the shape that the Parameter had then.
    torch forgets that where the dtype changes, and only there.
    """
    parameter.data = data.new_empty(0, dtype=torch.float16 if data.dtype != torch.float16 else torch.float32)
    parameter.data = data
