"""A few tiny products, and attention, on each path, for compute-sanitizer: `python -m tests.sanitize_cases [NAME...]`.

They are small, as a sanitizer slows every access down, and ragged, as it is at edges that accesses go wrong. Results
are compared too: a kernel that does nothing has no memory errors. Operands are drawn and results compared on the CPU,
so that few kernels but ours run.
"""

import contextlib
import copy
import sys
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch

import cute_kernels
from attention import attention, block_sparse_attention
from attention.decode import heuristics as decode
from cute_kernels import explain
from cute_kernels.matmul import heuristics
from cute_kernels.testing import reference
from cute_kernels.testing.reference import poisoned
from sparse_collective import BsrMatrix, bsr_linear, random_bsr
from sparse_collective.nn import BsrLinear, change_pattern_

from .calls import FP16, FP32, Case, attend, batched, dense, grouped, linear, matmul, paths
from .sparse_collective.bsr_parts import bsr
from .sparse_collective.nn_parts import near

DEVICE = "cuda"


def check(case: Case) -> None:
    found = [t.cpu() for t in case(DEVICE).run()]
    complaint = case("cpu").complaint(found)
    assert not complaint, complaint


def only(kept: Callable, make: partial) -> Callable:
    """A case that runs with those candidates alone for which `kept(family, configuration)` holds."""

    def run(path: str) -> None:
        with narrowed(kept):
            check(Case(make, path))

    return run


def narrowed(kept: Callable):
    """A context in which those candidates alone are tried for which `kept(family, configuration)` holds."""
    listed = heuristics.candidates_for
    some = lambda *args: [candidate for candidate in listed(*args) if kept(*candidate)]  # noqa: E731
    return mock.patch.object(heuristics, "candidates_for", some)


def family_is(name: str) -> Callable:
    return lambda family, config: family.name == name


def outgrown(path: str) -> None:
    """Attention whose scores grow from tile to tile, so that some warps of a warpgroup multiply theirs again."""
    from .attention import test_recompute

    q, k, v = test_recompute.operands(128, 40, 500, device="cpu", rows=130, columns=300, heads=1)
    q[..., 16:, :2] = 0
    out = poisoned(*q.shape).to(DEVICE)
    with cute_kernels.path(path):
        _, lse = attention(*(t.to(DEVICE) for t in (q, k, v)), scale=1 / 8, return_lse=True, out=out)
    test_recompute.check(q, k, v, out.cpu(), lse.cpu(), torch.ones(130, 300, dtype=torch.bool))


def changed(path: str) -> None:
    """A layer whose pattern changes, by rows and among all of them, and the tables of the new one: as on the CPU."""
    for even in (True, False):
        ours = BsrLinear(112, 80, False, (16, 16), density=3 / 7, dtype=torch.bfloat16)
        theirs = copy.deepcopy(ours).to(DEVICE)
        scores = {"grow": torch.rand(ours.grid), "drop": torch.rand(ours.nnz)}
        x, dy = reference.normal(40, 112), reference.normal(40, 80)
        for layer in (ours, theirs):
            there = {name: t.to(layer.values.device) for name, t in scores.items()}
            change_pattern_(layer, 0.5, **there, even_rows=even)
            with cute_kernels.path(path):
                layer(x.to(layer.values.device)).backward(dy.to(layer.values.device))
        for mine, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
            assert torch.equal(mine, other.cpu())
        near(theirs.values.grad.cpu(), ours.values.grad.double())


def of_float8(path: str) -> None:
    """FP8 with row and column scales, a copied b, promoted and fast accumulation."""
    (a, scale_a), (b, scale_b) = (cute_kernels.quantize(torch.randn(n, 272), per="row") for n in (136, 200))
    terms = {"scale_a": scale_a, "scale_b": scale_b.t(), "bias": torch.randn(200), "activation": "gelu"}
    there = {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in terms.items()}
    for fast in (False, True):
        out = poisoned(136, 200).to(DEVICE)
        with cute_kernels.path(path):
            given = a.to(DEVICE), b.t().contiguous().to(DEVICE)
            cute_kernels.gemm(*given, out=out, use_fast_accum=fast, **there)
        near(out.cpu(), cute_kernels.gemm(a, b.t(), out_dtype=torch.float32, **terms).double())


def of_fp16_sums(path: str) -> None:
    """Sums in fp16, of a tile with tails and of one whose K several CTAs share."""
    for M, N, K in ((136, 200, 272), (128, 128, 4096)):
        a, b = torch.randn(M, K).half(), torch.randn(K, N).half()
        out = poisoned(M, N, dtype=torch.float16).to(DEVICE)
        with cute_kernels.path(path):
            cute_kernels.gemm(a.to(DEVICE), b.to(DEVICE), out=out, accumulation_dtype=torch.float16)
        exact = a.double() @ b.double()
        assert (out.cpu().double() - exact).norm() < 0.01 * exact.norm()


def of_fp32(path: str) -> None:
    """fp32 operands as TF32 and in two parts, b being copied; and stored blocks of them."""
    a, b, W = torch.randn(136, 272), torch.randn(272, 200), random_bsr((192, 272), (64, 16), density=0.5, dtype=FP32)
    for precision, near_to in (("tf32", 2e-3), ("3xtf32", 1e-5)):
        with cute_kernels.path(path):
            out = poisoned(136, 200, dtype=FP32).to(DEVICE)
            cute_kernels.gemm(a.to(DEVICE), b.to(DEVICE), out=out, precision=precision)
            blocks = bsr_linear(a.to(DEVICE), W.to(DEVICE), precision=precision)
        for ours, exact in ((out, a.double() @ b.double()), (blocks, a.double() @ W.to_dense().double().t())):
            assert (ours.cpu().double() - exact).norm() < near_to * exact.norm()


def of_float8_blocks(path: str) -> None:
    """FP8 with block scales: row tiles, columns and K with tails, scales contiguous along M and K."""
    a, scale_a = cute_kernels.quantize(torch.randn(136, 400), per="1x128")
    b, scale_b = cute_kernels.quantize(torch.randn(200, 400), per="128x128")
    expected = cute_kernels.gemm(a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=torch.float32)
    for given in (scale_a, scale_a.t().contiguous().t()):
        out = poisoned(136, 200).to(DEVICE)
        scales = {"scale_a": given.to(DEVICE), "scale_b": scale_b.to(DEVICE).t()}
        with cute_kernels.path(path):
            cute_kernels.gemm(a.to(DEVICE), b.to(DEVICE).t(), out=out, **scales)
        near(out.cpu(), expected.double())


def of_sparse_float8(path: str) -> None:
    """FP8 blocks with a scale each, in an uneven pattern, and a scale per token."""
    for block in ((128, 128), (64, 64)):
        W = bsr("power_law", block, "cpu").quantize()
        x, scale_x = cute_kernels.quantize(torch.randn(200, W.shape[1]), per="row")
        bias, out = torch.randn(W.shape[0]), poisoned(200, W.shape[0]).to(DEVICE)
        with cute_kernels.path(path):
            x_there, *there = (t.to(DEVICE) for t in (x, scale_x, bias))
            bsr_linear(x_there, W.to(DEVICE), bias=there[1], activation="gelu", out=out, scale_x=there[0])
        wide = torch.empty(200, W.shape[0])
        near(out.cpu(), bsr_linear(x, W, bias=bias, activation="gelu", out=wide, scale_x=scale_x).double())


def of_tiles_begun_ahead(path: str) -> None:
    """The same, of more tiles than CTAs, each of which begins while the one before is stored."""
    wide = lambda family, config: family.name == "bsr" and config.tile_n == 256  # noqa: E731
    mask = torch.rand(32, 5) < torch.linspace(0.7, 0.0, 32)[:, None]  # uneven rows, some of them empty
    W = BsrMatrix.from_dense(torch.randn(4096, 640).to(torch.bfloat16), (128, 128), mask=mask).quantize()
    x, scale_x = cute_kernels.quantize(torch.randn(1500, 640), per="row")
    out = poisoned(1500, 4096).to(DEVICE)
    with cute_kernels.path(path), narrowed(wide):
        there = x.to(DEVICE), W.to(DEVICE), scale_x.to(DEVICE)
        assert explain(bsr_linear, *there[:2], scale_x=there[2]).facts.overlaps_store
        bsr_linear(*there[:2], out=out, scale_x=there[2])
    near(out.cpu(), bsr_linear(x, W, scale_x=scale_x, out_dtype=torch.float32).double())


def of_2_4(path: str) -> None:
    """A 2:4 sparse matrix with tails, and 2:4 sparse blocks of an uneven pattern."""
    W = cute_kernels.Sparse24.from_dense(cute_kernels.prune_2_4(torch.randn(200, 136).bfloat16()))
    b, out = torch.randn(136, 72).bfloat16(), poisoned(200, 72).to(DEVICE)
    with cute_kernels.path(path):
        cute_kernels.gemm(W.to(DEVICE), b.to(DEVICE), out=out)
    near(out.cpu(), cute_kernels.gemm(W, b, out_dtype=FP32).double())
    for block in ((128, 128), (64, 64), (256, 64)):
        V = bsr("power_law", block, "cpu").prune_2_4()
        x, bias, out = torch.randn(200, V.shape[1]).bfloat16(), torch.randn(V.shape[0]), poisoned(200, V.shape[0])
        out = out.to(DEVICE)
        with cute_kernels.path(path):
            bsr_linear(x.to(DEVICE), V.to(DEVICE), bias=bias.to(DEVICE), activation="gelu", out=out)
        near(out.cpu(), bsr_linear(x, V, bias=bias, activation="gelu", out=torch.empty(200, V.shape[0])).double())


def of_float8_layers(path: str) -> None:
    """Kernels that follow others: of 3 and 40 tokens, by the kernel for few columns and by narrow tiles. Of 100 tokens
    two warpgroups exchange a gate and what it multiplies."""
    from sparse_collective.nn import Float8SwiGLU, SwiGLU

    for block in ((128, 128), (64, 64)):
        layer = Float8SwiGLU(SwiGLU(256, 512, False, block, density=0.5, dtype=torch.bfloat16)).eval()
        inputs = [torch.randn(tokens, 256).to(torch.bfloat16) for tokens in (3, 40, 330)]
        expected = [layer(x) for x in inputs]
        layer = layer.to(DEVICE)
        with cute_kernels.path(path):
            found = [layer(x.to(DEVICE)).cpu() for x in inputs]
        for ours, wanted in zip(found, expected, strict=True):
            assert (ours.double() - wanted.double()).norm() < 2e-2 * wanted.double().norm()


def of_float8_cache(path: str) -> None:
    """Decoding from FP8 pages with a scale for each head, split and not."""
    from .attention.test_fp8_cache import case

    for dim, splits in ((96, 2), (256, 1)):
        call = case(lengths=[0, 40, 208], capacity=208, rows=3, D=dim, page_size=16)
        out = poisoned(*call["q"].shape).to(DEVICE)
        with cute_kernels.path(path), decode.splits(splits):
            attention(**{name: t.to(DEVICE) for name, t in call.items()}, out=out)
        near(out.cpu(), attention(**call).double())


def of_float8_attention(path: str) -> None:
    """FP8 attention: with ragged edges, packed, of scores that grow over many tiles, and with scales of
    tokens; with P of 16 bits, V being converted inside of the kernel and before it, and of 8."""
    from .attention import test_fp8 as float8
    from .attention import test_fp8_tokens as tokens
    from .attention.fp8_parts import converting

    calls = [
        float8.case(DEVICE, D=128, Sq=130, Sk=177) | {"causal": True},
        float8.narrow(float8.packed([70, 0, 33], [90, 17, 200], D=64, device=DEVICE)),
        {name: t.to(DEVICE) for name, t in float8.growing(D=64, Sq=64, Sk=2700).items()},
        tokens.case(DEVICE, D=128, Sq=330, Sk=177) | {"causal": True},
    ]
    for call in calls:
        for fast, inside in (({}, True), ({}, False), (float8.FAST, False)):
            with cute_kernels.path(path), converting(inside):
                float8.check(call | fast)


def of_selected_blocks(path: str) -> None:
    """Selected-block attention with the heads of a KV head as rows, and packed sequences."""
    from .attention import selected_parts as selected

    packed, sequences = selected.packed_call((60, 0, 70), (77, 13, 70), 4, 6, device=DEVICE)
    with cute_kernels.path(path):
        selected.check(*selected.call_of(90, 300, 4, 20, B=1, H=12, heads=1, groups=1, device=DEVICE), causal=True)
        selected.check(*selected.call_of(130, 260, 64, 3, B=1, groups=4, device=DEVICE))
        selected.check(*packed, causal=True, **sequences)


def of_gathered_blocks(path: str) -> None:
    """Selected-block attention by KV tiles that are gathered: each block size and head dimension."""
    from .attention import test_selected_gathered as gathered

    with cute_kernels.path(path):
        for sizes, options, terms in gathered.CALLS.values():
            gathered.check(*gathered.call_of(*sizes, **options, device=DEVICE), **terms)


def of_gathered_gradients(path: str) -> None:
    """Gradients of selected-block attention by KV tiles that are gathered."""
    from .attention import test_selected_gathered_backward as gathered

    with cute_kernels.path(path):
        for sizes, options, terms in gathered.CALLS.values():
            gathered.check(gathered.call_of(*sizes, **options, device=DEVICE), **terms)


def of_selected_gradients(path: str) -> None:
    """Gradients of selected-block attention by block masks, in ranges of two rows of blocks."""
    from .attention import test_selected

    with cute_kernels.path(path), mock.patch.object(test_selected.ranges, "FEWEST", 2):
        for name in test_selected.IN_RANGES:
            test_selected.compare_gradients(DEVICE, contextlib.nullcontext, name)


def of_split_heads(path: str) -> None:
    """Gradients whose work items have some of the heads that share a head of K and V."""
    from .attention import test_backward_items as items
    from .attention import test_gradients as gradients

    with cute_kernels.path(path):
        for heads, make in items.SPLIT.values():
            with items.split(heads), mock.patch.dict(gradients.CASES, {"split": make}):
                gradients.check_case("split", DEVICE, contextlib.nullcontext)
        with items.split(1):
            gradients.check_packed("packed, causal", DEVICE, contextlib.nullcontext)


def of_equal_rows(path: str) -> None:
    """A mask with equally many blocks a row, in any order, the last column of which is cut."""
    from .attention import test_block_attention

    mask = test_block_attention.equal_rows(2, 64)((200, 170), DEVICE)
    q, k, v = (reference.normal(1, heads, rows, 64).to(DEVICE) for heads, rows in ((4, 200), (4, 170), (4, 170)))
    with cute_kernels.path(path):
        out = block_sparse_attention(q, k, v, mask, out=poisoned(*q.shape).to(DEVICE))
    exact, _ = reference.attention_plainly(*(t.cpu().double() for t in (q, k, v)), mask.to("cpu").to_dense(1, 4))
    near(out.cpu(), exact)


def of_selected_decode(path: str) -> None:
    """Decoding with lists, from BF16 and FP8 caches with and without pages, split and not."""
    from .attention import test_selected_decode as selected

    for name in ("tokens", "QSA", "MSA", "pages of 16", "E4M3", "E4M3, D 256"):
        operands, terms, splits = selected.CALLS[name]
        call = selected.call_of(**operands | {"lengths": [0, 40, 300]}, device=DEVICE)
        for count in splits:
            with decode.splits(count):
                selected.check(call, **terms)


def of_union_tiles(path: str) -> None:
    """Lists with tails, and lists whose bits are made in parts."""
    from .attention import test_unions as unions

    if DEVICE != "cuda":
        return
    for name in ("QSA", "NSA", "blocks of 1", "long lists"):
        lead, top, *terms = unions.CASES[name]
        unions.check(DEVICE, unions.lists(*lead, top=top, blocks=terms[1]), *terms)
    unions.check(DEVICE, torch.arange(1024, dtype=torch.int32).view(1, 128, 1, 8), 4, 1024, 1)


def of_selected_tables(path: str) -> None:
    """Bits and lists of selected blocks, the order of tiles, and transposed lists."""
    from .attention import test_selected_tables as tables
    from .attention import test_transposed_lists as transposed

    if DEVICE != "cuda":  # what stands in for these kernels are the torch operations that they are compared with
        return
    for name in ("QSA, combined", "MSA", "one row per token, copied", "many blocks"):
        tables.test_lists(DEVICE, name)
    for block_size in (1, 16):
        tables.test_packed_sequences(DEVICE, block_size, True)
    tables.test_order(DEVICE, 64, 2)
    for shape in ((2, 1, 70, 33), (1, 2, 1100, 40)):
        transposed.test_lists(DEVICE, shape, 0.3)


def of_sharded_masks(path: str) -> None:
    """Plans of context parallelism: deals of few and of many tiles, and lists of each kind of mask."""
    from .attention import test_sharded_masks as sharded

    if DEVICE != "cuda":  # these are the torch operations that the kernels are compared with
        return
    for name in ("causal", "window", "per head, small blocks", "tall blocks"):
        sharded.test_plans(DEVICE, name, 3)
        sharded.test_a_capacity(DEVICE, name, 3)
    sharded.test_many_tiles(DEVICE, 6)


def of_expert_rows(path: str) -> None:
    """Rows of experts, to the layouts of two ranks and back, and of one GPU's layer."""
    from .sparse_collective import test_expert_rows as rows
    from .sparse_collective import test_routed_rows as routed

    if DEVICE != "cuda":  # compared with torch operations
        return
    for name in ("two ranks", "one rank has none"):
        rows.test_tokens_to_layouts(DEVICE, name, "bf16")
        rows.test_sums_of_layouts(DEVICE, name, "bf16")
        rows.test_gradients(DEVICE, name, "bf16")
    routed.test_results_and_gradients(DEVICE, "choices elsewhere", torch.bfloat16)


def of_gates(path: str) -> None:
    """The gate of a layer in training and its gradient, whose last CTA is partial."""
    from .cute_kernels import test_gate

    for rows in (1, 37):
        test_gate.test_against_fp64(DEVICE, torch.bfloat16, "gelu", (rows, 384))


def of_block_selection(path: str) -> None:
    """Scores of an indexer by kernels, and the top k of ragged rows by warps and by CTAs, compacted and not."""
    from .attention import test_top_blocks as tops

    if DEVICE != "cuda":  # the kernels' inputs are not those of the torch ops that stand in for them
        return
    with cute_kernels.path(path):
        tops.test_sums("cuda", (1, 1, 3, 20, 40), torch.float16)
        for blocks, top in ((61, 5), (253, 16), (2001, 40), (9001, 512)):
            for kind in ("normal", "few values", "ascending"):
                score = tops.SCORES_OF[kind](1, 2, 3, blocks)
                tops.check("cuda", score, top, 4 * blocks - 3, 4 * blocks, 4, 1, 1, True, True)
        if path == "sm_90":
            for name in ("QSA", "MSA", "three heads of 40", "max of 4"):
                tops.test_scores("cuda", name, torch.bfloat16)


def differentiated(name: str) -> Callable:
    """Attention and its gradients, of a case of test_attention_gradients."""

    def run(path: str) -> None:
        from .attention import test_gradients as gradients

        check_of = gradients.check_packed if name in gradients.PACKED else gradients.check_case
        check_of(name, DEVICE, partial(cute_kernels.path, path))

    return run


CASES = {  # a maker's arguments, or a function of the path
    "dense ragged": partial(dense, 200, 136, 72),
    "dense, sums in fp16": of_fp16_sums,
    "fp32 operands": of_fp32,
    "dense nt with terms": partial(dense, 136, 200, 72, "nt", dtype=FP16, terms="bias+gelu+residual"),
    "dense tn fp32 m-major": partial(dense, 136, 72, 200, "tn", out_dtype=FP32, m_major=True),
    "dense batch": partial(dense, 40, 72, 136, batch=(3,)),
    "bsr 64x64 with empty rows": partial(matmul, (64, 64), "empty_rows", 5, 4, 136),
    "bsr 48x112": partial(matmul, (48, 112), "power_law", 4, 3, 136, terms="relu"),
    "bsr linear 128x64": partial(linear, (128, 64), "power_law", 4, 3, 40, terms="bias"),
    "bsr linear 16x16": partial(linear, (16, 16), "power_law", 6, 5, 40, terms="bias"),
    "bsr linear of few columns": partial(linear, (16, 48), "power_law", 6, 21, 3, terms="bias"),
    "bsr linear of 16 columns": partial(linear, (64, 64), "empty_rows", 5, 14, 16, terms="bias"),
    "bsr few columns, row-major": partial(matmul, (32, 112), "power_law", 4, 13, 8),
    "bsr batch of one pattern": partial(batched, True, 136),
    "bsr batch of patterns": partial(batched, False, 136),
    "bsr grouped, one pattern": partial(grouped, True),
    "bsr grouped, patterns": partial(grouped, False),
    "2:4 sparsity, dense and of blocks": of_2_4,
    "a pattern that changes": changed,
    "attention": partial(attend, "dense", 1, 2, 2, 300, 177, 128),
    "attention, causal, tiles drawn": partial(attend, "dense", 2, 68, 17, 65, 70, 64, causal=True),
    "attention, a window": partial(attend, "dense", 1, 4, 1, 130, 200, 256, window_size=(70, 30), lse=False),
    "attention, softcap": partial(attend, "dense", 1, 2, 1, 200, 130, 96, softcap=5.0, causal=True, dtype=FP16),
    "attention, scores that grow": outgrown,
    "attention, packed": partial(attend, "packed", 5, 4, 2, 150, 170, 128, causal=True),
    "attention, packed, tiles drawn": partial(attend, "packed", 9, 32, 8, 100, 90, 64, lse=False),
    "attention, 128x128 blocks": partial(attend, "blocks", 1, 72, 9, 200, 300, 64, block=(128, 128)),
    "attention, 64x64 blocks": partial(attend, "blocks", 1, 72, 9, 200, 170, 128, block=(64, 64), lse=False),
    "attention, 128x64 blocks": partial(attend, "blocks", 1, 2, 1, 200, 170, 256, block=(128, 64)),
    "attention, equal rows of blocks": of_equal_rows,
    "attention, selected blocks": of_selected_blocks,
    "gradients of attention": differentiated("tails"),
    "gradients of attention, a window": differentiated("left bound, cap"),
    "gradients of attention, sinks": differentiated("sinks"),
    "gradients of attention, packed": differentiated("packed, causal"),
    "gradients of attention, blocks": differentiated("blocks, causal"),
    "decoding, K and V split": partial(attend, "dense", 2, 8, 2, 1, 333, 128, splits=3),
    "decoding, a cache": partial(attend, "cache", 3, 6, 2, 3, 200, 256, causal=True, splits=1, lse=False),
    "decoding, pages of 16, split": partial(attend, "cache", 4, 8, 2, 3, 208, 64, causal=True, splits=3, page=16),
    "decoding, pages of 128": partial(attend, "cache", 3, 4, 2, 40, 256, 128, window_size=(70, 0), splits=2, page=128),
}
HOPPER = {  # kernels that the sm_80 path has not, or for which the cost model there wants larger products
    "dense with K among CTAs": only(lambda family, config: config.split > 1, partial(dense, 136, 200, 520)),
    "gradients of attention, split heads": of_split_heads,
    "dense FP8": of_float8,
    "dense FP8, block scales": of_float8_blocks,
    "bsr FP8": of_sparse_float8,
    "bsr FP8, overlapped store": of_tiles_begun_ahead,
    "FP8 layers": of_float8_layers,
    "decoding, FP8 pages": of_float8_cache,
    "decoding, selected blocks": of_selected_decode,  # the same kernels on both paths
    "block selection": of_block_selection,
    "union tiles": of_union_tiles,  # likewise
    "tables of selected blocks": of_selected_tables,  # likewise
    "sharded masks": of_sharded_masks,  # likewise
    "expert rows": of_expert_rows,  # likewise
    "gates": of_gates,  # likewise
    "FP8 attention": of_float8_attention,
    "attention, gathered blocks": of_gathered_blocks,
    "attention, gradients of gathered blocks": of_gathered_gradients,
    "attention, gradients of selected blocks": of_selected_gradients,
    "bsr small blocks": only(family_is("small blocks"), partial(matmul, (16, 16), "power_law", 14, 9, 264)),
}
ODD = {
    "dense by element": partial(dense, 67, 45, 33, "tn"),
    "bsr of odd width": partial(matmul, (32, 48), "power_law", 4, 3, 37),
}
NAMES = tuple(CASES | HOPPER | ODD)


def main(names: list[str]) -> int:
    if not torch.cuda.is_available():
        print("sanitize_cases: no CUDA GPU; these cases run kernels")
        return 2
    if unknown := set(names) - set(NAMES):
        print(f"sanitize_cases: there is no case {', '.join(map(repr, sorted(unknown)))}")
        return 2
    for path in paths():
        for name, make in (CASES | (ODD if path == "sm_80" else HOPPER)).items():
            if names and name not in names:
                continue
            reference.seed(name)
            if isinstance(make, partial):
                check(Case(make, path))
            else:
                make(path)
            torch.cuda.synchronize()
            print(f"{path} {name}: right", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
