"""One product for a profiler to look at: `python -m bench.gates.probe dense` or `bsr`.

It launches one kernel of ours, and none of anybody else's has a name with Gemm in it: that is how a profiler finds it.
"""

import sys

import torch

from cute_kernels import gemm
from sparse_collective import bsr_matmul, random_bsr

BF16 = torch.bfloat16


def dense() -> None:
    """4096^3."""
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=BF16) for _ in range(2))
    gemm(a, b)


def bsr() -> None:
    """8192^3 with 128x128 blocks, one in eight stored, the same number in every row."""
    W = random_bsr((8192, 8192), (128, 128), per_row=8, device="cuda", dtype=BF16)
    bsr_matmul(W, torch.randn(8192, 8192, device="cuda", dtype=BF16))


PROBES = {"dense": dense, "bsr": bsr}


def main(names: list[str]) -> int:
    if len(names) != 1 or names[0] not in PROBES:
        print(f"python -m bench.gates.probe NAME; there are {', '.join(PROBES)}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    PROBES[names[0]]()
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
