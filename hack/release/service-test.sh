#!/usr/bin/env bash
# Runs in the virtual machine of hack/release-check.sh, under systemd, with the installed package and nothing of this tree.
set -euo pipefail

say() { printf '==> %s\n' "$*"; }

fail() {
    printf 'FAILED: %s\n' "$*"
    systemctl --no-pager status 'csi-loopback*' || true
    journalctl --no-pager --lines 60 --unit 'csi-loopback*' || true
    exit 1
}
trap 'fail "line $LINENO: $BASH_COMMAND"' ERR

main_pid() { systemctl show --property MainPID --value csi-loopback; }

# The root filesystem is in memory.
mkdir -p /var/lib/csi-loopback
mount --bind /scratch /var/lib/csi-loopback
say "start; systemctl returns when the socket exists"
echo 'CSI_LOOPBACK_DRIVER_FLAGS="--pool image --pool-size 1Gi --target-root /mnt"' >/etc/default/csi-loopback
bash -euxc "$(</root/readme-start)"
[[ -S /run/csi-loopback/csi.sock && -S /run/csi-loopback/freeze-guard.sock ]]
[[ $(systemctl is-active csi-loopback csi-loopback-freeze-guard | sort -u) == active ]]
# Where a backup stages a snapshot; the driver takes no path outside of --target-root.
export TMPDIR=/mnt
say "a volume on the host's mount table"
csi-loopback volume create data --size 64Mi
mkdir -p /mnt/staging /mnt/data /mnt/restored
csi-loopback volume stage data --staging /mnt/staging
csi-loopback volume publish data --staging /mnt/staging --target /mnt/data
mountpoint -q /mnt/data
head -c 8M /dev/urandom >/mnt/data/file
say "snapshot, with the filesystem frozen through the guard; backup"
csi-loopback snapshot create monday --volume data
csi-loopback backup create monday --repository /root/backups
say "kill: the service starts again, and the volume stays mounted"
before=$(main_pid)
kill -KILL "$before"
for _ in {1..100}; do [[ $(main_pid) != "$before" && $(systemctl is-active csi-loopback) == active ]] && break; sleep 0.2; done
[[ $(main_pid) != "$before" ]]
systemctl is-active --quiet csi-loopback-freeze-guard
head -c 1M /dev/urandom >>/mnt/data/file
csi-loopback snapshot create tuesday --volume data
csi-loopback backup create tuesday --repository /root/backups
csi-loopback backup list --repository /root/backups
csi-loopback restore tuesday --repository /root/backups --to /root/restored.img
mount -o loop,ro,norecovery /root/restored.img /mnt/restored
cmp /mnt/data/file /mnt/restored/file
umount /mnt/restored
say "stop"
systemctl stop csi-loopback csi-loopback-freeze-guard
mountpoint -q /mnt/data
say "the service passed its test"
