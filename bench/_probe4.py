import torch
from cute_kernels.config import *
from cute_kernels.heuristics import sm90
from cute_kernels.arch import ARCHS
from cute_kernels.runtime.kernels import function_for
from sparse_collective import random_bsr
from bench.timing import interleaved, median
S=ARCHS["sm_90"]; bf=torch.bfloat16; SMS=132
def R(*s): return torch.randn(*s, device="cuda", dtype=bf)
CO12=sm90(128,256,64,2,1,1,2,spec=S); CO21=sm90(128,256,64,2,1,2,1,spec=S); CO14=sm90(128,256,64,2,1,1,4,spec=S)
PP12=sm90(128,192,64,1,1,1,2,2,1,spec=S); PP21=sm90(128,192,64,1,1,2,1,2,1,spec=S); SQ12=sm90(256,128,64,2,1,1,2,spec=S); SQ21=sm90(256,128,64,2,1,2,1,spec=S)
P64=sm90(64,256,64,1,1,1,2,2,1,spec=S); C64=sm90(64,256,64,1,2,1,2,spec=S)
def report(title, calls, flops, base, rounds=40, extra=None):
    t={n: median(v) for n,v in interleaved(calls, warm_s=.7, rounds=rounds).items()}
    for n,u in t.items():
        print(f"{title:22s} {n:28s} {u:8.1f} us {flops/u/1e6:6.0f} TF ratio {t[base]/u:.3f}" + (f" rate/dense {flops/u/(extra[1]/t[extra[0]]):.3f}" if extra else ""), flush=True)
def dense(M,N,K,lb,cfgs):
    a=R(M,K); b=R(K,N) if lb=="n" else R(N,K).t(); d=torch.empty(M,N,device="cuda",dtype=bf)
    calls={"cublas": lambda: torch.mm(a,b,out=d)}
    for n,c in cfgs.items():
        f=function_for(GemmFacts("sm_90a","sm_90",c,majors=("k",lb if lb=="n" else "k","n")))
        for g in (8,16): calls[f"{n} g{g}"]=lambda f=f,g=g: f(a,b,d,None,None,1.0,1.0,g,SMS)
    report(f"dense {M}x{N}x{K} {lb}", calls, 2*M*N*K, "cublas", 20)
def sparse(bm,bk,M,K,per,cfgs,gs,lin=False):
    N=8192; W=random_bsr((M,K),(bm,bk),per_row=per,device="cuda",dtype=bf)
    b=R(N,K) if lin else R(K,N); d=torch.empty((N,M) if lin else (M,N),device="cuda",dtype=bf)
    ku=per*bk; a1,b1,d1=R(M,ku),R(ku,N),torch.empty(M,N,device="cuda",dtype=bf)
    calls={"cublas equal": lambda: torch.mm(a1,b1,out=d1)}; ex=None
    if bm==512:
        a2,b2=R(8192,8192),R(8192,8192); calls["cublas 8192"]=lambda: torch.mm(a2,b2,out=d1); ex=("cublas 8192",2*8192**3)
    for n,c in cfgs.items():
        f=function_for(GemmFacts("sm_90a","sm_90",c,block=BlockFacts(bm,bk,"int32"),majors=("k","k","m") if lin else ("k","n","n"),transposed=lin))
        for g in gs: calls[f"{n} g{g}"]=lambda f=f,g=g: f(W.crow_indices,W.col_indices,W.values,b,d,None,None,1.0,1.0,g,SMS)
    report(f"bsr {bm}x{bk} lin={int(lin)}", calls, 2*M*N*ku, "cublas equal", 30, ex)
import sys
if "dense" in sys.argv:
    for s in ((4096,)*3,(8192,)*3,(8192,8192,1024)):
        for lb in "nt": dense(*s,lb,{"CO21":CO21,"SQ12":SQ12})
if "bsr" in sys.argv:
    sparse(128,128,8192,8192,8,{"CO12":CO12,"CO14":CO14,"PP12":PP12},(1,2))
    sparse(128,128,8192,8192,8,{"CO12":CO12,"PP12":PP12},(1,2),True)
    sparse(128,64,8192,8192,16,{"CO12":CO12,"PP12":PP12},(1,2))
    sparse(256,64,8192,8192,16,{"CO21":CO21,"PP21":PP21,"SQ12":SQ12},(2,4))
    sparse(64,64,8192,8192,16,{"P64":P64,"C64":C64},(1,2))
    sparse(64,64,8192,8192,16,{"P64":P64},(1,2),True)
    sparse(512,112,8192,8288,16,{"CO21":CO21,"PP21":PP21,"SQ21":SQ21},(2,4,8))
