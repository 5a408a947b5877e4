#!/usr/bin/env bash
# Scenario: a clone of a claim in use has its bytes, and then differs
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

claim original 128Mi
user original original
in_pod original 'head -c 8388608 /dev/urandom >/data/file; sync -f /data'
step "a clone, larger than its source"
claim clone 192Mi "dataSource: {kind: PersistentVolumeClaim, name: original}"
user clone clone
equal "file of the clone" "$(in_pod original 'sha256sum /data/file')" "$(in_pod clone 'sha256sum /data/file')"
in_pod clone 'echo changed >/data/file; sync -f /data'
[[ $(in_pod original 'wc -c </data/file') == 8388608 ]]
discard -n "$namespace" {pod,pvc}/{original,clone}
