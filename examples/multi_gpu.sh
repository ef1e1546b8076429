#!/usr/bin/env bash
# How do I train on several GPUs, on one machine or on several under Slurm?
#
#     examples/multi_gpu.sh                          # all GPUs of this machine, one process
#     sbatch --nodes 4 --gpus-per-node 8 examples/multi_gpu.sh   # a process per GPU; they find each other through Slurm
#
# The plan is made for the same devices first, also on a machine without them. More arguments go to the training loop.
# DRY_RUN=1 prints the commands instead.
set -euo pipefail

NODES=${SLURM_JOB_NUM_NODES:-1}
GPUS=${GPUS:-8}
TARGET=${TARGET:-h100:${NODES}x$GPUS}
MODEL=${MODEL:-llama3_8b}
BATCH=${BATCH:-$((NODES * GPUS))}
SEQ=${SEQ:-2048}
STEPS=${STEPS:-1000}
# On storage that all nodes share.
RUN=${RUN:-runs/$MODEL}
PLAN=${PLAN:-plan.toml}
# Such as 70GiB; without one, all memory of the target.
BUDGET=${BUDGET:-}

run() { if [[ -n ${DRY_RUN:-} ]]; then printf '%q ' "$@"; echo; else "$@"; fi; }

run remat-kit plan "models:$MODEL" --set "batch=$BATCH" --set "seq=$SEQ" --target "$TARGET" ${BUDGET:+--budget "$BUDGET"} --out "$PLAN"
train=(python -m train --model "$MODEL" --batch "$BATCH" --seq "$SEQ" --steps "$STEPS" --plan "$PLAN" --dir "$RUN" "$@")
if ((NODES > 1)); then
    # JAX gives a process under Slurm the one GPU of its local number.
    run srun --ntasks $((NODES * GPUS)) --ntasks-per-node "$GPUS" "${train[@]}" --coordinator auto
else
    run "${train[@]}"
fi
