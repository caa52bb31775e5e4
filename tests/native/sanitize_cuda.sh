#!/usr/bin/env bash
# The CUDA kernels under compute-sanitizer, on a machine with a GPU: builds cuda_check in BUILD (default build/gpu, which
# `benchmarks/gpu.sh` configures) and runs its small set with each tool, all tools at the same time. racecheck is some 50
# times slower than the others, so it takes a sample.
#
#   bash tests/native/sanitize_cuda.sh [cuda_check arguments, such as --kernel simple]
set -euo pipefail
cd "$(dirname "$0")/../.."
BUILD=${BUILD:-build/gpu}
cmake --build "$BUILD" --target cuda_check
check=$(find "$BUILD" -name cuda_check -type f | head -n 1)
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
declare -A jobs
for tool in memcheck initcheck synccheck racecheck; do
  sample=()
  if [ "$tool" = racecheck ]; then sample=(--every 9); fi
  "$sanitizer" --tool "$tool" --error-exitcode 9 "$check" --quick "${sample[@]}" "$@" >"$logs/$tool" 2>&1 &
  jobs[$tool]=$!
done
status=0
for tool in "${!jobs[@]}"; do
  wait "${jobs[$tool]}" || status=$?
  echo "== $tool"
  cat "$logs/$tool"
done
exit $status
