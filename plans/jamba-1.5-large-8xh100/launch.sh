#!/bin/sh
# Trains jamba-1.5-large with this plan: 8 pipeline ranks.
# Arguments are handed to train.py, which lists them at its head.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec deepspeed --num_gpus 8 --master_port "${MASTER_PORT:-29500}" \
    "$here/train.py" --deepspeed_config "$here/ds_config.json" "$@"
