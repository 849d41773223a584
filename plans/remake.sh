#!/bin/sh
# Makes the worked plans again from the profiles in their folders. `sh plans/remake.sh OUT` writes them under OUT instead.
set -eu
cd "$(dirname "$0")/.."
out=${1:-plans}
optimize() {
    "${PYTHON:-python3}" -m pipeplan optimize "$@"
}

optimize plans/nemotron-nano-9b-v2-4xh800/profile.yaml \
    --ranks 4 --device h800-sxm --micro-batches 8 \
    --work-limit 60000000 -o "$out/nemotron-nano-9b-v2-4xh800"

optimize plans/jamba-1.5-large-8xh100/profile.yaml \
    --ranks 8 --device h100-sxm --memory-gb 27.433 --link-latency-us 10 --link-gb-per-s 40 --micro-batches 32 \
    --work-limit 60000000 -o "$out/jamba-1.5-large-8xh100"

optimize plans/tiny-jamba-2xcpu/profile.yaml \
    --cluster templates/clusters/2xcpu.yaml --micro-batches 8 \
    --work-limit 20000000 -o "$out/tiny-jamba-2xcpu"
