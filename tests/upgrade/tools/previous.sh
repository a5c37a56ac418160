#!/usr/bin/env bash
# Install an earlier version in an environment of its own, for the tests of upgrades: tests/upgrade/tools/previous.sh REF. A wheel is built
# from the commit REF, and installed with the versions of libraries that its constraints.txt names. It lies in .previous/COMMIT/, which
# git ignores, beside the stages that do almost nothing of that commit. Prints the folder. A second call with the same commit
# finds what the first has made.
#
#   PYTHON  makes the environment; by default that of .venv
#   UV      installs; by default uv where it is there, pip otherwise
set -euo pipefail
cd "$(dirname "$0")/../../.."
EXTRAS=coordinator,prepare,merge,quantize,validate,report,sample
PYTHON=${PYTHON:-.venv/bin/python}
UV=${UV-$(command -v uv || true)}
[[ $# == 1 && -n $1 ]] || { echo "name one commit: $0 REF" >&2; exit 2; }
commit=$(git rev-parse --verify --quiet "$1^{commit}") || { echo "there is no commit $1 in this clone" >&2; exit 1; }
place=$PWD/.previous/${commit:0:12}

if [[ ! -e $place/.installed ]]; then
    rm -rf "$place"
    mkdir -p "$place"
    source=$(mktemp -d)
    trap 'rm -rf "$source"' EXIT
    git archive "$commit" | tar -x -C "$source"
    cp -r "$source/tests/support/tiny_stages" "$place/tiny_stages"
    "$PYTHON" -P -m venv "$place/environment"
    python=$place/environment/bin/python
    "$python" -P -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$place" "$source" >&2
    wheel=$(echo "$place"/slipway_ml-*.whl)
    if [[ -n $UV ]]; then
        "$UV" pip install --quiet -c "$source/constraints.txt" --python "$python" "$wheel[$EXTRAS]" >&2
    else
        "$python" -P -m pip install --quiet --disable-pip-version-check -c "$source/constraints.txt" "$wheel[$EXTRAS]" >&2
    fi
    echo "$commit" >"$place/.installed"
fi
echo "$place"
