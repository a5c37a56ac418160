#!/usr/bin/env bash
# The step of action.yml: export, tell the next steps where the outputs are, and show the results on the page of the job.
# RUN, BASE_MODEL, FORMATS, OUT, SETTINGS and COORDINATOR are the action's inputs. A token of the coordinator is in SLIPWAY_TOKEN.
set -euo pipefail

words=(export "$RUN" -f "$FORMATS" --out "$OUT" --json)
[ -z "${BASE_MODEL:-}" ] || words+=(--base-model "$BASE_MODEL")
[ -z "${COORDINATOR:-}" ] || words+=(--coordinator "$COORDINATOR")
while IFS= read -r setting; do
    [ -z "$setting" ] || words+=(--set "$setting")
done <<<"${SETTINGS:-}"

result=$(mktemp)
trap 'rm -f "$result"' EXIT
code=0
slipway "${words[@]}" >"$result" || code=$?

# Exit codes 0 and 4 have a result; 4 says that an output differs from the fine-tuned model.
python3 -I - "$result" "$GITHUB_OUTPUT" "$GITHUB_STEP_SUMMARY" <<'END'
import json
import sys

result, outputs, summary = sys.argv[1:]
try:
    with open(result, encoding="utf-8") as file:
        said = json.load(file)
except ValueError:  # it ended before there was a result; its words are in the log
    sys.exit()
if not said.get("output_directory"):
    sys.exit()
with open(outputs, "a", encoding="utf-8") as file:
    file.write(f"directory={said['output_directory']}\n")
    file.write(f"passed={str(bool(said['validation_passed'])).lower()}\n")
with open(summary, "a", encoding="utf-8") as file:
    file.write("| output | state | bytes | KL divergence |\n|---|---|---|---|\n")
    for name, each in said["formats"].items():
        distance = "" if each["mean_kl"] is None else f"{each['mean_kl']:.1e}"
        file.write(f"| {name} | {each['status']} | {each['size_bytes']:,} | {distance} |\n")
END
exit "$code"
