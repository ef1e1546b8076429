#!/usr/bin/env bash
# How do I train on a TPU slice of several hosts? Plan on this machine, then start one process on every host of the slice:
#
#     TPU=my-slice ZONE=us-west4-a examples/multi_host_tpu.sh
#
# TARGET is the slice as remat-kit writes it (v5e:4x4 = 16 chips); the hosts need a checkout in ~/remat-kit with the extras tpu
# and train. Processes find each other by the TPU's own metadata. More arguments go to the training loop. DRY_RUN=1 prints the
# commands instead of running them.
set -euo pipefail

TPU=${TPU:-my-slice}
ZONE=${ZONE:-us-west4-a}
TARGET=${TARGET:-v5e:4x4}
MODEL=${MODEL:-llama3_8b}
BATCH=${BATCH:-16}
SEQ=${SEQ:-2048}
STEPS=${STEPS:-1000}
# On storage that all hosts share: checkpoints are written by all of them.
RUN=${RUN:-/mnt/shared/runs/$MODEL}

run() { if [[ -n ${DRY_RUN:-} ]]; then printf '%q ' "$@"; echo; else "$@"; fi; }

run remat-kit plan "models:$MODEL" --set "batch=$BATCH" --set "seq=$SEQ" --target "$TARGET" --out plan.toml
run gcloud compute tpus tpu-vm scp plan.toml "$TPU:remat-kit/plan.toml" --zone "$ZONE" --worker all
train=(.venv/bin/python -m train --model "$MODEL" --batch "$BATCH" --seq "$SEQ" --steps "$STEPS" --plan plan.toml --dir "$RUN" "$@")
run gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker all \
    --command "cd remat-kit && $(printf '%q ' "${train[@]}")--coordinator auto"
