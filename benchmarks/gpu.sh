#!/usr/bin/env bash
# Everything that needs a GPU, in one command: build, GPU tests, compute-sanitizer, benchmarks.
#
#   make gpu                             in the project's virtual environment, with the CUDA plugin of JAX
#   PYTHON=python3 bash benchmarks/gpu.sh   with a Python that has jax (CUDA), flax, pytest, pytest-xdist, hypothesis, nanobind,
#                                        cmake and ninja already; nothing is installed
#
#   STEPS="build test sanitize bench"    which steps to run
#   SUITES="decode prefill train paper model"  which suites to measure
#   OUT=DIR                              where results and logs go (default: benchmarks/results/<device>/)
set -euo pipefail
cd "$(dirname "$0")/.."
STEPS=${STEPS:-build test sanitize bench}
SUITES=${SUITES:-decode prefill train paper model}
if [ -z "${PYTHON:-}" ]; then
  make .venv/installed
  .venv/bin/python -m pip install --quiet "jax[cuda13]==$(.venv/bin/python -c 'import jax; print(jax.__version__)')"
  PYTHON=$PWD/.venv/bin/python
fi
# The modules are built in place and imported from here. JAX must not take all memory: PyTorch, a peer, needs some.
export PYTHONPATH=$PWD XLA_PYTHON_CLIENT_PREALLOCATE=false

wants() { [[ " $STEPS " == *" $1 "* ]]; }

if wants build; then
  cmake -S . -B build/gpu -G Ninja -DPython_EXECUTABLE="$("$PYTHON" -c 'import sys; print(sys.executable)')" \
    -DJAX_NMSPARSE_CUDA=ON -DJAX_NMSPARSE_CUDA_LINEINFO=ON -DCMAKE_CUDA_FLAGS=--threads=2 >build-gpu.log ||
    { cat build-gpu.log; exit 1; }
  targets=(all)
  if wants sanitize; then targets+=(cuda_check); fi
  cmake --build build/gpu --target "${targets[@]}" >>build-gpu.log || { tail -n 50 build-gpu.log; exit 1; }
  cmake --install build/gpu --prefix . >>build-gpu.log
  rm build-gpu.log
fi
if wants test; then
  # Most of the time goes into compiling, so the tests share the GPU; pytest-benchmark, if it is installed, objects.
  "$PYTHON" -m pytest -m gpu -q -n "${WORKERS:-8}" -p no:cacheprovider -p no:benchmark tests
fi
if wants sanitize; then
  bash tests/native/sanitize_cuda.sh
fi
if wants bench; then
  for suite in $SUITES; do
    out=${OUT:+--out "$OUT/$suite.json"}
    command="benchmarks.run --suite $suite --peers"
    if [ "$suite" = model ]; then command=benchmarks.model; fi
    # shellcheck disable=SC2086
    "$PYTHON" -m $command $out
  done
fi
