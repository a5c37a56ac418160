#!/usr/bin/env bash
# Install DeepSpeed for the test of its checkpoints into .deepspeed/, which git ignores. It is built against the torch of the environment, so no extra
# can list it, and it lies apart, because transformers and accelerate behave differently where they find it. Its dependencies are named
# here, so that none of them replaces a package of the environment.
# Says what could not be had, and ends with 0: it is for tests alone.
set -euo pipefail
cd "$(dirname "$0")/../../../.."
DEEPSPEED=0.19.8
folder=.deepspeed

[[ ! -d $folder/deepspeed-$DEEPSPEED.dist-info ]] || exit 0
rm -rf "$folder"
if ! DS_BUILD_OPS=0 "${PYTHON:-.venv/bin/python}" -P -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
    -c constraints.txt --target "$folder" "deepspeed==$DEEPSPEED" einops hjson msgpack ninja py-cpuinfo; then
    echo "not installed: DeepSpeed, as Python's packages cannot be had or do not build" >&2
    rm -rf "$folder"
fi
