"""A small random Llama in the form of Hugging Face, and its forward pass in NumPy, independent of the example."""

from __future__ import annotations

import json
import math
import pathlib

import numpy as np
import safetensors.numpy

FIELDS = {
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "tie_word_embeddings": False,
    "eos_token_id": [7, 9],
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [1, 2, 3], [20, 21, 22, 23, 24, 25]]
RULES = {"layers.*qkv/kernel": "8:32/1x8", "gate_up|down|head": "2:4"}


def random_weights(fields: dict) -> dict[str, np.ndarray]:
    """The tensors of a file: [out_features, in_features]."""
    rng = np.random.default_rng(3)
    hidden, up = fields["hidden_size"], fields["intermediate_size"]
    queries, keys = (fields[f"num_{kind}_heads"] * fields["head_dim"] for kind in ("attention", "key_value"))
    shapes = {"model.embed_tokens": (fields["vocab_size"], hidden), "model.norm": (hidden,)}
    if not fields["tie_word_embeddings"]:
        shapes["lm_head"] = (fields["vocab_size"], hidden)
    for i in range(fields["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.input_layernorm": (hidden,), f"{layer}.post_attention_layernorm": (hidden,)}
        shapes |= {f"{layer}.self_attn.q_proj": (queries, hidden), f"{layer}.self_attn.o_proj": (hidden, queries)}
        shapes |= {f"{layer}.self_attn.{part}_proj": (keys, hidden) for part in "kv"}
        shapes |= {f"{layer}.mlp.{part}_proj": (up, hidden) for part in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = (hidden, up)
    return {
        f"{name}.weight": (rng.normal(1, 0.1, shape) if len(shape) == 1 else rng.normal(0, 0.3, shape)).astype("f4")
        for name, shape in shapes.items()
    }


def write(path: pathlib.Path, fields: dict, shards: int = 1) -> dict[str, np.ndarray]:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    weights = random_weights(fields)
    if shards == 1:
        safetensors.numpy.save_file(weights, path / "model.safetensors")
        return weights
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(weights)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    for file in set(files.values()):
        safetensors.numpy.save_file({n: w for n, w in weights.items() if files[n] == file}, path / file)
    return weights


def frequencies(fields: dict) -> list[float]:
    frequencies = [fields["rope_theta"] ** (-2 * i / fields["head_dim"]) for i in range(fields["head_dim"] // 2)]
    scaling = fields["rope_scaling"]
    if scaling is None:
        return frequencies
    stretched = []
    for frequency in frequencies:
        length = 2 * math.pi / frequency
        original = scaling["original_max_position_embeddings"]
        if length > original / scaling["low_freq_factor"]:
            stretched.append(frequency / scaling["factor"])
        elif length < original / scaling["high_freq_factor"]:
            stretched.append(frequency)
        else:
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            share = (original / length - low) / (high - low)
            stretched.append((1 - share) * frequency / scaling["factor"] + share * frequency)
    return stretched


def forward(weights: dict[str, np.ndarray], fields: dict, tokens: list[int], keep=lambda name, matrix: matrix):
    """Logits of every position of one sequence, float64 [tokens, vocab_size], straight from the names of the file.

    keep(name of a projection, matrix [in_features, out_features]) may drop some of the matrix.
    """

    def linear(name, h):
        return h @ keep(name, weights[f"{name}.weight"].astype(np.float64).T)

    def norm(name, h):
        return weights[f"{name}.weight"] * h / np.sqrt((h**2).mean(-1, keepdims=True) + fields["rms_norm_eps"])

    def rotate(x, position):
        out = np.empty_like(x)
        half = fields["head_dim"] // 2
        for i, frequency in enumerate(frequencies(fields)):
            turned = (x[i] + 1j * x[i + half]) * np.exp(1j * frequency * position)
            out[i], out[i + half] = turned.real, turned.imag
        return out

    h = weights["model.embed_tokens.weight"].astype(np.float64)[tokens]
    heads, kv_heads, size = (fields[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    for layer in (f"model.layers.{i}" for i in range(fields["num_hidden_layers"])):
        x = norm(f"{layer}.input_layernorm", h)
        q, k, v = (linear(f"{layer}.self_attn.{p}_proj", x).reshape(len(tokens), -1, size) for p in "qkv")
        mixed = np.zeros_like(q)
        for head in range(heads):
            shared = head * kv_heads // heads
            for t in range(len(tokens)):
                query = rotate(q[t, head], t)
                scores = np.array([query @ rotate(k[s, shared], s) / math.sqrt(size) for s in range(t + 1)])
                probabilities = np.exp(scores - scores.max())
                mixed[t, head] = probabilities / probabilities.sum() @ v[: t + 1, shared]
        h = h + linear(f"{layer}.self_attn.o_proj", mixed.reshape(len(tokens), -1))
        x = norm(f"{layer}.post_attention_layernorm", h)
        gate = linear(f"{layer}.mlp.gate_proj", x)
        h = h + linear(f"{layer}.mlp.down_proj", gate / (1 + np.exp(-gate)) * linear(f"{layer}.mlp.up_proj", x))
    h = norm("model.norm", h)
    return h @ weights["model.embed_tokens.weight"].T if fields["tie_word_embeddings"] else linear("lm_head", h)


def largest(name: str, matrix: np.ndarray) -> np.ndarray:
    """The matrix pruned as RULES say, by sorting."""
    if "o_proj" in name:
        return matrix
    n, m, columns = (8, 32, 8) if "self_attn" in name else (2, 4, 1)
    tiles = matrix.reshape(-1, m, matrix.shape[1] // columns, columns)
    order = np.argsort(-np.abs(tiles).sum(-1), axis=1, kind="stable").argsort(axis=1)
    return np.where((order < n)[..., None], tiles, 0).reshape(matrix.shape)


def assert_close(got, want) -> None:
    assert np.isfinite(np.asarray(got)).all()
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())
