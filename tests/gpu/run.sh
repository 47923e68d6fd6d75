#!/bin/sh
# All GPU tests, each under a time limit. Needs one GPU that nothing else uses.
#
#   tests/gpu/run.sh [DIR [LIBRARY]]
#
#   DIR: a folder of cubins, where nvidia-cutlass-dsl is not installed; made with:
#       python tests/gpu/cubins.py DIR
#   LIBRARY: the native library, where the package is not installed; made with:
#       cmake -S ffi -B build/ffi && cmake --build build/ffi
set -u
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
[ $# -gt 0 ] && JAX_LATENT_TAIL_CUBINS=$(cd "$1" && pwd) && export JAX_LATENT_TAIL_CUBINS
[ $# -gt 1 ] && JAX_LATENT_TAIL_LIBRARY=$(realpath "$2") && export JAX_LATENT_TAIL_LIBRARY
export JAX_LATENT_TAIL_REQUIRE_GPU=1 PYTHONUNBUFFERED=1
export PYTHONPATH="${KERNELS_ROOT:-$root}:$here:$root/tests"
unset CUDA_DEVICE_MAX_CONNECTIONS
failed=0

tests() {
    limit=$1
    shift
    # Only this folder's conftest: these tests need nothing of the JAX side.
    timeout -k 5 "$limit" "$python" -m pytest -q -p no:cacheprovider --confcutdir="$here" \
        --rootdir="$here" -c /dev/null --durations=8 "$@" || failed=1
}

tests 240 "$here/test_gpu_failure.py"
tests 300 "$here/test_gpu_streams.py"
tests 240 "$here/test_gpu_processes.py"
tests 900 "$here/test_gpu_jax.py"
tests 600 -rx "$here/test_gpu_faults.py"
timeout -k 5 300 "$python" "$here/jax_soak.py" --calls 100000 --timeout 280 || failed=1
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        echo "== $tool"
        timeout -k 5 120 compute-sanitizer --tool "$tool" --error-exitcode 9 \
            "$python" "$here/kernel_sanitize.py" || failed=1
    done
else
    echo "compute-sanitizer is not on the PATH: not run"
    failed=1
fi
exit $failed
