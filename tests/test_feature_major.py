"""Feature-major kernels inside a model: activations stay [features, tokens] in memory from one call to the next.

Without a GPU the lowered program shows what each call asks of XLA (operand and result layouts) and that nothing else
orders memory; on a GPU the compiled one shows that XLA transposes where row-major data enter and leave, and nowhere in
between.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_nmsparse as nms
from jax_nmsparse import dispatch, native
from jax_nmsparse.layout import Layout

TOKENS, FEATURES, HIDDEN, DEPTH = 192, 256, 512, 3
FEATURE_MAJOR = "1, 2, 0"  # of [batch, tokens, features], minor axis first
KERNELS = {"8:32/1x128": "block_wgmma", "2:4": "ew_wgmma_sparse24", "8:32": "ew_wgmma"}


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch and lowering as where the CUDA module is built and the GPU is an H200."""
    monkeypatch.setitem(native.MODULES, "cuda", native.NativeModule("cuda", frozenset(), None))
    monkeypatch.setattr(native, "cuda_capability", lambda: "9.0")


def _norm(x):
    x = x.astype(jnp.float32)
    return (x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)


def _mlp(x, block, spmm=nms.spmm):
    return x + spmm(spmm(_norm(x), block["up"], activation="gelu"), block["down"])


def _swiglu(x, block, spmm=nms.spmm):
    normed = _norm(x)
    gated = spmm(normed, block["gate"], activation="silu") * spmm(normed, block["up"])
    return x + spmm(gated, block["down"])


def _stack(block):
    """DEPTH blocks one after the other, each with weights of its own."""

    def model(x, blocks):
        for weights in blocks:
            x = block(x, weights)
        return x

    return model


def _scan(block):
    """DEPTH blocks as one loop over stacked weights."""
    return lambda x, blocks: jax.lax.scan(lambda x, weights: (block(x, weights), None), x, blocks)[0]


MODELS = {
    "mlp": (_stack, _mlp, 2 * DEPTH),
    "swiglu": (_stack, _swiglu, 3 * DEPTH),
    "scan": (_scan, _swiglu, 3),
}  # how blocks follow each other, the block, and the calls in the program


def _prune(rng, shape, pattern):
    sizes = {"up": (FEATURES, HIDDEN), "gate": (FEATURES, HIDDEN), "down": (HIDDEN, FEATURES)}
    return {
        name: nms.prune(jnp.asarray(oracle.normal(rng, (*shape, *size)) / size[0] ** 0.5, jnp.bfloat16), pattern)
        for name, size in sizes.items()
    }


def _arguments(rng, wrap, pattern):
    x = jnp.asarray(oracle.normal(rng, (TOKENS, FEATURES)), jnp.bfloat16)
    if wrap is _scan:
        return x, _prune(rng, (DEPTH,), pattern)
    return x, [_prune(rng, (), pattern) for _ in range(DEPTH)]


@pytest.mark.parametrize("pattern", KERNELS)
@pytest.mark.parametrize("model", MODELS)
def test_every_call_of_a_model_asks_for_feature_major_activations(rng, hopper, model, pattern):
    """The program itself moves nothing: the layouts of the calls are all that it asks, so XLA may choose in between."""
    wrap, block, calls = MODELS[model]
    arguments = jax.eval_shape(lambda: _arguments(np.random.default_rng(0), wrap, pattern))
    with dispatch.only_kernel(KERNELS[pattern]):
        text = jax.jit(wrap(block)).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    found = [line for line in text.splitlines() if "@nms_cuda_spmm(" in line]
    assert len(found) == calls
    for line in found:
        layouts = {
            name: re.findall(r"dense<\[?([\d, ]+)\]?>", listed)
            for name, listed in re.findall(r"(operand_layouts|result_layouts) = \[(.*?)\] *[,}]", line)
        }
        assert layouts["operand_layouts"][0] == FEATURE_MAJOR, line
        assert layouts["operand_layouts"][1] == "0", "values keep the order of the format"
        assert layouts["result_layouts"][0] == FEATURE_MAJOR, line
    assert "stablehlo.transpose" not in text


@pytest.mark.parametrize("tokens", [255, 0])
def test_a_number_of_tokens_that_no_tensor_map_describes(hopper, tokens):
    """Feature-major rows are not multiples of 16 bytes, or there are none: each of these kernels says so."""
    for pattern, name in KERNELS.items():
        layout = Layout(nms.NMPattern.parse(pattern), FEATURES, HIDDEN)
        call = dispatch.Call("spmm", layout, 1, TOKENS, jnp.bfloat16, jnp.bfloat16, jnp.bfloat16)
        (kernel,) = [k for k in dispatch.KERNELS if k.name == name]
        assert kernel.rejects(call) is None
        assert f"multiples of 8, not {tokens}" in str(kernel.rejects(dataclasses.replace(call, tokens=tokens)))


@pytest.mark.parametrize(
    ("pattern", "change", "reason"),
    [
        ("8:32", {"batch": 1, "in_features": 100}, "multiples of 32"),
        ("8:32", {"batch": 2, "in_features": 96}, "multiples of 64"),
        ("3:32", {"batch": 1, "out_features": 100}, "multiples of 8 values"),
        ("8:32/1x128", {}, "element-wise"),
        ("4:64", {}, "element-wise patterns with m dividing 32"),
    ],
)
def test_what_the_expanding_kernel_rejects(pattern, change, reason):
    sizes = {"in_features": FEATURES, "out_features": HIDDEN, "batch": 1, **change}
    layout = Layout(nms.NMPattern.parse(pattern), sizes["in_features"], sizes["out_features"])
    call = dispatch.Call("spmm", layout, sizes["batch"], TOKENS, jnp.bfloat16, jnp.bfloat16, jnp.bfloat16)
    (kernel,) = [k for k in dispatch.KERNELS if k.name == "ew_wgmma"]
    assert reason in str(kernel.rejects(call))


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", KERNELS)
@pytest.mark.parametrize("model", MODELS)
def test_one_transpose_at_each_end_of_a_model(rng, model, pattern):
    """Compiled for the GPU: x is transposed for the first product and, inside a fusion, for the first residual sum; the
    result is transposed once. Nothing between the blocks, and nothing inside the loop of a scan."""
    if native.cuda_capability() != "9.0":
        pytest.skip("these kernels have code for compute capability 9.0 alone")
    wrap, block, calls = MODELS[model]
    x, blocks = _arguments(rng, wrap, pattern)
    with dispatch.only_kernel(KERNELS[pattern]):
        compiled = jax.jit(wrap(block)).lower(x, blocks).compile()
    text = compiled.as_text() or ""
    assert len(re.findall(r'custom_call_target="nms_cuda_spmm"', text)) == calls
    moved = [line for line in text.splitlines() if _moves_activations(line)]
    assert len(moved) <= 3, "\n".join(moved)
    dense = wrap(functools.partial(block, spmm=functools.partial(nms.spmm, implementation="dense")))
    oracle.assert_close(compiled(x, blocks), np.asarray(jax.jit(dense)(x, blocks), np.float64), depth=DEPTH * HIDDEN)


def _moves_activations(line: str) -> bool:
    """Whether an instruction changes the order of activations: a transpose, or a copy to another layout."""
    found = re.search(r"= \w+\[([\d,]+)\]\S* (transpose|copy)\(", line)
    sizes = [int(size) for size in found[1].split(",")] if found else []
    return TOKENS in sizes and math.prod(sizes) in (TOKENS * FEATURES, TOKENS * HIDDEN)
