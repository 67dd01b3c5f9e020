import torch, traceback
from cute_kernels import gemm, explain, path, functions as F
from sparse_collective import *
torch.manual_seed(0)
bf=torch.bfloat16
def err(o, r): return ((o.double()-r).norm()/r.norm().clamp_min(1e-30)).item()
def t(name, fn):
    try:
        o, r = fn(); torch.cuda.synchronize(); e = err(o, r)
        print(f"{'ok ' if e < 6e-3 else 'BAD'} {name} {e:.2e}", flush=True)
    except Exception as ex:
        print("EXC", name, str(ex)[:300].replace("\n"," "), flush=True)
def R(*s): return torch.randn(*s, device="cuda", dtype=bf)
def g(M,N,K,la="n",lb="n",out=None,**kw):
    def f():
        a = R(M,K) if la=="n" else R(K,M).t(); b = R(K,N) if lb=="n" else R(N,K).t()
        return gemm(a,b,**kw), a.double()@b.double()
    return f
def everything():
  for la in "nt":
      for lb in "nt": t(f"{la}{lb}", g(264,520,200,la,lb))
  t("1x256x64", g(1,256,64)); t("256x1x64 nt", g(256,1,64,"n","t")); t("1x1x8", g(1,1,8)); t("K8", g(300,264,8)); t("M1 NT", g(1,264,1024,"n","t"))
  t("out fp32", g(264,520,200,out_dtype=torch.float32)); t("out f16", g(264,520,200,out_dtype=torch.float16))
  t("N=261 NT direct", g(264,261,200,"n","t")); 
  def ep():
      a,b=R(264,200),R(200,520); bias=R(520); res=R(264,520)
      return gemm(a,b,bias,"gelu",res,0.5,2.0), torch.nn.functional.gelu(0.5*(a.double()@b.double())+bias.double()+2*res.double())
  t("epilogue", ep)
  def ep2():
      a,b=R(264,200),R(200,520); bias=torch.randn(264,1,device="cuda")
      return gemm(a,b,bias,"silu"), torch.nn.functional.silu(a.double()@b.double()+bias.double())
  t("row bias", ep2)
  def ep3():
      a,b=R(264,200),R(200,520)
      return gemm(a,b,epilogue=lambda x: F.maximum(x,0.0)*3.0), torch.relu(a.double()@b.double())*3
  t("user", ep3)
  def bat(sa,sb):
      def f():
          a,b=R(*sa),R(*sb); return gemm(a,b), a.double()@b.double()
      return f
  t("batch fold", bat((3,40,64),(64,72))); t("batch", bat((3,40,64),(3,64,72))); t("batch bc", bat((40,64),(3,64,72))); t("batch 4d", bat((2,1,40,64),(1,3,64,72)))
  t("K0", lambda: (gemm(R(40,0),R(0,72),bias=torch.ones(72,device="cuda")), torch.ones(40,72,device="cuda").double()))
  def bs(bm,bk,M,K,N,lin,dens=.4,**kw):
      def f():
          W=random_bsr((M,K),(bm,bk),density=dens,device="cuda",dtype=bf)
          if lin:
              x=R(N,K); return bsr_linear(x,W,**kw), x.double()@W.to_dense().double().t()
          b=R(K,N); return bsr_matmul(W,b,**kw), W.to_dense().double()@b.double()
      return f
  for bm,bk in ((16,16),(32,32),(32,64),(64,64),(128,128),(128,64),(64,256),(256,64),(48,112),(512,112),(192,64),(80,48)):
      for lin in (0,1): t(f"bsr {bm}x{bk} lin={lin}", bs(bm,bk,bm*3,bk*5,264,lin))
  t("bsr empty", bs(64,64,256,256,264,0,0.0)); t("bsr full", bs(64,64,256,256,264,0,1.0)); t("bsr dens .05", bs(64,64,1024,1024,1000,0,0.05))
  t("bsr N=8", bs(64,64,256,256,8,1)); t("bsr N=1 lin", bs(64,64,256,256,1,1)); t("bsr 128 N=64", bs(128,64,256,256,64,1))
  t("odd 127x129x65", g(127,129,65)); t("1x1x1", g(1,1,1)); t("odd K tn", g(64,72,33,"t","n")); t("mixed", g(64,73,40,"n","t"))
  def anyv():
    a=R(80,128)[:, ::2]; b=R(128,72)[::2]; return gemm(a,b), a.double()@b.double()
  t("any stride", anyv)
  def mout():
    a,b=R(136,64),R(64,72); o=torch.full((72,136),float("nan"),device="cuda",dtype=bf).t(); return gemm(a,b,out=o), a.double()@b.double()
  t("m-major out", mout)
  def uout():
    a,b=R(136,64),R(64,72); o=torch.full((136,75),float("nan"),device="cuda",dtype=bf)[:,1:73]; return gemm(a,b,out=o), a.double()@b.double()
  t("unaligned out", uout)
import sys
for p in ("sm_90","sm_80"):
  print("== default" if p=="sm_90" else "== sm_80", flush=True)
  if p=="sm_90": everything()
  else:
    with path(p): everything()
x=R(64,64); out=torch.empty_like(x)
from bench.timing import host_cost
print("host us: gemm", host_cost(lambda: gemm(x,x,out=out)), "torch.mm", host_cost(lambda: torch.mm(x,x,out=out)))
W=random_bsr((64,64),(64,64),density=1.0,device="cuda",dtype=bf)
print("host us: bsr_linear", host_cost(lambda: bsr_linear(x,W,out=out)))
