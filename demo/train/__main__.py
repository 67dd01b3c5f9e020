"""python -m demo.train: train a byte-level transformer dense and block-sparse; without a GPU, in a tiny form."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.table import make_console

from ..device import why_no_gpu
from . import report, runs, text

DEMO = Path(__file__).resolve().parents[1]
NAMES = {"dense": runs.DENSE, "sparse": runs.SPARSE, "wide": runs.WIDE}
INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it


def positive(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is no positive number")
    return int(value)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.train", description=__doc__)
    parser.add_argument("--steps", type=positive, help="optimizer steps of each run")
    parser.add_argument("--only", choices=NAMES, help="one of the runs")
    parser.add_argument("--png", type=Path, default=DEMO / "train.png", help="the picture (default: demo/train.png)")
    parser.add_argument("--json", type=Path, help="write the figures, versions, device and command here, too")
    return parser.parse_args(argv)


def progress(console: Console) -> Progress:
    columns = "[progress.description]{task.description}", "{task.fields[found]}"
    times = TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(TextColumn(columns[0]), BarColumn(), MofNCompleteColumn(), *times, TextColumn(columns[1]),
                    console=console)  # fmt: skip


def train_bytes(args: argparse.Namespace, argv: Sequence[str], console: Console) -> None:
    """The runs, their table, picture and result file."""
    no_gpu = why_no_gpu()
    gpu, plan = not no_gpu, runs.CPU if no_gpu else runs.GPU
    plan = plan if args.steps is None else replace(plan, steps=args.steps)
    if no_gpu:
        console.print(f"{no_gpu} A tiny model is trained on the CPU.")
    texts = [text.as_bytes(part).to("cuda" if gpu else "cpu") for part in text.split()]
    sizes = {"train": len(texts[0]), "held_out": len(texts[1])}
    console.print(
        f"Text: Python's help topics and docstrings, {sizes['train']:,} bytes to train on and {sizes['held_out']:,} of "
        "other documents held out."
    )
    found = []
    with progress(console) as bar:
        for name in [NAMES[args.only]] if args.only else NAMES.values():
            task = bar.add_task(name, total=plan.steps, found="preparing")

            def tell(step: int, loss: float, task=task) -> None:
                bar.update(task, completed=step, found=f"held-out loss {loss:.3f}")

            found.append(runs.train(name, plan, *texts, tell, compiled=gpu))
    where = report.environment(gpu)
    shape = plan.shape
    console.print(report.runs_table(
        found, f"{shape.layers} layers of {shape.dim}, context {shape.context}, {plan.batch} windows a step, "
        f"{plan.steps} steps, {shape.block}x{shape.block} blocks, {'bf16' if gpu else 'fp32'}; {where['card']}"
    ))  # fmt: skip
    if no_gpu:
        console.print("Times say nothing of the kernels: CPU tensors take a plain torch reference.")
    if args.json:
        report.write_json(args.json, "training-demo", where, argv, found, plan=asdict(plan), text_bytes=sizes)
    report.draw(args.png, found, where["card"])
    console.print(f"Picture: {args.png}")


def main(argv: Sequence[str] | None = None) -> int:
    """What is wrong with a path, and Ctrl-C, is one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    try:
        for path in filter(None, (args.png, args.json)):  # before minutes of work, and not after them
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        train_bytes(args, argv, make_console(150))
    except OSError as error:
        print(f"python -m demo.train: error: {error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError:
        print("python -m demo.train: error: the GPU's memory does not suffice", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    status = main()
    if status == INTERRUPTED:  # without the seconds that Python takes to free what it has imported
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
