"""Rows of sharded layers: tensor-parallel SwiGLU over its shards' GEMMs alone, and a training step with FSDP2."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from demo.train.model import Decoder, Shape
from sparse_collective.distributed import BsrColwiseParallel, BsrRowwiseParallel, partition_hidden
from sparse_collective.nn import SwiGLU

from .distributed import Row, timed

TOKENS, DIM, HIDDEN, DENSITY = 8192, 4096, 14336, 0.125
DECODER = Shape(1024, 4096, 8, 16, 1024, 128, DENSITY)
WINDOWS = 32  # of DECODER.context bytes, for each GPU
LAYERS = 4  # calls one after another, as in a model


def step_of(module: Callable, x: torch.Tensor, dy: torch.Tensor, parameters: list) -> Callable[[], None]:
    """Forward and backward, with gradients of x and of the parameters made anew."""

    def step() -> None:
        for leaf in (x, *parameters):
            leaf.grad = None
        module(x).backward(dy)

    return step


def in_a_row(call: Callable[[], object]) -> Callable[[], None]:
    def calls() -> None:
        for _ in range(LAYERS):
            call()

    return calls


def tensor_parallel(sequence: bool, training: bool, overlap: bool = False) -> Callable[[torch.device], dict]:
    """SwiGLU over all ranks, beside this rank's GEMMs of all tokens without communication.

    sequence: x and y are split by tokens, so that x is all-gathered and y reduce-scattered; else y is all-reduced.
    overlap: beside the GEMMs.
    """

    def run(device: torch.device) -> dict:
        world, rank = dist.get_world_size(), dist.get_rank()
        mesh = init_device_mesh(device.type, (world,))
        ffn = SwiGLU(DIM, HIDDEN, density=DENSITY, device=device, dtype=torch.bfloat16).train(training)
        partition = partition_hidden(ffn.gate_up, ffn.down, world)
        layout = Shard(0) if sequence else Replicate()
        parallelize_module(ffn, mesh, {
            "gate_up": BsrColwiseParallel(input_layouts=layout, partition=partition, overlap=overlap),
            "down": BsrRowwiseParallel(output_layouts=layout, partition=partition, overlap=overlap),
        })  # fmt: skip
        whole = torch.randn(TOKENS, DIM, device=device, dtype=torch.bfloat16)
        dy = torch.randn_like(whole)
        x, dx = (t.chunk(world)[rank].contiguous() if sequence else t for t in (whole, dy))

        def shards(t: torch.Tensor) -> torch.Tensor:
            return ffn.down.local_forward(ffn.gate_up.local_forward(t))

        if training:
            parameters = list(ffn.parameters())
            calls = {
                "tensor parallel": step_of(ffn, x.requires_grad_(), dx, parameters),
                "shards": step_of(shards, whole.detach().requires_grad_(), dy, parameters),
            }
        else:
            calls = {"tensor parallel": lambda: ffn(x), "shards": lambda: shards(whole)}
        with torch.set_grad_enabled(training):
            return result(timed(calls | {f"{name}, in a row": in_a_row(call) for name, call in calls.items()}), ffn)

    return run


def result(times: dict[str, float], ffn: SwiGLU) -> dict:
    """Milliseconds of a call after a pause, in which links have rested, and of one of LAYERS in a row."""
    blocks = [len(layer.values.to_local()) for layer in (ffn.gate_up, ffn.down)]
    ms, shards_ms = times["tensor parallel"], times["shards"]
    each, shards_each = (times[f"{name}, in a row"] / LAYERS for name in ("tensor parallel", "shards"))
    return {
        "ms": ms, "shards_ms": shards_ms, "ratio": ms / shards_ms, "in_a_row_ms": each,
        "in_a_row_ratio": each / shards_each, "blocks": blocks,
    }  # fmt: skip


def fsdp_step(device: torch.device) -> dict:
    """A training step of the demo's transformer under fully_shard, beside one GPU's own step of as many tokens.

    Both have one policy, so that they compute the same in the same dtypes: one GPU's model is sharded over a mesh of
    its rank alone.
    """
    tokens = torch.randint(256, (WINDOWS, DECODER.context + 1), dtype=torch.uint8, device=device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=("ranks", "one"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    alone = Decoder(DECODER).to(device)
    models = {"alone": alone, "sharded": copy.deepcopy(alone)}
    for model, ranks in zip(models.values(), (mesh["one"], mesh["ranks"]), strict=True):
        for layer in model.layers:
            fully_shard(layer, mesh=ranks, mp_policy=policy)
        fully_shard(model, mesh=ranks, mp_policy=policy)

    def step_of_model(model: Decoder) -> Callable[[], torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> torch.Tensor:
            loss = model.loss(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    calls: dict[str, Callable[[], object]] = {name: step_of_model(model) for name, model in models.items()}
    times = timed(calls, rounds=15, sleep=5 * 20_000_000)
    count = WINDOWS * DECODER.context
    return {
        "ms": times["sharded"], "alone_ms": times["alone"], "efficiency": times["alone"] / times["sharded"],
        "tokens_per_s_per_gpu": 1e3 * count / times["sharded"],
    }  # fmt: skip


def rows() -> list[Row]:
    limits = {"ratio": {2: 1.05, 4: 1.08}}
    name = f"TP SwiGLU {DIM} to {HIDDEN}, {DENSITY:.1%}, {TOKENS} tokens"
    return [
        *(
            Row(f"{name}, {how}, {what}", tensor_parallel(True, training, overlap), target=limits if overlap else None)
            for overlap, how in ((True, "overlapped"), (False, "sequence parallel"))
            for training, what in ((False, "forward"), (True, "forward and backward"))
        ),
        Row(f"{name}, replicated x and y, forward", tensor_parallel(False, False)),
        Row(f"FSDP2 step of the demo transformer at {DENSITY:.1%}, weak scaling", fsdp_step,
            target={"efficiency": {2: 0.93, 4: 0.9}}),
    ]  # fmt: skip
