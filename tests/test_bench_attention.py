"""The benchmark's attention suite on a CPU: what its cases are, their work, and a whole run of it on small shapes."""

import io
import json
import sys
import types

import pytest
import torch
from rich.console import Console
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

from attention import reference
from bench import __main__ as command
from bench import cases_attention as cases
from bench import findings_attention as findings
from bench import peers_attention as peers
from bench import record, table, timing
from bench.rows import FASTEST, OURS, Case, Row, Timing
from sparse_collective import BsrMatrix


def by_name(mode="quick") -> dict[str, Case]:
    return {case.name: case for case in cases.attention_cases(mode)}


def row(name: str, ratio: float, asked=None, peers_at=(1.0,), against=FASTEST) -> Row:
    """A row at `ratio` of the fastest peer; peers have these shares of its rate."""
    p = cases.dense_problem((1, 1024, 8, 64))
    others = [Timing(f"peer {i}", p.flops, [100.0 / share] * 5) for i, share in enumerate(peers_at)]
    return Row("attention", name, p, Timing(OURS, p.flops, [100.0 / ratio] * 5), others, against, asked, "sm_90")


# -- cases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["quick", "full"])
def test_cases_are_what_is_asked(mode):
    found = list(cases.attention_cases(mode))
    assert len(found) == len({case.name for case in found}) == 50
    for case in found:
        names = [peer.name for peer in case.peers]
        assert len(set(names)) == len(names) and (case.against in names or case.against == FASTEST)
        assert case.asked is not None and case.problem.flops > 0 and case.problem.bytes > 0
        assert case.patches_dsl == (peers.FA4 in names)
    flex = [case.name for case in found if peers.FLEX in [peer.name for peer in case.peers]]
    assert len([name for name in flex if name.startswith("forward")]) == (18 if mode == "full" else 2)
    assert findings.EIGHTH in by_name()
    parser = command.parser()
    assert [parser.parse_args([name]).suites for name in ("attention", "all")] == [("attention",), command.PRODUCTS]
    held = [case for case in found if cases.OUR_KEPT in [peer.name for peer in case.peers]]
    assert len(held) == 8 and sum(case.name.endswith(cases.FLEX_MASK) for case in held) == 6
    for case in held:
        base = by_name(mode)[case.name.rpartition(", ")[0]]
        assert (case.against, case.asked, case.problem) == (base.against, base.asked, base.problem)
        assert [peer.name for peer in case.peers] == [cases.OUR_KEPT, case.against]


@pytest.mark.parametrize("queries, keys", [(40, 40), (1, 40), (24, 40), (40, 24)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (9, 0), (3, 4), (None, 5), (7, None)])
def test_pairs_are_those_that_are_seen(queries, keys, causal, window):
    p = cases.AttentionProblem("attention", 2, queries, keys, 4, 2, 32, causal, window)
    x = cases.operands(p, device="cpu")
    seen = int(x.kept(torch.arange(queries)).sum())
    assert p.pairs == seen and p.flops == 4 * seen * 32 * 4 * 2
    assert p.kv_bytes == 2 * (x.k.numel() + x.v.numel()) and p.bytes == p.kv_bytes + 2 * 2 * x.q.numel()


def test_work_of_blocks_and_of_the_copy():
    found = by_name()
    eighth, dense = found[cases.EIGHTH].problem, cases.dense_problem(cases.SPARSE)
    assert eighth.density == 1 / 8 and eighth.flops == dense.flops / 8
    case = found["decoding B8, 16k keys, 32/8 heads D128"]
    assert case.problem.kv_bytes == 2 * 2 * 8 * 16384 * 8 * 128
    (copy,) = (peer for peer in case.peers if peer.name == cases.COPY)
    us = case.problem.kv_bytes / 4.25e6  # at 4.25 TB/s
    rate = copy.flops / (2 * cases.ceilings.COPY_BYTES / 4.25e6)
    assert case.problem.flops / us == pytest.approx(rate)


# -- a whole run ---------------------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch):
    """Small shapes on the CPU; FlashAttention 4, FlexAttention and CUDA's backends computed by the reference."""

    def fa4(q, k, v, causal=False, window_size=None, block_sparse_tensors=None):
        heads_first, mask = (t.transpose(1, 2) for t in (q, k, v)), None
        if block_sparse_tensors is not None:
            mask = types.SimpleNamespace(**block_sparse_tensors)
            lists = (mask.mask_block_cnt, mask.mask_block_idx, mask.full_block_cnt, mask.full_block_idx)
            mask = reference.BlockMask(*lists, lengths=(q.shape[1], k.shape[1]), blocksize=mask.block_size, check=False)
        out = reference.attention(*heads_first, causal=causal, window_size=window_size, block_mask=mask)
        return out.transpose(1, 2).contiguous(), None

    def flex(q, k, v, *, block_mask, enable_gqa, kernel_options):
        seen = None if block_mask is None else block_mask.mask_mod
        rows, cols = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        mask = None if seen is None else seen(0, 0, rows, cols)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)

    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface", "flash_attn.cute.block_sparsity"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["flash_attn.cute.interface"].flash_attn_func = fa4
    sys.modules["flash_attn.cute.block_sparsity"].BlockSparseTensorsTorch = dict
    monkeypatch.setattr(peers, "compiled", lambda key: flex)
    monkeypatch.setattr(peers, "sdpa_kernel", lambda backend: torch.nn.attention.sdpa_kernel(SDPBackend.MATH))
    real = cases.operands
    for module in (cases, findings):
        monkeypatch.setattr(module, "operands", lambda p, blocks=None, device="cpu": real(p, blocks, "cpu"))
    first = (2, 256, 2, 32)
    small = {"FIRST": first, "SPARSE": (1, 1024, 1, 32), "SM_80": (first,), "SHAPES": (first, (1, 128, 2, 64))}
    small |= {"SMALL": ((1, 64, 2, 32),), "WINDOW": ((1, 512, 2, 32), (100, 0)), "CACHE_HEADS": (4, 2, 32)}
    small |= {"CACHES": ((2, 512, 0.88),)}
    for name, value in small.items():
        monkeypatch.setattr(cases, name, value)
    monkeypatch.setattr(findings, "ERRORS", (((1, 128, 2, 64), True),))

    def interleaved(calls, *, warm_s, rounds):
        for call in calls.values():
            call()
        return {name: [10.0 + i] * rounds for i, name in enumerate(calls)}

    for name in ("interleaved", "interleaved_graphs", "interleaved_bursts"):
        monkeypatch.setattr(timing, name, interleaved)
    monkeypatch.setattr(timing, "graphed", lambda call: call)
    monkeypatch.setattr(command, "host_cost", lambda call: 7.0 if call() is not None else None)
    monkeypatch.setattr(command.ceilings, "measure", lambda rounds: {"copy_tbs": 4.25})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(record, "environment", lambda: {"card": "NVIDIA H200", "date": "2026-12-02"})


def test_a_run_measures_and_writes_everything(on_cpu, tmp_path, capsys):
    """Ours is op by op the reference; every peer that a CPU has agrees with the truth before it gets a time."""
    assert command.main(["--attention", "--rounds", "5", "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "nvidia-h200" / "attention.json").read_text())
    rows = {row["name"]: row for row in data["rows"]}
    assert data["suite"] == "attention" and len(rows) == len(data["rows"])
    for name, row in rows.items():
        kinds = {t["name"]: t.get("error", "") for t in row["timings"]}
        wrong = {n: e for n, e in kinds.items() if e and n != cases.COPY}
        assert not wrong, f"{name}: {wrong}"
        if cases.COPY not in kinds:
            assert row["ratio"] is not None
    assert rows["window 101, B1 S512 H2 D32 causal"]["problem"]["window"] == [100, 0]
    assert {"ours, dense", "FlexAttention", "FA4"} < {t["name"] for t in rows[cases.EIGHTH]["timings"]}
    assert set(data["host_us"]) >= {"attention", "torch SDPA"}
    (errors,) = data["errors"]
    assert set(errors["errors"]) == {OURS, peers.FLASH, peers.FA4}
    assert all(0 < e["rms"] < e["max"] < 0.05 for e in errors["errors"].values())
    names = [check["name"] for check in data["checks"]]
    shares = [check for check in data["checks"] if check["name"].endswith("that of a kept BlockMask")]
    assert len(shares) == 8 and all(check["value"] is not None for check in shares)
    assert names[:2] == ["forward, geometric mean of 4", "forward, worst"] and any("our own dense" in n for n in names)
    shown = capsys.readouterr().out
    assert "Error against fp64" in shown and "host cost of a call, µs: 7.000, asked at most 8" in shown


@pytest.mark.parametrize("held", cases.HELD)
def test_masks_that_users_hold(on_cpu, monkeypatch, held):
    """Each call is given the object itself, the same one, and computes what a BlockMask does."""
    given, real = [], cases.block_sparse_attention
    monkeypatch.setattr(
        cases, "block_sparse_attention", lambda q, k, v, m, **more: given.append(m) or real(q, k, v, m, **more)
    )
    case = cases.sparse(128, 1 / 8, peers.FA4, 1.1, held=held)
    call, _ = case.ours()
    kept = case.peers[0].setup()
    kinds = {cases.FLEX_MASK: FlexBlockMask, cases.BOOL_MASK: torch.Tensor, cases.BSR_MASK: BsrMatrix}
    first = given[0]
    assert isinstance(first, kinds[held]) and not isinstance(given[-1], kinds[held])
    given.clear()
    assert torch.equal(call(), kept()) and given[0] is first


def test_rows_whose_op_raises_say_so(on_cpu, monkeypatch, tmp_path, capsys):
    def absent(*args, **kwargs):
        raise RuntimeError("there is no kernel yet")

    monkeypatch.setattr(cases, "block_sparse_attention", absent)
    assert command.main(["attention", "--rounds", "5", "--out", str(tmp_path)]) == 1
    data = json.loads((tmp_path / "nvidia-h200" / "attention.json").read_text())
    errors = {row["name"]: row["timings"][0].get("error") for row in data["rows"]}
    assert {name for name, error in errors.items() if error} == {n for n in errors if n.startswith("block-sparse")}
    assert errors[cases.EIGHTH] == "RuntimeError: there is no kernel yet"
    shown = capsys.readouterr().out
    assert "ours: RuntimeError: there is no kernel yet" in shown and f"FAILED {cases.EIGHTH}" in shown


@pytest.mark.parametrize("only", ["window", "host", "errors"])
def test_parts_of_a_run_write_nothing(on_cpu, tmp_path, capsys, only):
    assert command.main(["--attention", "--only", only, "--out", str(tmp_path)]) == 0
    assert not list(tmp_path.iterdir())
    shown = capsys.readouterr().out
    assert ("Error against" in shown) == (only == "errors") and ("torch SDPA" in shown) == (only == "host")


def test_fa4_is_imported_after_ours_has_run(on_cpu, monkeypatch):
    """Its import changes CuTe DSL: compile_first must have met every configuration of ours before."""
    ran, late = set(), []
    real = cases.attention

    def ours(q, k, v, **terms):
        key = q.shape[-1], terms["causal"], terms["window_size"]
        if not imported:
            ran.add(key)
        elif key not in ran:
            late.append(key)
        return real(q, k, v, **terms)

    imported = []
    needs = peers.needs
    monkeypatch.setattr(peers, "needs", lambda m, p: (imported.append(m) if "flash" in m else None, needs(m, p))[1])
    monkeypatch.setattr(cases, "attention", ours)
    args = command.parser().parse_args(["attention", "--only", "forward"])
    command.compile_first(args)
    assert ran and not imported
    for case in cases.attention_cases("quick"):
        if args.only in case.name:
            case.measure(rounds=1)
    assert imported and not late


# -- timing, checks and tables -------------------------------------------------------------------------------


def test_bursts_take_turns_and_graphs_are_divided_by_their_calls(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    order = []
    calls = {
        "a": lambda: order.append("a"),
        "b": peers.Call(lambda: order.append("no"), bare=lambda: order.append("b")),
    }
    found = timing.interleaved_bursts(calls, warm_s=0.0, rounds=3)
    assert {name: len(times) for name, times in found.items()} == {"a": 3, "b": 3}
    assert "".join(order) == ("a" * timing.IN_BURST + "b" * timing.IN_BURST) * 3
    monkeypatch.setattr(timing, "interleaved", lambda calls, **_: {name: [40.0, 60.0] for name in calls})
    assert timing.interleaved_graphs({"a": None}) == {"a": [2.0, 3.0]}


def test_the_fastest_peer_is_held_against():
    found = row("forward x", 0.95, 0.93, (0.7, 1.0, 0.9))
    assert found.ratio == pytest.approx(0.95) and found.rival.name == "peer 1" and "0.950 of peer 1" in found.line()
    console = Console(width=170, record=True, file=io.StringIO())
    table.show([found], {}, {}, console)
    text = console.export_text()
    assert "peer 1" in next(line for line in text.splitlines() if "forward x" in line) and "MISSED" not in text


def test_checks():
    rows = [row("forward a", 1.25), row("forward b", 0.8), row("small", 0.1)]
    mean, worst = findings.checks(rows, {}, [])
    assert mean.value == pytest.approx(1.0) and worst.value == pytest.approx(0.8) and not worst.ok
    failed = by_name()["window 1024, B1 S16384 H16 D128 causal"].failed(ValueError("no"))
    failed.name = "forward c"
    assert [check.value for check in findings.checks([*rows, failed], {}, [])] == [None, None]
    (host,) = findings.checks([], {"attention": 7.9, "torch SDPA": 16.0}, [])
    assert host.ok and not findings.checks([], {"torch SDPA": 16.0}, [])[0].ok
    entry = {"shape": "x", "rms": 1.0, "errors": {OURS: {"max": 2.0, "rms": 1.0}, peers.FLASH: {"error": "no"}}}
    entry["errors"][peers.FA4] = {"max": 1.0, "rms": 1.0}
    rms, largest = findings.checks([], {}, [entry])
    assert rms.ok and not largest.ok and "at most 1.1" in str(largest)
    entry["errors"][OURS] = {"error": "no"}
    assert [check.value for check in findings.checks([], {}, [entry])] == [None, None]
