import sys, time, itertools
import torch
from cute_kernels.config import *
from cute_kernels.dense import DenseGemm
from sparse_collective.collective import SparseCollective
from cute_kernels.runtime.fake import *
import cutlass.cute as cute
C = GemmConfig
def compile_for(arch, fn, *args):
    from cute_kernels.runtime import compile as CC
    return CC.load_compiled(CC.compile_for(arch, fn, *args))
SMS = 132

def mat(facts, op, contiguous):
    return fake_tensor(facts.out_dtype if op == 2 else facts.dtype, facts.ranks[op], contiguous, facts.aligns[op])

def dense(cfg, majors=("k", "n", "n"), path="sm_90", **kw):
    f = GemmFacts("sm_90a", path, cfg, majors=majors, **kw)
    g = DenseGemm(f)
    c = compile_for("sm_90a", g, mat(f, 0, 1 if majors[0] == "k" else 0), mat(f, 1, 1 if majors[1] == "n" else 0), mat(f, 2, 1), *epilogue_args(f), *launch_args())
    return c

def bsr(bm, bk, cfg, majors=("k", "n", "n"), transposed=False, path="sm_90", **kw):
    f = GemmFacts("sm_90a", path, cfg, block=BlockFacts(bm, bk, "int32"), majors=majors, transposed=transposed, **kw)
    g = SparseCollective(f)
    idx = lambda: fake_tensor("int32", 1, 0, 1)
    vals = fake_tensor(f.dtype, 3, 2, 8, (cute.sym_int32(), bm, bk))
    return compile_for("sm_90a", g, idx(), idx(), vals, mat(f, 1, 1 if (majors[1] == "n") != transposed else 0), mat(f, 2, 1 if (majors[2] == "n") != transposed else 0), *epilogue_args(f), *launch_args())

flush = None
def timed(fns, reps=20):
    """median us of each, interleaved, L2 flushed"""
    global flush
    if flush is None: flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    out = {k: [] for k in fns}
    for k, f in fns.items():
        for _ in range(2): f()
    for _ in range(reps):
        for k, f in fns.items():
            flush.zero_()
            s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            s.record(); f(); e.record()
            out[k].append((s, e))
    torch.cuda.synchronize()
    return {k: sorted(s.elapsed_time(e) * 1e3 for s, e in v)[len(v) // 2] for k, v in out.items()}

def relerr(out, ref):
    return ((out.float() - ref.float()).norm() / ref.float().norm()).item()

def pattern(rows, cols, per_row):
    col = torch.rand(rows, cols, device="cuda").argsort(1)[:, :per_row].sort(1).values.int().reshape(-1).contiguous()
    crow = torch.arange(rows + 1, device="cuda", dtype=torch.int32) * per_row
    return crow, col

def todense(crow, col, val, M, K):
    bm, bk = val.shape[1:]
    d = torch.zeros(M // bm, K // bk, bm, bk, device="cuda", dtype=val.dtype)
    rows = torch.repeat_interleave(torch.arange(M // bm, device="cuda"), crow.diff().long())
    d[rows, col.long()] = val
    return d.permute(0, 2, 1, 3).reshape(M, K)
