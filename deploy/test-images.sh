#!/usr/bin/env bash
# Build images for real, without any registry, and run `slipway doctor` in each as their user: their stage runs, nothing is
# written outside the volume. deploy/test-images.sh [NAME…], by default coordinator and merge. Needs root, buildah and debootstrap; says so and ends
# with 0 where they are not there. The base is made from Debian's packages and takes the place of python:…-slim.
#
#   WORK         folder for base, layers and images, removed at the end; by default a temporary one (several GB)
#   KEEP         anything: do not remove it
#   ROOTFS       a Debian made before, with python3 and python3-venv
#   BUILD_FLAGS, TORCH_INDEX  as for build.sh
set -euo pipefail
cd "$(dirname "$0")/.."

for tool in buildah debootstrap; do
    if ! command -v "$tool" >/dev/null; then
        echo "skipped: $tool is not installed (apt-get install buildah debootstrap)"
        exit 0
    fi
done
if [[ $(id -u) != 0 ]]; then
    echo "skipped: debootstrap needs root"
    exit 0
fi

WORK=${WORK:-$(mktemp -d)}
mkdir -p "$WORK"
export BASE=localhost/slipway-test-base:bookworm BUILDER=buildah STORAGE_DRIVER=vfs TMPDIR="$WORK"
export CONTAINERS_STORAGE_CONF="$WORK/storage.conf"
printf '[storage]\ndriver = "vfs"\nrunroot = "%s/run"\ngraphroot = "%s/graph"\n' "$WORK" "$WORK" >"$CONTAINERS_STORAGE_CONF"
buildah() { command buildah --storage-driver vfs "$@"; }
finish() {
    buildah rm --all >/dev/null 2>&1 || true
    [[ -n ${KEEP:-} ]] || rm -rf "$WORK"
}
trap finish EXIT

if [[ -z ${ROOTFS:-} ]]; then
    ROOTFS="$WORK/rootfs"
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$ROOTFS" >"$WORK/debootstrap.log"
fi
base=$(buildah from scratch)
buildah copy --quiet "$base" "$ROOTFS" / >/dev/null
buildah commit --quiet "$base" "$BASE" >/dev/null
buildah rm "$base" >/dev/null

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
for name in "${@:-coordinator merge}"; do
    for image in $name; do
        deploy/build.sh "$image" >"$WORK/$image.log" 2>&1 || { tail -n 40 "$WORK/$image.log"; exit 1; }
        container=$(buildah from "localhost/slipway-$image:$version")
        user=$(buildah inspect --format '{{.OCIv1.Config.User}}' "$container")
        [[ $user == 10001:10001 ]] || { echo "slipway-$image runs as ${user:-root}"; exit 1; }
        root=$(buildah mount "$container")
        size=$(du --summarize --block-size=1M --exclude=./proc "$root" | cut --fields=1)
        echo "== slipway-$image:$version, $size MB unpacked"
        # What the container writes to is listed before and after: nothing may change outside the volume and /tmp.
        buildah run --isolation chroot --user 10001:10001 "$container" -- slipway doctor
        check='import json, sys; print(*[s["name"] for s in json.load(sys.stdin)["stages"] if s["available"]])'
        runs=$(buildah run --isolation chroot --user 10001:10001 "$container" -- \
            sh -c 'slipway doctor --json 2>/dev/null | python -c "$1"' sh "$check")
        stage=${image//-/_}
        if [[ $stage != coordinator && " $runs " != *" $stage "* ]] || [[ $stage == coordinator && -n $runs ]]; then
            echo "slipway-$image runs the stages: ${runs:-none}"
            exit 1
        fi
        written=$(find "$root" -xdev -newer "$WORK/$image.log" -type f \
            ! -path "$root/var/lib/slipway/*" ! -path "$root/tmp/*" ! -path "$root/proc/*" ! -path "$root/run/*" ! -path "$root/etc/*")
        [[ -z $written ]] || { echo "slipway-$image wrote outside its volume: $written"; exit 1; }
        buildah umount "$container" >/dev/null
        buildah rm "$container" >/dev/null
    done
done
