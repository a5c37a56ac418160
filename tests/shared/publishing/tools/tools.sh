#!/usr/bin/env bash
# Unpack Debian's registry, skopeo and a shell without libraries into .registry-tools/, which git ignores, without installing them: the
# registry's package is a service that begins to run. Tests that miss one are skipped. Says what could not be had, and ends with 0: it is for tests alone.
set -euo pipefail
cd "$(dirname "$0")/../../../.."
tools=$PWD/.registry-tools

for package in docker-registry skopeo libgpgme11 libassuan0 busybox-static; do
    [[ -e $tools/$package.unpacked ]] && continue
    scratch=$(mktemp -d)
    if command -v apt-get >/dev/null && (cd "$scratch" && apt-get -qq download "$package" 2>/dev/null && dpkg-deb -x ./*.deb "$tools"); then
        touch "$tools/$package.unpacked"
    else
        echo "not installed: $package, as apt-get cannot download it" >&2
    fi
    rm -rf "$scratch"
done
