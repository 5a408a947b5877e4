#!/usr/bin/env bash
# Scenario: docs/guide/backup-to-s3.md, its commands as printed: a CronJob backs up to S3; restores of the claim and of a file
# shellcheck source=hack/e2e/scenario.sh
source "$(dirname "$0")/../scenario.sh"

page=$repo/docs/guide/backup-to-s3.md
work=$e2e/backup-to-s3

clean_up() {
    # shellcheck disable=SC2181 # the exit code of the script
    (($? == 0)) || cat "$work/output" >&2
    umount "$work"/files "$work"/image 2>/dev/null || true
    kubectl delete --ignore-not-found --wait=false namespace s3 >/dev/null 2>&1 || true
    rm -rf --one-file-system "$work"
}
trap clean_up EXIT

# The program of the image, as an administrator has it.
csi-loopback() { KUBECONFIG=$e2e/kubeconfig in_network "$work/program" "$@"; }

# section HEADING: runs the commands of a section of the page; prints their output and keeps it in $work/output.
section() {
    step "$1"
    commands_of "$page" "$1" >"$work/commands"
    [[ -s $work/commands ]]
    # shellcheck source=/dev/null
    source "$work/commands" >"$work/output" 2>&1
    sed 's/^/        /' "$work/output"
}

has() { # has WORDS...: whether the output of the last section has a line with these words
    grep -qF -- "$*" "$work/output" || equal "output of the page" "… $* …" "$(<"$work/output")"
}

rm -rf "$work"
mkdir -p "$work"
ln -s "$repo/deploy" "$work/deploy"
cd "$work"
: >output
on_node cat "/proc/$(process_of csi-loopback csi-loopback-0 driver)/exe" >program
chmod 755 program
step "an S3 server"
s3_server s3
cat >s3.env <<END
AWS_ENDPOINT_URL=http://$(kubectl -n s3 get service s3 -o jsonpath='{.spec.clusterIP}'):9000
AWS_ALLOW_HTTP=true
AWS_REGION=us-east-1
AWS_ACCESS_KEY_ID=local
AWS_SECRET_ACCESS_KEY=not-a-real-key
END
section Prepare
section "Back up"
has full
has incremental
section "Restore the claim"
has second
if [[ -e /dev/fuse ]]; then
    section "Restore one file"
    has second
else
    step "not run, without /dev/fuse: Restore one file"
fi
step "nothing of the movers remains, and no snapshot"
eventually movers_are_gone
equal "temporary snapshots" "" "$(kubectl -n "$namespace" get volumesnapshots -l backup.loopback.csi.local/temporary -o name)"
section "Clean up"
