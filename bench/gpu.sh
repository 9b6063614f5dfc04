#!/usr/bin/env bash
# Everything that needs a GPU, in one call and without a download: the tests of tests/gpu, then `python -m bench` on one
# process and on as many ranks as there are GPUs: NCCL 2.28 refuses two ranks on one GPU. Without a GPU it does the same
# on the CPU at a tiny size.
#
#   bench/gpu.sh [OUT [NAME...]]   results go to OUT (default: runs/gpu): one JSON and one log for each measurement;
#                                  with names, such as tests and memory, these alone
#
# PYTHON names the interpreter (default: .venv/bin/python if it is there, else python3); fsharding has to be importable.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${1:-runs/gpu}" only=" ${*:2} "
mkdir -p "$out"
python="${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv | tee "$out/machine.txt"
    preset=bench-1b dtype=bfloat16 batch=4 length=2048 rounds=10 graphs=1
    gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
else
    echo "no GPU: the same on the CPU, at a tiny size" | tee "$out/machine.txt"
    preset=tiny dtype=float32 batch=1 length=16 rounds=2 graphs= gpus=2
fi

failed=0
wanted() { [[ -z "${only// }" || "$only" == *" $1 "* ]]; }
measure() { # name, then the command
    local name="$1"; shift
    wanted "$name" || return 0
    echo "== $name: $*"
    if timeout 540 "$@" >"$out/$name.json" 2>"$out/$name.log"; then
        "$python" -m bench.show_rows "$out/$name.json"
    else
        echo "   failed with status $?; the end of $out/$name.log:"; tail -n 5 "$out/$name.log" | sed 's/^/   /'; failed=1
    fi
}
step() { # ranks, then options
    local ranks="$1"; shift
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m bench step --json \
        --preset "$preset" --dtype "$dtype" --batch "$batch" --seq-len "$length" --rounds "$rounds" "$@"
}
export -f step; export python preset dtype batch length rounds

if wanted tests; then
    echo "== tests/gpu"
    timeout 540 "$python" -m pytest -q -p no:cacheprovider -m '' tests/gpu 2>&1 | tee "$out/tests.log" | tail -n 40
    [[ ${PIPESTATUS[0]} -eq 0 ]] || failed=1
fi

# Calls fit a GPU of 80 GB. A contender of bench-1b keeps 11 GiB (weights and moments), DDP 15; the one whose turn it is
# takes 15 more. A graph keeps its 17 GiB, and while it is captured there are two states: with three contenders beside it
# that would be 87 GiB. So each call has three, and the graph has fsdp2 alone.
few="compute-only fsdp2 fsharding-zero3"
measure one-rank bash -c "step 1 --contenders $few"
if [[ -n "$graphs" ]]; then
    measure one-rank-captured bash -c "step 1 --contenders fsdp2 fsharding-zero3-captured"
    # a step so short that it waits for its host
    preset=bench-34m batch=1 length=128 measure captured-short bash -c "step 1 --contenders $few fsharding-zero3-captured"
fi
measure one-rank-compiled bash -c "step 1 --compiled --contenders $few"
for ranks in 2 4 8; do
    if (( ranks <= gpus )); then
        measure "ranks-$ranks" bash -c "step $ranks --contenders $few"
        measure "ranks-$ranks-replicated" bash -c "step $ranks --contenders ddp fsharding-zero0 fsharding-zero1 fsharding-zero2"
    fi
done
measure memory "$python" -m torch.distributed.run --standalone --nproc-per-node 1 -m bench memory --json \
    --preset "$preset" --dtype "$dtype" --batch "$batch" --seq-len "$length"
measure overhead "$python" -m torch.distributed.run --standalone --nproc-per-node 1 -m bench overhead --json
measure optimizer "$python" -m bench optimizer --json --preset "$preset"
exit "$failed"
