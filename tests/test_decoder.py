"""The decoder example beside a forward pass in NumPy, on small random Hugging Face folders."""

import dataclasses
import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import llama
import numpy as np
import oracle
import pytest

import jax_nmsparse as nms
from jax_nmsparse import dispatch, native

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))

import decoder as decoder_lib
import decoder_weights
import generate

FORWARD = jax.jit(lambda model, tokens: model(tokens))
PREFILL = jax.jit(lambda model, tokens, cache: model.prefill(tokens, cache))
DECODE = jax.jit(lambda model, token, cache: model.decode(token, cache), donate_argnums=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    llama.write(path, llama.FIELDS)
    return path


def _load(folder: pathlib.Path, rules: dict | None = None, **options) -> decoder_lib.Decoder:
    model = decoder_weights.load(folder, **options)
    return nms.sparsify(model, rules)[0] if rules else model


@pytest.fixture(scope="module")
def model(folder) -> decoder_lib.Decoder:
    return decoder_weights.load(folder)


# Forward.


@pytest.mark.parametrize(
    ("changes", "scan"),
    [
        ({}, False),
        ({}, True),
        ({"tie_word_embeddings": True, "rope_scaling": None}, False),
        ({"num_key_value_heads": 4, "head_dim": 8}, False),
    ],
    ids=["llama3", "scanned", "tied", "one key head each"],
)
def test_forward(tmp_path, changes, scan):
    fields = {**llama.FIELDS, **changes}
    weights = llama.write(tmp_path, fields)
    model = decoder_weights.load(tmp_path, scan=scan)
    got = FORWARD(model, jnp.array([llama.PROMPTS[0], llama.PROMPTS[0][::-1]]))
    llama.assert_close(got[0], llama.forward(weights, fields, llama.PROMPTS[0]))
    llama.assert_close(got[1], llama.forward(weights, fields, llama.PROMPTS[0][::-1]))


@pytest.mark.parametrize("scan", [False, True])
def test_sparse_is_the_dense_decoder_of_what_is_kept(folder, scan):
    model = _load(folder, llama.RULES, scan=scan)
    got = FORWARD(model, jnp.array([llama.PROMPTS[0]]))
    llama.assert_close(
        got[0], llama.forward(llama.random_weights(llama.FIELDS), llama.FIELDS, llama.PROMPTS[0], llama.largest)
    )
    assert decoder_weights.nbytes(model) < decoder_weights.nbytes(decoder_weights.load(folder)) * 0.85


def test_sparse_table_is_both_embedding_and_tied_head(tmp_path):
    fields = {**llama.FIELDS, "tie_word_embeddings": True}
    weights = llama.write(tmp_path, fields)
    got = FORWARD(_load(tmp_path, {"embedding$": "2:4"}), jnp.array([llama.PROMPTS[0]]))
    table = weights["model.embed_tokens.weight"]
    llama.assert_close(
        got[0],
        llama.forward({**weights, "model.embed_tokens.weight": llama.largest("", table.T).T}, fields, llama.PROMPTS[0]),
    )


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("rules", [{}, llama.RULES], ids=["dense", "sparse"])
def test_cache_gives_the_logits_of_the_whole_sequence(folder, scan, rules):
    """Prompts of three lengths in one batch, then tokens one by one."""
    model = _load(folder, rules, scan=scan)
    more = np.array([[30, 31, 32], [40, 41, 42], [50, 51, 52]])
    tokens, start = generate.pad(llama.PROMPTS)
    cache = model.empty_cache(3, 12, start)
    logits, cache = PREFILL(model, tokens, cache)
    got = [logits]
    for i in range(3):
        logits, cache = DECODE(model, more[:, i], cache)
        got.append(logits)
    weights = llama.random_weights(llama.FIELDS)
    keep = llama.largest if rules else lambda name, matrix: matrix
    for row, prompt in enumerate(llama.PROMPTS):
        want = llama.forward(weights, llama.FIELDS, [*prompt, *more[row]], keep)[len(prompt) - 1 :]
        llama.assert_close(np.stack([g[row] for g in got]), want)
    assert int(cache.position) == 10


def test_prompt_of_one_token(model):
    cache = model.empty_cache(1, 4)
    logits, cache = PREFILL(model, jnp.array([[5]]), cache)
    llama.assert_close(logits[0], np.asarray(FORWARD(model, jnp.array([[5]])))[0, 0])


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
    with dispatch.only_kernel("ew_spmv"):
        text = _hlo_of_step(model)
    assert text.count('custom_call_target="nms_cuda_spmm"') == 4 * llama.FIELDS["num_hidden_layers"]
    for name in ("qkv", "out", "gate_up", "down"):
        dims = ",".join(map(str, getattr(model.layers[0], name).weight.values.shape))
        written = re.findall(rf"= bf16\[(?:1,)?{dims}\]\S* (\S+)\(", text)
        assert set(written) <= {"parameter", "bitcast", "get-tuple-element"}, (name, written)


@pytest.mark.gpu
@pytest.mark.parametrize("scan", [False, True])
def test_cached_decoding_on_a_gpu(folder, scan):
    """Flash attention in the prefill, native kernels, the cache in half precision."""
    model = _load(folder, llama.RULES, dtype=jnp.bfloat16, scan=scan)
    cache = model.empty_cache(1, 16)
    logits, cache = PREFILL(model, jnp.array([llama.PROMPTS[0]]), cache)
    again, cache = DECODE(model, jnp.array([30]), cache)
    want = llama.forward(llama.random_weights(llama.FIELDS), llama.FIELDS, [*llama.PROMPTS[0], 30], llama.largest)[-2:]
    error = np.linalg.norm(np.stack([logits[0], again[0]]) - want) / np.linalg.norm(want)
    assert error < 0.05


# Reading.


def test_shards_are_the_single_file(tmp_path, folder):
    llama.write(tmp_path, llama.FIELDS, shards=3)
    oracle.assert_same_bits(decoder_weights.load(tmp_path), decoder_weights.load(folder))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_norm_before_a_projection(rng, dtype):
    """Also where the product without the factor of the token would overflow float16."""
    x, kernel = 3e3 * rng.normal(size=(2, 64)), rng.normal(size=(64, 8)).astype(dtype)
    norm = decoder_lib.RMSNorm(jnp.full(64, 1.5, dtype), 1e-5)
    got = norm.into(lambda h: h @ kernel, jnp.asarray(x, dtype))
    want = 1.5 * x / np.sqrt(np.square(x).mean(-1, keepdims=True)) @ kernel.astype(np.float64)
    assert got.dtype == dtype
    oracle.assert_close(got, want, depth=64)


def test_dtype_of_the_parameters(folder):
    model = _load(folder, {"down": "2:4"}, dtype=jnp.bfloat16)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model)} == {"bfloat16", "uint32"}
    logits = FORWARD(model, jnp.array([llama.PROMPTS[0]]))
    assert logits.dtype == jnp.float32
    keep = lambda name, matrix: llama.largest(name, matrix) if "down" in name else matrix  # noqa: E731
    want = llama.forward(llama.random_weights(llama.FIELDS), llama.FIELDS, llama.PROMPTS[0], keep)
    assert np.linalg.norm(logits[0] - want) < 0.05 * np.linalg.norm(want)


def test_config_of_either_form(tmp_path, folder):
    """transformers 4 has rope_theta and rope_scaling, 5 has rope_parameters; defaults follow from other sizes."""
    new = {k: v for k, v in llama.FIELDS.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**llama.FIELDS["rope_scaling"], "rope_theta": llama.FIELDS["rope_theta"]}
    (tmp_path / "config.json").write_text(json.dumps(new))
    config = decoder_weights.read_config(tmp_path / "config.json")
    assert config == decoder_weights.read_config(folder / "config.json")
    plain = {k: v for k, v in llama.FIELDS.items() if k not in ("head_dim", "num_key_value_heads", "rope_scaling")}
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
    llama.write(tmp_path, llama.FIELDS)
    (tmp_path / "config.json").write_text(json.dumps({**llama.FIELDS, **changes}))
    with pytest.raises(ValueError, match=message):
        decoder_weights.load(tmp_path)


def test_missing_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(llama.FIELDS))
    with pytest.raises(FileNotFoundError, match="expected model.safetensors or model.safetensors.index.json"):
        decoder_weights.load(tmp_path)


def test_config_is_of_llama_3():
    """The frequencies of Llama 3.1 8B, kept, blended and stretched, as published code computes them."""
    scaling = decoder_lib.RopeScaling(8.0, 1.0, 4.0, 8192)
    config = decoder_lib.Config(128256, 4096, 14336, 32, 32, 8, 128, rope_theta=500000.0, rope_scaling=scaling)
    fields = {**dataclasses.asdict(config)}
    np.testing.assert_allclose(decoder_lib.inverse_frequencies(config), llama.frequencies(fields), rtol=1e-12)
