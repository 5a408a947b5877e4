#!/usr/bin/env bash
# hack/release/former.sh VERSION: keeps a pool and a repository of backups, as this version writes them, in
# tests/data/releases/VERSION.tar.xz (below 1 MiB), with what a later version must find in them, expected.json. Run it once for
# each release: tests/storage/former_release.rs reads all of them.
#
# CSI_LOOPBACK_BIN   the csi-loopback that writes them
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/../lib.sh"

version=${1:-}
[[ $# == 1 && $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ && -x ${CSI_LOOPBACK_BIN:-} ]] ||
    die "usage: CSI_LOOPBACK_BIN=FILE hack/release/former.sh VERSION"
is_root || die "needs root, for loop devices"
install_missing "${storage_commands[@]}" jq xz || die "required commands are missing"
work=$(mktemp --directory --tmpdir csi-loopback-former.XXXXXX)
driver=
# shellcheck disable=SC2317,SC2329 # called by the trap
clean_up() {
    [[ -z $driver ]] || { kill "$driver" && wait "$driver"; } 2>/dev/null || true
    clear_directory "$work"
}
trap clean_up EXIT

# csi ARGUMENT...: a client command.
csi() { "$CSI_LOOPBACK_BIN" "$@" --endpoint "$work/csi.sock"; }

mkdir "$work/release" "$work/staging"
"$CSI_LOOPBACK_BIN" --mode driver --endpoint "$work/csi.sock" --data-dir "$work/release/pool" --pool image --pool-size 320Mi \
    --pool-sparse --pool-block-size 4Ki --change-record-retention 36500days 2>"$work/driver.log" &
driver=$!
for _ in {1..300}; do [[ ! -S $work/csi.sock ]] || break; sleep 0.1; done
csi volume create data --size 64Mi >/dev/null
csi volume stage data --staging "$work/staging" >/dev/null
csi volume publish data --staging "$work/staging" --target "$work/target" >/dev/null
# write NAME: 256 KiB that compress well, in a file.
write() {
    head -c 262144 < <(yes "csi-loopback $version, file $1") >"$work/target/$1"
    sync --file-system "$work/target/$1"
}
write first
csi snapshot create monday --volume data >/dev/null
csi backup create monday --repository "$work/release/repository" --quiet >/dev/null
write second
csi snapshot create tuesday --volume data >/dev/null
csi backup create tuesday --repository "$work/release/repository" --quiet >/dev/null
# Its change record remains, as the base of deltas.
monday=$(csi snapshot list --output json | jq -r '.. | objects | select(.name? == "monday") | .id')
csi snapshot delete monday >/dev/null
csi restore tuesday --repository "$work/release/repository" --to "$work/restored.img" --quiet >/dev/null
csi snapshot delta "$monday" tuesday --output json >"$work/delta.json"
csi snapshot allocated tuesday --output json >"$work/allocated.json"
jq -n --arg version "$version" --arg base "$monday" --arg sha256 "$(sha256sum <"$work/restored.img" | cut -d ' ' -f 1)" \
    --slurpfile delta "$work/delta.json" --slurpfile allocated "$work/allocated.json" \
    '{version: $version, base: $base, target: "tuesday", sha256: $sha256, delta: $delta[0].extents, allocated: $allocated[0].extents}' \
    >"$work/release/expected.json"
csi volume unpublish data --target "$work/target" >/dev/null
csi volume unstage data --staging "$work/staging" >/dev/null
kill "$driver"
wait "$driver" || true
driver=
mkdir -p "$repo/tests/data/releases"
tar --create --directory="$work/release" --sparse --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner . |
    xz -9e >"$work/archive"
mv "$work/archive" "$repo/tests/data/releases/$version.tar.xz"
stat --format '%n: %s bytes' "$repo/tests/data/releases/$version.tar.xz"
