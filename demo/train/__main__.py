"""python -m demo.train: train a byte-level transformer with dense and block-sparse layers, and block-sparse attention;
without a GPU, in a tiny form.

--minilm: prune a sentence model to blocks, and train it until its embeddings recover.
--long: a few steps of a model of Llama's shape on 32k tokens, whose attention sees a window, global tokens and
documents: ours, FlexAttention, SDPA and FlashAttention 4.
"""

import argparse
import copy
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.table import make_console

from ..device import why_no_gpu
from . import long, minilm, recovery, report, runs, text

DEMO = Path(__file__).resolve().parents[1]
NAMES = {"dense": runs.DENSE, "sparse": runs.SPARSE, "wide": runs.WIDE, "attention": runs.ATTENTION}
INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it


def positive(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is no positive number")
    return int(value)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.train", description=__doc__)
    parser.add_argument("--steps", type=positive, help="optimizer steps of each run")
    parser.add_argument("--only", choices=NAMES, help="one of the runs")
    parser.add_argument("--minilm", action="store_true", help="prune all-MiniLM-L6-v2 and train it until it recovers")
    parser.add_argument(
        "--long", action="store_true", help="a model of Llama's shape on 32k tokens; needs transformers"
    )
    parser.add_argument("--png", type=Path, help="the picture (default: demo/train.png, minilm.png or long.png)")
    parser.add_argument("--json", type=Path, help="write the figures, versions, device and command here, too")
    args = parser.parse_args(argv)
    if args.minilm and args.long:
        parser.error("--minilm and --long are two things to train; give one of them")
    if (args.minilm or args.long) and args.only:
        parser.error("--only names a run of the byte-level transformer; leave it out with --minilm and --long")
    args.png = args.png or DEMO / ("minilm.png" if args.minilm else "long.png" if args.long else "train.png")
    return args


def check_writable(path: Path) -> None:
    """Make the folder of a file that is to be written.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OSError(f"{path} cannot be written")


def progress(console: Console) -> Progress:
    times = TimeElapsedColumn(), TimeRemainingColumn()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times
    return Progress(*columns, TextColumn("{task.fields[found]}"), console=console)


def train_bytes(args: argparse.Namespace, argv: Sequence[str], console: Console) -> None:
    """The runs, their table, picture and result file."""
    no_gpu = why_no_gpu()
    gpu, plan = not no_gpu, runs.CPU if no_gpu else runs.GPU
    plan = plan if args.steps is None else replace(plan, steps=args.steps)
    if no_gpu:
        console.print(f"{no_gpu} A tiny model is trained on the CPU.")
    where = report.environment(gpu)
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

            found.append(runs.train(name, plan, *texts, tell))
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


def train_long(args: argparse.Namespace, argv: Sequence[str], console: Console) -> None:
    """Each candidate's steps, their table, picture and result file."""
    no_gpu = why_no_gpu()
    gpu, plan = not no_gpu, long.CPU if no_gpu else long.GPU
    plan = plan if args.steps is None else replace(plan, timed=args.steps)
    if no_gpu:
        console.print(f"{no_gpu} A tiny model is trained on the CPU.")
    where = report.environment(gpu)
    data = text.as_bytes(text.split()[0]).to("cuda" if gpu else "cpu")
    found = []
    with progress(console) as bar:
        # The last one's import changes CuTe DSL for the process: ours is compiled before.
        for name in (*long.SAME_MASK, long.PACKED):
            steps = plan.slow_steps if name == long.SDPA else plan.warmup + plan.timed
            task = bar.add_task(name, total=steps, found="preparing")

            def tell(step: int, loss: float, task=task) -> None:
                bar.update(task, completed=step, found=f"loss {loss:.3f}")

            found.append(long.train(name, plan, data, tell))
            if found[-1].error:
                bar.update(task, found="failed")
    shape = f"{plan.length:,} tokens a step, {plan.layers} layers of {plan.dim}, {plan.heads}/{plan.kv_heads} heads"
    mask = f"window {plan.window}, {plan.global_tokens} global tokens, {len(plan.starts()) - 1} documents"
    console.print(report.long_table(found, plan.length, f"{shape}; {mask}; {where['card']}"))
    for run in found:
        if run.error:
            console.print(f"{run.name}: {run.error}")
    apart = long.difference(found)
    console.print(f"Losses of the same mask differ by at most {apart:.2%} at the same step.")
    if no_gpu:
        console.print("Times say nothing of the kernels: CPU tensors take a plain torch reference.")
    if args.json:
        report.write_json(args.json, "long-context", where, argv, found, plan=asdict(plan), largest_difference=apart)
    report.draw_long(args.png, found, f"A step on {where['card']}")
    console.print(f"Picture: {args.png}")


def recover_minilm(args: argparse.Namespace, argv: Sequence[str], console: Console) -> None:
    """Recovery at each density, its table, picture and result file."""
    no_gpu = why_no_gpu()
    device, steps = "cpu" if no_gpu else "cuda", args.steps or recovery.STEPS
    where = report.environment(not no_gpu)
    teacher = minilm.load().to(device).requires_grad_(False)
    sentences = recovery.texts()
    inputs = [[tokens.to(device) for tokens in minilm.batches(minilm.tokenize(part), recovery.TOKENS)]
              for part in sentences]  # fmt: skip
    console.print(
        f"{no_gpu + ' ' if no_gpu else ''}all-MiniLM-L6-v2, its feed-forward layers in "
        f"{'x'.join(map(str, recovery.BLOCKSIZE))} blocks.\nText: Python's help topics and docstrings, "
        f"{len(sentences[0]):,} sentences to train on and {len(sentences[1])} of other documents held out."
    )
    found, student = [], copy.deepcopy(teacher)
    with progress(console) as bar:
        for density in recovery.DENSITIES:
            task = bar.add_task(f"density {density:.1%}", total=steps, found="preparing")

            def tell(step: int, cosine: float, task=task) -> None:
                bar.update(task, completed=step, found=f"cosine {cosine:.3f}")

            found.append(recovery.recover(student, teacher, density, *inputs, steps, tell))
    title = (
        f"Cosine with the dense model's embeddings, {steps} steps each, {'fp32' if no_gpu else 'bf16'}; {where['card']}"
    )
    console.print(report.recovery_table(found, title))
    if args.json:
        plan = {"blocksize": recovery.BLOCKSIZE, "rate": recovery.RATE, "tokens_a_step": recovery.TOKENS}
        plan |= {"sentences": len(sentences[0]), "held_out_sentences": len(sentences[1]), "low": recovery.LOW}
        report.write_json(args.json, "minilm", where, argv, found, plan=plan)
    curves = partial(report.draw_curves, found=found)
    report.write_png(args.png, curves, partial(report.draw_before_and_after, found=found), 1)
    console.print(f"Picture: {args.png}")


def main(argv: Sequence[str] | None = None) -> int:
    """What is wrong with a path, and Ctrl-C, is one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    try:
        for path in filter(None, (args.png, args.json)):  # before minutes of work, and not after them
            check_writable(path)
        run = recover_minilm if args.minilm else train_long if args.long else train_bytes
        run(args, argv, make_console(150))
    except (OSError, minilm.MissingModel, ImportError) as error:
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
