#!/usr/bin/env bash
# Build images for real, without any registry, and see what they hold: deploy/test-images.sh [NAME…], by default all of build.sh.
#
# Each runs as its own user with its root file system read-only: `slipway doctor`, the programs, and check_image.py. The bases are
# made from Debian's packages. That of Dockerfile.cuda stands in for NVIDIA's, so nothing here shows that a GPU is found.
# Needs root, buildah, debootstrap, the right to mount, and Debian's and Python's packages; where one of them is missing or does not
# answer it says so and ends with 0. What is wrong with an image ends with 1.
#
#   WORK         folder for bases, layers and images, removed at the end; by default a temporary one (up to 6 GB, 20 GB with CUDA)
#   KEEP         anything: do not remove it
#   MIRROR       of Debian; by default http://deb.debian.org/debian
#   BUILD_FLAGS, TORCH_INDEX, WITHOUT  as for build.sh
set -euo pipefail
cd "$(dirname "$0")/.."

skip() {
    echo "skipped: $1"
    exit 0
}
for tool in buildah debootstrap unshare python3; do
    command -v "$tool" >/dev/null || skip "$tool is not installed (apt-get install buildah debootstrap util-linux)"
done
[[ $(id -u) == 0 ]] || skip "debootstrap needs root"
unshare --mount --pid --fork true 2>/dev/null || skip "this machine does not let its root mount anything"

MIRROR=${MIRROR:-http://deb.debian.org/debian}
WORK=${WORK:-$(mktemp -d)}
mkdir -p "$WORK"
finish() {
    buildah rm --all >/dev/null 2>&1 || true
    buildah rmi --all --force >/dev/null 2>&1 || true
    [[ -n ${KEEP:-} ]] || rm -rf "$WORK"
}
trap finish EXIT

export CONTAINERS_STORAGE_CONF="$WORK/storage.conf" TMPDIR="$WORK" BUILDER=buildah
for STORAGE_DRIVER in overlay vfs; do # overlay is much faster, but needs a kernel and a disk that let it
    export STORAGE_DRIVER usable=
    printf '[storage]\ndriver = "%s"\nrunroot = "%s/run"\ngraphroot = "%s/graph"\n' "$STORAGE_DRIVER" "$WORK" "$WORK" \
        >"$CONTAINERS_STORAGE_CONF"
    if buildah info >/dev/null 2>"$WORK/buildah.log"; then
        usable=1
        break
    fi
done
[[ -n $usable ]] || skip "buildah does not work here: $(tail -n 1 "$WORK/buildah.log")"

# The build gets its packages as this machine does: with the same settings of pip and the same authorities.
settings() {
    printf '[global]\nretries = 2\ntimeout = 30\n' # so that an index that is gone is noticed
    python3 -P -m pip config list 2>/dev/null | sed -En "s/^(global|:env:)\.([a-z-]+)='(.*)'$/\2 = \3/p" |
        grep -vE '^(retries|timeout|default-timeout) ' | sort -u -t= -k1,1 || true
}
settings >"$WORK/pip.conf"
# Whether the package index answers, asked as the build will ask; packages that lie on this machine say nothing about that.
index_answers() {
    local flags=() key value words
    while IFS='=' read -r key value; do
        case ${key% } in
            no-index) return 0 ;;
            index-url | cert | client-cert | proxy | trusted-host)
                read -ra words <<<"$value"
                flags+=("${words[@]/#/--${key% }=}")
                ;;
        esac
    done <"$WORK/pip.conf"
    python3 -P -m pip --version >/dev/null 2>&1 || return 0 # the build will see
    rm -rf "$WORK/probe"
    PIP_CONFIG_FILE=/dev/null timeout 30 env --unset=PIP_FIND_LINKS --unset=PIP_EXTRA_INDEX_URL \
        python3 -P -m pip download "${flags[@]}" --disable-pip-version-check --timeout 10 --retries 0 --quiet --no-deps \
        --no-cache-dir --dest "$WORK/probe" typing-extensions >"$WORK/index.log" 2>&1
}
index_answers || skip "Python's packages cannot be had: $(tail -n 1 "$WORK/index.log")"

read -ra MOUNTS <<<"${BUILD_FLAGS:-}"
MOUNTS+=(--volume "$WORK/pip.conf:/etc/pip.conf:ro" --volume /etc/ssl/certs:/etc/ssl/certs:ro)
# Folders of packages, and files such as a list of constraints. Certificates are there already.
for place in $(grep -oE '(^|[ /])/[a-zA-Z0-9_./-]+' "$WORK/pip.conf" | sed -E 's#^[ /]*/#/#; s#/simple$##' | sort -u); do
    [[ $place == /etc/ssl/certs* || (! -d $place && ! -f $place) ]] || MOUNTS+=(--volume "$place:$place:ro")
done
export BUILD_FLAGS="${MOUNTS[*]}"
reached='import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=10)'
if [[ -z ${TORCH_INDEX+set} ]] && ! python3 -P -c "$reached" https://download.pytorch.org/whl/cpu/ 2>/dev/null; then
    export TORCH_INDEX=
fi

# Debian in place of the base of a Dockerfile: make_base NAME PACKAGES
make_base() {
    local container rootfs="$WORK/rootfs-$1"
    # Asked first with its own tool, which otherwise repeats itself for many minutes.
    wget --quiet --tries=1 --timeout=10 --output-document=/dev/null "$MIRROR/dists/bookworm/InRelease" ||
        skip "Debian's packages cannot be had from $MIRROR"
    timeout 120 debootstrap --variant=minbase --include="$2" bookworm "$rootfs" "$MIRROR" >"$WORK/debootstrap.log" 2>&1 ||
        skip "Debian's packages cannot be had: $(tail -n 1 "$WORK/debootstrap.log")"
    rm -rf "$rootfs"/var/cache/apt/*.bin "$rootfs"/var/cache/apt/archives/*.deb "$rootfs"/var/lib/apt/lists/*
    container=$(buildah from scratch)
    buildah copy --quiet "$container" "$rootfs" / >/dev/null
    buildah run --isolation chroot "$container" true 2>"$WORK/buildah.log" ||
        skip "buildah cannot run anything here: $(tail -n 1 "$WORK/buildah.log")"
    buildah commit --quiet --rm "$container" "localhost/slipway-test-base:$1" >/dev/null
    rm -rf "$rootfs"
}

# Runs in a mount namespace of its own, so that nothing stays mounted: what Kubernetes makes of the image's root.
# shellcheck disable=SC2016 # expanded there
CONFINED='
set -euo pipefail
root=$1 extras=$2 image_env=$3
mount --bind "$root" "$root"
mount --options remount,bind,ro "$root"
mount --types tmpfs --options mode=1777 tmpfs "$root/tmp"
mount --types tmpfs --options uid=10001,gid=10001 tmpfs "$root/var/lib/slipway"
mount --bind /dev "$root/dev"
mount --types proc proc "$root/proc"
inside() {
    chroot "$root" setpriv --reuid=10001 --regid=10001 --clear-groups --no-new-privs --bounding-set=-all \
        env --ignore-environment --chdir=/var/lib/slipway $image_env "$@"
}
inside slipway doctor | sed "s/^/  /"
inside slipway coordinator --help >/dev/null
inside slipway worker --help >/dev/null
inside python -P - "$extras" <deploy/check_image.py
'

# check NAME IMAGE EXTRAS
check() {
    local container root user leftovers
    container=$(buildah from --pull-never "localhost/$2")
    user=$(buildah inspect --format '{{.OCIv1.Config.User}}' "$container")
    [[ $user == 10001:10001 ]] || { echo "$2 runs as ${user:-root}"; exit 1; }
    root=$(buildah mount "$container")
    leftovers=$(find "$root"/{root/.cache,src,tmp,var/lib/slipway,var/lib/apt/lists,var/cache/apt/archives} -type f ! -name lock 2>/dev/null || true)
    leftovers=$(grep -v "/var/lib/slipway/\.\(bash\|profile\)" <<<"$leftovers" || true)
    [[ -z $leftovers ]] || { echo "$2 still holds: $(head -n 3 <<<"$leftovers")"; exit 1; }
    [[ ! -e $root/opt/slipway/bin/pip ]] || { echo "$2 still holds pip"; exit 1; }
    echo "== $2: $(du --summarize --block-size=1M "$root" | cut --fields=1) MB unpacked, built in $4 s"
    unshare --mount --pid --fork --kill-child bash -c "$CONFINED" "$1" "$root" "$3" \
        "$(buildah inspect --format '{{range .OCIv1.Config.Env}}{{.}} {{end}}' "$container")"
    buildah umount "$container" >/dev/null
    buildah rm "$container" >/dev/null
}

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
read -ra NAMES <<<"${*:-$(deploy/build.sh --list | cut --delimiter=' ' --fields=1 | paste -sd' ')}"
for name in "${NAMES[@]}"; do
    read -r _ dockerfile extras < <(deploy/build.sh --list | grep "^$name ") || { deploy/build.sh "$name"; exit 2; }
    case $dockerfile in
        cpu) packages=ca-certificates,python3,python3-venv ;;
        *) packages=ca-certificates ;; # Python is installed by the Dockerfile
    esac
    export BASE="localhost/slipway-test-base:$dockerfile"
    buildah inspect --type image "$BASE" >/dev/null 2>&1 || make_base "$dockerfile" "$packages"
    if [[ ,$extras, == *,tensorrt,* && -z ${WITHOUT+set} ]] && ! python3 -P -c "$reached" https://pypi.nvidia.com/ 2>/dev/null; then
        echo "TensorRT comes from NVIDIA's own package index, which cannot be reached: $name is built without it"
        extras=${extras/,tensorrt,/,} without=tensorrt
    fi
    began=$SECONDS
    if ! WITHOUT=${WITHOUT-${without:-}} deploy/build.sh "$name" >"$WORK/$name.log" 2>&1; then
        tail -n 40 "$WORK/$name.log"
        index_answers || skip "$name was not built, as Python's packages cannot be had any more"
        exit 1
    fi
    tag=$version
    [[ $dockerfile == cpu ]] || tag+=-$dockerfile
    check "$name" "slipway-${name%-cuda}:$tag" "$extras" $((SECONDS - began))
    if [[ -z ${KEEP:-} ]]; then buildah rmi --force "localhost/slipway-${name%-cuda}:$tag" >/dev/null; fi
done
