"""The CPU kernels, called as plain FFI targets, against float64 NumPy on the dense weight."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_nmsparse import native

if not native.MODULES["cpu"].loaded:
    pytest.skip(f"_cpu {native.MODULES['cpu'].problem}", allow_module_level=True)

EPSILON = {"float64": 2e-16, "float32": 6e-8, "bfloat16": 4e-3, "float16": 5e-4}
FLOATS = ("float32", "bfloat16", "float16")
DTYPES = tuple((d, d) for d in (*FLOATS, "float64", "int8")) + tuple((d, "int8") for d in FLOATS)
RAGGED = (1, 31, 33, 63, 65, 127, 129, 1000)
TOKENS = (*range(18), 64, 128, 129)
# (q, window_units): the format knows n and m only through these.
WINDOWS = (
    (16, 32),
    (8, 32),
    (3, 32),
    (1, 32),
    (31, 32),
    (3, 6),
    (1, 10),
    (7, 10),
    (32, 64),
    (5, 64),
    (25, 100),
    (16, 128),
    (127, 128),
)
BLOCKS = ((1, 1), (1, 4), (1, 32), (4, 4), (3, 5), (2, 1), (16, 16), (1, 128))


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight in the format, and what it means."""

    values: np.ndarray
    mask: np.ndarray
    dense: np.ndarray  # float64 [batch, in_features, out_features]
    window_units: int
    positions: np.ndarray  # [batch, windows, out_blocks, q]

    def compress(self, dense: np.ndarray) -> np.ndarray:
        """The kept units of another float64 [batch, in_features, out_features]."""
        units = to_units(dense, self.window_units, self.values.shape[-2:])
        return np.take_along_axis(units, self.positions[..., None, None], axis=3)


def to_units(dense, window_units, block):
    """[batch, in, out] -> [batch, windows, out_blocks, window_units, bk, bn], padded with zeros."""
    bk, bn = block
    batch, rows, columns = dense.shape
    windows, out_blocks = -(-rows // (bk * window_units)), -(-columns // bn)
    padded = np.zeros((batch, windows * window_units * bk, out_blocks * bn), dense.dtype)
    padded[:, :rows, :columns] = dense
    return padded.reshape(batch, windows, window_units, bk, out_blocks, bn).transpose(0, 1, 4, 2, 3, 5)


def random_array(rng, shape, dtype):
    if dtype == "int8":
        return rng.integers(-127, 128, shape).astype(np.int8)
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def random_weight(rng, batch, rows, columns, window, block, dtype) -> Weight:
    q, units = window
    values_dense = random_array(rng, (batch, rows, columns), dtype)
    unit_values = to_units(values_dense, units, block)
    positions = np.sort(np.argsort(rng.random(unit_values.shape[:4]), axis=-1)[..., :q], axis=-1)
    keep = np.zeros(unit_values.shape[:4], bool)
    np.put_along_axis(keep, positions, True, axis=-1)
    words = -(-units // 32)
    bits = np.zeros((*keep.shape[:3], 32 * words), np.uint64)
    bits[..., :units] = keep
    mask = (bits.reshape(*keep.shape[:3], words, 32) << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32)
    values = np.take_along_axis(unit_values, positions[..., None, None], axis=3)
    kept = np.where(keep[..., None, None], unit_values, np.zeros((), unit_values.dtype)).astype(np.float64)
    bk, bn = block
    dense = kept.transpose(0, 1, 3, 4, 2, 5).reshape(batch, kept.shape[1] * units * bk, kept.shape[2] * bn)[
        :, :rows, :columns
    ]
    return Weight(np.ascontiguousarray(values), mask, dense, units, positions)


def call(target, result, *operands, weight, activation=0, precision=0, kernel="simd"):
    attributes = {
        "pattern": np.asarray((weight.window_units, *weight.values.shape[-3:]), np.int64),
        "activation": np.int64(activation),
        "precision": np.int64(precision),
        "kernel": kernel,
    }
    return np.asarray(jax.ffi.ffi_call(target, result)(*operands, **attributes))


def spmm(x, weight, scales=None, bias=None, dtype=None, **attributes):
    absent = np.zeros((0,), np.float32)
    integer = x.dtype == np.int8
    result = jax.ShapeDtypeStruct((*x.shape[:2], weight.dense.shape[2]), dtype or (np.int32 if integer else x.dtype))
    extras = (absent if extra is None else extra for extra in (scales, bias))
    return call("nms_cpu_spmm", result, x, weight.values.ravel(), weight.mask, *extras, weight=weight, **attributes)


def spmm_t(g, weight, dtype=None):
    result = jax.ShapeDtypeStruct(
        (*g.shape[:2], weight.dense.shape[1]), dtype or (np.int32 if g.dtype == np.int8 else g.dtype)
    )
    return call("nms_cpu_spmm_t", result, g, weight.values.ravel(), weight.mask, weight=weight)


def sddmm(x, g, weight, dtype=None):
    result = jax.ShapeDtypeStruct((weight.values.size,), dtype or x.dtype)
    return call("nms_cpu_sddmm", result, x, g, weight.mask, weight=weight).reshape(weight.values.shape)


def assert_close(got, expected, magnitude, result_dtype, accumulator="float32"):
    """|got - expected| <= rounding of the result + rounding of the sums, whose terms add up to `magnitude`."""
    got = got.astype(np.float64)
    assert got.shape == expected.shape
    if result_dtype == "int32":
        np.testing.assert_array_equal(got, expected)
        return
    smallest = 3e-8 if result_dtype == "float16" else 1e-30  # half a step of its subnormals
    bound = EPSILON[str(result_dtype)] * np.abs(expected) + 32 * EPSILON[accumulator] * magnitude + smallest
    with np.errstate(invalid="ignore"):
        bad = ~(np.abs(got - expected) <= bound)
    assert not bad.any(), f"{bad.sum()} of {bad.size} wrong, first {got[bad][0]} for {expected[bad][0]}"


def check_all(rng, batch, tokens, rows, columns, window, block, dtypes):
    x_dtype, values_dtype = dtypes
    weight = random_weight(rng, batch, rows, columns, window, block, values_dtype)
    x = random_array(rng, (batch, tokens, rows), x_dtype)
    g = random_array(rng, (batch, tokens, columns), x_dtype)
    x64, g64, w = x.astype(np.float64), g.astype(np.float64), weight.dense
    result = "int32" if x_dtype == "int8" else x_dtype
    accumulator = "float64" if x_dtype == "float64" else "float32"
    assert_close(spmm(x, weight), x64 @ w, np.abs(x64) @ np.abs(w), result, accumulator)
    wt = w.transpose(0, 2, 1)
    assert_close(spmm_t(g, weight), g64 @ wt, np.abs(g64) @ np.abs(wt), result, accumulator)
    if x_dtype != "int8":
        xt = x64.transpose(0, 2, 1)
        expected, magnitude = weight.compress(xt @ g64), weight.compress(np.abs(xt) @ np.abs(g64))
        assert_close(sddmm(x, g, weight), expected, magnitude, result, accumulator)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield
    jax.clear_caches()  # every call compiles: thousands of executables otherwise


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 16, 17, 40, 100])
def test_every_dtype(dtypes, tokens):
    rng = np.random.default_rng(tokens)
    for window, block in (((8, 32), (1, 1)), ((16, 32), (1, 32)), ((3, 6), (3, 5)), ((16, 128), (1, 1))):
        check_all(rng, 1, tokens, 257, 131, window, block, dtypes)


@pytest.mark.parametrize("block", BLOCKS, ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("window", WINDOWS, ids="{0[0]}of{0[1]}".format)
def test_every_window_and_block(window, block):
    rng = np.random.default_rng(1)
    for tokens, dtype in ((1, "float32"), (4, "bfloat16"), (20, "float32"), (70, "bfloat16")):
        check_all(rng, 1, tokens, 300, 150, window, block, (dtype, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [(1, 1), (1, 32), (4, 4)], ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_number_of_tokens(tokens, block, dtype):
    check_all(np.random.default_rng(tokens), 1, tokens, 200, 97, (8, 32), block, (dtype, dtype))


RAGGED_CASES = tuple(
    (tokens, block, window, dtype)
    for tokens, block in ((1, (1, 1)), (1, (1, 32)), (3, (3, 5)), (19, (1, 1)), (19, (16, 16)))
    for window, dtype in (((8, 32), "float32"), ((3, 32), "bfloat16"))
)


@pytest.mark.parametrize("columns", RAGGED)
@pytest.mark.parametrize("rows", RAGGED)
def test_ragged_sizes(rows, columns):
    rng = np.random.default_rng(rows)
    first = RAGGED.index(rows) + 3 * RAGGED.index(columns)
    for i in range(3):  # of the ten, others for the neighbouring sizes
        tokens, block, window, dtype = RAGGED_CASES[(first + 4 * i) % len(RAGGED_CASES)]
        check_all(rng, 1, tokens, rows, columns, window, block, (dtype, dtype))


@pytest.mark.parametrize("tokens", [0, 1, 3, 17, 300])
def test_batched_weights(tokens):
    rng = np.random.default_rng(tokens)
    for block in ((1, 1), (1, 32)):
        check_all(rng, 5, tokens, 130, 70, (8, 32), block, ("float32", "float32"))
    check_all(rng, 0, tokens, 130, 70, (8, 32), (1, 1), ("float32", "float32"))


@pytest.mark.parametrize("result", ["float32", "bfloat16", "float16", "float64", "int32"])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "int8")], ids="-".join)
def test_every_result_dtype(dtypes, result):
    rng = np.random.default_rng(0)
    for tokens in (1, 20):
        weight = random_weight(rng, 1, 100, 50, (8, 32), (1, 1), dtypes[1])
        x = random_array(rng, (1, tokens, 100), dtypes[0])
        expected = x.astype(np.float64) @ weight.dense
        scale = np.abs(x.astype(np.float64)) @ np.abs(weight.dense)
        got = spmm(x, weight, dtype=ml_dtypes.bfloat16 if result == "bfloat16" else result)
        if result == "int32" and dtypes[0] != "int8":
            np.testing.assert_allclose(got, expected, atol=0.5001)
        elif result == "float16" and dtypes[0] == "int8":
            assert np.isfinite(got[np.abs(expected) < 65000]).all()
        else:
            assert_close(got, expected, scale, result)


def _activate(v, activation):
    erf = np.vectorize(math.erf)
    tanh = 0.7978845608028654 * (v + 0.044715 * v**3)
    return (
        v,
        np.maximum(v, 0),
        v * (1 + erf(v / math.sqrt(2))) / 2,
        v * (1 + np.tanh(tanh)) / 2,
        v / (1 + np.exp(-v)),
    )[activation]


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
@pytest.mark.parametrize("activation", range(5))
def test_epilogue(dtypes, activation):
    rng = np.random.default_rng(activation)
    result = dtypes[0] if dtypes[0] != "int8" else "float32"
    for tokens, batch, block in ((1, 2, (1, 1)), (1, 1, (1, 32)), (3, 1, (1, 1)), (33, 2, (1, 1)), (33, 1, (4, 4))):
        weight = random_weight(rng, batch, 70, 45, (8, 32), block, dtypes[1])
        x = random_array(rng, (batch, tokens, 70), dtypes[0])
        small = 1e-4 if dtypes[1] == "int8" else 0.3
        scales = (small * rng.random((batch, 45))).astype(np.float32)
        for bias_dtype in ("float32", "bfloat16", "float64") if result != "float64" else ("float64",):
            bias = random_array(rng, (batch, 45), bias_dtype)
            for use_scales in (True, False) if small == 0.3 else (True,):
                scale = scales[:, None].astype(np.float64) if use_scales else 1.0
                linear = (x.astype(np.float64) @ weight.dense) * scale + bias[:, None].astype(np.float64)
                magnitude = (np.abs(x.astype(np.float64)) @ np.abs(weight.dense)) * scale + 4
                got = spmm(
                    x,
                    weight,
                    scales if use_scales else None,
                    bias,
                    activation=activation,
                    dtype=ml_dtypes.bfloat16 if result == "bfloat16" else result,
                )
                accumulator = "float64" if result == "float64" else "float32"
                assert_close(got, _activate(linear, activation), magnitude, result, accumulator)


@pytest.mark.parametrize("activation", range(1, 5))
def test_activations_over_their_whole_range(activation):
    v = np.concatenate([np.linspace(-20, 20, 4001), [-1e4, 1e4, 0.0, -60.0, 60.0, -100.0, 100.0]]).astype(np.float32)
    x = v.reshape(1, -1, 1)
    weight = Weight(
        np.ones((1, 1, 1, 1, 1, 1), np.float32),
        np.ones((1, 1, 1, 1), np.uint32),
        np.ones((1, 1, 1)),
        32,
        np.zeros((1, 1, 1, 1), np.int64),
    )
    got = spmm(x, weight, activation=activation)
    with np.errstate(over="ignore"):
        expected = _activate(x.astype(np.float64), activation)
    np.testing.assert_allclose(got, expected, rtol=3e-6, atol=3e-7)
    special = spmm(np.array([[[np.nan], [np.inf]]], np.float32), weight, activation=activation)
    assert np.isnan(special[0, 0, 0]) and special[0, 1, 0] == np.inf


@pytest.mark.parametrize("block", [(1, 1), (1, 32), (3, 5)], ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("tokens", [1, 2, 5, 20, 70])
def test_infinities_reach_only_what_keeps_them(tokens, block):
    rng = np.random.default_rng(0)
    weight = random_weight(rng, 1, 130, 75, (8, 32), block, "float32")
    x = random_array(rng, (1, tokens, 130), "float32")
    g = random_array(rng, (1, tokens, 75), "float32")
    x[0, 0, 7] = np.inf
    g[0, 0, 11] = np.inf
    y, dx, dv = spmm(x, weight), spmm_t(g, weight), sddmm(x, g, weight)
    reached = weight.dense[0, 7] != 0
    assert np.isinf(y[0, 0, reached]).all() and np.isfinite(y[0, 0, ~reached]).all() and np.isfinite(y[0, 1:]).all()
    reached = weight.dense[0, :, 11] != 0
    assert np.isinf(dx[0, 0, reached]).all() and np.isfinite(dx[0, 0, ~reached]).all() and np.isfinite(dx[0, 1:]).all()
    touched = np.zeros((1, 130, 75))
    touched[0, 7] = touched[0, :, 11] = 1
    touched = weight.compress(touched) != 0
    assert np.isinf(dv[touched]).all() and np.isfinite(dv[~touched]).all()
    padding = weight.compress(np.ones((1, 130, 75))) == 0
    assert padding.any() and (dv[padding] == 0).all()


@pytest.mark.parametrize("window", WINDOWS, ids="{0[0]}of{0[1]}".format)
@pytest.mark.parametrize("fill", ["zeros", "ones", "random"])
def test_corrupt_masks_stay_inside_their_window(fill, window):
    """Any finite answer is right here; tests/native checks the addresses."""
    rng = np.random.default_rng(0)
    for block in ((1, 1), (1, 32), (3, 5)):
        weight = random_weight(rng, 1, 200, 70, window, block, "float32")
        mask = {
            "zeros": np.zeros_like(weight.mask),
            "ones": np.full_like(weight.mask, 0xFFFFFFFF),
            "random": rng.integers(0, 2**32, weight.mask.shape, dtype=np.uint32),
        }[fill]
        corrupt = dataclasses.replace(weight, mask=mask)
        for tokens in (1, 3, 20):
            x = random_array(rng, (1, tokens, 200), "float32")
            g = random_array(rng, (1, tokens, 70), "float32")
            assert np.isfinite(spmm(x, corrupt)).all()
            assert np.isfinite(spmm_t(g, corrupt)).all()
            assert np.isfinite(sddmm(x, g, corrupt)).all()


def test_results_do_not_depend_on_threads_or_calls():
    rng = np.random.default_rng(0)
    for tokens, dtype in ((1, "float32"), (1, "bfloat16"), (40, "float32")):
        weight = random_weight(rng, 1, 1024, 1000, (8, 32), (1, 1), dtype)
        x = random_array(rng, (1, tokens, 1024), dtype)
        g = random_array(rng, (1, tokens, 1000), dtype)
        first = [spmm(x, weight), spmm_t(g, weight), sddmm(x, g, weight)]
        for _ in range(10):
            for got, before in zip([spmm(x, weight), spmm_t(g, weight), sddmm(x, g, weight)], first, strict=True):
                assert got.tobytes() == before.tobytes()


def test_thousand_calls_inside_one_jit():
    rng = np.random.default_rng(0)
    weight = random_weight(rng, 1, 64, 64, (8, 32), (1, 1), "float32")
    values, mask = jnp.asarray(weight.values.ravel()), jnp.asarray(weight.mask)
    empty = jnp.zeros((0,), jnp.float32)
    attributes = {"activation": np.int64(0), "precision": np.int64(0), "kernel": "simd"}
    attributes["pattern"] = np.asarray((32, 8, 1, 1), np.int64)

    @jax.jit
    def run(x):
        def step(x, _):
            y = jax.ffi.ffi_call("nms_cpu_spmm", jax.ShapeDtypeStruct(x.shape, x.dtype))(
                x, values, mask, empty, empty, **attributes
            )
            return y / jnp.maximum(jnp.max(jnp.abs(y)), 1e-3), None

        return jax.lax.scan(step, x, length=1000)[0]

    assert np.isfinite(run(jnp.ones((1, 40, 64), jnp.float32))).all()


def test_wrong_buffers_are_errors_that_name_the_operand():
    rng = np.random.default_rng(0)
    weight = random_weight(rng, 1, 64, 40, (8, 32), (1, 1), "float32")
    x = random_array(rng, (1, 3, 64), "float32")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"spmm: mask has windows size 2, expected 4"):
        spmm(random_array(rng, (1, 3, 100), "float32"), weight)
    with pytest.raises(jax.errors.JaxRuntimeError, match="window_units is outside 1 to 128"):
        spmm(x, dataclasses.replace(weight, window_units=0))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"spmm: values has total size 639, expected 640"):
        result, absent = jax.ShapeDtypeStruct((1, 3, 40), x.dtype), np.zeros((0,), np.float32)
        call("nms_cpu_spmm", result, x, weight.values.ravel()[1:], weight.mask, absent, absent, weight=weight)
    with pytest.raises(jax.errors.JaxRuntimeError, match="spmm: the CPU kernels take"):
        spmm(x.astype(np.float64), weight)
    with pytest.raises(jax.errors.JaxRuntimeError, match="spmm: there is no CPU kernel 'fast'"):
        spmm(x, weight, kernel="fast")


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_other_instruction_sets(isa):
    """The same tests, a few of them, with the kernels that other processors run."""
    from jax_nmsparse import _cpu  # pyright: ignore[reportAttributeAccessIssue]

    wanted = "test_every_dtype or infinities or test_every_number_of_tokens"
    # Safe path: the sources in the working directory must not hide the installed package.
    environment = {**os.environ, "JAX_NMSPARSE_CPU_ISA": isa, "PYTHONSAFEPATH": "1"}
    code = "from jax_nmsparse import _cpu; print(_cpu.isa())"
    got = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    if got.stdout.strip() != isa or "JAX_NMSPARSE_CPU_ISA" in os.environ or _cpu.isa() == isa:
        pytest.skip(f"{isa} kernels are not for this processor, or tested already")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0", __file__, "-k", wanted]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]
