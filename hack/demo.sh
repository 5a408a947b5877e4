#!/usr/bin/env bash
# hack/demo.sh [SCENE]: shows a part of csi-loopback at work on this machine. No mount, loop device, process or file
# remains, also when it is interrupted. Each file in hack/demo but stage.sh is a scene.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"

scenes=(main sidecar session aggregated inline admission runtime node-proxy)

list() {
    local name
    for name in "${scenes[@]}"; do
        printf '  %-11s %s\n' "$name" "$(sed -n 's/^# Scene: //p' "$repo/hack/demo/$name.sh")"
    done
}

usage() {
    cat <<END
Usage: hack/demo.sh [SCENE]

Show a part of csi-loopback at work on this machine (default: main), then remove all that was made.
Needs root, for loop devices and mounts. Installs missing commands with apt-get.

Scenes:
$(list)

Options:
  --list  List the scenes
  --help  Print this help

Environment:
  CSI_LOOPBACK_BIN  Binary to show (default: build this tree)
END
}

scene=${1:-main}
case $scene in
    --list) list && exit ;;
    --help | -h) usage && exit ;;
esac
if (($# > 1)) || [[ " ${scenes[*]} " != *" $scene "* ]]; then
    printf '%s: no such scene: %s\nScenes:\n%s\n' "${0##*/}" "$*" "$(list)" >&2
    exit 2
fi

# shellcheck source=hack/demo/stage.sh
source "$repo/hack/demo/stage.sh"
# shellcheck source=/dev/null
source "$repo/hack/demo/$scene.sh"
finish
