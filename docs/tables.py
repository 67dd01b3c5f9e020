"""Generate the tables of results in README.md, docs/performance.md and docs/notes/targets.md from bench/results.

python docs/tables.py            rewrite the tables between <!-- table: NAME --> and <!-- end -->
python docs/tables.py --check    exit 1 if a table differs from the result files
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results/nvidia-h200"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs/performance.md", ROOT / "docs/notes/targets.md")
TABLE = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
README_ROWS = {  # row of single.json -> label in the README
    "gemm 8192x8192x8192, eager": "`gemm` 8192³",
    "bsr_linear 128x128, 0.125, 8192 tokens, 8192 squared, eager": "`bsr_linear`, 8192 tokens × 8192², 12.5 %",
    "bsr_linear 128x128, 0.25, 1 tokens, 16384 squared, eager": "`bsr_linear`, 1 token × 16384², 25 %",
    "SwiGLU 4096 to 14336, 0.05, inference, compiled": "`SwiGLU` 4096 → 14336, 5 %, compiled",
    "BsrLinear 128x128, 0.125, bias, forward and backward, eager": (
        "`BsrLinear` 8192 → 8192, 12.5 %, forward and backward"
    ),
    "BsrLinear 128x128, 0.125, bias, gelu, forward and backward, compiled": "the same with GELU, compiled",
    "attention forward B2 S8192 H16 D128 full, eager": "`attention` B2 S8192 H16 D128",
    "attention forward B2 S8192 H16 D128 causal, eager": "the same, causal",
    "attention backward B2 S8192 H16 D128 causal, eager": "its backward",
    "block_sparse_attention of a FlexAttention mask, window 1024, B2 S8192 H16 D128, forward and backward, eager": (
        "`block_sparse_attention`, a FlexAttention mask, forward and backward"
    ),
}
SUITES = "gemm", "block-sparse", "attention", "training", "attention-backward"
LARGE_COPY = "copy bandwidth"  # its time is for another number of bytes
SECTIONS = {  # table -> (suite, regular expression for the start of a row's name)
    "dense": ("gemm", r"gemm (?!.*sm_80)"),
    "dense sm_80": ("gemm", r"gemm .*sm_80"),
    "block-sparse": ("block-sparse", r"bsr_\w+ \d+x\d+, 0\.(125|216)(, sm_80 path)?$"),
    "patterns": ("block-sparse", r"bsr_\w+ .*(scattered|skewed|banded|local and global)"),
    "density": ("block-sparse", r"bsr_matmul \d+x\d+, (?!0\.125|0\.216)[\d.]+$"),
    "small M": ("block-sparse", r".*tokens"),
    "experts": ("block-sparse", r"bsr_grouped"),
    "attention": ("attention", r"forward|window|sm_80 path"),
    "small attention": ("attention", r"small"),
    "block-sparse attention": ("attention", r"block-sparse"),
    "decoding": ("attention", r"decoding"),
    "training": ("training", r""),
    "attention's gradients": ("attention-backward", r"backward|sm_80 path"),
    "other gradients": ("attention-backward", r"(?!backward|sm_80 path)"),
}


def load(suite: str) -> dict:
    return json.loads((RESULTS / f"{suite}.json").read_text())


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def microseconds(us: float) -> str:
    return f"{us:.0f}" if us >= 1000 else f"{us:.1f}" if us >= 100 else f"{us:.2f}"


def cells(row: dict) -> list[str]:
    """One row: ours, the peer, and the ratio of useful rates."""
    ours, *peers = (t for t in row["timings"] if "median_us" in t)
    if row["against"] == "the fastest peer":
        peer = max(peers, key=lambda t: t["tflops"])
    else:
        peer = next(t for t in peers if t["name"] == row["against"])
    tflops = f"{ours['tflops']:.0f}" if ours["tflops"] >= 20 else f"{ours['tflops']:.1f}"
    us = "" if peer["name"] == LARGE_COPY else microseconds(peer["median_us"])
    return [row["name"], microseconds(ours["median_us"]), tflops, peer["name"], us, f"{row['ratio']:.2f}"]


def results(suite: str, pattern: str) -> list[str]:
    head = ["case", "µs", "TFLOP/s", "peer", "peer µs", "ratio"]
    return table(head, [cells(r) for r in load(suite)["rows"] if re.match(pattern, r["name"])])


def both_times(row: dict, label: str) -> list[str]:
    """Cells of a row of single.json: times and speedup of single calls, then of the kernels alone."""
    texts = [label, row["peer"]]
    for kind in ("single", "kernels"):
        ours, peer = row[kind]["ours"], row[kind][row["peer"]]
        texts += [microseconds(ours), microseconds(peer), f"{peer / ours:.2f}×"]
    return texts


def single(labels: dict[str, str] | None = None) -> list[str]:
    """Single calls and kernels alone: all rows, or the rows in `labels`, in that order."""
    rows = {row["name"]: row for row in load("single")["rows"]}
    head = ["call", "peer", "µs", "peer µs", "speedup", "kernels alone, µs", "peer µs", "speedup"]
    return table(head, [both_times(rows[name], label) for name, label in (labels or {n: n for n in rows}).items()])


def readme() -> list[str]:
    return single(README_ROWS)


def measured() -> list[str]:
    """Date, GPU and versions of each suite."""
    rows = []
    for suite in SUITES:
        file = load(suite)
        env, top, rounds = file["environment"], file["ceilings"], file["rows"][0]["timings"][0]["rounds"]
        versions = f"driver {env['driver']}, torch {env['torch']}, DSL {env['nvidia-cutlass-dsl']}"
        rows.append([suite, env["date"], env["card"], versions, str(rounds), f"{top['copy_tbs']:.5g}"])
    return table(["suite", "date", "card", "versions", "rounds", "copy TB/s"], rows)


def commits() -> list[str]:
    """Commit of each suite's measurement."""
    return table(["suite", "commit"], [[suite, load(suite)["environment"]["commit"]] for suite in SUITES])


def below_target() -> list[str]:
    """Rows and checks below the lowest acceptable ratio that bench.cases states."""
    rows = []
    for suite in SUITES:
        file = load(suite)
        under = [r for r in file["rows"] if (r["asked"] or 0) > r["ratio"]]
        rows += [[suite, r["name"], f"{r['ratio']:.3f}", f"{r['asked']:.3g}"] for r in under]
        for check in file.get("checks", ()):
            if not check["ok"]:
                bound = "at most " if check["at_most"] else ""
                rows.append([suite, check["name"], f"{check['value']:.3f}", f"{bound}{check['asked']:g}"])
    return table(["suite", "case", "measured", "target"], rows)


def written(text: str) -> str:
    """Return the document with every table regenerated from the result files."""
    special = {
        "readme": readme,
        "single": single,
        "measured": measured,
        "commits": commits,
        "below target": below_target,
    }

    def fill(match: re.Match) -> str:
        name = match[2]
        lines = special[name]() if name in special else results(*SECTIONS[name])
        return match[1] + "\n".join(lines) + "\n" + match[3]

    return TABLE.sub(fill, text)


def main() -> int:
    stale = [path for path in DOCUMENTS if path.read_text() != written(path.read_text())]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'differs from bench/results' if '--check' in sys.argv else 'written'}")
        if "--check" not in sys.argv:
            path.write_text(written(path.read_text()))
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
