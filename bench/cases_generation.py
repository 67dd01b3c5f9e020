"""Tokens that transformers' generate() adds to a long prompt, with a static cache, beside transformers' own attention.

A model of Llama's shape with random weights is compiled once for each implementation; they share weights and cache. A
row's time is that of one token in the loop of generate(): the compiled model and all that transformers does around it.
The prompt is in the cache already, and the tokens are given ones, so that all compute the same: logits are compared.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .peers import Call, compare, needs
from .rows import FASTEST, Candidate, Case

SUITE = "generation"
OURS_IN_TRANSFORMERS = "cute_kernels"
THEIRS = ("sdpa", "flex_attention", "eager")
CHECKED = 8  # tokens whose logits are compared
LARGE = 50.0  # of cached values: their mean over a long prompt is small, and is to count in the logits
TOLERANCE = 0.05  # of logits after eight layers in bf16, relative to those of "sdpa", not compiled
ASKED = 1.05


@dataclass(frozen=True)
class GenerationProblem:
    """What is computed for one token of each item, as result files name it."""

    op: str = "generate"
    batch: int = 1
    prompt: int = 15_901  # tokens, in the cache but for the last
    cache: int = 16_384
    tokens: int = 64  # generated
    layers: int = 8
    hidden: int = 4096
    intermediate: int = 14_336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 32_000
    dtype: str = "bfloat16"

    @property
    def weights(self) -> int:
        """Of all matrices that a token is multiplied by."""
        attending = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attending + 3 * self.hidden * self.intermediate) + self.hidden * self.vocabulary

    @property
    def flops(self) -> float:
        """The useful ones."""
        seen = self.prompt + self.tokens / 2
        return self.batch * (2.0 * self.weights + 4.0 * self.layers * seen * self.heads * self.head_dim)

    @property
    def bytes(self) -> float:
        """The least that passes through device memory: weights, keys and values."""
        seen = self.prompt + self.tokens / 2
        return 2.0 * (self.weights + 2 * self.batch * self.layers * seen * self.kv_heads * self.head_dim)


class Generation:
    """The models of one row, their common weights and cache, and the loop.

    Args:
        compile: further arguments of transformers' CompileConfig.
    """

    def __init__(self, p: GenerationProblem, device: str = "cuda", **compile) -> None:
        self.problem, self.device = p, device
        needs("transformers", "transformers").logging.set_verbosity_error()
        from transformers.generation.configuration_utils import CompileConfig

        from attention.integrations.transformers import register

        register()
        self.compile_config = CompileConfig(**compile)
        self.compile_config._compile_all_devices = True
        draw = torch.Generator().manual_seed(0)
        self.prompt = torch.randint(p.vocabulary, (p.batch, p.prompt), generator=draw).to(device)
        self.tokens = torch.randint(p.vocabulary, (p.tokens,), generator=draw).tolist()

    def new_model(self, implementation: str) -> torch.nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        p = self.problem
        config = LlamaConfig(
            vocab_size=p.vocabulary, hidden_size=p.hidden, intermediate_size=p.intermediate,
            num_hidden_layers=p.layers, num_attention_heads=p.heads, num_key_value_heads=p.kv_heads,
            head_dim=p.head_dim, max_position_embeddings=p.cache, tie_word_embeddings=False, pad_token_id=0,
            bos_token_id=1, eos_token_id=None,
        )  # fmt: skip
        more = {"attn_implementation": implementation, "dtype": getattr(torch, p.dtype)}
        with torch.device(self.device):
            return LlamaForCausalLM._from_config(config, **more).eval()

    @cached_property
    def plain(self) -> torch.nn.Module:
        """Torch's own attention, never compiled."""
        torch.manual_seed(0)
        return self.new_model("sdpa")

    def model(self, implementation: str) -> torch.nn.Module:
        """With the weights of all others."""
        found = self.new_model(implementation)
        found.load_state_dict(self.plain.state_dict(), assign=True)
        return found

    @cached_property
    def cache(self):
        """A StaticCache as after all of the prompt but its last token, of random keys and values."""
        from transformers import StaticCache

        found = StaticCache(config=self.plain.config, max_cache_len=self.problem.cache)
        with torch.no_grad():
            self.plain(self.prompt[:, :1], past_key_values=found)  # makes the tensors
        for layer in found.layers:
            layer.keys.normal_()
            layer.values.normal_().mul_(LARGE)
        return found

    def generate(self, model: torch.nn.Module, tokens: int | None = None, **options) -> tuple[float, Tensor]:
        """(microseconds of a token, logits (CHECKED, B, vocabulary) of the first ones).

        The first token, which transformers takes as the rest of the prompt and does not compile, is not timed.
        """
        for layer in self.cache.layers:  # what was generated before counts no more
            layer.cumulative_length.fill_(self.problem.prompt - 1)
        steps = Steps(self.tokens, self.device)
        model.generate(
            self.prompt, attention_mask=torch.ones_like(self.prompt), past_key_values=self.cache,
            max_new_tokens=tokens or self.problem.tokens, do_sample=False, logits_processor=[steps], **options,
        )  # fmt: skip
        return steps.microseconds(), torch.stack(steps.logits)

    @cached_property
    def reference(self) -> Tensor:
        return self.generate(self.plain, CHECKED, disable_compile=True)[1]

    def call(self, implementation: str) -> Call:
        """Compiled, its logits compared; it returns microseconds of a token."""
        reference, model = self.reference, self.model(implementation)
        before = dict(compiled())
        _, logits = self.generate(model, CHECKED, compile_config=self.compile_config)
        compare(logits, reference, TOLERANCE)
        note = ", ".join(f"{count - before[name]} {name}" for name, count in compiled().items())
        return Call(lambda: self.generate(model, compile_config=self.compile_config)[0], note)


class Steps:
    """A logits processor that notes when each token's logits are there, and says which token comes next."""

    def __init__(self, tokens: list[int], device: str) -> None:
        self.tokens, self.gpu = tokens, torch.device(device).type == "cuda"
        self.marks, self.logits = [], []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.gpu:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())
        if len(self.logits) < CHECKED:
            self.logits.append(scores)
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, self.tokens[len(self.marks) - 1]] = 0.0
        return chosen

    def microseconds(self) -> float:
        """Of a token, from the first mark on."""
        first, *_, last = self.marks
        if self.gpu:
            torch.cuda.synchronize()
            return 1e3 * first.elapsed_time(last) / (len(self.marks) - 1)
        return 1e6 * (last - first) / (len(self.marks) - 1)


def compiled() -> dict[str, int]:
    """What torch.compile has counted in this process, of which there should be one graph and no more for each."""
    counters = torch._dynamo.utils.counters
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "graph breaks": sum(counters["graph_break"].values()),
        "CUDA graphs skipped": counters["inductor"]["cudagraph_skips"],
    }


def in_turns(calls: dict[str, Callable[[], float]], *, warm_s: float, rounds: int) -> dict[str, list[float]]:
    """As timing.interleaved, of calls that return their own microseconds; each warms the card itself."""
    found = {name: [] for name in calls}
    for _ in range(max(3, rounds // 5)):
        for name, call in calls.items():
            found[name].append(call())
    return found


def generation(problem: GenerationProblem, theirs: tuple[str, ...] = THEIRS, device: str = "cuda", **compile) -> Case:
    """A token by ours beside transformers' own implementations, all compiled in the same mode."""
    held = []

    def made() -> Generation:
        if not held:
            held.append(Generation(problem, device, **compile))
        return held[0]

    def ours():
        return made().call(OURS_IN_TRANSFORMERS), None

    others = [Candidate(name, problem.flops, lambda name=name: made().call(name)) for name in theirs]
    p = problem
    name = f"generation B{p.batch}, {p.cache // 1024}k cache, {p.layers} layers, {p.heads}/{p.kv_heads} heads"
    return Case(SUITE, f"{name} D{p.head_dim}", problem, ours, others, FASTEST, ASKED, timer=in_turns)


def generation_cases(mode: str) -> Iterator[Case]:
    """One sequence; with "full" also eight, whose caches are as large as the weights."""
    yield generation(GenerationProblem())
    if mode == "full":
        yield generation(GenerationProblem(batch=8))
