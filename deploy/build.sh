#!/usr/bin/env bash
# Build the images: deploy/build.sh [--push REGISTRY] [NAME…], by default all that need no GPU; --list shows all. Uses docker, podman or
# buildah, whichever works. With --push each goes to the registry, and its name with the digest there is printed.
#
#   BUILDER      one of them, in place of the first that works
#   VERSION      tag; by default the project's version
#   BASE         base image, in place of the Dockerfile's own
#   TORCH_INDEX  package index with PyTorch's CPU builds; empty for none
#   WITHOUT      an extra to leave out, such as tensorrt where NVIDIA's own package index cannot be reached
#   BUILD_FLAGS  more flags of the builder, such as --volume or --pull
set -euo pipefail
cd "$(dirname "$0")/.."

# name → Dockerfile and extras, with hyphens: to pip before 23.3 an extra with an underscore is another one, and no error; what ends in -cuda is the same image's variant with the tag VERSION-cuda
# begin images: made by services/generate.py from services/services.toml
declare -A IMAGES=(
    [coordinator]="cpu coordinator,kubernetes,s3"
    [prepare]="cpu prepare,s3"
    [merge]="cpu merge,s3"
    [quantize]="cpu quantize,s3"
    [onnx-export]="cpu onnx-export,s3"
    [tensorrt-build]="cpu tensorrt-build,s3"
    [tensorrt-llm]="cpu tensorrt-llm,s3"
    [gguf]="cpu gguf,s3"
    [openvino]="cpu openvino,s3"
    [executorch]="cpu executorch,s3"
    [litert]="cpu litert,s3"
    [coreml]="cpu coreml,s3"
    [torchscript]="cpu torchscript,s3"
    [adapter]="cpu adapter,s3"
    [validate]="cpu validate,s3"
    [tensorrt-build-cuda]="cuda tensorrt-build,tensorrt,s3"
    [validate-cuda]="cuda validate,tensorrt,s3"
)
ON_CPU=(coordinator prepare merge quantize onnx-export tensorrt-build tensorrt-llm gguf openvino executorch litert coreml torchscript adapter validate)
# end images

if [[ ${1:-} == --list ]]; then # what there is, for scripts: name, Dockerfile, extras
    for name in "${!IMAGES[@]}"; do echo "$name ${IMAGES[$name]}"; done | sort
    exit
fi

REGISTRY=
if [[ ${1:-} == --push ]]; then
    REGISTRY=${2:-}
    [[ -n $REGISTRY ]] || { echo "--push needs a registry: deploy/build.sh --push registry.example.org/team" >&2; exit 2; }
    shift 2
fi

builder() {
    if command -v docker >/dev/null && docker info >/dev/null 2>&1; then echo docker
    elif command -v podman >/dev/null; then echo podman
    elif command -v buildah >/dev/null; then echo buildah
    else
        echo "make images needs docker with its daemon running, podman or buildah; none of them is here" >&2
        exit 7
    fi
}

BUILDER=${BUILDER:-$(builder)}
VERSION=${VERSION:-$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)}
read -ra FLAGS <<<"${BUILD_FLAGS:-}"
[[ -n ${BASE+set} ]] && FLAGS+=(--build-arg "BASE=$BASE")
[[ -n ${TORCH_INDEX+set} ]] && FLAGS+=(--build-arg "TORCH_INDEX=$TORCH_INDEX")
case $BUILDER in
    buildah) COMMAND=(buildah --storage-driver "${STORAGE_DRIVER:-vfs}" bud --isolation "${BUILDAH_ISOLATION:-chroot}") ;;
    *) COMMAND=("$BUILDER" build) ;;
esac

# push IMAGE:TAG: print its name in the registry, with the digest
push() {
    local there=$REGISTRY/$1 file digest
    file=$(mktemp)
    case $BUILDER in
        docker)
            docker tag "$1" "$there"
            docker push --quiet "$there"
            docker inspect --format '{{index .RepoDigests 0}}' "$there" >"$file"
            ;;
        podman) podman push --quiet --digestfile "$file" "$1" "$there" ;;
        buildah) buildah --storage-driver "${STORAGE_DRIVER:-vfs}" push --quiet --digestfile "$file" "$1" "docker://$there" ;;
    esac >&2
    digest=$(sed 's/.*@//' "$file")
    rm "$file"
    [[ $digest == sha256:* ]] || { echo "$BUILDER did not say the digest of $there" >&2; exit 1; }
    echo "$there@$digest"
}

for name in "${@:-${ON_CPU[@]}}"; do
    if [[ -z ${IMAGES[$name]+known} ]]; then
        echo "there is no image $name; known are $(printf '%s\n' "${!IMAGES[@]}" | sort | paste -sd' ')" >&2
        exit 2
    fi
    read -r dockerfile extras <<<"${IMAGES[$name]}"
    [[ -z ${WITHOUT:-} ]] || extras=$(tr , '\n' <<<"$extras" | grep -vx -e "$WITHOUT" | paste -sd,)
    image=slipway-${name%-cuda} tag=$VERSION
    [[ $dockerfile == cpu ]] || tag+=-$dockerfile
    own=services/${name//-/_}/constraints.txt # pins that win over those of constraints.txt
    [[ -e $own ]] || own=
    echo "building $image:$tag with $BUILDER" >&2
    "${COMMAND[@]}" --file "deploy/Dockerfile.$dockerfile" --tag "$image:$tag" \
        --build-arg "EXTRAS=$extras" --build-arg "NAME=$image" --build-arg "VERSION=$VERSION" ${own:+--build-arg "CONSTRAINTS=$own"} "${FLAGS[@]}" . >&2
    [[ -z $REGISTRY ]] || push "$image:$tag"
done
