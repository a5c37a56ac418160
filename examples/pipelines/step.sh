# One step of a pipeline: make an export at a coordinator, wait for its end, and cancel it if the step is ended before.
# The programs in argo/ and kubeflow/ put this script into their containers, which have the command and nothing else of ours.
#
#   sh -ec "$(cat step.sh)" step EXPORT OUTPUTS --request-id=RUN [--checkpoint=… --base-model=… -f … --set=…]
#
# EXPORT and OUTPUTS are files that the step writes: the export's name, and the digest of each output as JSON.

export_file=$1 outputs_file=$2
shift 2

field() { printf '%s' "$submitted" | python -P -c 'import json, sys; print(json.load(sys.stdin).get(sys.argv[1], ""))' "$1"; }
stop() {
    [ -z "${submitted:-}" ] || slipway cancel "$(field name)"
    exit 143
}
trap stop TERM INT

# The same request id again is the same export, so the step may be repeated.
submitted=$(slipway submit --json "$@")
name=$(field name)
mkdir -p "$(dirname "$export_file")" "$(dirname "$outputs_file")"
printf '%s' "$name" > "$export_file"
# A try before this one was ended, and cancelled the export: go on where it stopped.
case $(field state) in EXPORT_STATE_CANCEL*)
    slipway watch "$name" > /dev/null 2>&1 || true # until it is cancelled
    slipway retry "$name" ;;
esac

# A shell runs its trap only between commands, so it waits for the command in the background.
slipway watch "$name" &
wait $!
submitted=$(slipway get "$name" --json)
printf '%s' "$submitted" | python -P -c '
import json, sys
print(json.dumps({name: digest for name, digest in json.load(sys.stdin)["outputs"].items() if name != "validation"}))
' > "$outputs_file"
