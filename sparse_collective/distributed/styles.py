"""Parallel styles of torch.distributed.tensor.parallel for block-sparse layers."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from ..nn.grouped import BsrGroupedLinear
from ..nn.module import BsrModule
from .parallel import parallelize
from .partition import Partition, evenly, least_unit

__all__ = ["BsrColwiseParallel", "BsrRowwiseParallel"]


class BsrColwiseParallel(ColwiseParallel):
    """Split the output features of a block-sparse layer over ranks, as torch's ColwiseParallel does for nn.Linear.

    Takes BsrLinear, GatedBsrLinear and BsrGroupedLinear; any other module goes to torch's ColwiseParallel. `values`
    becomes a DTensor, in which each rank's blocks follow those of the rank before; the layer stays an instance of its
    class, and computes with this rank's part.

    Args:
        input_layouts: placement of x: Replicate() (the default), or Shard(dim) of its tokens, which are all-gathered
            (sequence parallel); not for BsrGroupedLinear, whose routing is of the tokens that it gets.
        output_layouts: placement of the result: Shard(-1) (the default), the rank's features; or Replicate().
        use_local_output: True returns a torch.Tensor instead of a DTensor.
        partition: the hidden features of each rank, from partition_hidden; by default ranks get ranges of equally many
            block rows, or one more.
        overlap: copy x to the memory of the other ranks while the GEMM of own tokens runs; tokens of other ranks are
            multiplied as they arrive. If `down` of a SwiGLU has it too, both layers are scheduled together. Needs
            input_layouts=Shard(0), and GPUs of one host that reach each other's memory (NVLink).

    parallelize_module raises:
        TypeError: the layer is sharded already, or the module is none of these layers and contains some, or does not
            support the partition or overlap.
        ValueError: the layer does not fit the partition, or the partition the mesh; output_layouts need equal ranges of
            features; tokens of a BsrGroupedLinear are split; or the mesh has several dimensions or ranks that do not
            ascend.
        RuntimeError: ranks hold different layers or patterns, or pass other arguments to the style.

    The layer's first call raises RuntimeError if ranks pass different numbers or dtypes of tokens; see
    docs/howto/distributed.md.

    Example::

        mesh = init_device_mesh("cuda", (2,))
        parallelize_module(ffn, mesh, {"gate_up": BsrColwiseParallel(), "down": BsrRowwiseParallel()})
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        output_layouts: Any = None,
        use_local_output: bool = True,
        partition: Partition | None = None,
        overlap: bool = False,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.partition, self.overlap = partition, overlap

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        if not isinstance(module, BsrModule):
            check_dense(self, module)
            return super()._apply(module, device_mesh)
        check_mesh(self, device_mesh)
        return parallelize(module, 0, device_mesh, self)

    def _partition_of(self, module: BsrModule, ranks: int) -> Partition:
        """The partition of the rows of a layer's weight.

        Raises:
            TypeError, ValueError: the layer does not support the style's arguments.
        """
        unit = least_unit(module)
        rows = module.out_features // (2 if getattr(module, "gated", False) else 1)
        partition = evenly(rows // unit, unit, ranks) if self.partition is None else self.partition
        wanted = self.output_layouts[0]
        if not (partition.contiguous and partition.even) and not (wanted.is_shard(-1) and self.use_local_output):
            raise ValueError(
                f"BsrColwiseParallel: output_layouts={wanted} with use_local_output={self.use_local_output} needs "
                "ranks with equal, contiguous ranges of features; use Shard(-1) and a local output, or no partition"
            )
        check_routing(self, module, "input_layouts", self.input_layouts[0])
        if self.overlap:
            check_overlap(self, module, self.input_layouts[0].is_shard(0) and wanted.is_shard(-1), "input_layouts")
        return partition.of_rows(module)


class BsrRowwiseParallel(RowwiseParallel):
    """Split the input features of a block-sparse layer over ranks, as torch's RowwiseParallel does for nn.Linear.

    Takes BsrLinear and BsrGroupedLinear; any other module goes to torch's RowwiseParallel. Each rank multiplies its
    features of x with its block columns; the results are summed over ranks. Bias and activation apply to the sum.

    Args:
        input_layouts: placement of x: Shard(-1) (the default), the rank's features, as a layer with the same partition
            returns them; Replicate(); or Shard(dim) of its tokens: then only the columns of x that a rank's blocks
            read are sent to it; not for BsrGroupedLinear.
        output_layouts: placement of the result: Replicate() (the default, an all-reduce), or Shard(dim) of its tokens
            (a reduce-scatter; not for BsrGroupedLinear).
        use_local_output: True returns a torch.Tensor instead of a DTensor.
        partition: the features of each rank, from partition_hidden; by default ranks get ranges of equally many block
            columns, or one more.
        overlap: the GEMM stores each rank's tokens of its result to the memory of that rank, which then adds what has
            arrived. Needs output_layouts=Shard(0), and tokens that are a multiple of the number of ranks; see
            BsrColwiseParallel.

    Raises as BsrColwiseParallel does.
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        output_layouts: Any = None,
        use_local_output: bool = True,
        partition: Partition | None = None,
        overlap: bool = False,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.partition, self.overlap = partition, overlap

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        if not isinstance(module, BsrModule):
            check_dense(self, module)
            return super()._apply(module, device_mesh)
        check_mesh(self, device_mesh)
        return parallelize(module, 1, device_mesh, self)

    def _partition_of(self, module: BsrModule, ranks: int) -> Partition:
        """The partition of the columns of a layer's weight.

        Raises:
            TypeError, ValueError: the layer does not support the style's arguments.
        """
        outputs: Any = self.output_layouts[0]
        if not (outputs.is_replicate() or (outputs.is_shard() and outputs.dim >= 0)):
            raise ValueError(
                f"BsrRowwiseParallel: output_layouts is {outputs}; use Replicate() or Shard(dim) of tokens"
            )
        check_routing(self, module, "input_layouts", self.input_layouts[0])
        check_routing(self, module, "output_layouts", outputs)
        side = module.blocksize[1]
        if self.overlap:
            check_overlap(self, module, self.input_layouts[0].is_shard(-1) and outputs.is_shard(0), "output_layouts")
        return evenly(module.in_features // side, side, ranks) if self.partition is None else self.partition


def check_dense(style: Any, module: nn.Module) -> None:
    """Reject options of block-sparse layers for a module that goes to torch, and a module that contains such layers.

    Raises:
        TypeError: it is one of these.
    """
    name, got = type(style).__name__, type(module).__name__
    for option in ("partition", "overlap"):
        if getattr(style, option):
            raise TypeError(f"{name}: {option} is for block-sparse layers, got {got}")
    layers = [path for path, layer in module.named_modules() if isinstance(layer, BsrModule)]
    if layers:
        raise TypeError(f"{name} takes one layer, got {got}; give each of its layers a style: {', '.join(layers)}")


def check_routing(style: Any, module: nn.Module, which: str, layout: Any) -> None:
    """Reject tokens that are split over ranks, of a layer whose routing is of this rank's tokens.

    Raises:
        ValueError: they are split.
    """
    if isinstance(module, BsrGroupedLinear) and layout.is_shard() and layout.dim not in (-1, 1):
        raise ValueError(
            f"{type(style).__name__}: {which} is {layout}, but the routing of a BsrGroupedLinear is of the tokens that "
            "it gets; use Replicate(), or BsrExpertParallel for tokens that are split over ranks"
        )


def check_mesh(style: Any, mesh: Any) -> None:
    """Reject a mesh with several dimensions, of other ranks, or with ranks that do not ascend.

    Torch splits a DTensor by the order of ranks in the mesh, and gathers it by that in the process group, which is
    ascending: a state dict would be permuted.

    Raises:
        ValueError: it is one of these.
    """
    name, ranks = type(style).__name__, mesh.mesh.tolist()
    if mesh.ndim != 1:
        raise ValueError(f'{name}: the mesh has {mesh.ndim} dimensions; pass one, as mesh["tp"]')
    if mesh.get_coordinate() is None:
        raise ValueError(f"{name}: this rank is not in the mesh, {mesh!r}")
    if ranks != sorted(ranks):
        raise ValueError(f"{name}: ranks of the mesh must ascend, got {ranks}; pass a mesh of {sorted(ranks)}")


def check_overlap(style: Any, module: nn.Module, layouts_fit: bool, which: str) -> None:
    """Reject layers and layouts without an overlapped form.

    Raises:
        ValueError: the layouts are others, or a DTensor is to be returned.
        TypeError: the layer takes a routing.
    """
    name = type(style).__name__
    if isinstance(module, BsrGroupedLinear):
        raise TypeError(f"{name}: overlap=True is for BsrLinear and GatedBsrLinear, got {type(module).__name__}")
    if not layouts_fit or not style.use_local_output:
        raise ValueError(
            f"{name}: overlap=True needs {which}=Shard(0), features in Shard(-1), and use_local_output=True"
        )
