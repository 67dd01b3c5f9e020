"""python -m demo: a pruned model that recovers, its layer computed here, a long prompt; on a GPU, times."""

import argparse
import os
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from bench.table import make_console
from sparse_collective import BsrMatrix

from . import accuracy, figure, long_context, recorded, timing
from .device import why_no_gpu
from .layer import FeedForward, load_layer

DENSITIES = (0.5, 0.25, 0.125)
BLOCKS = ((64, 64), (128, 64), (32, 32), (48, 96))  # each divides (1536, 384) and (384, 1536)
LARGE_BLOCKS = ((128, 128), (64, 64))
PICTURED = ((32, 32), 0.25)
ROOT = Path(__file__).resolve().parent.parent
INSPECTED = ("sm_80", "sm_86", "sm_89", "sm_90a")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--no-large", action="store_true", help="on a GPU, leave out the large model's layers")
    parser.add_argument("--attention", action="store_true", help="the attention part alone")
    text = "where the picture goes (default: demo/demo.png); attention.png beside it"
    parser.add_argument("--png", type=Path, default=ROOT / "demo" / "demo.png", help=text)
    return parser.parse_args(argv)


def show_recovery(console: Console) -> list[recorded.Recovery]:
    """What pruning and training do to a whole model, as it was recorded."""
    rows, source = recorded.load()
    console.print(
        "\nMiniLM, a sentence encoder, with the feed-forward layers pruned to 32x32 blocks."
        "\nPruning alone ruins it; some hundred training steps bring it back:\n"
    )
    console.print(recorded.table(rows))
    console.print(f"[dim]{escape(source)}[/]\n")
    return rows


def show_accuracy(console: Console, layer: FeedForward) -> list[accuracy.Accuracy]:
    """Check the block-sparse GEMMs on a real layer."""
    shape = f"{layer.w1.shape[1]} -> {layer.w1.shape[0]} -> {layer.w2.shape[0]}"
    console.print(
        f"Its first layer here and now: {shape}, {len(layer.x)} tokens of real text.\n"
        "Does bsr_linear compute what the pruned weights should give?\n"
    )
    with console.status("pruning and comparing"):
        rows = [accuracy.measure(layer, *point) for point in product(BLOCKS, DENSITIES)]
    console.print(accuracy.accuracy_table(rows))
    console.print(
        "Errors are relative to FP32 with the same pruned weights, in FP16; next to ours,\n"
        "the error of torch's dense FP16 GEMMs.\n"
    )
    return rows


def show_timings(console: Console, layer: FeedForward, large: bool) -> list[list[timing.Timing]]:
    """Tables of times; returns the rows of each table that has any."""
    shown: list[list[timing.Timing]] = []
    parts = {f"The real layer, {len(layer.x)} tokens, fp16": timing.time_layer(layer, BLOCKS, DENSITIES)}
    if large:
        title = f"A large model's layers, {timing.LARGE_TOKENS} tokens, random normal weights, bf16"
        parts[title] = timing.time_large(LARGE_BLOCKS, DENSITIES)
    for title, products in parts.items():
        rows = []
        try:
            with console.status(title) as status:
                for row in products:
                    rows.append(row)
                    status.update(f"{title}: {len(rows)} measured")
        except torch.OutOfMemoryError:
            console.print("The GPU's memory does not suffice for the rest of this table.")
        if rows:
            shown.append(rows)
            table, notes = timing.timing_table(title, rows)
            console.print(table)
            console.print("".join(f"{escape(note)}\n" for note in notes))
    console.print(
        "Medians in µs with L2 flushed, the three called in turn. Dense: F.linear, unpruned.\n"
        "torch BSR: F.linear with torch.sparse_bsr, without the bias."
    )
    return shown


def show_attention(console: Console, device: str, png: Path) -> long_context.LongContext:
    """Attention of a long prompt: its table and its picture."""
    console.print(
        "\nA long prompt: each token sees its own document, a window of the last tokens,\n"
        "and the first tokens. Blocks of scores without any of these are not computed.\n"
    )
    with console.status("attending"):
        found = long_context.study("cuda" if device else "cpu")
    console.print(long_context.table(found))
    for note in dict.fromkeys(us for us in found.micros.values() if isinstance(us, str)):
        console.print(escape(note))
    console.print("Blocks computed: of those of the causal mask. Error: the largest of some rows,\nagainst FP32.\n")
    path = png.with_name("attention.png")
    saving = partial(figure.draw_saving, found=found, device=device)
    figure.write_png(path, partial(figure.draw_mask, mask=found.mask), saving, 1.3)
    console.print(f"Picture: {path}")
    return found


def inspect_kernels(console: Console) -> bool:
    """Compile for every architecture and print each kernel's resources; whether that worked."""
    console.print(f"\nCompiling the kernels for {', '.join(INSPECTED)}; this needs no GPU.")
    command = [sys.executable, "-m", "cute_kernels", "inspect", "--arch", ",".join(INSPECTED), "--quick"]
    sys.stdout.flush()
    code = subprocess.run(command, cwd=ROOT).returncode
    if code:
        console.print(f"[bold red]python {' '.join(command[1:])} failed with exit code {code}.[/]")
    return code == 0


def main(argv: list[str] | None = None) -> int:
    args, console, no_gpu = parse(argv), make_console(80), why_no_gpu()
    if no_gpu:
        console.print(f"{no_gpu}\nResults come from the reference on the CPU, and nothing is timed.")
    device = "" if no_gpu else torch.cuda.get_device_name()
    if device:
        console.print(f"Running on {device}.")
    results: list = []
    if not args.attention:
        recovery = show_recovery(console)
        layer = load_layer("cuda" if device else "cpu")
        results += show_accuracy(console, layer)
        draw = partial(recorded.draw, rows=recovery)
        if device:
            timings = show_timings(console, layer, large=not args.no_large)
            results += [row for table in timings for row in table]
            draw = partial(figure.draw_timing, rows=timings[-1], device=device)
        w = BsrMatrix.from_dense(layer.w1, PICTURED[0], density=PICTURED[1])
        figure.write_png(args.png, partial(figure.draw_pattern, w=w, name="intermediate.weight"), draw, 2.4)
        console.print(f"Picture: {args.png}")
    results.append(show_attention(console, device, args.png))
    compiled = bool(args.attention or device) or inspect_kernels(console)
    wrong = [result for result in results if not result.agrees]
    if wrong:
        console.print(f"[bold red]{len(wrong)} of {len(results)} results failed or disagree with fp32.[/]")
    return 0 if compiled and not wrong else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)  # skip Python's shutdown, which takes seconds
