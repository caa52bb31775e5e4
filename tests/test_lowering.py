"""What the compiled program holds: the kernel that was asked for, no fallback, and no buffer that is too large."""

import itertools
import math
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import export

import jax_nmsparse as nms
from jax_nmsparse import dispatch, native, reference
from jax_nmsparse.lowering import COMPRESS_TARGET, EXPAND_TARGET, target_name
from jax_nmsparse.reference import temporary_bytes

OPS = ("spmm", "spmm_t", "sddmm")
needs_cpu = pytest.mark.skipif(not native.MODULES["cpu"].loaded, reason="the native module _cpu is not built")
needs_cuda = pytest.mark.skipif(not native.MODULES["cuda"].loaded, reason="the native module _cuda is not built")


def _function(op, **options):
    return {
        "spmm": lambda x, g, w: nms.spmm(x, w, **options),
        "spmm_t": lambda x, g, w: nms.spmm(g, w, transpose=True, **options),
        "sddmm": lambda x, g, w: nms.sddmm(x, g, w, **options),
    }[op]


def _structs(tokens, in_features, out_features, pattern="2:4", dtype=jnp.float32, values_dtype=None):
    x, g = (jax.ShapeDtypeStruct((tokens, size), dtype) for size in (in_features, out_features))
    dense = jax.ShapeDtypeStruct((in_features, out_features), values_dtype or dtype)
    return x, g, jax.eval_shape(lambda d: nms.prune(d, pattern), dense)


def _lower(op, operands, platform, **options):
    return jax.jit(_function(op, **options)).trace(*operands).lower(lowering_platforms=(platform,)).as_text()


def _targets(text: str) -> set[str]:
    return set(re.findall(r"@(nms_\w+)\(", text))


def _shapes(text: str | None) -> set[tuple[int, ...]]:
    """Every array shape in an HLO text."""
    found = re.findall(r"\b(?:f64|f32|f16|bf16|s32|u32|s8|u8|pred)\[([\d,]+)\]", text or "")
    return {tuple(int(size) for size in shape.split(",")) for shape in found}


@needs_cuda
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("implementation", [None, "cuda"])
def test_lowers_for_cuda_on_a_machine_without_a_gpu(op, implementation):
    for pattern, dtype in itertools.product(
        ("2:4", "8:32/1x128", "1:2/16x16"), (jnp.float32, jnp.bfloat16, jnp.float16)
    ):
        operands = _structs(4096, 256, 256, pattern, dtype)
        text = _lower(op, operands, "cuda", implementation=implementation)
        choice = dispatch.choose(
            dispatch.Call(op, operands[2].layout, 1, 4096, dtype, dtype, dtype), "cuda", implementation
        )
        wanted = target_name(op, "cuda") if choice.multiplies else target_name(choice.name, "cuda")
        assert _targets(text) == ({wanted} if choice.kernel else set()), (pattern, dtype)
        if implementation == "cuda":
            assert choice.kernel
        if choice.multiplies:
            assert f'kernel = "{choice.name}"' in text


_ACTIVATIONS, _VALUES = "1, 2, 0", "0"


@pytest.mark.parametrize(
    ("op", "kernel", "pattern", "operands", "result"),
    [
        ("spmm", "block_wgmma", "8:32/1x128", [_ACTIVATIONS, _VALUES], _ACTIVATIONS),
        ("spmm", "block_fma", "8:32/1x32", [_ACTIVATIONS, _VALUES], _ACTIVATIONS),
        ("spmm", "block_mma_many", "8:32/1x64", [_ACTIVATIONS, _VALUES], _ACTIVATIONS),
        ("spmm", "block_wgmma_rs", "8:32/1x64", [_ACTIVATIONS, _VALUES], _ACTIVATIONS),
        ("spmm_t", "block_t_wgmma", "8:32/1x128", [_ACTIVATIONS, _VALUES], _ACTIVATIONS),
        ("spmm_t", "ew_t_wgmma", "2:4", [_ACTIVATIONS, _VALUES], _ACTIVATIONS),
        ("sddmm", "block_sddmm_wgmma", "8:32/1x128", [_ACTIVATIONS, _ACTIVATIONS], _VALUES),
        ("sddmm", "ew_sddmm_wgmma", "2:4", [_ACTIVATIONS, _ACTIVATIONS], _VALUES),
    ],
)
def test_feature_major_kernels_ask_for_activations_with_tokens_innermost(
    monkeypatch, op, kernel, pattern, operands, result
):
    """Layouts, minor axis first, of [batch, tokens, features] and of values, which are one axis."""
    monkeypatch.setitem(native.MODULES, "cuda", native.NativeModule("cuda", frozenset(), None))
    monkeypatch.setattr(native, "cuda_capability", lambda: "9.0")
    dtype = jnp.float32 if kernel in ("block_fma", "block_mma_many", "block_wgmma_rs") else jnp.bfloat16
    with dispatch.only_kernel(kernel):
        text = _lower(op, _structs(256, 256, 128, pattern, dtype), "cuda", implementation="cuda")
    (call,) = [line for line in text.splitlines() if f"@{target_name(op, 'cuda')}(" in line]
    layouts = re.findall(r"(operand_layouts|result_layouts) = \[(.*?)\] *[,}]", call)
    asked = {name: re.findall(r"dense<\[?([\d, ]+)\]?>", listed) for name, listed in layouts}
    assert asked["operand_layouts"][:2] == operands
    assert asked["result_layouts"][0] == result


@pytest.mark.parametrize("op", ["spmm", "spmm_t"])
@pytest.mark.parametrize("tokens", [5, 4096])
def test_xla_multiplies_what_a_kernel_expands(monkeypatch, op, tokens):
    """spmm expands all of the weight at once, spmm_t no more than 1024 of its rows."""
    monkeypatch.setitem(native.MODULES, "cuda", native.NativeModule("cuda", frozenset(), None))
    with dispatch.only_kernel("expand"):
        text = _lower(op, _structs(tokens, 4096, 96, "16:32", jnp.bfloat16), "cuda", implementation="cuda")
    assert _targets(text) == {EXPAND_TARGET}
    assert "dot_general" in text
    rows = {"spmm": 4096, "spmm_t": 1024}[op]
    expanded = re.findall(rf"@{EXPAND_TARGET}.*-> tensor<1x(\d+)x96xbf16>", text)
    assert set(expanded) == {str(rows)}


def test_a_kernel_compresses_a_gradient_of_xla(monkeypatch):
    """1024 rows at a time."""
    monkeypatch.setitem(native.MODULES, "cuda", native.NativeModule("cuda", frozenset(), None))
    with dispatch.only_kernel("compress"):
        text = _lower("sddmm", _structs(512, 4096, 96, "16:32"), "cuda", implementation="cuda")
    assert _targets(text) == {COMPRESS_TARGET}
    compressed = re.findall(rf"@{COMPRESS_TARGET}.*: \(tensor<1x(\d+)x96xf32>.*-> tensor<(\d+)xf32>", text)
    assert set(compressed) == {("1024", str(512 * 96))}


@pytest.mark.parametrize(
    ("precision", "code"),
    [
        (None, 0),
        ("TF32_TF32_F32", 0),
        ("BF16_BF16_F32", 0),
        ("TF32_TF32_F32_X3", 1),
        ("BF16_BF16_F32_X3", 1),
        ("BF16_BF16_F32_X6", 2),
        ("F32_F32_F32", 2),
        ("high", 2),
        ("highest", 2),
        (("default", "highest"), 2),
    ],
)
def test_what_was_asked_of_float32_reaches_the_kernel(monkeypatch, precision, code):
    monkeypatch.setitem(native.MODULES, "cuda", native.NativeModule("cuda", frozenset(), None))
    with dispatch.only_kernel("block_fma" if code == 2 else "block_mma_many"):
        text = _lower("spmm", _structs(256, 256, 128, "8:32/1x64"), "cuda", implementation="cuda", precision=precision)
    assert f"precision = {code} : i64" in text
    if code == 2:  # a kernel of TF32 products refuses
        with dispatch.only_kernel("block_mma_many"), pytest.raises(NotImplementedError, match="not with the float32"):
            _lower("spmm", _structs(256, 256, 128, "8:32/1x64"), "cuda", implementation="cuda", precision=precision)


@needs_cpu
@pytest.mark.parametrize("op", OPS)
def test_the_cpu_kernel_is_called(op):
    operands = _structs(3, 64, 32)
    assert _targets(_lower(op, operands, "cpu", implementation="cpu")) == {target_name(op, "cpu")}


@needs_cpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("op", OPS)
def test_the_cpu_copies_no_weight(op, dtype):
    """XLA has copied bfloat16 values, whose last two axes of size one it ordered otherwise, at each call."""
    for pattern in ("2:4", "8:32/1x32", "1:2/16x16"):
        operands = _structs(2, 256, 512, pattern, dtype)
        text = jax.jit(_function(op)).lower(*operands).compile().as_text() or ""
        elements = math.prod(operands[-1].values.shape)
        copies = [line for line in text.splitlines() if re.search(r" (copy|fusion|transpose)\(", line)]
        assert "nms_cpu_" + op in text
        assert not [line for line in copies if any(math.prod(shape) >= elements for shape in _shapes(line))], pattern


@pytest.mark.parametrize("implementation", ["xla", "dense"])
@pytest.mark.parametrize("op", OPS)
def test_plain_implementations_contain_no_custom_call(op, implementation):
    for platform in ("cpu", "cuda", "tpu", "rocm"):
        text = _lower(op, _structs(3, 64, 32), platform, implementation=implementation)
        assert "custom_call" not in text, platform
        assert "dot_general" in text


@pytest.mark.parametrize("op", OPS)
def test_platforms_without_kernels_run_the_reference(op):
    text = _lower(op, _structs(3, 64, 32), "tpu")
    assert "custom_call" not in text
    assert "dot_general" in text


@needs_cpu
@pytest.mark.parametrize("op", OPS)
def test_a_named_implementation_never_falls_back(op):
    operands = _structs(3, 64, 32)
    for name, platform in (("cpu", "cuda"), ("cpu", "tpu")):
        with pytest.raises(NotImplementedError, match=f"implementation='{name}' .*compiled for (cuda|this platform)"):
            _lower(op, operands, platform, implementation=name)
    with pytest.raises(NotImplementedError, match="implementation='cuda'"):
        _lower(op, operands, "cpu", implementation="cuda")


@pytest.mark.parametrize(
    ("activation", "bias", "precision", "transpose", "preferred"),
    [
        *((a, True, None, False, None) for a in oracle.ACTIVATIONS),
        (None, False, "highest", False, None),
        (None, False, ("default", "highest"), False, jnp.float32),
        ("gelu", True, "high", False, jnp.bfloat16),
        (None, False, "highest", True, jnp.float16),
    ],
)
def test_every_static_parameter_lowers_everywhere(activation, bias, precision, transpose, preferred):
    """Attributes are typed; every value lowers on every platform and compiles on this one."""
    x, g, w = _structs(3, 64, 32, dtype=jnp.bfloat16)
    options = {"activation": activation, "precision": precision, "preferred_element_type": preferred}
    options["bias"] = jnp.ones(32) if bias else None
    f = jax.jit(lambda x, w: nms.spmm(x, w, transpose=transpose, **options))
    traced = f.trace(g if transpose else x, w)
    for platform in ("cuda", "tpu"):
        assert "stablehlo" in traced.lower(lowering_platforms=(platform,)).as_text()
    (aval,) = jax.tree.leaves(traced.lower().compile().out_info)
    assert aval.dtype == (preferred or jnp.bfloat16)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("size", "pattern"), [((4096, 96), "2:4"), ((3072, 64), "8:32/1x64"), ((1000, 33), "3:6")])
def test_temporary_memory_is_bounded(op, size, pattern):
    """The documented formula: four expanded chunks, whatever in_features is (and x padded to whole windows)."""
    x, g, w = _structs(16, size[0], size[1], pattern)
    compiled = jax.jit(_function(op, implementation="xla")).lower(x, g, w).compile()
    used = cast(Any, compiled.memory_analysis()).temp_size_in_bytes
    bound = temporary_bytes(w.layout, 1, jnp.float32)
    # x or dx padded to whole windows, the result that is accumulated, and the gradient before it is cut.
    activations = 4 * 16 * (w.layout.padded_in + 2 * w.layout.padded_out) + w.layout.values_bytes(jnp.float32)
    assert used <= bound + activations
    if size[0] >= 3072:
        assert used < 4 * size[0] * size[1] * 4, "less than four dense weights"


@pytest.mark.parametrize("implementation", [i for i in oracle.IMPLEMENTATIONS if i != "dense"])
def test_no_buffer_of_kept_times_tokens(implementation):
    tokens = 17
    x, g, w = _structs(tokens, 2048, 24, "2:4")
    for op in OPS:
        text = jax.jit(_function(op, implementation=implementation)).lower(x, g, w).compile().as_text()
        sizes = {int(np.prod(shape)) for shape in _shapes(text)}
        assert max(sizes) < w.values.size * tokens, op


@pytest.mark.parametrize("implementation", [i for i in oracle.IMPLEMENTATIONS if i != "dense"])
def test_the_gradient_by_values_has_no_dense_buffer(implementation):
    in_features, out_features = 4096, 40
    x, g, w = _structs(8, in_features, out_features, "2:4")

    def loss(values, x, g, mask):
        weight = nms.NMSparse(values, mask, shape=w.shape, pattern=w.pattern)
        return jnp.sum(g * nms.spmm(x, weight, implementation=implementation))

    text = jax.jit(jax.grad(loss)).lower(w.values, x, g, w.mask).compile().as_text()
    shapes = _shapes(text)
    assert w.values.shape in {s[-5:] for s in shapes}, "the gradient itself"
    assert max(int(np.prod(s)) for s in shapes if s[-5:] != w.values.shape) < in_features * out_features
    assert (in_features, out_features) not in {s[-2:] for s in shapes}


@pytest.mark.parametrize("implementation", oracle.IMPLEMENTATIONS)
def test_export_restore_and_run(rng, implementation):
    """A custom call needs its safety check disabled, target by target; nothing else does."""
    w = oracle.draw(rng, (64, 6), "2:4")
    x = oracle.integers(rng, (3, 64))
    targets = [t for module in native.MODULES.values() for t in module.targets]
    checks = [export.DisabledSafetyCheck.custom_call(t) for t in targets]

    def f(x, values, mask):
        return nms.spmm(x, nms.NMSparse(values, mask, shape=w.shape, pattern="2:4"), implementation=implementation)

    exported = export.export(jax.jit(f), disabled_checks=checks)(x, w.values, w.mask)
    restored = export.deserialize(exported.serialize())
    np.testing.assert_array_equal(restored.call(x, w.values, w.mask), oracle.spmm(x, w))


def test_the_reference_reads_x_in_chunks_of_whole_windows():
    """Sizes around a chunk: 1024 rows, one window more, and one row less."""
    rng = np.random.default_rng(0)
    for in_features in (1023, 1024, 1056, 2080):
        w = oracle.draw(rng, (in_features, 3), "8:32")
        x, g = oracle.integers(rng, (2, in_features)), oracle.integers(rng, (2, 3))
        mask = w.mask_with_words[None]
        static = {"layout": w.layout, "dtype": np.float32}
        y = reference.spmm(x[None], w.values[None], mask, **static)[0]
        dx = reference.spmm_t(g[None], w.values[None], mask, **static)[0]
        dv = reference.sddmm(x[None], g[None], mask, **static)[0]
        np.testing.assert_array_equal(y, oracle.spmm(x, w))
        np.testing.assert_array_equal(dx, oracle.spmm(g, w, transpose=True))
        np.testing.assert_array_equal(dv, oracle.sddmm(x, g, w))
