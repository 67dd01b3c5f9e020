"""Numbers that masks and score functions capture: constants of a kernel, arguments from the second value on."""

import contextlib
import shutil

import pytest
import torch

import cute_kernels
from attention import attention, block_sparse_attention, create_block_mask, mask_mods
from attention.masks.element_mask import element_mask
from attention.masks.score_mod import bound
from cute_kernels.testing.reference import attention_plainly
from cute_kernels.traced import memo, numbers

from ..attention.emulate_attention import EmulatedFlash
from ..attention.mask_parts import N, operands
from ..attention.parts import qkv
from ..attention.test_masks_saved import assert_right
from ..emulator.emulate import COMPILER
from ..emulator.ops import on_emulator

CPU = torch.device("cpu")
MACHINES = [
    pytest.param(("cpu", None), id="reference"),
    *(pytest.param(("emulator", p), marks=getattr(pytest.mark, p), id=f"emulator {p}") for p in ("sm_80", "sm_90")),
    *(
        pytest.param(("cuda", p), marks=[pytest.mark.gpu, getattr(pytest.mark, p)], id=f"cuda {p}")
        for p in ("sm_80", "sm_90")
    ),
]


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch):
    monkeypatch.setattr(numbers, "_SEEN", {})
    monkeypatch.setattr(numbers, "_CHOSEN", {})
    monkeypatch.setattr(memo, "_OF_STATE", {})


@pytest.fixture
def machine(request):
    kind, path = request.param
    if kind == "emulator" and shutil.which(COMPILER) is None:
        pytest.skip("the emulator needs a C++ compiler")
    with contextlib.ExitStack() as stack:
        if kind == "emulator":
            stack.enter_context(on_emulator("sm_90", sms=4, path=path))
        if path:
            stack.enter_context(cute_kernels.path(path))
        yield "cuda" if kind == "cuda" else "cpu"


def prefix(n):
    return lambda b, h, q, kv: (kv <= q) | (kv < n)


def dilated(step):
    return lambda b, h, q, kv: (q - kv) % step == 0


def tempered(t, shift=2):
    return lambda s, b, h, q, kv: s / t - 0.01 * (q + shift - kv).abs()


def kernel_of(mask_mod):
    return element_mask(mask_mod, CPU)


class TestWhichAreArguments:
    def test_from_the_second_value_on(self):
        first, given = kernel_of(prefix(100))
        assert given == () and kernel_of(prefix(100))[0] == first
        second, given = kernel_of(prefix(30))
        assert second != first and given == (30,)
        for n in (0, -5, 1000, 2**29):
            found, given = kernel_of(prefix(n))
            assert found == second and given == (n,)
        far, given = kernel_of(prefix(2**30))
        assert far != second and given == (2**30,), "sums with positions may not fit into int32"

    def test_numbers_of_before_keep_their_kernel(self, monkeypatch):
        """A copy of a mask needs the mask's kernel, whether or not its trace is remembered."""
        made = [(n, kernel_of(prefix(n))) for n in (100, 30, 7)]
        monkeypatch.setattr(memo, "_OF_STATE", {})
        assert [(n, kernel_of(prefix(n))) for n, _ in made] == made

    def test_literals_and_other_code_are_not(self):
        kernel_of(lambda b, h, q, kv: kv < 5)
        assert kernel_of(lambda b, h, q, kv: kv < 6)[1] == ()

    def test_what_python_computes_of_numbers(self):
        """Band adds its offset to its bounds."""
        kernel_of(mask_mods.Band(5, 3, 10))
        kernel, given = kernel_of(mask_mods.Band(7, 3, 10))
        assert given == (3,), "13 is the bound on the right of both"
        kernel, given = kernel_of(mask_mods.Band(8, 4, 20))
        assert given == (12, 24) and kernel_of(mask_mods.Band(1, 1, 0))[0] == kernel

    def test_other_branches_are_other_kernels(self):
        kernel_of(mask_mods.Band(5, 3))
        assert kernel_of(mask_mods.Band(None, 4))[1] == ()

    def test_divisors_only_after_many_values(self):
        for step in range(2, 2 + numbers.VALUES_OF_A_DIVISOR):
            assert kernel_of(dilated(step))[1] == ()
        kernel, given = kernel_of(dilated(99))
        assert given == (99,) and kernel.program.arguments[0].low == 1
        negative, given = kernel_of(dilated(-3))
        assert given == (-3,) and negative != kernel

    def test_floats(self):
        assert bound(tempered(2.0), CPU).numbers == ()
        second = bound(tempered(3.0), CPU)
        assert second.numbers == (3.0,)
        assert bound(tempered(7), CPU).mod == second.mod, "an int beside a float32 is a float32"
        assert bound(tempered(0.1), CPU).numbers == (torch.tensor(0.1).item(),), "rounded to float32, as a constant is"
        assert bound(tempered(0.1, 9), CPU).numbers == (torch.tensor(0.1).item(), 9)

    def test_of_16_bits(self):
        table = torch.randn(4, dtype=torch.bfloat16)
        mods = [lambda s, b, h, q, kv, t=t: torch.where(s > 0, table[h], t) + s for t in (0.1, 0.3)]
        (_, second), at = [bound(mod, CPU) for mod in mods], torch.randn(1, 4, 3, 3)
        assert second.numbers != ()
        want = torch.where(at > 0, table.view(4, 1, 1), 0.3).float() + at
        torch.testing.assert_close(second.apply(at), want)


def test_few_kernels(device):
    """On the host side of a GPU's calls."""
    if device == "cuda":
        pytest.skip("kernels are counted where torch stands in their place")
    for n in range(10, 100, 10):
        mask = create_block_mask(prefix(n), None, None, N, N)
        call = operands()
        out = block_sparse_attention(*call, mask)
        want = attention_plainly(*(t.double() for t in call), mask.to_dense())[0]
        torch.testing.assert_close(out.double(), want, atol=0.03, rtol=0.03)
    assert len(EmulatedFlash.built) == 2


def truth(call, seen, mod, dout):
    """(out, dq, dk, dv) in fp64."""
    q, k, v = (t.detach().double().requires_grad_() for t in call)
    (B, H, S, D), T = q.shape, k.shape[2]
    b, h, i, j = torch.meshgrid(*(torch.arange(n, device=q.device) for n in (B, H, S, T)), indexing="ij")
    keys, values = (t.repeat_interleave(H // k.shape[1], 1) for t in (k, v))
    s = mod(q @ keys.mT * D**-0.5, b, h, i, j).masked_fill(~seen, -torch.inf)
    out = s.softmax(-1) @ values
    out.backward(dout.double())
    return out.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("machine", MACHINES, indirect=True)
def test_masks_in_kernels(machine):
    """A prefix and a divisor; forward and backward."""

    def mask_of(n, step):
        return lambda b, h, q, kv: ((kv <= q) | (kv < n)) & ((q - kv) % step != 1)

    S = 100
    for i in range(numbers.VALUES_OF_A_DIVISOR):
        kernel_of(mask_of(20 + i, 101 + i))
    call = [t.requires_grad_() for t in qkv(S, S, 64, B=1, H=1, heads=1, device=machine)]
    mask = create_block_mask(mask_of(70, 5), None, None, S, S, device=machine)
    assert element_mask(mask.mask_mod, mask.device)[1] == (70, 5)
    out = block_sparse_attention(*call, mask)
    dout = torch.randn_like(out)
    out.backward(dout)
    want, *gradients = truth(call, mask.to_dense(), lambda s, b, h, q, kv: s, dout)
    assert ((out.double() - want).norm() / want.norm()).item() < 0.02
    assert_right(call, gradients)


@pytest.mark.parametrize("machine", MACHINES, indirect=True)
def test_scores_in_kernels(machine):
    """A float, an int that is added to positions, and a captured tensor with a gradient."""
    S, slopes = 100, torch.tensor([0.02, 0.05], device=machine)
    seen = torch.ones(S, S, dtype=torch.bool, device=machine).tril()

    def mod_of(temperature, shift, slopes):
        return lambda s, b, h, q, kv: s * temperature - slopes[h] * (q + shift - kv).abs()

    bound(mod_of(1.0, 3, slopes), slopes.device)
    for temperature, shift in ((0.5, 4), (1.7, 40)):
        call = [t.requires_grad_() for t in qkv(S, S, 64, B=1, H=2, heads=1, device=machine)]
        of_ours, of_truth = (slopes.to(t, copy=True).requires_grad_() for t in (torch.float32, torch.float64))
        out = attention(*call, causal=True, score_mod=mod_of(temperature, shift, of_ours))
        dout = torch.randn_like(out)
        out.backward(dout)
        want, *gradients = truth(call, seen, mod_of(temperature, shift, of_truth), dout)
        assert ((out.double() - want).norm() / want.norm()).item() < 0.02
        assert_right(call, gradients)
        assert ((of_ours.grad.double() - of_truth.grad).norm() / of_truth.grad.norm()).item() < 0.05
    assert bound(mod_of(2.0, 7, slopes), slopes.device).numbers == (2.0, 7)
