#!/bin/sh
# Trains tiny-jamba with this plan: 2 pipeline ranks.
# Arguments are handed to train.py, which lists them at its head.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
export DS_ACCELERATOR=cpu OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec deepspeed --num_gpus 2 --master_port "${MASTER_PORT:-29500}" \
    "$here/train.py" --deepspeed_config "$here/ds_config.json" "$@"
