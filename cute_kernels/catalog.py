"""Which kernels there are: the facts that ops can ask for, listed, so that tools and tests need no tensors.

Compiling needs no GPU. So a test can hold each of these to its registers and its instructions on every
architecture, and a bundle can carry them to machines that should not compile.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from . import candidates, checks, functions
from .arch import ARCHS, ArchSpec, arch_named
from .config import BlockFacts, EpilogueSpec, GemmConfig, GemmFacts
from .legality import unsupported

# One block shape for each way that blocks meet tiles: as high as a tile, several tiles high (256, 512), half a tile
# (64), a fraction of one (48, 32, 16); several K-tiles wide (256), a last K-tile of 48 (112), narrow K-tiles.
BLOCKS = ((128, 128), (128, 64), (256, 64), (64, 64), (512, 112), (32, 32), (16, 16), (48, 112), (64, 256))
OPS = ("gemm", "bsr_matmul", "bsr_linear")

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def squared_relu(x):
    """A user's own epilogue function, as the documentation of `functions` shows it."""
    return functions.maximum(x, 0.0) * functions.maximum(x, 0.0)


LIGHT = EpilogueSpec(scale=True, activation="relu")


def loaded(bias: str, residual: str) -> EpilogueSpec:
    """What costs the most. Of the activations that is gelu, which has an error function in it."""
    return EpilogueSpec(bias=bias, bias_dtype="bfloat16", residual=residual, activation="gelu")


COL, ROW, LINEAR = loaded("col", "n"), loaded("row", "n"), loaded("row", "m")
SQUARED_RELU = checks.epilogue_program("gemm", squared_relu)
FULL = replace(COL, scale=True, bias_dtype="float32", activation="gelu_tanh", function=SQUARED_RELU)


def configurations(path: str, block: tuple[int, int] | None, spec: ArchSpec, **more) -> list[GemmConfig]:
    """What the heuristics choose from, for a dense product or a block shape and `more` of BlockFacts."""
    facts = None if block is None else BlockFacts(*block, "int32", **more)
    if path == "sm_90":
        return candidates.candidates_sm90(facts, ARCHS["sm_90"])
    return candidates.candidates_sm80(facts, spec)


def dense(spec: ArchSpec, path: str, config: GemmConfig, **changes) -> GemmFacts:
    """gemm(a, b) of contiguous matrices."""
    return GemmFacts(**{"arch": spec.target, "path": path, "config": config, "majors": ("k", "n", "n")} | changes)


def bsr(spec: ArchSpec, path: str, config: GemmConfig, block: tuple[int, int], **changes) -> GemmFacts:
    """bsr_matmul(W, b) of a contiguous b."""
    more = {name: changes.pop(name) for name in ("batch", "run") if name in changes}
    index = BlockFacts(*block, changes.pop("index_dtype", "int32"), **more)
    return dense(spec, path, config, **{"block": index, "ranks": (3, 2, 2)} | changes)


def linear(spec: ArchSpec, path: str, config: GemmConfig, block: tuple[int, int], **changes) -> GemmFacts:
    """bsr_linear(x, W) of a contiguous x."""
    return bsr(spec, path, config, block, **{"majors": ("k", "k", "m"), "transposed": True} | changes)


def kernel_configurations(arch: str, quick: bool = False) -> list[GemmFacts]:
    """Each kernel configuration of an architecture, plain, and the main ones in all their variations.

    With `quick` three of them: a dense product, the commonest block, the most awkward one under an epilogue.
    """
    spec = arch_named(arch)
    found = [
        *main(dense, spec, spec.path, None),
        *main(bsr, spec, spec.path, (128, 128)),
        *main(linear, spec, spec.path, (512, 112), epilogue=LINEAR),
    ]
    if quick:
        return _buildable(found)
    found += _every_configuration(spec)
    found += dense_variations(spec, spec.path)
    found += sparse_variations(spec, spec.path)
    found += unaligned(spec)
    found += batches(spec, spec.path)
    found += _few(spec, spec.path)
    if spec.path != "sm_80":
        found += _shared(spec)
        found += _swept(spec)
        found += _paired(spec)
        found += _older_path(spec)
    return _buildable(found)


def main(make, spec: ArchSpec, path: str, block: tuple[int, int] | None, **changes) -> list[GemmFacts]:
    """The first configuration that supports these changes, in a list; an empty one if none does."""
    shape = () if block is None else (block,)
    entries = (make(spec, path, config, *shape, **changes) for config in configurations(path, block, spec))
    return _buildable(entries)[:1]


def _buildable(facts: Iterable[GemmFacts]) -> list[GemmFacts]:
    """Without repetitions, and without what no kernel can be built from."""
    return [f for f in dict.fromkeys(facts) if not unsupported(f)]


def _every_configuration(spec: ArchSpec) -> Iterator[GemmFacts]:
    """Plain; the dense ones and those of 128x128 blocks, which all blocks of that height share, loaded as well."""
    for block in (None, *BLOCKS):
        for config in configurations(spec.path, block, spec):
            if block is None:
                plain = dense(spec, spec.path, config)
                # The narrowest tiles take only a K-major B.
                majors = ("k", "k" if unsupported(plain) else "n", "n")
                yield from (dense(spec, spec.path, config, majors=majors, epilogue=e) for e in (EpilogueSpec(), COL))
                continue
            yield bsr(spec, spec.path, config, block)
            if block == (128, 128):
                yield linear(spec, spec.path, config, block, epilogue=LINEAR)


def dense_variations(spec: ArchSpec, path: str) -> list[GemmFacts]:
    """Dense products with other operands, outputs and epilogues."""
    fp32 = {"out_dtype": "float32", "aligns": (8, 8, 4)}
    changes = [{"majors": (a, b, "n")} for a in "km" for b in "kn"]
    changes += [
        {"majors": ("k", "n", "m")},
        {"dtype": "float16", "out_dtype": "float16"},
        fp32,
        {**fp32, "majors": ("k", "n", "m")},
        {**fp32, "epilogue": FULL},
        {"aligns": (8, 8, 1)},
        {"aligns": (8, 8, 1), "epilogue": COL},
        {"aligns": (8, 8, 1), "majors": ("k", "n", "any")},
        {"epilogue": LIGHT},
        {"epilogue": ROW},
        {"epilogue": FULL},
        {"epilogue": loaded("col", "any")},
        {"ranks": (3, 3, 3)},
        {"ranks": (2, 3, 3)},  # one A for the whole batch
    ]
    return [facts for change in changes for facts in main(dense, spec, path, None, **change)]


def sparse_variations(spec: ArchSpec, path: str) -> list[GemmFacts]:
    """Products with 128x128 blocks with other operands, outputs and epilogues."""
    fp32 = {"out_dtype": "float32", "aligns": (8, 8, 4)}
    matmul = [
        {"majors": ("k", "k", "n")},
        {"dtype": "float16", "out_dtype": "float16"},
        fp32,
        {"index_dtype": "int64"},
        {"ordered": True},
        {"ranks": (3, 3, 3)},
        {"aligns": (8, 8, 1)},
        {"epilogue": LIGHT},
        {"epilogue": COL},
        {"epilogue": ROW},
        {"epilogue": FULL},
    ]
    layer = [{}, {"majors": ("k", "n", "m")}, {"aligns": (8, 8, 1)}, {"epilogue": LIGHT}, {**fp32, "epilogue": LINEAR}]
    found = [facts for change in matmul for facts in main(bsr, spec, path, (128, 128), **change)]
    found += [facts for change in layer for facts in main(linear, spec, path, (128, 128), **change)]
    found += [facts for block in ((256, 64), (64, 64)) for facts in main(bsr, spec, path, block, ordered=True)]
    return found + main(linear, spec, path, (32, 32), epilogue=LINEAR)


def batches(spec: ArchSpec, path: str) -> list[GemmFacts]:
    """Batches of block-sparse matrices in both forms, and grouped products."""
    values, patterns = {"batch": "values", "ranks": (4, 3, 3)}, {"batch": "patterns", "ranks": (3, 3, 3)}
    layer = replace(LINEAR, residual=None, bias_items=True)
    found = []
    for form in (values, patterns):
        found += main(bsr, spec, path, (128, 128), **form)
        found += main(linear, spec, path, (128, 128), **form, epilogue=replace(LINEAR, bias_items=True))
        for block in ((128, 128), (64, 64)):
            grouped = form | {"ranks": (form["ranks"][0], 2, 2), "run": 128}
            found += main(linear, spec, path, block, **grouped, epilogue=layer)
    found += main(bsr, spec, path, (128, 128), batch="values", ranks=(4, 2, 3), ordered=True)
    found += main(bsr, spec, path, (128, 128), batch="patterns", ranks=(3, 2, 3), index_dtype="int64")
    found += main(bsr, spec, path, (128, 128), **values, epilogue=replace(ROW, bias_items=True))
    found += main(bsr, spec, path, (128, 128), **patterns, epilogue=FULL)
    for block in ((32, 32), (512, 112)):
        found += main(bsr, spec, path, block, batch="patterns", ranks=(3, 2, 3))
    for block in ((128, 128), (64, 64), (256, 64), (32, 32)):
        for config in configurations(path, block, spec, run=256):
            if not config.few:
                found.append(linear(spec, path, config, block, batch="patterns", run=256, epilogue=layer))
    found += main(linear, spec, path, (128, 128), batch="values", ranks=(4, 2, 2), run=256, ordered=True)
    return _buildable(found)


def unaligned(spec: ArchSpec) -> list[GemmFacts]:
    """Operands that cp.async takes in narrower copies, or element by element; the sm_80 path's alone."""
    narrow = [{"aligns": (align,) * 3} for align in (1, 2, 4)]
    narrow += [
        {"aligns": (1, 1, 1), "majors": ("m", "k", "n")},
        {"aligns": (1, 1, 1), "majors": ("any", "any", "any")},
        {"aligns": (1, 1, 1), "epilogue": COL},
    ]
    found = [facts for change in narrow for facts in main(dense, spec, "sm_80", None, **change)]
    sparse = [{"aligns": (8, align, align)} for align in (1, 4)]
    sparse += [{"aligns": (8, 1, 8), "majors": ("k", "any", "n")}]
    found += [facts for change in sparse for facts in main(bsr, spec, "sm_80", (128, 128), **change)]
    return found + main(linear, spec, "sm_80", (128, 128), aligns=(8, 1, 1), epilogue=LINEAR)


def _shared(spec: ArchSpec) -> Iterator[GemmFacts]:
    """A K shared among the CTAs of a cluster: what its store and exchange meet besides plain and loaded products."""
    high, _ = candidates.split_sm90(64, ARCHS["sm_90"])
    fp32 = {"out_dtype": "float32", "aligns": (8, 8, 4)}
    for config in high:
        for change in ({"majors": ("k", "n", "m")}, fp32, {**fp32, "majors": ("k", "n", "m")}, {"epilogue": FULL}):
            yield dense(spec, spec.path, config, **change)
        yield dense(spec, spec.path, config, aligns=(8, 8, 1), epilogue=COL)
        yield dense(spec, spec.path, config, ranks=(3, 3, 3))
        yield linear(spec, spec.path, config, (512, 112), epilogue=LINEAR)
        yield bsr(spec, spec.path, config, (128, 128), ordered=True, index_dtype="int64")


def _swept(spec: ArchSpec) -> Iterator[GemmFacts]:
    """The sweep kernel: each configuration plain, as a layer and with what its epilogue bears; blocks of every kind."""
    loaded_layer = replace(LINEAR, residual=None)
    for block in ((16, 16), (32, 32), (64, 64), (16, 128), (64, 32)):
        for config in candidates.sweeps(spec)[: 5 if block == (16, 16) else 1]:
            yield bsr(spec, spec.path, config, block)
            yield linear(spec, spec.path, config, block)
            yield linear(spec, spec.path, config, block, epilogue=loaded_layer)
            yield bsr(spec, spec.path, config, block, epilogue=COL)
    config, _, narrow, *_ = candidates.sweeps(spec)  # 256 columns, and 128
    yield bsr(spec, spec.path, config, (32, 32), batch="values", ranks=(4, 3, 3))
    for each, epilogue in ((config, replace(loaded_layer, bias_items=True)), (narrow, LINEAR)):
        yield linear(spec, spec.path, each, (16, 16), batch="values", ranks=(4, 2, 3), epilogue=epilogue)
    for change in ({"index_dtype": "int64"}, {"ranks": (3, 3, 3)}, {"dtype": "float16", "out_dtype": "float16"}):
        yield bsr(spec, spec.path, config, (32, 32), **change)
    for change in ({"out_dtype": "float32", "aligns": (8, 8, 4)}, {"aligns": (8, 8, 1)}, {"epilogue": FULL}):
        yield bsr(spec, spec.path, narrow, (32, 32), **change)


def _paired(spec: ArchSpec) -> Iterator[GemmFacts]:
    """Pairs of block rows: each configuration as a layer and with what its epilogue bears; operands of every kind."""
    col, layer, full = (replace(epilogue, residual=None) for epilogue in (COL, LINEAR, FULL))
    for config in candidates.pairs(spec):
        yield linear(spec, spec.path, config, (64, 64))
        yield linear(spec, spec.path, config, (64, 128), epilogue=layer)
        yield bsr(spec, spec.path, config, (64, 64), epilogue=col)
        yield bsr(spec, spec.path, config, (64, 64), ordered=True, epilogue=col)
        yield bsr(spec, spec.path, config, (64, 64), epilogue=full)
        yield bsr(spec, spec.path, config, (64, 64), epilogue=replace(col, bias="row"))
        yield bsr(spec, spec.path, config, (64, 64), aligns=(8, 8, 1))
        yield bsr(spec, spec.path, replace(config, cluster_n=1), (64, 64))
        rows = replace(layer, bias_items=True)
        yield linear(spec, spec.path, config, (64, 64), batch="values", ranks=(4, 3, 3), epilogue=rows)
        yield bsr(spec, spec.path, config, (64, 64), batch="values", ranks=(4, 2, 3), ordered=True)
    config = candidates.pairs(spec)[0]
    changes = ({"index_dtype": "int64"}, {"ranks": (3, 3, 3)}, {"dtype": "float16", "out_dtype": "float16"})
    yield from main(bsr, spec, spec.path, (512, 112), ranks=(3, 3, 3))
    yield from main(linear, spec, spec.path, (512, 112), ranks=(3, 3, 3))
    for change in (*changes, {"out_dtype": "float32", "aligns": (8, 8, 4)}, {"majors": ("k", "k", "n")}):
        yield bsr(spec, spec.path, config, (64, 64), **change)


def _few(spec: ArchSpec, path: str) -> Iterator[GemmFacts]:
    """Few columns: each configuration with every epilogue; B in vectors and element by element; batches, runs."""
    wide, narrow, uneven = (128, 128), (16, 16), (512, 112)
    items = replace(LINEAR, bias_items=True)
    for config in candidates.few(BlockFacts(*wide, "int32")):
        yield linear(spec, path, config, wide)
        yield linear(spec, path, config, narrow, epilogue=LINEAR)
        yield bsr(spec, path, config, uneven, epilogue=FULL)
        yield linear(spec, path, config, wide, majors=("k", "any", "any"), aligns=(8, 1, 1), epilogue=LINEAR)
        yield bsr(spec, path, config, uneven, batch="patterns", ranks=(3, 3, 3), index_dtype="int64", epilogue=FULL)
        runs = {"batch": "patterns", "run": 64, "ranks": (3, 2, 2)}
        yield linear(spec, path, config, wide, **runs, epilogue=replace(items, residual=None))


def _older_path(spec: ArchSpec) -> list[GemmFacts]:
    """The sm_80 kernels compiled for a newer GPU, which takes them when told to."""
    found = main(dense, spec, "sm_80", None) + main(dense, spec, "sm_80", None, epilogue=COL)
    for block in ((128, 128), (512, 112), (32, 32)):
        found += main(bsr, spec, "sm_80", block)
    strides = {"majors": ("k", "any", "any"), "aligns": (8, 1, 1)}
    found += [
        linear(spec, "sm_80", config, (128, 128), **strides, epilogue=LINEAR)
        for config in candidates.few(BlockFacts(128, 128, "int32"))
    ]
    return found + batches(spec, "sm_80")[:6]


def bundle_facts(
    arch: str,
    dtypes: Iterable[str],
    blocks: Iterable[tuple[int, int]],
    ops: Iterable[str] = OPS,
    index_dtypes: Iterable[str] = ("int32",),
) -> list[GemmFacts]:
    """What `ops` ask for on aligned contiguous matrices: with no epilogue, a bias, a bias and each activation.

    Shapes decide between the configurations, so all of them are here; sparse ones with and without an order of work
    tiles. gemm's b may also be the transpose of a contiguous weight. The bias has the operands' dtype, one value for
    each output feature. Not here, and compiled on their first call: batches that do not fold into rows, residuals, fp32
    outputs, alpha, functions of one's own, and batches of block-sparse matrices.
    """
    spec = arch_named(arch)
    blocks, index_dtypes, ops = list(blocks), list(index_dtypes), list(ops)
    if unknown := set(ops) - set(OPS):
        raise ValueError(f"unknown operation {min(unknown)!r}; known are {', '.join(OPS)}")
    found = []
    for dtype in dtypes:
        types = {"dtype": dtype, "out_dtype": dtype}
        for op in ops:
            epilogues = epilogues_of("row" if op == "bsr_linear" else "col", dtype)
            for block in (None,) if op == "gemm" else blocks:
                configs = configurations(spec.path, block, spec)
                for config, epilogue in ((c, e) for c in configs for e in epilogues):
                    if op == "gemm":
                        for b in "nk":
                            majors = ("k", b, "n")
                            found.append(dense(spec, spec.path, config, majors=majors, epilogue=epilogue, **types))
                        continue
                    make = linear if op == "bsr_linear" else bsr
                    for index in index_dtypes:
                        plain = make(spec, spec.path, config, block, epilogue=epilogue, index_dtype=index, **types)
                        found += [plain] if config.sweep or config.few else [plain, replace(plain, ordered=True)]
    return _buildable(found)


def epilogues_of(bias: str, dtype: str) -> list[EpilogueSpec]:
    """None, a bias, and a bias with each activation."""
    with_bias = EpilogueSpec(bias=bias, bias_dtype=dtype)
    return [
        EpilogueSpec(),
        with_bias,
        *(replace(with_bias, activation=name) for name in functions.ACTIVATIONS),
    ]


# -- in words -------------------------------------------------------------------------------------------------


def config_text(config: GemmConfig) -> str:
    """As str(config), in half the width: tile/stages, warpgroups, and what is not 1; "k/4" is K among 4 CTAs."""
    text = f"{config.tile_m}x{config.tile_n}x{config.tile_k}/{config.stages} {config.warps_m}x{config.warps_n}"
    text += f" k/{config.split}" if config.split > 1 else ""
    if config.cluster_m * config.cluster_n > 1:
        text += f" c{config.cluster_m}x{config.cluster_n}"
    text += " pairs" if config.pairs else ""
    return text + (" pp" if config.teams == 2 else " sweep" if config.sweep else " few" if config.few else "")


def block_text(facts: GemmFacts) -> str:
    return f"{facts.block.bm}x{facts.block.bk}" if facts.block else "dense"


def operands_text(facts: GemmFacts) -> str:
    """Majors and types; then what differs from aligned matrices with 32-bit indices."""
    types = SHORT[facts.dtype] + (f">{SHORT[facts.out_dtype]}" if facts.out_dtype != facts.dtype else "")
    text = f"{','.join(facts.majors)} {types}"
    aligned = (8, 8, 16 // facts.out_bytes)
    if facts.aligns != aligned:
        text += " align " + ",".join(map(str, facts.aligns))
    if facts.ranks[1:] != (2, 2):
        text += " rank " + ",".join(map(str, facts.ranks))
    if facts.block and facts.block.index_dtype != "int32":
        text += f" {facts.block.index_dtype}"
    if facts.block and facts.block.batch:
        text += f" batch of {facts.block.batch}" + (f" runs of {facts.block.run}" if facts.block.run else "")
    return text + (" ordered" if facts.ordered else "") + (" linear" if facts.transposed else "")


def epilogue_text(spec: EpilogueSpec) -> str:
    """The terms in their order; "" for none."""
    terms = ["alpha"] if spec.scale else []
    terms += [f"{spec.bias}{'s' if spec.bias_items else ''}({SHORT[spec.bias_dtype]})"] if spec.bias else []
    terms += [f"residual({spec.residual})"] if spec.residual else []
    terms += [spec.activation] if spec.activation else []
    terms += ["function"] if spec.function else []
    return "+".join(terms)


def name_of(facts: GemmFacts) -> str:
    """One line that no other entry of an architecture's catalogue shares."""
    parts = (facts.path, config_text(facts.config), block_text(facts), operands_text(facts))
    return "; ".join(filter(None, (*parts, epilogue_text(facts.epilogue))))
