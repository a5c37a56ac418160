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

case ${1:-} in
    "" | --check | --upgrade) ;;
    *)
        echo "there is no option $1; known are --check and --upgrade" >&2
        exit 2
        ;;
esac
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cp constraints.txt "$scratch/resolved.txt"
flags=(--quiet --extra all --extra coreml --extra dev --extra docs --extra executorch --extra ray --extra release)
flags+=(--python-version 3.11 --no-annotate --no-header --output-file "$scratch/resolved.txt")
[[ ${1:-} != --upgrade ]] || flags+=(--upgrade)
if ! "$UV" pip compile pyproject.toml "${flags[@]}" 2>"$scratch/error.txt"; then
    cat "$scratch/error.txt" >&2
    # Where no index can be reached, nothing is known to be wrong.
    [[ ${1:-} == --check ]] && grep -qE "Failed to fetch|error sending request" "$scratch/error.txt" || exit 1
    echo "constraints.txt was not checked: uv could not ask for versions" >&2
    exit
fi
{
    echo "# Versions that the tests of this repository ran with; written by make lock."
    echo "# A version of torch without a suffix takes the +cpu and the +cu… build alike; without a version pip takes the newest CUDA build."
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
