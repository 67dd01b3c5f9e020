from _probe import *
torch.manual_seed(0)
bf = torch.bfloat16
M = N = 8192
def case(bm, bk, K, per_row, cfgs, groups, lin=False):
    crow, col = pattern(M // bm, K // bk, per_row)
    val = torch.randn(col.numel(), bm, bk, device="cuda", dtype=bf)
    W = todense(crow, col, val, M, K)
    if lin: b = torch.randn(N, K, device="cuda", dtype=bf); bt = b.t(); d = torch.empty(N, M, device="cuda", dtype=bf)
    else: b = torch.randn(K, N, device="cuda", dtype=bf); bt = b; d = torch.empty(M, N, device="cuda", dtype=bf)
    ref = W @ bt
    if lin: ref = ref.t()
    Ku = per_row * bk
    a1 = torch.randn(M, Ku, device="cuda", dtype=bf); b1 = torch.randn(Ku, N, device="cuda", dtype=bf); d1 = torch.empty(M, N, device="cuda", dtype=bf)
    Kf = 8192
    a2 = torch.randn(M, Kf, device="cuda", dtype=bf); b2 = torch.randn(Kf, N, device="cuda", dtype=bf)
    fns = {"cublas equal": lambda: torch.mm(a1, b1, out=d1), "cublas 8192": lambda: torch.mm(a2, b2, out=d1)}
    for cfg in cfgs:
        k = bsr(bm, bk, cfg, majors=("k", "k", "m") if lin else ("k","n","n"), transposed=lin)
        d.fill_(float("nan"))
        k(crow, col, val, b, d, None, None, 1.0, 1.0, groups[0], SMS); torch.cuda.synchronize()
        print(bm, bk, cfg, "relerr", relerr(d, ref), flush=True)
        for g in groups:
            fns[f"{cfg} g{g}"] = lambda k=k, g=g: k(crow, col, val, b, d, None, None, 1.0, 1.0, g, SMS)
    t = timed(fns, 10)
    fl = 2*M*N*Ku
    rate = 2*M*N*Kf/t["cublas 8192"]
    for n, u in t.items():
        print(f"{bm}x{bk} lin={lin} {n:45s} {u:8.1f} us {fl/u/1e6:7.0f} TF  equal-work {t['cublas equal']/u:.3f}  rate/dense {fl/u/rate:.3f}", flush=True)
PP192=C(128,192,64,5,1,1,1,2,2,1); PP192b=C(128,192,64,5,1,1,1,1,2,1); PP128=C(128,128,64,6,1,1,1,2,2,2); CO=C(128,256,64,4,2,1,1,2)
case(128,128,8192,8,[CO, PP192, PP192b, PP128], (2,3,4))
case(128,128,8192,8,[CO, PP192, PP128], (2,4,), True)
case(128,64,8192,16,[CO, PP192], (2,4))
case(256,64,8192,16,[CO, C(256,128,64,4,2,1,1,2), PP192, C(128,192,64,5,1,1,2,1,2,1)], (2,4,8))
P64=[C(64,256,64,5,1,1,1,2,2,1), C(64,256,64,4,1,2,1,2,1,2), C(64,256,64,5,1,1,1,1,2,1)]
case(64,64,8192,16,P64, (2,4,8))
case(64,64,8192,16,P64[:2], (2,4), True)
case(512,112,8288,16,[CO, PP192, C(128,256,64,4,2,1,2,1), C(128,192,64,5,1,1,2,1,2,1), C(256,128,64,4,2,1,2,1), C(256,128,64,4,2,1,1,2)], (2,4,8))
