#!/usr/bin/env bash
# Write constraints.txt, the version of everything that pyproject.toml can ask for: deploy/lock.sh [--check | --upgrade]. Versions that are
# in it stay, unless nothing can be installed with them; --upgrade takes the newest of all. With --check nothing is written: what uv
# would write otherwise is an error.
#
#   UV  the program; by default that of .venv
set -euo pipefail
cd "$(dirname "$0")/.."
UV=${UV:-.venv/bin/uv}
unset UV_TORCH_BACKEND # it is about what is installed, and another index

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cp constraints.txt "$scratch/resolved.txt"
flags=(--quiet --extra all --extra coreml --extra dev --extra docs --extra executorch)
flags+=(--python-version 3.11 --no-annotate --no-header --output-file "$scratch/resolved.txt")
[[ ${1:-} != --upgrade ]] || flags+=(--upgrade)
"$UV" pip compile pyproject.toml "${flags[@]}" || {
    status=$?
    # uv ends with 1 if nothing can be installed, and with 2 if it could not ask.
    [[ ${1:-} == --check && $status == 2 ]] || exit 1
    echo "constraints.txt was not checked: uv could not ask for versions" >&2
    exit
}
{
    echo "# Versions that the tests of this repository ran with; written by make lock."
    echo "# torch==2.13.0 takes the +cpu and the +cu130 build alike; without this line pip takes the newest CUDA build."
    # What PyTorch's build for CUDA requires is as new as it needs; the build for CPUs requires none of it.
    grep -vE '^(cuda-|nvidia-|triton==|setuptools==)' "$scratch/resolved.txt"
} >"$scratch/constraints.txt"
if [[ ${1:-} == --check ]]; then
    diff -u constraints.txt "$scratch/constraints.txt" || {
        echo "constraints.txt is not what uv resolves: run make lock" >&2
        exit 1
    }
else
    cp "$scratch/constraints.txt" constraints.txt
fi
