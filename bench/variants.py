"""`python -m bench.variants [NAME ...]`: time FP8 kernels that heuristics never select against the selected one.

    ping-pong       promoted accumulation, tiles of 64x256: dense and block-sparse GEMMs
    overlap-gate    gated GEMM whose store overlaps the next tile's first WGMMAs

Replays of CUDA graphs are timed. Results must be bitwise identical to the selected kernel's, since both add partial
sums in the same order; "differs" in a row is an error.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from cute_kernels import explain, gemm, quantize
from cute_kernels.arch import arch_named
from cute_kernels.matmul.candidates import sm90
from cute_kernels.matmul.config import OVERLAP_STORE, GemmConfig
from cute_kernels.testing.forced import forced_config
from cute_kernels.tile.element import element_of
from sparse_collective import bsr_gated_linear, bsr_linear, random_bsr

from . import timing

OF = {"spec": arch_named("sm_90a"), "element": element_of("float8_e4m3fn")}
PAIRS = ((2, 1), (1, 2), (1, 1))  # CTAs of a cluster
PING_PONG = [sm90(64, 256, 128, 1, 1, *pair, consumer_groups=2, ring=1, **OF) for pair in PAIRS]
OVERLAP = [replace(sm90(128, 256, 128, 2, 1, *pair, **OF), schedule=OVERLAP_STORE) for pair in PAIRS]
NAMES = ("ping-pong", "overlap-gate")


def problems(names: list[str]) -> Iterator[tuple[str, Callable, tuple, dict, list[GemmConfig]]]:
    """(name, op, arguments, keyword arguments, configurations) of each problem."""
    wide = {"dtype": torch.bfloat16, "device": "cuda"}
    for size in (4096, 8192) if "ping-pong" in names else ():
        a, scale_a = quantize(torch.randn(size, size, **wide), per="row")
        b, scale_b = quantize(torch.randn(size, size, **wide), per="row")
        yield f"gemm {size}", gemm, (a, b.t()), {"scale_a": scale_a, "scale_b": scale_b.t()}, PING_PONG
    for size, share in ((8192, 8), (4096, 4)):
        W = random_bsr((size, size), (128, 128), per_row=size // 128 // share, device="cuda").quantize()
        x, scale = quantize(torch.randn(8192, size, **wide), per="row")
        if "ping-pong" in names:
            yield f"bsr_linear {size} 1/{share}", bsr_linear, (x, W), {"scale_x": scale}, PING_PONG
        if "overlap-gate" in names:
            yield f"bsr_gated_linear {size} 1/{share}", bsr_gated_linear, (x, W), {"scale_x": scale}, OVERLAP


def main(names: list[str]) -> None:
    for name, op, args, terms, configs in problems(names or list(NAMES)):
        call = partial(op, *args, **terms)
        wanted, graphs, notes = call(), {"selected": timing.graphed(call)}, {}
        notes["selected"] = str(explain(op, *args, **terms).facts.config)
        for config in configs:
            try:
                with forced_config(config):
                    notes[config.short] = "" if torch.equal(call(), wanted) else "differs"
                    graphs[config.short] = timing.graphed(call)
            except ValueError as error:  # not legal
                print(f"{name}: {config.short}: {error}")
        for each, times in timing.interleaved_graphs(graphs).items():
            print(f"{name}: {each}: {timing.median(times):.1f} us {notes[each]}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=(*NAMES, []))
    main(parser.parse_args().names)
