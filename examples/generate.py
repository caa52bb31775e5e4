"""Generates text with a Llama model whose projections are dense or N:M sparse.

    python examples/generate.py --model FOLDER --prompt "Once upon a time" --rule 'layers=8:32'

FOLDER is a Hugging Face folder (config.json, safetensors, and tokenizer.json where there is one). Without --model, a
small random decoder shows the mechanics on bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from decoder import Cache, Config, Decoder, Random
from decoder_weights import load, nbytes

import jax_nmsparse as nms

_CHUNK = 16
_TINY = Config(256, 128, 352, 4, 8, 2, 16)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Logits to the next token.

    Attributes:
      temperature: 0 takes the largest logit (greedy); otherwise logits are divided by it.
      top_k: Only the k largest logits may be drawn.
      top_p: Only the fewest largest whose probabilities add up to at least p, at least one. Applies behind top_k.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"Sampler: temperature is {self.temperature}, expected 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"Sampler: top_k is {self.top_k}, expected at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"Sampler: top_p is {self.top_p}, expected more than 0 and at most 1")

    def logits(self, logits: jax.Array) -> jax.Array:
        """The logits that are drawn from, ``[..., vocab_size]``; -inf where nothing may be."""
        logits = logits / self.temperature
        if self.top_k is not None:
            least = jax.lax.top_k(logits, min(self.top_k, logits.shape[-1]))[0][..., -1:]
            logits = jnp.where(logits >= least, logits, -jnp.inf)
        if self.top_p is not None:
            order = jnp.sort(logits, axis=-1, descending=True)
            probability = jax.nn.softmax(order)
            kept = jnp.cumsum(probability, axis=-1) - probability < self.top_p
            least = jnp.min(jnp.where(kept, order, jnp.inf), axis=-1, keepdims=True)
            logits = jnp.where(logits >= least, logits, -jnp.inf)
        return logits

    def __call__(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """Tokens, int32 ``[...]``, for logits ``[..., vocab_size]``."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return jax.random.categorical(key, self.logits(logits)).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames="sampler", donate_argnames="cache")
def prefill(decoder: Decoder, tokens: jax.Array, cache: Cache, key: jax.Array, sampler: Sampler):
    """Reads prompts; returns the first new token of each, and the cache."""
    logits, cache = decoder.prefill(tokens, cache)
    return sampler(logits, key), cache


@functools.partial(jax.jit, static_argnames=("sampler", "steps"), donate_argnames="cache")
def decode(decoder: Decoder, token: jax.Array, cache: Cache, key: jax.Array, sampler: Sampler, steps: int):
    """Generates steps tokens from token on, int32 ``[batch, steps]``; the last one returned is not in the cache yet."""

    def step(carry, key):
        logits, cache = decoder.decode(*carry)
        token = sampler(logits, key)
        return (token, cache), token

    (_, cache), tokens = jax.lax.scan(step, (token, cache), jax.random.split(key, steps))
    return tokens.T, cache


def pad(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray | None]:
    """Prompts padded on the left: int32 tokens ``[batch, length]``, and the first slot of each if any differ."""
    if not prompts or not all(prompts):
        raise ValueError("generate: expected at least one prompt, each of at least one token")
    length = max(map(len, prompts))
    tokens = np.zeros((len(prompts), length), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[length - len(prompt) :] = prompt
    start = np.array([length - len(prompt) for prompt in prompts], np.int32)
    return tokens, start if start.any() else None


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    key: jax.Array,
    sampler: Sampler = Sampler(),
    stop: Sequence[int] = (),
) -> list[list[int]]:
    """Continues every prompt.

    Args:
      decoder: The model.
      prompts: Token ids, of any lengths.
      tokens: How many to generate at most.
      key: For the sampler; the same key gives the same tokens.
      sampler: How a token is drawn.
      stop: Ids that end a sequence, and are not part of the result.

    Returns:
      The new token ids of each prompt.
    """
    if tokens < 1:
        raise ValueError(f"generate: tokens is {tokens}, expected at least 1")
    ids, start = pad(prompts)
    # Whole chunks, so that few programs are compiled.
    chunks = -(-(tokens - 1) // _CHUNK)
    cache = decoder.empty_cache(len(prompts), ids.shape[1] + chunks * _CHUNK, start)
    first, *keys = jax.random.split(key, chunks + 1)
    token, cache = prefill(decoder, jnp.asarray(ids), cache, first, sampler)
    made = np.asarray(token)[:, None]
    for key in keys:
        if np.isin(made, stop).any(axis=1).all():
            break
        more, cache = decode(decoder, made[:, -1], cache, key, sampler, _CHUNK)
        made = np.concatenate([made, np.asarray(more)], axis=1)
    return [_until(row[:tokens].tolist(), set(stop)) for row in made]


def _until(ids: list[int], stop: set[int]) -> list[int]:
    return ids[: next((i for i, token in enumerate(ids) if token in stop), len(ids))]


class Bytes:
    """Text as its UTF-8 bytes, for models without a tokenizer."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class Pieces:
    """tokenizer.json of a Hugging Face folder."""

    def __init__(self, path: pathlib.Path) -> None:
        import tokenizers  # noqa: PLC0415  (an extra, needed where a folder has the file)

        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids))


def read_tokenizer(folder: pathlib.Path | None) -> Bytes | Pieces:
    """The tokenizer of a folder, bytes where it has none."""
    path = None if folder is None else folder / "tokenizer.json"
    return Pieces(path) if path is not None and path.is_file() else Bytes()


def read_stop(folder: pathlib.Path | None) -> list[int]:
    """The ids that end a text, from generation_config.json or config.json."""
    for name in ("generation_config.json", "config.json"):
        if folder is not None and (folder / name).is_file():
            stop = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            if stop is not None:
                return [stop] if isinstance(stop, int) else list(stop)
    return []


def parse_rules(texts: Sequence[str]) -> dict[str, str | None]:
    """["gate_up|down=8:32", "head=dense"] -> rules of `jax_nmsparse.sparsify`."""
    rules: dict[str, str | None] = {}
    for text in texts:
        expression, found, pattern = text.rpartition("=")
        if not found:
            raise ValueError(f"--rule is {text!r}, expected REGEX=PATTERN such as 'gate_up|down=8:32', or REGEX=dense")
        rules[expression] = None if pattern == "dense" else pattern
    return rules


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, help="a Hugging Face folder; by default a small random decoder")
    parser.add_argument("--prompt", action="append", help="may be given several times: a batch")
    parser.add_argument("--rule", action="append", default=[], metavar="REGEX=PATTERN", help="the first match decides")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scan", action="store_true", help="scan over stacked layers: compiles faster, runs slower")
    options = parser.parse_args(arguments)
    try:
        rules = parse_rules(options.rule)
        sampler = Sampler(options.temperature, options.top_k, options.top_p)
        if options.model is None:
            decoder = Decoder(_TINY, Random(jax.random.key(options.seed)), scan=options.scan)
        else:
            decoder = load(options.model, scan=options.scan)
        if rules:
            decoder, report = nms.sparsify(decoder, rules, progress=True)
            print(report)
        tokenizer, stop = read_tokenizer(options.model), read_stop(options.model)
    except (ValueError, OSError) as error:
        print(f"generate: {error}", file=sys.stderr)
        return 2
    prompts = [tokenizer.encode(text) for text in options.prompt or ["N:M sparsity"]]
    run = functools.partial(generate, decoder, prompts, tokens=options.tokens, sampler=sampler, stop=stop)
    key = jax.random.key(options.seed)
    run(key=key)
    begin = time.perf_counter()
    made = run(key=key)
    seconds = time.perf_counter() - begin
    for prompt, ids in zip(prompts, made, strict=True):
        print(f"{tokenizer.decode(prompt)}{tokenizer.decode(ids)}\n")
    print(f"{nbytes(decoder) / 1e6:.1f} MB of parameters, {sum(map(len, made)) / seconds:.1f} tokens/s with the prompt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
