#!/usr/bin/env bash
# The CUDA kernels under compute-sanitizer, on a machine with a GPU: builds cuda_check in BUILD (default build/gpu, which
# `benchmarks/gpu.sh` configures) and runs its small set with each tool. racecheck is some 50 times slower than the
# others, so it takes a sample.
#
#   bash tests/native/sanitize_cuda.sh [cuda_check arguments, such as --kernel simple]
set -euo pipefail
cd "$(dirname "$0")/../.."
BUILD=${BUILD:-build/gpu}
cmake --build "$BUILD" --target cuda_check
check=$(find "$BUILD" -name cuda_check -type f | head -n 1)
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
for tool in memcheck initcheck synccheck; do
  echo "== $tool"
  "$sanitizer" --tool "$tool" --error-exitcode 9 "$check" --quick "$@"
done
echo "== racecheck"
"$sanitizer" --tool racecheck --error-exitcode 9 "$check" --quick --every 9 "$@"
