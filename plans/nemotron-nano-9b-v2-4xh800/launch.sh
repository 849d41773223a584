#!/bin/sh
# Trains nemotron-nano-9b-v2 with this plan: 4 pipeline ranks.
# Arguments are handed to train.py, which lists them at its head.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec deepspeed --num_gpus 4 --master_port "${MASTER_PORT:-29500}" \
    "$here/train.py" --deepspeed_config "$here/ds_config.json" "$@"
