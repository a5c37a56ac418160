#!/usr/bin/env bash
# Install what the tests of k8s/ use and Slipway's environment does not have: npm's schemas of KEDA, cert-manager and the Gateway
# API; checkov, whose pinned libraries do not go with ours; Helm, as a library of 250 MB. They lie in .k8s-tools/, which git ignores;
# tests that miss one are skipped.
# Says what could not be had, and ends with 0: it is for tests alone.
set -euo pipefail
cd "$(dirname "$0")/../../.."
CHECKOV=3.3.30
HELM=0.2.2
tools=.k8s-tools

missing() { echo "not installed: $1" >&2; }

if ! command -v npm >/dev/null; then
    missing "npm's schemas, as there is no npm (Debian's packages nodejs and npm)"
elif ! cmp --silent tests/k8s/tools/package.json "$tools/npm/package.json" || [[ ! -e $tools/npm/.installed ]]; then
    rm -rf "$tools/npm"
    mkdir -p "$tools/npm"
    cp tests/k8s/tools/package.json "$tools/npm/"
    if npm install --prefix "$tools/npm" --silent --no-audit --no-fund --no-package-lock; then
        touch "$tools/npm/.installed"
    else
        missing "npm's schemas, as the registry does not answer"
    fi
fi

if [[ $("$tools/checkov/bin/checkov" --version 2>/dev/null || true) != "$CHECKOV" ]]; then
    rm -rf "$tools/checkov"
    if ! "${PYTHON:-python3}" -P -m venv "$tools/checkov" ||
        ! "$tools/checkov/bin/python" -P -m pip install --quiet --disable-pip-version-check "checkov==$CHECKOV"; then
        missing "checkov, as Python's packages cannot be had"
        rm -rf "$tools/checkov"
    fi
fi

if [[ $("$tools/helm/bin/python" -P -m pip show helm-python-sdk 2>/dev/null || true) != *"Version: $HELM"* ]]; then
    rm -rf "$tools/helm"
    if ! "${PYTHON:-python3}" -P -m venv "$tools/helm" ||
        ! "$tools/helm/bin/python" -P -m pip install --quiet --disable-pip-version-check "helm-python-sdk==$HELM"; then
        missing "Helm, as Python's packages cannot be had"
        rm -rf "$tools/helm"
    fi
fi
