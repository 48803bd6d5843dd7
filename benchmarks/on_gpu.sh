#!/usr/bin/env bash
# Everything that needs a GPU, in one call whose tables resume: CUDA tests, the first command's time, condensation, DP steps,
# a FedDM round at the paper's CIFAR-10 setting, the Fashion-MNIST table, bf16 against fp32, the DP table, and FedDM on MNIST at the
# paper's full setting.   usage: bash benchmarks/on_gpu.sh   (FEDSYNTH_DATA: folder with FashionMNIST; without it the table is left out)
# Needs torch with CUDA and this package's dependencies; results go to benchmarks/results/, logs to $OUT or there too.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
out=${OUT:-benchmarks/results}
failed=0

step() { # name, command ...
    printf '\n== %s\n' "$1"
    "${@:2}" 2>&1 | tee "$out/gpu-${1// /-}.log" || { failed=1; printf '== %s failed\n' "$1"; }
}

python3 -c 'import torch; assert torch.cuda.is_available(); print(torch.__version__, torch.cuda.get_device_name())' || exit 2
step "cuda tests" python3 -m pytest -q -m cuda tests
step "first command" bash -c 'time python3 -c "from fedsynth.cli.app import main; main()" train --method feddm --dp-sigma 3 --output "$(mktemp -d)"'
step "condense" python3 benchmarks/condense.py --device cuda --clients 1 10 --steps 20
step "dp step" python3 benchmarks/dp_step.py --device cuda
step "a round of CIFAR-10's size" python3 benchmarks/condense.py --device cuda --cases cifar10 --clients 10 --steps 1000 --repeats 1 --no-reference
if [ -n "${FEDSYNTH_DATA:-}" ]; then
    step "fashion table" python3 benchmarks/run.py fashion_table --device cuda
    step "precision" python3 benchmarks/run.py precision --device cuda
    step "dp utility" python3 benchmarks/run.py dp_utility --device cuda
    # FedDM's own setting (its Sec. 4.1): ConvNet-128, 20 rounds, 1000 iterations, Dir(0.5), 10 clients; the run folder has the curve
    step "paper setting" python3 -c "from fedsynth.cli.app import main; main()" train --method feddm --dataset mnist --alpha 0.5 \
        --clients 10 --rounds 20 --precision bf16 --device cuda --output "$out/paper"
fi
cp benchmarks/results/*.jsonl "$out"/ 2>/dev/null
exit "$failed"
