#!/bin/sh
# A CI job: export a finished training run at a coordinator, fail the job if an output differs from the fine-tuned model,
# and keep the report. Works in any CI that runs a shell, after: pip install 'slipway-ml[report]'
#
#   SLIPWAY_COORDINATOR  HOST:PORT; with the production overlay of k8s/, the Service slipway-clients, which accepts tokens
#   SLIPWAY_PROJECT      project of this repository
#   SLIPWAY_TOKEN        token of a submitter, from the CI's secrets; SLIPWAY_TOKEN_FILE if it can mount files
#   SLIPWAY_TLS_CA_FILE  authority of the coordinator's certificate
set -eu

configuration=${1:-export.yaml}
reports=${2:-reports}
mkdir -p "$reports"

code=0
slipway export -c "$configuration" --json > "$reports/result.json" || code=$?

case $code in
    0) echo "exported; every output behaves like the fine-tuned model" ;;
    4) echo "an output differs from the fine-tuned model: see report.html" >&2 ;;
    7) echo "the coordinator does not answer; run the job again to continue where this one stopped" >&2 ;;
    *) echo "the export failed with exit code $code: see result.json" >&2 ;;
esac

# The report, if there is one, is beside the models.
report=$(python3 -I -c 'import json, sys; print(json.load(open(sys.argv[1])).get("validation_report_path") or "")' \
    "$reports/result.json" 2>/dev/null || true)
if [ -n "$report" ] && [ -e "$report" ]; then
    cp "$(dirname "$report")"/report.* "$reports/"
fi
exit "$code"
