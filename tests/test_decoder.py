"""The decoder example beside a forward pass in NumPy, on small random Hugging Face folders."""

import dataclasses
import functools
import json
import math
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import safetensors.numpy
import tokenizers

import jax_nmsparse as nms
from jax_nmsparse import native

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))

import decoder as decoder_lib
import decoder_weights
import generate

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
RULES = {"layers.*qkv/kernel": "8:32/1x8", "gate_up|down|head": "2:4"}
FORWARD = jax.jit(lambda model, tokens: model(tokens))
PREFILL = jax.jit(lambda model, tokens, cache: model.prefill(tokens, cache))
DECODE = jax.jit(lambda model, token, cache: model.decode(token, cache), donate_argnums=2)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [1, 2, 3], [20, 21, 22, 23, 24, 25]]


def _random_weights(fields: dict) -> dict[str, np.ndarray]:
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


def _write(path: pathlib.Path, fields: dict, shards: int = 1) -> dict[str, np.ndarray]:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    weights = _random_weights(fields)
    if shards == 1:
        safetensors.numpy.save_file(weights, path / "model.safetensors")
        return weights
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(weights)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    for file in set(files.values()):
        safetensors.numpy.save_file({n: w for n, w in weights.items() if files[n] == file}, path / file)
    return weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    _write(path, FIELDS)
    return path


def _load(folder: pathlib.Path, rules: dict | None = None, **options) -> decoder_lib.Decoder:
    model = decoder_weights.load(folder, **options)
    return nms.sparsify(model, rules)[0] if rules else model


@pytest.fixture(scope="module")
def model(folder) -> decoder_lib.Decoder:
    return decoder_weights.load(folder)


# An independent forward pass.


def _frequencies(fields: dict) -> list[float]:
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
        for i, frequency in enumerate(_frequencies(fields)):
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


def _largest(name: str, matrix: np.ndarray) -> np.ndarray:
    """The matrix pruned as RULES say, by sorting."""
    if "o_proj" in name:
        return matrix
    n, m, columns = (8, 32, 8) if "self_attn" in name else (2, 4, 1)
    tiles = matrix.reshape(-1, m, matrix.shape[1] // columns, columns)
    order = np.argsort(-np.abs(tiles).sum(-1), axis=1, kind="stable").argsort(axis=1)
    return np.where((order < n)[..., None], tiles, 0).reshape(matrix.shape)


def _close(got, want) -> None:
    assert np.isfinite(np.asarray(got)).all()
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())


# Forward.


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True, "rope_scaling": None}, {"num_key_value_heads": 4, "head_dim": 8}],
    ids=["llama3", "tied", "one key head each"],
)
@pytest.mark.parametrize("scan", [False, True])
def test_forward(tmp_path, changes, scan):
    fields = {**FIELDS, **changes}
    weights = _write(tmp_path, fields)
    model = decoder_weights.load(tmp_path, scan=scan)
    got = FORWARD(model, jnp.array([PROMPTS[0], PROMPTS[0][::-1]]))
    _close(got[0], forward(weights, fields, PROMPTS[0]))
    _close(got[1], forward(weights, fields, PROMPTS[0][::-1]))


@pytest.mark.parametrize("scan", [False, True])
def test_sparse_is_the_dense_decoder_of_what_is_kept(folder, scan):
    model = _load(folder, RULES, scan=scan)
    got = FORWARD(model, jnp.array([PROMPTS[0]]))
    _close(got[0], forward(_random_weights(FIELDS), FIELDS, PROMPTS[0], _largest))
    assert decoder_weights.nbytes(model) < decoder_weights.nbytes(decoder_weights.load(folder)) * 0.85


def test_sparse_table_is_both_embedding_and_tied_head(tmp_path):
    fields = {**FIELDS, "tie_word_embeddings": True}
    weights = _write(tmp_path, fields)
    got = FORWARD(_load(tmp_path, {"embedding$": "2:4"}), jnp.array([PROMPTS[0]]))
    table = weights["model.embed_tokens.weight"]
    _close(got[0], forward({**weights, "model.embed_tokens.weight": _largest("", table.T).T}, fields, PROMPTS[0]))


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("rules", [{}, RULES], ids=["dense", "sparse"])
def test_cache_gives_the_logits_of_the_whole_sequence(folder, scan, rules):
    """Prompts of three lengths in one batch, then tokens one by one."""
    model = _load(folder, rules, scan=scan)
    more = np.array([[30, 31, 32], [40, 41, 42], [50, 51, 52]])
    tokens, start = generate.pad(PROMPTS)
    cache = model.empty_cache(3, 12, start)
    logits, cache = PREFILL(model, tokens, cache)
    got = [logits]
    for i in range(3):
        logits, cache = DECODE(model, more[:, i], cache)
        got.append(logits)
    weights = _random_weights(FIELDS)
    keep = _largest if rules else lambda name, matrix: matrix
    for row, prompt in enumerate(PROMPTS):
        want = forward(weights, FIELDS, [*prompt, *more[row]], keep)[len(prompt) - 1 :]
        _close(np.stack([g[row] for g in got]), want)
    assert int(cache.position) == 10


def test_prompt_of_one_token(model):
    cache = model.empty_cache(1, 4)
    logits, cache = PREFILL(model, jnp.array([[5]]), cache)
    _close(logits[0], np.asarray(FORWARD(model, jnp.array([[5]])))[0, 0])


# What is compiled.


def _compiled_step(model, cache):
    return DECODE.lower(model, jnp.zeros(2, jnp.int32), cache).compile()


def _hlo_of_step(model) -> str:
    return _compiled_step(model, model.empty_cache(2, 8)).as_text() or ""


@pytest.mark.parametrize("scan", [False, True])
def test_cache_is_updated_in_place(folder, scan):
    model = _load(folder, scan=scan)
    cache = model.empty_cache(2, 8)
    buffers = jax.tree.leaves((cache.keys, cache.values))
    memory = _compiled_step(model, cache).memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= sum(b.nbytes for b in buffers)
    places = {b.unsafe_buffer_pointer() for b in buffers}
    _, new = DECODE(model, jnp.zeros(2, jnp.int32), cache)
    assert all(b.is_deleted() for b in buffers)
    assert {b.unsafe_buffer_pointer() for b in jax.tree.leaves((new.keys, new.values))} == places


@pytest.mark.skipif(not native.MODULES["cpu"].loaded, reason="needs the native CPU module")
@pytest.mark.parametrize("scan", [False, True])
def test_only_a_scan_copies_weights(folder, scan):
    """Why decoding is unrolled: nothing can be fused into a custom call, and on a CPU XLA copies the slice."""
    model = _load(folder, {"qkv|out|gate_up|down": "8:32"}, scan=scan)
    text = _hlo_of_step(model)
    assert 'custom_call_target="nms_cpu_spmm"' in text
    shape = model.layers[0].down.weight.values.shape if not scan else model.layers.down.weight.values.shape[1:]
    written = re.findall(rf"= f32\[(?:1,)?{','.join(map(str, shape))}\]\S* (\S+)\(", text)
    moved = [op for op in written if op not in ("parameter", "bitcast", "get-tuple-element")]
    assert bool(moved) == scan, moved


@pytest.mark.gpu
def test_decoding_copies_no_weight_on_a_gpu(folder):
    model = _load(folder, {"qkv|out|gate_up|down": "8:32"}, dtype=jnp.bfloat16)
    text = _hlo_of_step(model)
    assert text.count('custom_call_target="nms_cuda_spmm"') == 4 * FIELDS["num_hidden_layers"]
    for name in ("qkv", "out", "gate_up", "down"):
        dims = ",".join(map(str, getattr(model.layers[0], name).weight.values.shape))
        written = re.findall(rf"= bf16\[(?:1,)?{dims}\]\S* (\S+)\(", text)
        assert set(written) <= {"parameter", "bitcast", "get-tuple-element"}, (name, written)


@pytest.mark.gpu
@pytest.mark.parametrize("scan", [False, True])
def test_cached_decoding_on_a_gpu(folder, scan):
    """Flash attention in the prefill, native kernels, the cache in half precision."""
    model = _load(folder, RULES, dtype=jnp.bfloat16, scan=scan)
    cache = model.empty_cache(1, 16)
    logits, cache = PREFILL(model, jnp.array([PROMPTS[0]]), cache)
    again, cache = DECODE(model, jnp.array([30]), cache)
    want = forward(_random_weights(FIELDS), FIELDS, [*PROMPTS[0], 30], _largest)[-2:]
    error = np.linalg.norm(np.stack([logits[0], again[0]]) - want) / np.linalg.norm(want)
    assert error < 0.05


# Reading.


def test_shards_are_the_single_file(tmp_path, folder):
    _write(tmp_path, FIELDS, shards=3)
    oracle.assert_same_bits(decoder_weights.load(tmp_path), decoder_weights.load(folder))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_of_the_parameters(folder, dtype):
    model = _load(folder, {"down": "2:4"}, dtype=dtype)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model)} == {dtype, "uint32"}
    logits = FORWARD(model, jnp.array([PROMPTS[0]]))
    assert logits.dtype == jnp.float32
    keep = lambda name, matrix: _largest(name, matrix) if "down" in name else matrix  # noqa: E731
    want = forward(_random_weights(FIELDS), FIELDS, PROMPTS[0], keep)
    assert np.linalg.norm(logits[0] - want) < 0.05 * np.linalg.norm(want)


def test_config_of_either_form(tmp_path, folder):
    """transformers 4 has rope_theta and rope_scaling, 5 has rope_parameters; defaults follow from other sizes."""
    new = {k: v for k, v in FIELDS.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**FIELDS["rope_scaling"], "rope_theta": FIELDS["rope_theta"]}
    (tmp_path / "config.json").write_text(json.dumps(new))
    config = decoder_weights.read_config(tmp_path / "config.json")
    assert config == decoder_weights.read_config(folder / "config.json")
    plain = {k: v for k, v in FIELDS.items() if k not in ("head_dim", "num_key_value_heads", "rope_scaling")}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    config = decoder_weights.read_config(tmp_path / "config.json")
    assert (config.head_dim, config.num_key_value_heads, config.rope_scaling) == (8, 4, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', expected one of llama, mistral"),
        ({"attention_bias": True}, "attention_bias is True, expected False"),
        ({"sliding_window": 128}, "sliding_window is 128, expected None"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn', expected 'default' or 'llama3'"),
        ({"num_key_value_heads": 3}, "expected a multiple of num_key_value_heads = 3"),
        ({"intermediate_size": 96}, "gate_proj.weight and .* have 128 rows together, expected 192"),
        ({"hidden_size": 48}, r"embed_tokens.weight has shape \(64, 32\), expected \(64, 48\)"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, changes, message):
    _write(tmp_path, FIELDS)
    (tmp_path / "config.json").write_text(json.dumps({**FIELDS, **changes}))
    with pytest.raises(ValueError, match=message):
        decoder_weights.load(tmp_path)


def test_missing_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    with pytest.raises(FileNotFoundError, match="expected model.safetensors or model.safetensors.index.json"):
        decoder_weights.load(tmp_path)


# Sampling and generation.


def _frequency(sampler, logits, draws=4000):
    keys = jax.random.split(jax.random.key(0), draws)
    tokens = jax.vmap(functools.partial(sampler, jnp.asarray(logits)))(keys)
    return np.bincount(np.asarray(tokens), minlength=len(logits)) / draws


def test_sampling_follows_the_probabilities():
    logits = np.array([2.0, 1.0, 0.5, -1.0, 1.5], np.float32)

    def want(temperature, allowed):
        weights = np.where(np.isin(np.arange(5), allowed), np.exp(logits / temperature), 0)
        return weights / weights.sum()

    everything, four_sigma = [0, 1, 2, 3, 4], 4 * math.sqrt(0.25 / 4000)
    cases = [
        (generate.Sampler(1.0), want(1.0, everything)),
        (generate.Sampler(0.5), want(0.5, everything)),
        (generate.Sampler(1.0, top_k=2), want(1.0, [0, 4])),
        # Probabilities in order: 0.43, 0.26, 0.16, 0.10, 0.02.
        (generate.Sampler(1.0, top_p=0.5), want(1.0, [0, 4])),
        (generate.Sampler(1.0, top_p=0.4), want(1.0, [0])),
        (generate.Sampler(1.0, top_k=3, top_p=0.9), want(1.0, [0, 1, 4])),
        (generate.Sampler(1.0, top_k=99, top_p=1.0), want(1.0, everything)),
        (generate.Sampler(), want(1.0, [0])),
    ]
    for sampler, probabilities in cases:
        got = _frequency(sampler, logits)
        np.testing.assert_array_equal(got > 0, probabilities > 0, err_msg=str(sampler))
        np.testing.assert_allclose(got, probabilities, atol=four_sigma, err_msg=str(sampler))


@pytest.mark.parametrize("changes", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_sampler_arguments(changes):
    with pytest.raises(ValueError, match=f"Sampler: {next(iter(changes))} is"):
        generate.Sampler(**changes)


def test_greedy_generation_is_argmax_of_the_whole_sequence(folder, model):
    made = generate.generate(model, PROMPTS, tokens=5, key=jax.random.key(0))
    for prompt, new in zip(PROMPTS, made, strict=True):
        logits = forward(_random_weights(FIELDS), FIELDS, [*prompt, *new])[len(prompt) - 1 : -1]
        assert new == logits.argmax(-1).tolist()


def test_generation_by_key_and_stop(model):
    run = functools.partial(generate.generate, model, PROMPTS, tokens=20, sampler=generate.Sampler(1.0))
    first = run(key=jax.random.key(1))
    assert first == run(key=jax.random.key(1)) != run(key=jax.random.key(2))
    assert [len(row) for row in first] == [20, 20, 20]
    stop = first[0][3]
    stopped = run(key=jax.random.key(1), stop=[stop])
    assert stopped == [row[: row.index(stop)] if stop in row else row for row in first]
    with pytest.raises(ValueError, match="expected at least one prompt"):
        generate.generate(model, [[1], []], tokens=1, key=jax.random.key(0))


def test_tokenizers(tmp_path, folder):
    text = "N:M – ½"
    plain = generate.read_tokenizer(folder)
    assert plain.decode(plain.encode(text)) == text
    words = {word: i for i, word in enumerate(["a", "sparse", "model"])}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    pieces = generate.read_tokenizer(tmp_path)
    assert pieces.encode("sparse") == [1]
    assert pieces.decode([1]) == "sparse"
    assert generate.read_stop(folder) == [7, 9]
    assert generate.read_stop(None) == []


def test_program(folder, capsys):
    arguments = ["--model", str(folder), "--prompt", "\x05\x06", "--tokens", "3"]
    assert generate.main([*arguments, "--rule", "qkv|out=2:4", "--rule", "head=dense"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"layers/1/out .*2:4 .*magnitude", out)
    assert re.search(r"0\.\d MB of parameters, [\d.]+ tokens/s", out)
    assert generate.main([*arguments, "--rule", "nothing"]) == 2
    assert "expected REGEX=PATTERN" in capsys.readouterr().err
    assert generate.main(["--model", str(folder / "none")]) == 2


def test_config_is_of_llama_3():
    """The frequencies of Llama 3.1 8B, kept, blended and stretched, as published code computes them."""
    scaling = decoder_lib.RopeScaling(8.0, 1.0, 4.0, 8192)
    config = decoder_lib.Config(128256, 4096, 14336, 32, 32, 8, 128, rope_theta=500000.0, rope_scaling=scaling)
    fields = {**dataclasses.asdict(config)}
    np.testing.assert_allclose(decoder_lib.inverse_frequencies(config), _frequencies(fields), rtol=1e-12)
