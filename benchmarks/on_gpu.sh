#!/usr/bin/env bash
# Runs what needs a GPU: the CUDA tests, speed, and then rows of published tables, many at once.
# Repeat the command to resume.
#
#   usage: FEDSYNTH_DATA=DIR bash benchmarks/on_gpu.sh [MINUTES]   (of the rows, default 20)
#
# Needs torch with CUDA and this package's dependencies. Logs, rows and unfinished runs go to $OUT
# (default: on_gpu/), rows of speed to benchmarks/results/. Rows' seconds are those of shared time.
set -uo pipefail
FEDSYNTH_DATA=${FEDSYNTH_DATA:+$(realpath "$FEDSYNTH_DATA")}
out=$(realpath -m "${OUT:-on_gpu}")
minutes=${1:-20}
failed=0
mkdir -p "$out"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export FEDSYNTH_DATA PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1

step() { # NAME COMMAND...: once
    [ ! -e "$out/$1.done" ] || return
    printf '\n== %s\n' "$1"
    if "${@:2}" > "$out/$1.log" 2>&1; then touch "$out/$1.done"; else failed=1; fi
    tail -n 5 "$out/$1.log"
}

rows() { # NAME OPTIONS...: one process in the background, with a folder of its own
    python3 -c "from fedsynth.cli.app import main; main()" reproduce "${@:2}" \
        --time-budget "$minutes" --memory-gb 6 --output "$out/$1" > "$out/$1.log" 2>&1 &
    processes+=("$!")
}

uses_gpu() {
    timeout 60 python3 -c 'import torch; print(torch.ones(2, device="cuda"))' > /dev/null
}

stop() {
    kill "${processes[@]}" 2> /dev/null
    [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ] || echo quit | nvidia-cuda-mps-control
    unset CUDA_MPS_PIPE_DIRECTORY
}

processes=()
uses_gpu || exit 2
step tests python3 -m pytest -q -n 8 --dist load --continue-on-collection-errors \
    -m "cuda and not slow" tests
step condense python3 benchmarks/condense.py --device cuda --clients 1 10 --steps 10 --repeats 3
step dp-step python3 benchmarks/dp_step.py --device cuda
[ -n "$FEDSYNTH_DATA" ] || exit "$failed"

trap 'stop; exit 130' INT TERM
# Without this service, kernels of different processes do not run at the same time.
export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
export CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
nvidia-cuda-mps-control -d || unset CUDA_MPS_PIPE_DIRECTORY
uses_gpu || stop

for method in feddm fedaf; do
    rows "$method" fedaf:table1 --dataset fashion_mnist --alpha 0.02 --method "$method" \
        --precision bf16
done
rows table2 feddm:table2 --dataset mnist --alpha 0.1 --method feddm --precision bf16
for data in mnist fashion_mnist; do
    rows "$data-half" fedhydra:table1 --dataset "$data" --alpha 0.5
    rows "$data-two-classes" fedhydra:table2 --dataset "$data"
done
for process in "${processes[@]}"; do
    wait "$process" || failed=1
done
stop
tail -n 3 "$out"/*.log
exit "$failed"
