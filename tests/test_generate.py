"""Sampling and generation of the decoder example."""

import functools
import math
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import llama
import numpy as np
import pytest
import tokenizers

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))

import decoder as decoder_lib
import decoder_weights
import generate


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    llama.write(path, llama.FIELDS)
    return path


@pytest.fixture(scope="module")
def model(folder) -> decoder_lib.Decoder:
    return decoder_weights.load(folder)


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
    made = generate.generate(model, llama.PROMPTS, tokens=5, key=jax.random.key(0))
    for prompt, new in zip(llama.PROMPTS, made, strict=True):
        logits = llama.forward(llama.random_weights(llama.FIELDS), llama.FIELDS, [*prompt, *new])[len(prompt) - 1 : -1]
        assert new == logits.argmax(-1).tolist()


def test_generation_by_key_and_stop(model):
    run = functools.partial(generate.generate, model, llama.PROMPTS, tokens=20, sampler=generate.Sampler(1.0))
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
