"""Export for this machine and another, serialised executables, and the persistent compilation cache."""

import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import export
from jax.experimental import serialize_executable
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_nmsparse as nms
from jax_nmsparse import aot, native

needs_cpu = pytest.mark.skipif(not native.MODULES["cpu"].loaded, reason="the native module _cpu is not built")


def _loss(w, x):
    return jnp.sum(nms.spmm(x, w, activation="relu") ** 2)


@needs_cpu
def test_export_here(rng):
    w, x = oracle.draw(rng, (64, 6), "2:4"), oracle.integers(rng, (3, 64))
    exported = aot.export(jax.jit(nms.grad(_loss)))(w, x)
    assert aot.targets(exported) == {"nms_cpu_spmm", "nms_cpu_sddmm"}
    restored = export.deserialize(exported.serialize())
    np.testing.assert_array_equal(jax.tree.leaves(restored.call(w, x))[0], nms.grad(_loss)(w, x).values)


@pytest.mark.parametrize(
    ("tokens", "pattern", "capability", "kernel"),
    [
        (1, "16:32", None, "ew_spmv"),
        (8, "2:4", None, "ew_sparse24"),
        (4096, "8:32/1x128", "9.0", "block_wgmma"),
        (16, "8:32/1x128", None, "block_mma"),
    ],
)
def test_export_for_cuda_from_a_machine_without_it(tokens, pattern, capability, kernel):
    """Our kernel of that platform, and none of this one's; not plain JAX, whether or not _cuda is built here."""
    w = jax.eval_shape(lambda: nms.prune(jnp.ones((4096, 4096), jnp.bfloat16), pattern))
    x = jax.ShapeDtypeStruct((tokens, 4096), jnp.bfloat16)
    exported = aot.export(jax.jit(nms.spmm), platforms=["cuda"], cuda_capability=capability)(x, w)
    assert aot.targets(exported) == {"nms_cuda_spmm"}
    assert f'kernel = "{kernel}"' in exported.mlir_module()
    assert exported.platforms == ("cuda",)
    export.deserialize(exported.serialize())


@needs_cpu
def test_export_for_several_platforms(rng):
    w, x = oracle.draw(rng, (64, 6), "2:4"), oracle.integers(rng, (1, 64))
    exported = aot.export(jax.jit(nms.spmm), platforms=["cpu", "cuda", "tpu"])(x, w)
    assert aot.targets(exported) == {"nms_cpu_spmm", "nms_cuda_spmm"}
    np.testing.assert_array_equal(export.deserialize(exported.serialize()).call(x, w), oracle.spmm(x, w))


def test_a_named_implementation_without_its_module_is_still_refused_here():
    w, x = nms.prune(jnp.ones((64, 6)), "2:4"), jnp.ones((1, 64))
    if not native.MODULES["cuda"].loaded:
        with pytest.raises(NotImplementedError, match="_cuda was not built"):
            nms.spmm(x, w, implementation="cuda")
    f = jax.jit(lambda x, w: nms.spmm(x, w, implementation="cuda"))
    assert aot.targets(aot.export(f, platforms=["cuda"])(x, w)) == {"nms_cuda_spmm"}


@needs_cpu
@pytest.mark.skipif(jax.device_count() < 8, reason="fewer than 8 devices")
def test_export_of_a_sharded_product(rng):
    """Split by shard_map it is exported; what jit splits by a callback of this process is refused, with the remedy."""
    mesh = jax.make_mesh((8,), ("d",), devices=jax.devices()[:8], axis_types=(AxisType.Auto,))
    w, x = oracle.draw(rng, (64, 16), "2:4"), oracle.integers(rng, (8, 64))
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("d")))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(PartitionSpec("d"), PartitionSpec()), out_specs=PartitionSpec("d"))
    def f(x, w):
        return nms.spmm(x, w)

    exported = export.deserialize(aot.export(f)(placed, w).serialize())
    assert (exported.nr_devices, aot.targets(exported)) == (8, {"nms_cpu_spmm"})
    replicated = jax.device_put(w, NamedSharding(mesh, PartitionSpec()))
    np.testing.assert_array_equal(jax.jit(exported.call)(placed, replicated), oracle.spmm(x, w))
    with pytest.raises(NotImplementedError, match="export: a product is spread over several devices by jit.*shard_map"):
        aot.export(jax.jit(nms.spmm))(placed, replicated)


@needs_cpu
def test_serialised_executable(rng):
    """Compiled once, pickled, loaded again without compiling."""
    w, x = oracle.draw(rng, (64, 6), "2:4"), oracle.integers(rng, (3, 64))
    compiled = jax.jit(nms.spmm).lower(x, w).compile()
    payload, in_tree, out_tree = serialize_executable.serialize(compiled)
    stored = pickle.dumps(payload)
    loaded = serialize_executable.deserialize_and_load(
        pickle.loads(stored), in_tree, out_tree, execution_devices=jax.devices()[:1]
    )
    np.testing.assert_array_equal(loaded(x, w), oracle.spmm(x, w))


_CACHED = """
import jax, jax.numpy as jnp, numpy as np, sys
from jax._src import monitoring
hits = []
monitoring.register_event_listener(lambda name, **_: hits.append(name))
import jax_nmsparse as nms
from jax.sharding import NamedSharding, PartitionSpec as P
from jax_nmsparse import aot
aot.cache_programs(sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
w = jax.eval_shape(lambda: nms.prune(jnp.ones((64, 8)), "2:4"))
rng = np.random.default_rng(0)
put = lambda a, *s: jax.device_put(a, NamedSharding(mesh, P(*s)))
w = w._replace(values=put(np.ones(w.values.shape, np.float32)), mask=put(np.full(w.mask.shape, 0x33333333, np.uint32)))
x = put(np.full((4, 64), -1, np.float32), "d")
linear, relu = (jax.jit(lambda x, w, a=a: nms.spmm(x, w, activation=a))(x, w) for a in (None, "relu"))
count = lambda event: sum(event in h for h in hits)
print(float(linear.sum()), float(relu.sum()), count("cache_hits"), count("cache_misses"))
"""


def test_persistent_cache_hits_across_processes(tmp_path):
    """Also for a partitioned product, whose callback JAX would otherwise write into the key by its address."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}

    def run():
        command = [sys.executable, "-W", "error", "-c", _CACHED, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        linear, relu, hits, misses = done.stdout.split()
        # Two programs that differ in nothing but what their callbacks compute.
        assert (float(linear), float(relu)) == (-4 * 32 * 8, 0)
        return int(hits), int(misses)

    first, second = run(), run()
    assert first[0] == 0
    assert first[1] > 0
    assert second == (first[1], 0)
