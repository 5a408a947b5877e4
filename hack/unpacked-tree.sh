#!/usr/bin/env bash
# hack/unpacked-tree.sh ROOT: a hook of mmdebstrap for a Debian tree of another architecture, whose packages are unpacked but
# not configured, because none of its programs runs here. Does what the driver needs of their scripts, and records the
# packages as unpacked, for scanners of images and for "dpkg --configure --pending".
set -euo pipefail

root=$1
for name in passwd group; do
    install -m 644 "$root/usr/share/base-passwd/$name.master" "$root/etc/$name"
done
find "$root/usr/share/ca-certificates" -name '*.crt' -print0 | sort --zero-terminated |
    xargs --null awk 1 >"$root/etc/ssl/certs/ca-certificates.crt"
for package in "$root"/var/cache/apt/archives/*.deb; do
    dpkg-deb --field "$package" | sed '1a Status: install ok unpacked'
    echo
    name=$(dpkg-deb --field "$package" Package)
    dpkg-deb --field "$package" Multi-Arch | grep -qx same && name+=:$(dpkg-deb --field "$package" Architecture)
    dpkg-deb --fsys-tarfile "$package" | tar --list | sed -e 's|^\./$|/.|' -e 's|^\.||' -e 's|\(.\)/$|\1|' >"$root/var/lib/dpkg/info/$name.list"
done >"$root/var/lib/dpkg/status"
