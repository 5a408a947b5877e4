#!/usr/bin/env bash
# Suite: Kubernetes' storage specs (test/e2e, "External Storage") for all features of hack/e2e/suites/test-driver.yaml
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"
# shellcheck source=hack/ginkgo.sh
source "$repo/hack/ginkgo.sh"

# An argument is a pattern of the names of the specs to run.
focus=${1:-}
# More than processors, because specs wait most of the time.
processes=6
report=$e2e/storage.json
log=$e2e/log/storage.log

# Specs that are not run, by a pattern of their names.
declare -A not_run=(
    ["disruptive .*kubelet"]="stops kubelet by ssh and systemd, which the node does not have; see the scenario restarts"
    ["any volume data source"]="needs images of hello-populator and volume-data-source-validator, whose modules are not served"
)
# Specs that skip themselves, by a pattern of "NAME: REASON", with the suite's reason. Another reason is a failure: the driver
# would have a feature that is not tested.
declare -A skipped=(
    ["immediate is not compatible|immediate binding may cause"]="binds at once, which the suite does not allow with a topology"
    ["for expansion$"]="inline volumes do not grow"
    ["No SSH Key"]="stops kubelet by ssh and systemd, which the node does not have; see the scenario restarts"
    ["only supports singleNodeVolume|Not enough topologies"]="needs two nodes"
    ["doesn't support RWX"]="a volume is on one node"
    ["(Block volumes|block mode|Block volume mode|raw block volumes)"]="does not apply to raw block"
    ["filesystem volmode.*: Driver .* does not support snapshots"]="takes no snapshot; the same with ext4, xfs and raw block does"
    ["should be covered by block volume case"]="the same as the spec for raw block"
    ["supports VolumeMountGroup, which is incompatible"]="expects that kubelet sets the group, but the driver does"
    ["is not ephemeral|is ephemeral"]="does not apply to the kind of volume"
)

build_suite() { # build_suite DIRECTORY
    go_build storage-suite "$1" || return 1
    (cd "$repo/hack/tools/storage-suite" &&
        CGO_ENABLED=0 go test -c "${go_flags[@]}" -ldflags "-s -w" -o "$1/storage.test" .)
}

# load NAME CONFIG LAYER...: makes an image and imports it.
load() {
    oci_image "$e2e/images/suite.tar" "$@"
    load_image "$e2e/images/suite.tar"
}

# names PATTERN: the images of the suite whose names match.
names() { "$tools/storage.test" --list-images 2>/dev/null | grep -E "/e2e-test-images/($1):"; }

# load_images: what the specs run in pods. Where they need only a shell, it is busybox.
load_images() {
    local root=$e2e/images/root name base=$e2e/images/base.layer program=$e2e/images/program.layer
    rm -rf "$root"
    mkdir -p "$root/bin" "$root/tmp"
    chmod 755 "$root"
    chmod 1777 "$root/tmp"
    cp "$(command -v busybox)" "$root/bin/busybox"
    chroot "$root" /bin/busybox --install -s /bin
    oci_layer "$root" "$base"
    for name in $(names 'busybox|nginx'); do load "$name" '{}' "$base"; done

    rm -r "${root:?}"/*
    install -m 755 "$tools/agnhost" "$root/agnhost"
    oci_layer "$root" "$program"
    for name in $(names agnhost); do load "$name" '{"Entrypoint": ["/agnhost"], "Cmd": ["pause"]}' "$base" "$program"; done

    # The verifier is what the specs of snapshot metadata install by "go install". The module proxy does not serve that module.
    rm "$root/agnhost"
    mkdir -p "$root/bin" "$root/go/bin"
    # shellcheck disable=SC2016 # for the shell of the image
    printf '#!/bin/sh\n[ "$1" != env ] || echo /go\n' >"$root/bin/go"
    chmod 755 "$root/bin/go"
    install -m 755 "$e2e/tools/snapshot-metadata-verifier" "$root/go/bin/"
    oci_layer "$root" "$program"
    load "docker.io/library/$(golang_image)" '{}' "$base" "$program"
    rm -r "$root" "$base" "$program"

    # For direct I/O, for which dd of busybox does not align its buffers.
    quietly on_node ctr --namespace k8s.io images tag --force docker.io/library/csi-loopback:0.1.0 "$(names glibc-dns-testing)"
}

# golang_image: the image in which the specs of snapshot metadata build their client.
golang_image() {
    local module
    module=$(go_module storage-suite k8s.io/kubernetes)
    sed -nE 's/.*installToolImage *= "(.*)"/\1/p' "$module/test/e2e/storage/testsuites/snapshot-metadata.go"
}

clean_up() {
    local classes
    # Those of specs that were interrupted.
    kubectl delete --ignore-not-found --timeout="${patience}s" namespace --selector e2e-run >/dev/null 2>&1 || true
    kubectl delete --ignore-not-found --wait=false volumeattributesclass/storage-suite >/dev/null 2>&1 || true
    # Those of the specs of snapshot metadata, which leave them.
    mapfile -t classes < <(kubectl get storageclasses -o name | grep -e '-e2e-sc')
    ((${#classes[@]} == 0)) || kubectl delete "${classes[@]}" >/dev/null 2>&1 || true
    on_node rm -f /usr/local/bin/crictl
}

run_specs() {
    local skip
    skip=$(printf '|%s' "${!not_run[@]}")
    in_network env HOME="$e2e/cache" "$tools/ginkgo" run --procs="$processes" --no-color --timeout=1h \
        --focus="External.Storage.*$focus" --skip="${skip:1}" --json-report=storage.json --output-dir="$e2e" \
        "$tools/storage.test" -- --kubeconfig="$e2e/kubeconfig" --kubectl-path="$e2e/tools/kubectl" --provider=skeleton \
        --e2e-output-dir="$e2e/log" --storage.testdriver="$repo/hack/e2e/suites/test-driver.yaml" >"$log" 2>&1
}

# explanation SPEC REASON: prints why a spec was skipped. Fails if that is not expected.
explanation() {
    local pattern
    if [[ -z $2 ]]; then
        for pattern in "${!not_run[@]}"; do
            [[ ! $1 =~ $pattern ]] || { printf '%s\n' "${not_run[$pattern]}" && return; }
        done
    else
        for pattern in "${!skipped[@]}"; do
            [[ ! "$1: $2" =~ $pattern ]] || { printf '%s\n' "${skipped[$pattern]}" && return; }
        done
    fi
    return 1
}

# grows_mounted_ext4: whether root has CAP_SYS_RESOURCE, bit 24.
grows_mounted_ext4() { ((0x$(sed -n 's/^CapBnd:\s*//p' /proc/self/status) >> 24 & 1)); }

grows_mounted_ext4 || not_run["default fs.*(while pod is using it|pvcs created for ephemeral)"]="root of this machine has no CAP_SYS_RESOURCE, without which no mounted ext4 grows; xfs is tested"
tools=$(go_cached "$(go_key storage-suite)" "Kubernetes' storage suite" "about five minutes" build_suite)
step "images"
load_images
on_node install -m 755 "$tools/crictl" /usr/local/bin/crictl
trap clean_up EXIT
apply <<'YAML'
apiVersion: storage.k8s.io/v1
kind: VolumeAttributesClass
metadata: {name: storage-suite}
driverName: loopback.csi.local
parameters: {changePrecision: block}
YAML
step "specs, $processes at a time"
rm -f "$report"
run_specs || true
report_is_complete "$report" || {
    tail -n 40 "$log"
    exit 1
}
# The framework imports specs that are not of this suite.
jq --arg focus "External.Storage.*$focus" 'map(.SpecReports |=
    map(select(.LeafNodeType != "It" or ((.ContainerHierarchyTexts // []) + [.LeafNodeText] | join(" ") | test($focus)))))' \
    "$report" >"$report.ours"
mv "$report.ours" "$report"
step "results"
report_failures "$report"
unexpected=0
explained=()
while IFS=$'\t' read -r spec reason; do
    if why=$(explanation "$spec" "$reason"); then
        explained+=("$why")
    else
        printf '  unexpectedly skipped: %s: %s\n' "$spec" "$reason"
        unexpected=$((unexpected + 1))
    fi
done < <(report_specs "$report" skipped)
((${#explained[@]} == 0)) || printf '%s\n' "${explained[@]}" | sort | uniq -c | sort -rn | sed 's/^ */  skipped: /'
read -r passed failed pending skips < <(report_counts "$report")
count "Kubernetes storage specs" "$passed" $((failed + unexpected)) $((pending + skips - unexpected))
