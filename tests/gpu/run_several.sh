#!/bin/sh
# Tests and measurements on all GPUs of this host, each part under a time limit. NVLink multicast
# stays off, NCCL's too. On one GPU runs what ranks that share it can; the rest is said not to.
#
#   tests/gpu/run_several.sh [DIR [LIBRARY]]
#
#   DIR, LIBRARY: as for run.sh.
#   PARTS: some of them only, e.g. PARTS="own bench". All: shared own groups others faults bench.
#   TOKENS: of the measurements.
#   JAX_LATENT_TAIL_DIGESTS: a file of digests of results, read and added to. Kept from a machine
#       with one GPU, it shows whether several give the same bits; the GPUs have to be of one kind.
set -u
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
parts=${PARTS:-shared own groups others faults bench}
[ $# -gt 0 ] && JAX_LATENT_TAIL_CUBINS=$(cd "$1" && pwd) && export JAX_LATENT_TAIL_CUBINS
[ $# -gt 1 ] && JAX_LATENT_TAIL_LIBRARY=$(realpath "$2") && export JAX_LATENT_TAIL_LIBRARY
export JAX_LATENT_TAIL_REQUIRE_GPU=1 PYTHONUNBUFFERED=1
export JAX_LATENT_TAIL_MULTICAST=0 NCCL_NVLS_ENABLE=0
export PYTHONPATH="${KERNELS_ROOT:-$root}:$here:$root/tests"
unset CUDA_DEVICE_MAX_CONNECTIONS
failed=0
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
export JAX_LATENT_TAIL_DIGESTS="${JAX_LATENT_TAIL_DIGESTS:-$results/digests}"
count=$("$python" -c "import several; print(several.visible_gpus())") || exit 1
echo "== $count GPUs"
nvidia-smi topo -m || true

wanted() {
    case " $parts " in *" $1 "*) echo "== $1" ;; *) return 1 ;; esac
}

tests() {
    timeout -k 5 580 "$python" -m pytest -q -p no:cacheprovider --confcutdir="$here" \
        --rootdir="$here" -c /dev/null --durations=8 -rs "$@" || failed=1
}

measure() {
    # shellcheck disable=SC2086
    timeout -k 5 580 "$python" "$here/several_bench.py" ${TOKENS:+--tokens $TOKENS} "$@" || failed=1
}

several=$here/test_gpu_several.py
# Every part compares with the digests of those before.
wanted shared && tests "$several" -k "share_a_gpu and not pass and not results"
wanted own && tests "$several" -k "test_one_rank or test_ranks_with_gpus or test_results"
wanted groups && tests "$several" -k "test_groups_with_gpus or another_order"
wanted others && tests "$several" -k "see_their_own or a_gpu_pass or missing_call or example"
wanted faults && tests "$here/test_gpu_several_faults.py"
if wanted bench; then
    for n in 2 4 8; do
        if [ "$n" -le "$count" ]; then
            measure --processes 1 --devices "$n"
            measure --processes "$n" --devices 1
        else
            echo "not run: the measurement of $n GPUs, $count visible"
        fi
    done
    [ "$count" -eq 1 ] && measure --share --processes 2 --rounds 10
fi
exit $failed
