"""Products on a GPU through implementation="cuda": every kernel, operation, dtype, pattern and ragged size."""

import functools
import itertools
import pathlib
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_nmsparse as nms
from jax_nmsparse import dispatch

pytestmark = pytest.mark.gpu

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
KERNELS = [k.name for k in dispatch.KERNELS if k.implementation == "cuda"]
PATTERNS = (
    "2:4",
    "1:4",
    "8:32",
    "16:32",
    "3:32",
    "4:64",
    "32:128",
    "3:6",
    "8:32/1x32",
    "16:32/1x128",
    "1:2/16x16",
    "2:5/3x2",
)
SIZES = ((1, 1), (31, 33), (65, 127), (129, 65), (1000, 129), (512, 256))


def _products(op, **options):
    return {
        "spmm": lambda x, g, w: nms.spmm(x, w, **options),
        "spmm_t": lambda x, g, w: nms.spmm(g, w, transpose=True, **options),
        "sddmm": lambda x, g, w: nms.sddmm(x, g, w, **options),
    }[op]


def _want(op, x, g, w):
    return {
        "spmm": lambda: oracle.spmm(x, w),
        "spmm_t": lambda: oracle.spmm(g, w, transpose=True),
        "sddmm": lambda: oracle.sddmm(x, g, w),
    }[op]()


def _call(op, x, g, w):
    first, second = {"spmm": (x, w.values), "spmm_t": (g, w.values), "sddmm": (x, g)}[op]
    gradient = w.dtype if w.dtype in FLOATS else jnp.float32
    result = gradient if op == "sddmm" else x.dtype
    return dispatch.Call(op, w.layout, 1, x.shape[0], first.dtype, second.dtype, jnp.dtype(result))


def _takes(kernel: str, call: dispatch.Call) -> bool:
    (found,) = [k for k in dispatch.KERNELS if (k.implementation, k.name) == ("cuda", kernel)]
    return call.op in found.ops and not found.rejects(call)


def _poison(shape, dtype) -> None:
    """Leaves NaN in freed device memory, where the next result is likely to be placed."""
    if jnp.issubdtype(dtype, jnp.floating):
        jax.block_until_ready([jnp.full(shape, jnp.nan, dtype) for _ in range(4)])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("op", ["spmm", "spmm_t", "sddmm"])
def test_every_kernel_dtype_pattern_and_size(rng, op, kernel):
    """Small integers, so that every result is exact whatever the order and the tensor core."""
    ran = 0
    for dtype, (i, pattern) in itertools.product(FLOATS, enumerate(PATTERNS)):
        # Every pattern meets two sizes and every size four patterns; all dtypes see the same.
        tokens_of = ((1, 70), (17, 256))[i % 2]
        for (in_features, out_features), tokens in zip((SIZES[i % 6], SIZES[(i + 3) % 6]), tokens_of, strict=True):
            if in_features == 1 and op == "sddmm":
                tokens = 3
            small = functools.partial(oracle.integers, largest=1)
            w = oracle.draw(rng, (in_features, out_features), pattern, dtype, fill=small)
            x, g = small(rng, (tokens, in_features), dtype), small(rng, (tokens, out_features), dtype)
            if not _takes(kernel, _call(op, x, g, w)):
                continue
            ran += 1
            want = _want(op, x, g, w)
            with dispatch.only_kernel(kernel):
                f = jax.jit(_products(op, implementation="cuda"))
                _poison(want.shape, dtype)
                got = f(x, g, w)
            np.testing.assert_array_equal(
                np.asarray(got).astype(np.float64), want, err_msg=f"{pattern} {w.shape} {tokens} {dtype}"
            )
    if not ran and op in next(k.ops for k in dispatch.KERNELS if k.name == kernel):
        pytest.skip("this kernel takes none of these calls: large sizes are in test_large_sizes")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("op", ["spmm", "spmm_t", "sddmm"])
def test_large_sizes(rng, op, kernel):
    """Sizes that specialised kernels want, with random numbers, against float32 on the device."""
    ran = 0
    for dtype, pattern, tokens in itertools.product(
        FLOATS, ("2:4", "8:32", "8:32/1x128", "16:32/32x32"), (1, 16, 1024)
    ):
        w = oracle.draw(rng, (1024, 768), pattern, dtype, fill=oracle.normal)
        x, g = oracle.normal(rng, (tokens, 1024), dtype), oracle.normal(rng, (tokens, 768), dtype)
        if not _takes(kernel, _call(op, x, g, w)):
            continue
        ran += 1
        with dispatch.only_kernel(kernel):
            got = jax.jit(_products(op, implementation="cuda"))(x, g, w)
            again = jax.jit(_products(op, implementation="cuda"))(x, g, w)
        depth = {"spmm": 1024, "spmm_t": 768, "sddmm": tokens}[op]
        oracle.assert_close(got, _want(op, x, g, w), depth=depth, precision="tf32")
        oracle.assert_same_bits(got, again)
    if not ran:
        pytest.skip("this kernel takes none of these calls")


@pytest.mark.parametrize("values_dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_quantised_values(rng, values_dtype):
    small = functools.partial(oracle.integers, largest=1)
    for x_dtype in (*FLOATS, values_dtype):
        for pattern, tokens in (("2:4", 1), ("8:32/1x32", 33)):
            w = oracle.draw(rng, (129, 65), pattern, values_dtype, fill=small)
            x = small(rng, (tokens, 129), x_dtype)
            y = nms.spmm(x, w, implementation="cuda")
            np.testing.assert_array_equal(np.asarray(y).astype(np.float64), oracle.spmm(x, w))
            if x_dtype in FLOATS:
                scaled = w._replace(scales=jnp.asarray(2.0 ** oracle.integers(rng, (65,))))
                y = nms.spmm(x, scaled, implementation="cuda", preferred_element_type=jnp.float32)
                np.testing.assert_array_equal(y, oracle.spmm(x, scaled))
                g = small(rng, (tokens, 65), x_dtype)
                dx = nms.spmm(g, w, transpose=True, implementation="cuda")
                np.testing.assert_array_equal(np.asarray(dx).astype(np.float64), oracle.spmm(g, w, transpose=True))


@pytest.mark.parametrize("values_dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_quantised_values_are_expanded(rng, values_dtype):
    """By the kernel to the dtype in which XLA multiplies them."""
    small = functools.partial(oracle.integers, largest=1)
    for x_dtype, (pattern, tokens) in itertools.product((*FLOATS, values_dtype), (("2:4", 1), ("8:32/1x32", 33))):
        w = oracle.draw(rng, (2, 129, 65), pattern, values_dtype, fill=small)
        x = small(rng, (2, tokens, 129), x_dtype)
        with dispatch.only_kernel("expand"):
            y = jax.jit(functools.partial(nms.spmm, implementation="cuda"))(x, w)
        want = np.stack(
            [
                oracle.spmm(x[i], nms.NMSparse(w.values[i], w.mask[i], shape=(129, 65), pattern=pattern))
                for i in range(2)
            ]
        )
        np.testing.assert_array_equal(np.asarray(y).astype(np.float64), want)


@pytest.mark.parametrize("pattern", ["2:4", "8:32/1x32"])
def test_no_tail_column_is_dropped(rng, pattern):
    sizes = range(1, 301, 13)
    x = oracle.integers(rng, (3, 64))
    weights = [oracle.draw(rng, (64, size), pattern) for size in sizes]
    products = jax.jit(lambda x, weights: [nms.spmm(x, w, implementation="cuda") for w in weights])(x, weights)
    for y, w in zip(products, weights, strict=True):
        np.testing.assert_array_equal(y, oracle.spmm(x, w))


@pytest.mark.parametrize("activation", oracle.ACTIVATIONS)
def test_epilogue_with_ragged_sizes(rng, activation):
    for (in_features, out_features), dtype in itertools.product(((33, 127), (1000, 65)), FLOATS):
        w = oracle.draw(rng, (in_features, out_features), "2:4", dtype, fill=oracle.normal)
        x, bias = oracle.normal(rng, (5, in_features), dtype), oracle.normal(rng, (out_features,))
        y = nms.spmm(x, w, bias=bias, activation=activation, precision="highest", implementation="cuda")
        oracle.assert_close(y, oracle.spmm(x, w, bias=bias, activation=activation), depth=in_features)


def test_precision(rng):
    """float32 at the highest precision is float32; by default it may be TF32, as a dense product."""
    w = oracle.draw(rng, (1024, 256), "8:32", fill=oracle.normal)
    x = oracle.normal(rng, (64, 1024))
    exact = nms.spmm(x, w, precision="highest", implementation="cuda")
    oracle.assert_close(exact, oracle.spmm(x, w), depth=1024)
    oracle.assert_close(nms.spmm(x, w, implementation="cuda"), oracle.spmm(x, w), depth=1024, precision="tf32")


@pytest.mark.parametrize("kernel", ["block_mma_many", "block_wgmma_rs"])
@pytest.mark.parametrize("block", ["1x64", "1x128"])
def test_three_tf32_products_are_nearly_float32(rng, kernel, block):
    w = oracle.draw(rng, (1024, 256), f"8:32/{block}", fill=oracle.normal)
    x = oracle.normal(rng, (1024, 1024))
    want = oracle.spmm(x, w)
    errors = {}
    for precision in ("TF32_TF32_F32", "TF32_TF32_F32_X3"):
        with dispatch.only_kernel(kernel):
            y = jax.jit(functools.partial(nms.spmm, implementation="cuda", precision=precision))(x, w)
        errors[precision] = np.linalg.norm(y - want) / np.linalg.norm(want)
    assert 1e-5 < errors["TF32_TF32_F32"] < 1e-3
    assert errors["TF32_TF32_F32_X3"] < 5e-6


@pytest.mark.parametrize("kernel", ["block_mma_many", "block_wgmma_rs"])
def test_int8_times_int8_is_exact_for_many_tokens(rng, kernel):
    w = oracle.draw(rng, (1024, 256), "8:32/1x128", jnp.int8, fill=functools.partial(oracle.integers, largest=127))
    x = oracle.integers(rng, (512, 1024), jnp.int8, 127)
    with dispatch.only_kernel(kernel):
        y = jax.jit(functools.partial(nms.spmm, implementation="cuda", preferred_element_type=jnp.int32))(x, w)
    np.testing.assert_array_equal(y, oracle.spmm(x, w))


def test_thousand_calls(rng):
    w = oracle.draw(rng, (256, 129), "8:32")
    x = oracle.integers(rng, (5, 256))
    f = jax.jit(lambda x, w: nms.spmm(x, w, implementation="cuda"))
    results = [f(x, w) for _ in range(1000)]
    want = oracle.spmm(x, w)
    for y in results[::100]:
        np.testing.assert_array_equal(y, want)
    same = jax.jit(lambda ys: jnp.all(jnp.stack(ys) == ys[0]))
    assert all(bool(same(results[i : i + 100])) for i in range(0, 1000, 100))


@pytest.mark.parametrize("minimum", [1, 5, 1_000_000])
def test_captured_chain_equals_single_calls(rng, minimum):
    """A hundred dependent calls, captured in command buffers or (with a minimum that is never reached) not."""
    w = oracle.draw(rng, (128, 128), "8:32", fill=oracle.normal)
    x = jnp.asarray(oracle.normal(rng, (3, 128)))
    layer = lambda x: jnp.tanh(nms.spmm(x, w, precision="highest", implementation="cuda"))  # noqa: E731

    def chain(x):
        for _ in range(100):
            x = layer(x)
        return x

    compiled = jax.jit(chain, compiler_options={"xla_gpu_graph_min_graph_size": minimum})
    step = jax.jit(layer)
    want = x
    for _ in range(100):
        want = step(want)
    for _ in range(3):
        oracle.assert_same_bits(compiled(x), want)


def test_vmap_and_gradients(rng):
    w = oracle.draw(rng, (2, 70, 33), "8:32", fill=oracle.normal)
    x, ct = jnp.asarray(oracle.normal(rng, (2, 5, 70))), jnp.asarray(oracle.normal(rng, (2, 5, 33)))
    to_dense = oracle.scatter(w)

    def one(x, values, mask):
        single = nms.NMSparse(values, mask, shape=(70, 33), pattern="8:32")
        return nms.spmm(x, single, precision="highest", implementation="cuda")

    def sparse(x, values):
        return jnp.sum(ct * jnp.sin(jax.vmap(one)(x, values, w.mask)))

    def dense(x, values):
        return jnp.sum(ct * jnp.sin(jnp.matmul(x, to_dense(values), precision="highest")))

    for transform in (
        lambda f: jax.value_and_grad(f, argnums=(0, 1))(x, w.values),
        lambda f: jax.jvp(jax.grad(f, argnums=(0, 1)), (x, w.values), (jnp.cos(x), jnp.cos(w.values))),
    ):
        got, want = jax.jit(lambda t=transform: (t(sparse), t(dense)))()
        # The two take different roundings through sin, whose error enters every sum.
        jax.tree.map(lambda a, b: oracle.assert_close(a, b, depth=70 * 330), got, want)


def test_packed_on_one_device_and_used_on_another(rng):
    dense = oracle.normal(rng, (130, 33))
    dense[::7] = np.abs(dense[1::7][: len(dense[::7])].max())  # ties
    for pattern in PATTERNS:
        on_cpu, on_gpu = (nms.prune(jax.device_put(dense, jax.devices(p)[0]), pattern) for p in ("cpu", "cuda"))
        if nms.NMPattern.parse(pattern).is_elementwise:  # sums over blocks may round differently
            oracle.assert_same_bits(on_cpu, on_gpu)
        packed = jax.device_put(on_cpu, jax.devices("cuda")[0]).validate()
        np.testing.assert_array_equal(packed.todense(), oracle.dense(on_cpu))
        oracle.assert_same_bits(
            nms.NMSparse.fromdense(jax.device_put(on_cpu.todense(), jax.devices("cuda")[0]), pattern), on_cpu
        )


def test_every_output_element_is_written(rng):
    """Results of many sizes, each placed where NaN was."""
    for in_features, out_features, tokens in ((31, 33, 1), (129, 127, 17), (64, 300, 65), (1000, 1, 3)):
        w = oracle.draw(rng, (in_features, out_features), "8:32")
        x, g = oracle.integers(rng, (tokens, in_features)), oracle.integers(rng, (tokens, out_features))
        for op in ("spmm", "spmm_t", "sddmm"):
            want = _want(op, x, g, w)
            f = jax.jit(_products(op, implementation="cuda")).lower(x, g, w).compile()
            for _ in range(3):
                _poison(want.shape, jnp.float32)
                np.testing.assert_array_equal(f(x, g, w), want)


def test_code_for_every_architecture():
    """Machine code for sm_80 and sm_90a, and PTX for newer chips."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        pytest.skip("cuobjdump is not installed")
    (module,) = pathlib.Path(nms.__file__).parent.glob("_cuda.*so")
    elf, ptx = (
        subprocess.run([tool, option, str(module)], capture_output=True, text=True, check=True).stdout
        for option in ("--list-elf", "--list-ptx")
    )
    assert "sm_80" in elf
    assert "sm_90a" in elf
    assert ".ptx" in ptx
