#!/usr/bin/env bash
# hack/demo.sh [SCENE]: demonstrates a part of csi-loopback on this machine. Each file in hack/demo
# is a scene, except the shared functions in stage.sh.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/demo/stage.sh
source "$repo/hack/demo/stage.sh"

scenes=(main sidecar session aggregated inline runtime)

list() {
    local name
    for name in "${scenes[@]}"; do
        printf '  %-11s %s\n' "$name" "$(sed -n 's/^# Scene: //p' "$repo/hack/demo/$name.sh")"
    done
}

scene=${1:-main}
if [[ $scene == --list ]]; then
    list
elif [[ $scene == --help ]]; then
    cat <<END
Usage: hack/demo.sh [SCENE | --list | --help]

Demonstrates a part of csi-loopback on this machine (default: main). Needs root, installs missing commands, and leaves
no mount, loop device, process or file, also when interrupted. CSI_LOOPBACK_BIN is the binary to run (default: build it).

$(list)
END
elif [[ $# -gt 1 || " ${scenes[*]} " != *" $scene "* ]]; then
    printf '%s: no such scene: %s\n%s\n' "${0##*/}" "$*" "$(list)" >&2
    exit 2
else
    # shellcheck source=/dev/null
    source "$repo/hack/demo/$scene.sh"
    outcome="done"
fi
