#!/usr/bin/env bash
# Runs what needs a GPU: the CUDA tests, speed, and then rows of published tables, many at once.
# Repeat the command to resume the rows.
#
#   usage: FEDSYNTH_DATA=DIR bash benchmarks/on_gpu.sh [MINUTES]   (of the rows, default 20)
#
# Needs torch with CUDA and this package's dependencies. Logs, rows and unfinished runs go to $OUT
# (default: on_gpu/), rows of speed to benchmarks/results/.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
out=${OUT:-on_gpu}
minutes=${1:-20}
failed=0
mkdir -p "$out"

step() { # NAME COMMAND...
    printf '\n== %s\n' "$1"
    "${@:2}" > "$out/$1.log" 2>&1 || { failed=1; printf 'failed\n'; }
    tail -n 5 "$out/$1.log"
}

rows() { # NAME OPTIONS...: one process, with a folder of its own
    python3 -c "from fedsynth.cli.app import main; main()" reproduce "${@:2}" \
        --time-budget "$minutes" --memory-gb 6 --output "$out/$1" > "$out/$1.log" 2>&1
}

python3 -c 'import torch; assert torch.cuda.is_available(); print(torch.cuda.get_device_name())' \
    || exit 2
step tests python3 -m pytest -q -n 8 --dist load -m "cuda and not slow" tests
step condense python3 benchmarks/condense.py --device cuda --clients 1 10 --steps 10 --repeats 3
step dp-step python3 benchmarks/dp_step.py --device cuda
[ -n "${FEDSYNTH_DATA:-}" ] || exit "$failed"

# Without this service, kernels of different processes do not run at the same time.
export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
export CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
nvidia-cuda-mps-control -d || unset CUDA_MPS_PIPE_DIRECTORY
for method in feddm fedaf; do
    rows "$method" fedaf:table1 --dataset fashion_mnist --alpha 0.02 --method "$method" \
        --precision bf16 &
done
rows table2 feddm:table2 --dataset mnist --alpha 0.1 --method feddm --precision bf16 &
for data in mnist fashion_mnist; do
    rows "$data-half" fedhydra:table1 --dataset "$data" --alpha 0.5 &
    rows "$data-two-classes" fedhydra:table2 --dataset "$data" &
done
rows office fedfa:images --dataset office_caltech &
wait
[ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ] || echo quit | nvidia-cuda-mps-control
tail -n 3 "$out"/*.log
exit "$failed"
