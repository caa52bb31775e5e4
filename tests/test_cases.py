"""Kinds of faults that users reported of other systems, each named after its kind.

Numbers are rows of the project's list of cases; those that another file covers name its test.

| case | test |
| --- | --- |
| 1 | test_every_group_size_up_to_128_runs |
| 2, 4, 5 | test_lowering: test_temporary_memory_is_bounded, test_no_buffer_of_kept_times_tokens, test_the_gradient_by_values_has_no_dense_buffer |
| 7, A5 | test_primitives: test_spmm_by_x_values_bias_and_scales, test_every_primitive_by_both_operands, test_every_precision |
| 9 | oracle.TOLERANCE; test_ops: test_random_numbers_within_the_tolerance; test_gpu: test_precision |
| 10 | test_unsupported_dtypes_are_named_while_tracing; test_errors |
| 12 | test_array: test_construction_names_the_field |
| 13, 15 | test_sharding_jit: test_batch_sharded_operands_need_no_collective, test_scan_over_stacked_layers |
| 16 | test_transforms: test_every_transform, test_vmap_over_every_combination_of_axes |
| 18 | test_imports: test_any_module_may_be_imported_first |
| 19 | test_only_public_registration_is_used |
| 20, 32 | test_gpu: test_code_for_every_architecture; test_lowering: test_platforms_without_kernels_run_the_reference |
| 21, 23 | test_gpu: test_thousand_calls, test_captured_chain_equals_single_calls; test_native_cpu: test_thousand_calls_inside_one_jit |
| 24, 25 | test_lowering: test_every_static_parameter_lowers_everywhere, test_export_restore_and_run |
| 26, 27, 28 | test_the_automatic_choice_is_the_fastest_measured; the times themselves belong to the benchmarks |
| 29 | test_sparse_weights_save_memory, test_conversion_keeps_no_dense_copy |
| 31 | test_formats_are_equal_on_every_device; test_gpu: test_packed_on_one_device_and_used_on_another |
| 33, 41 | test_training_equals_masked_dense_and_the_pattern_stays_valid; test_linen: test_backward_twenty_steps_equal_masked_dense_training |
| 34, 37 | test_pruning: test_negative_zero_is_a_zero, test_nan_and_inf_are_kept_and_are_the_largest, test_groups_with_too_few_nonzeros |
| 35, 38, A4 | test_ops: test_bias_with_ragged_sizes, test_slices_of_a_larger_buffer, test_no_tail_column_is_dropped |
| 40 | test_what_supports_says_agrees_with_what_runs |
| 42 | test_mask_search_is_feasible_for_large_groups |
| 43 | test_checkpoint: test_round_trip_is_bit_identical_and_self_describing; test_linen: test_checkpoint_says_its_pattern_orbax |
| 45 | test_boolean_masks_of_any_source_give_the_same_logits |
| 46 | test_examples: test_whole_program |
| 47, 48 | test_linen: test_promotes_as_dense_dtype_and_param_dtype_surprise, test_remat_and_gradients_without_integer_leaves |
| A1 | test_pruning: test_groups_run_along_in_features_on_square_matrices |
| A2 | test_products_on_several_devices_at_once |
| A3 | test_gpu: test_every_output_element_is_written; test_native_cpu |
"""  # noqa: E501

import ast
import gc
import math
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import recorded

import jax_nmsparse as nms
from jax_nmsparse import dispatch, native, reference, tuning

PACKAGE = pathlib.Path(nms.__file__).parent


def test_every_group_size_up_to_128_runs(rng):
    sizes = (2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128)
    weights = [oracle.draw(rng, (130, 3), nms.NMPattern(max(1, m // 3), m)) for m in sizes]
    weights += [oracle.draw(rng, (130, 3), nms.NMPattern(m - 1, m)) for m in (2, 33, 128)]
    x = oracle.integers(rng, (2, 130))
    products = jax.jit(lambda x, weights: [x @ w for w in weights])(x, weights)
    for y, w in zip(products, weights, strict=True):
        np.testing.assert_array_equal(y, oracle.spmm(x, w), err_msg=str(w.pattern))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.uint8, jnp.bool_, jnp.float8_e5m2, jnp.int4])
def test_unsupported_dtypes_are_named_while_tracing(dtype):
    dense = jax.ShapeDtypeStruct((8, 8), dtype)
    with pytest.raises(
        TypeError, match=f"prune: .*dtype {jnp.dtype(dtype).name}, supported are float32, .*float8_e4m3fn"
    ):
        jax.eval_shape(lambda d: nms.prune(d, "2:4"), dense)


def test_only_public_registration_is_used():
    """Nothing that JAX calls private or has removed, but for the one name that partitioning a custom call needs."""
    removed = ("jax._src", "jax.lib", "jaxlib.xla_client", "jaxlib.xla_extension")
    found = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        names += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        found += [(path.name, n) for n in names if n and n.startswith(removed)]
    assert found in ([], [("sharding.py", "jax._src")])
    assert "jax.ffi.register_ffi_target" in (PACKAGE / "native.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_automatic_choice_is_the_fastest_measured(platform):
    """At every measured point that some implementation here can run; the table is data."""
    points = tuning.table(platform)
    if not points or not native.MODULES[platform].loaded:
        pytest.skip(f"no measurements or no kernels for {platform}")
    for point in points:
        shape = point.tokens, point.in_features, point.out_features
        call = recorded.call(point.op, point.pattern, point.dtype, point.precision, *shape)
        kernels = {
            k.name
            for k in dispatch.KERNELS
            if k.implementation == platform and point.op in k.ops and not k.rejects(call)
        }
        plain = set()  # kernels around a dense product do the same faster
        if not any(k.by_xla for k in dispatch.KERNELS if k.name in kernels):
            plain = {"dense", "xla"} if point.op == "spmm" else {"xla"}
        times = {name: t for name, t in point.times_us.items() if name in kernels | plain}
        for name in ("dense", "expand", "compress"):  # what happens around the dense product in every call
            if name in kernels | plain and "dense" in point.times_us:
                itemsize = max(2, reference.operand_dtype(call.x_dtype, call.values_dtype).itemsize)
                dense_bytes = point.in_features * point.out_features * itemsize
                expansion = tuning.expansion_us(platform, point.op, name, point.pattern, dense_bytes)
                times[name] = point.times_us["dense"] + expansion
        for other in points:  # no worse than more tokens, nor than several calls of fewer
            same = (other.op, other.dtype, other.precision) == (point.op, point.dtype, point.precision)
            if same and other.is_weight_of(point):
                calls = -(-point.tokens // other.tokens)
                for name in other.times_us.keys() & (kernels - point.times_us.keys()):
                    times[name] = min(times.get(name, math.inf), calls * other.times_us[name])
        if point.tokens < 256:  # x and y are transposed for a single call, at 2 us each
            transposed = {k.name for k in dispatch.KERNELS if k.feature_major}
            times = {name: t + 4 * (name in transposed) for name, t in times.items()}
        chosen = dispatch.choose(call, platform, None, capability="9.0" if platform == "cuda" else None).name
        assert times[chosen] <= 1.05 * min(times.values()), point


@pytest.mark.parametrize(
    ("pattern", "dtype", "ratio"),
    [
        ("2:4", jnp.bfloat16, 1 / 2 + 1 / 16),
        ("8:32", jnp.bfloat16, 1 / 4 + 1 / 16),
        ("3:32", jnp.float32, 3 / 32 + 1 / 32),
        ("16:32", jnp.int8, 1 / 2 + 1 / 8),
        ("8:32/1x128", jnp.bfloat16, 1 / 4 + 1 / 2048),
        ("32:128", jnp.float32, 1 / 4 + 1 / 32),
    ],
)
def test_sparse_weights_save_memory(rng, pattern, dtype, ratio):
    """The density, and one bit for every unit."""
    w = oracle.draw(rng, (512, 256), pattern, dtype)
    assert w.nbytes == ratio * 512 * 256 * jnp.dtype(dtype).itemsize
    assert w.nbytes == w.values.nbytes + w.mask.nbytes


def test_conversion_keeps_no_dense_copy():
    def alive():
        gc.collect()
        return sum(a.nbytes for a in jax.live_arrays())

    before = alive()
    dense = jax.random.normal(jax.random.key(0), (512, 256))
    w = nms.prune(dense, "2:4")
    x = jnp.ones((2, 512))
    nms.grad(lambda w, x: (x @ w).sum())(w, x).values.block_until_ready()
    del dense, x
    assert alive() - before <= w.nbytes + 1024


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
def test_formats_are_equal_on_every_device(rng):
    dense = oracle.normal(rng, (70, 9))
    first, last = (nms.prune(jax.device_put(dense, d), "2:4/1x2") for d in (jax.devices()[0], jax.devices()[-1]))
    oracle.assert_same_bits(first, last)
    assert last.values.devices() == {jax.devices()[-1]}


@pytest.mark.skipif(jax.device_count() < 4, reason="fewer than four devices")
def test_products_on_several_devices_at_once(rng):
    weights = [oracle.draw(rng, (256, 96), "8:32") for _ in range(4)]
    x = oracle.integers(rng, (5, 256))
    placed = [jax.device_put((x, w), d) for w, d in zip(weights, jax.devices(), strict=False)]
    f = jax.jit(lambda x, w: x @ w)
    for _ in range(5):
        for y, w in zip([f(*operands) for operands in placed], weights, strict=True):
            np.testing.assert_array_equal(y, oracle.spmm(x, w))


@pytest.mark.parametrize("pattern", ["2:4", "2:4/2x4"])
def test_training_equals_masked_dense_and_the_pattern_stays_valid(rng, pattern):
    """Twenty steps of gradient descent with momentum on a layer with padding."""
    w = oracle.draw(rng, (70, 10), pattern, fill=oracle.normal)
    x, target = oracle.normal(rng, (16, 70)), oracle.normal(rng, (16, 10))
    mask = np.asarray(w.keep(), np.float32)

    def loss(product):
        return lambda w: jnp.mean((jnp.tanh(product(w)) - target) ** 2)

    sparse = nms.value_and_grad(loss(lambda w: x @ w))
    dense = jax.value_and_grad(loss(lambda d: x @ (d * mask)))

    @jax.jit
    def step(w, momentum, d, velocity):
        loss_w, dw = sparse(w)
        loss_d, dd = dense(d)
        momentum, velocity = 0.9 * momentum + dw.values, 0.9 * velocity + dd
        return w.with_values(w.values - 0.5 * momentum), momentum, d - 0.5 * velocity, velocity, loss_w, loss_d

    state = (w, jnp.zeros_like(w.values), jnp.asarray(oracle.dense(w), jnp.float32), jnp.zeros((70, 10)))
    losses = []
    for _ in range(20):
        *state, loss_w, loss_d = step(*state)
        losses.append((float(loss_w), float(loss_d)))
    losses = np.array(losses)
    np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=1e-4)
    assert losses[-1, 0] < 0.8 * losses[0, 0]
    trained = state[0].validate()
    np.testing.assert_array_equal(trained.mask, w.mask)
    packed = nms.NMSparse.fromdense(trained.todense(), pattern)
    np.testing.assert_array_equal(packed.todense(), trained.todense())


@pytest.mark.parametrize("implementation", dispatch.IMPLEMENTATIONS)
def test_what_supports_says_agrees_with_what_runs(rng, implementation):
    """For every pair of dtypes and operation: supports is true exactly where the call compiles and runs, or lowers."""
    platform = implementation if implementation in native.MODULES else "cpu"
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn)
    seen = set()
    for values_dtype in dtypes:
        w = oracle.draw(rng, (32, 4), "2:4", values_dtype)
        for x_dtype in dtypes:
            if (x_dtype, values_dtype) == (jnp.int8, jnp.float8_e4m3fn):
                continue
            x = oracle.integers(rng, (2, 32), x_dtype)
            f = jax.jit(lambda x, w: nms.spmm(x, w, implementation=implementation))
            supported = nms.supports(x, w, implementation=implementation)
            seen.add(supported)
            if not supported:
                with pytest.raises(NotImplementedError, match=f"implementation='{implementation}'"):
                    f.trace(x, w)
            elif platform == "cuda":
                assert "nms_cuda_spmm" in f.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
            else:
                oracle.assert_close(f(x, w), oracle.spmm(x, w), depth=32)
    loaded = implementation not in native.MODULES or native.MODULES[implementation].loaded
    assert (True in seen) == loaded


def test_explain_names_what_is_compiled(rng):
    w, x = oracle.draw(rng, (64, 8), "2:4"), oracle.integers(rng, (2, 64))
    for implementation in oracle.IMPLEMENTATIONS:
        explanation = nms.explain(x, w, implementation=implementation, device="cpu")
        text = jax.jit(lambda x, w, i=implementation: nms.spmm(x, w, implementation=i)).lower(x, w).as_text()
        assert ("nms_cpu_spmm" in text) == (explanation.choice.implementation == "cpu")
        assert explanation.choice.name in str(explanation)
    assert (explanation.values_bytes, explanation.mask_bytes) == (w.values.nbytes, w.mask.nbytes)
    assert explanation.kept_flops * 2 == explanation.dense_flops == 2 * 2 * 64 * 8


def test_mask_search_is_feasible_for_large_groups():
    """A group of 32 costs a small multiple of a group of 4; the benchmark prunes 8192 x 8192."""
    dense = jax.random.normal(jax.random.key(0), (1024, 1024))
    seconds = {}
    for pattern in ("2:4", "16:32"):
        nms.prune(dense, pattern).mask.block_until_ready()
        start = time.perf_counter()
        w = nms.prune(dense, pattern)
        w.mask.block_until_ready()
        seconds[pattern] = time.perf_counter() - start
        assert oracle.kept(w).sum() == 1024 * 1024 // 2
    assert seconds["16:32"] < 5


def test_boolean_masks_of_any_source_give_the_same_logits(rng):
    keep = np.asarray(oracle.draw(rng, (64, 12), "2:4").keep())
    dense, x = oracle.integers(rng, (64, 12)), oracle.integers(rng, (3, 64))
    for mask in (keep, jnp.asarray(keep), keep.astype(np.int32)):
        w = nms.prune(dense, "2:4", scores=mask)
        np.testing.assert_array_equal(x @ w, x @ (dense * keep))
    np.testing.assert_array_equal(x @ nms.NMSparse.fromdense(jnp.asarray(dense * keep), "2:4"), x @ (dense * keep))
