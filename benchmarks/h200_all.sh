#!/usr/bin/env bash
# Everything that is measured on one H200, part by part; each part fits in ten minutes on a bare machine with torch,
# Triton, transformers and this project's dependencies.     benchmarks/h200_all.sh OUT PART...
#
#   check    kernels, gradients, families, faults: `make test-gpu`, its files side by side     2 minutes
#   small    fp8 KV against bf16, swap against recompute, two tenants, rows of uneven lengths,
#            the doctor's report                                                               6 minutes
#   served   short-short over HTTP with 1, 2 and 4 front ends                                  3 minutes
#   table    every workload three times, the batch curve, the host's time in a step            8 minutes
#   peers    the same requests through transformers                                            3 minutes
#   ablate   the three combinations, the batching generations, the four groups served          6 minutes
#
# COMMIT names what is measured where the checkout has no history. What failed is listed in OUT/failed.
set -u
out=$1
shift
mkdir -p "$out" && rm -f "$out/failed"
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
commit=${COMMIT:-$(git rev-parse --short HEAD)}

timed() { # name, command...: its output in OUT/name.log, its end on the screen
    local name=$1 began=$SECONDS
    shift
    local how=ok
    "$@" >"$out/$name.log" 2>&1 || how="FAILED ($?)"
    [ "$how" = ok ] || echo "$name" >>"$out/failed"
    echo "== $name: $how, $((SECONDS - began)) s"
    tail -n "${tail_lines:-3}" "$out/$name.log"
}

gpu_tests() { python3 -m pytest -q -m gpu -p no:cacheprovider "$@"; }

check() {
    tail_lines=12
    timed test-kernels gpu_tests tests/kernels/test_triton_gpu.py &
    timed test-gradient gpu_tests tests/kernels/test_backward.py &
    timed test-families gpu_tests tests/equality/test_gpu.py -k "family or rotary" &
    timed test-engine gpu_tests tests/equality/test_gpu.py -k "not family and not rotary" &
    wait
    timed test-ceilings gpu_tests tests/perf/test_ceilings.py
}

small() {
    tail_lines=20
    timed fp8 python3 benchmarks/fp8_kv_gpu.py "$out"
    timed swap python3 benchmarks/h200_swap.py "$out"
    timed ragged python3 benchmarks/ragged_gpu.py "$out"
    timed fair python3 benchmarks/h200_fair.py "$out"
    timed doctor python3 -m steelyard.cli.main doctor
}

served() {
    tail_lines=4
    timed served python3 benchmarks/h200_served.py "$out" --fronts 1,2,4
}

table() {
    tail_lines=60
    timed table python3 benchmarks/h200.py "$out" --parts llama3-8b,qwen3-0.6b --runs 3 --host --commit "$commit"
}

peers() {
    tail_lines=20
    timed peers-small python3 benchmarks/h200_transformers.py "$out" --model qwen3-0.6b --longest 512
    timed peers-large python3 benchmarks/h200_transformers.py "$out" --model llama3-8b
}

ablate() {
    tail_lines=3
    timed combinations python3 benchmarks/h200_ablate.py "$out" --part combinations
    timed batching python3 benchmarks/h200_ablate.py "$out" --part batching
    timed full python3 benchmarks/h200_ablate.py "$out" --part full --name llama3-8b
}

for part in "$@"; do
    case $part in
    check | small | served | table | peers | ablate) "$part" ;;
    *) echo "no part $part: choose of check small served table peers ablate" && exit 2 ;;
    esac
done
[ ! -s "$out/failed" ]
