import sys; sys.argv=["x"]
from bench._probe4 import *
C=GemmConfig
V={"128x128x32":C(128,128,32,4,2,2),"128x128x64":C(128,128,64,3,2,2),"128x256x32":C(128,256,32,4,2,4),"256x128x32":C(256,128,32,4,4,2),"128x256x64":C(128,256,64,3,2,4),"256x128x64":C(256,128,64,3,4,2)}
def F(c,blk,lb,lin=False):
    return function_for(GemmFacts("sm_90a","sm_80",c,block=blk,majors=("k","k","m") if lin else ("k",lb if lb=="n" else "k","n"),transposed=lin))
for lb in "nt":
    M=N=K=4096
    a=R(M,K); b=R(K,N) if lb=="n" else R(N,K).t(); d=torch.empty(M,N,device="cuda",dtype=bf)
    calls={"cublas": lambda: torch.mm(a,b,out=d)}
    for n,c in V.items():
        f=F(c,None,lb); d.fill_(float("nan")); f(a,b,d,None,None,1.0,1.0,8,SMS); torch.cuda.synchronize()
        e=((d.float()-a.float()@b.float()).norm()/d.float().norm()).item()
        if not e<4e-3: print("BAD",n,e)
        for g in (4,8,16): calls[f"{n} g{g}"]=lambda f=f,g=g: f(a,b,d,None,None,1.0,1.0,g,SMS)
    report(f"sm80 dense {lb}", calls, 2*M*N*K, "cublas", 20)
def sp(bm,bk,M,K,per,lin):
    N=8192; W=random_bsr((M,K),(bm,bk),per_row=per,device="cuda",dtype=bf)
    b=R(N,K) if lin else R(K,N); d=torch.empty((N,M) if lin else (M,N),device="cuda",dtype=bf)
    ku=per*bk; d1=torch.empty(M,N,device="cuda",dtype=bf)
    a2,b2=R(8192,8192),R(8192,8192)
    calls={"cublas 8192":lambda: torch.mm(a2,b2,out=d1)}
    for n,c in V.items():
        if c.tile_m>bm: continue
        f=F(c,BlockFacts(bm,bk,"int32"),"n",lin)
        for g in (2,4,8): calls[f"{n} g{g}"]=lambda f=f,g=g: f(W.crow_indices,W.col_indices,W.values,b,d,None,None,1.0,1.0,g,SMS)
    report(f"sm80 bsr {bm}x{bk} lin={int(lin)}", calls, 2*M*N*ku, "cublas 8192", 15, ("cublas 8192",2*8192**3))
sp(512,112,8192,8288,16,False); sp(512,112,8192,8288,16,True); sp(128,128,8192,8192,8,False)
