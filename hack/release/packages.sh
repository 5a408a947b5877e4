# shellcheck shell=bash disable=SC2154
# The archives and packages of a release. All have the files of one tree.
# Sourced by hack/release.sh, never run.

cargo_about_version=0.9.3

# pack_architectures: what each binary is packed in.
pack_architectures() {
    local architecture directory
    notices >"$out/THIRD-PARTY.md" || { rm -f "$out/THIRD-PARTY.md" && lacks "licenses of the crates (cargo-about)"; }
    for architecture in "${architectures[@]}"; do
        directory=$out/.build/$architecture
        say "packages for $architecture"
        rm -rf "$directory/root"
        stage "$directory/csi-loopback" "$directory/root"
        tar_of "$directory/root" "csi-loopback-$version-$architecture" "$out/csi-loopback-$version-$architecture.tar.gz"
        xz --threads=1 "-$level" --stdout "$directory/csi-loopback.debug" >"$out/csi-loopback-$version-$architecture.debug.xz"
        debian_package "$directory/root" "$architecture"
        rpm_package "$directory/root" "$architecture"
    done
}

# notices: the licenses of all crates in the binary.
notices() {
    local tool
    # It compares the texts of all licenses with all crates: without optimization for half an hour.
    tool=$(CARGO_PROFILE_DEV_OPT_LEVEL=2 release_tool cargo-about "$cargo_about_version" cli) &&
        "$tool" generate --locked --config hack/release/about.toml hack/release/about.hbs
}

# host_binary BINARY: a program of the release that runs here: man pages and completions are the same on all architectures.
host_binary() {
    local here
    here=$out/.build/$(uname -m)/csi-loopback
    if [[ -x $here ]]; then echo "$here"; else echo "$1"; fi
}

stage() { # stage BINARY ROOT: makes the tree of the packages
    local binary=$1 root=$2 program completions=$2/usr/share
    program=$(host_binary "$binary")
    install -D -m 755 "$binary" "$root/usr/bin/csi-loopback"
    # The name selects the mode (docs/reference/runtime-assisted-mount.md).
    ln -s csi-loopback "$root/usr/bin/csi-loopback-runc"
    install -D -m 644 -t "$root/usr/lib/systemd/system" deploy/systemd/*.service
    install -D -m 644 deploy/systemd/csi-loopback.default "$root/etc/default/csi-loopback"
    mkdir -p "$root/usr/share/man/man1" "$completions/bash-completion/completions" "$completions/zsh/site-functions" \
        "$completions/fish/vendor_completions.d" "$root/usr/share/doc/csi-loopback"
    "$program" man "$root/usr/share/man/man1"
    gzip --no-name --best "$root"/usr/share/man/man1/*.1
    "$program" completions bash >"$completions/bash-completion/completions/csi-loopback"
    "$program" completions zsh >"$completions/zsh/site-functions/_csi-loopback"
    "$program" completions fish >"$completions/fish/vendor_completions.d/csi-loopback.fish"
    install -m 644 LICENSE "$root/usr/share/doc/csi-loopback/copyright"
    [[ ! -e $out/THIRD-PARTY.md ]] || gzip --no-name --best --stdout "$out/THIRD-PARTY.md" >"$root/usr/share/doc/csi-loopback/THIRD-PARTY.md.gz"
    find "$root" -type d -exec chmod 755 {} + && find "$root" -type f ! -perm /111 -exec chmod 644 {} +
    find "$root" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
}

# tar_of DIRECTORY NAME FILE: an archive with the directory as NAME. The same contents give the same bytes.
tar_of() {
    tar --create --directory="$1" --transform="s|^\.|$2|" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 \
        --numeric-owner . | gzip --no-name "-$level" >"$3"
}

# debian_package ROOT ARCHITECTURE: depends on the packages of deploy/Dockerfile, except for btrfs. RELEASE_MAINTAINER is "NAME
# <ADDRESS>": a package must have one.
debian_package() {
    local root=$1 architecture=amd64 work=$out/.build/$2/deb
    [[ $2 == x86_64 ]] || architecture=arm64
    rm -rf "$work"
    cp -a "$root" "$work"
    # Debian's directory of completions for zsh.
    mkdir "$work/usr/share/zsh/vendor-completions" &&
        mv "$work"/usr/share/zsh/site-functions/* "$work/usr/share/zsh/vendor-completions/" && rmdir "$work/usr/share/zsh/site-functions"
    mkdir "$work/DEBIAN"
    cat >"$work/DEBIAN/control" <<END
Package: csi-loopback
Version: $version
Architecture: $architecture
Maintainer: ${RELEASE_MAINTAINER:-unknown <unknown@localhost>}
Installed-Size: $(du -sk --apparent-size "$root" | cut -f 1)
Depends: e2fsprogs, mount, util-linux, xfsprogs
Recommends: btrfs-progs
Section: admin
Priority: optional
Description: CSI driver with changed block tracking on loopback files
 Volumes and snapshots are files; the blocks that changed between two
 snapshots are known exactly. The services are installed disabled.
END
    echo /etc/default/csi-loopback >"$work/DEBIAN/conffiles"
    cat >"$work/DEBIAN/prerm" <<'END'
#!/bin/sh
set -e
# Volumes stay mounted, so an upgrade needs no stop.
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
    systemctl disable --now csi-loopback csi-loopback-runtime-ops csi-loopback-freeze-guard || true
fi
END
    cat >"$work/DEBIAN/postinst" <<'END'
#!/bin/sh
set -e
if [ "$1" = configure ] && [ -d /run/systemd/system ]; then
    systemctl daemon-reload || true
    systemctl try-restart csi-loopback-freeze-guard csi-loopback csi-loopback-runtime-ops || true
fi
END
    chmod 755 "$work/DEBIAN/prerm" "$work/DEBIAN/postinst"
    find "$work" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
    dpkg-deb --root-owner-group -Zxz "-z$level" --build "$work" "$out/csi-loopback_${version}_$architecture.deb" >/dev/null
    rm -rf "$work"
}

rpm_package() { # rpm_package ROOT ARCHITECTURE
    local root=$1 work=$out/.build/$2/rpm
    rm -rf "$work"
    mkdir -p "$work"
    cat >"$work/csi-loopback.spec" <<END
Name: csi-loopback
Version: $version
Release: 1
Summary: CSI driver with changed block tracking on loopback files
License: Apache-2.0
Requires: e2fsprogs, util-linux, xfsprogs
AutoReqProv: no
%description
Volumes and snapshots are files; the blocks that changed between two snapshots are known exactly. The services are
installed disabled.
%install
mkdir -p %{buildroot} && cp -a $root/. %{buildroot}/
%post
[ ! -d /run/systemd/system ] || systemctl daemon-reload || :
%preun
if [ "\$1" = 0 ] && [ -d /run/systemd/system ]; then
    systemctl disable --now csi-loopback csi-loopback-runtime-ops csi-loopback-freeze-guard || :
fi
%postun
if [ "\$1" -ge 1 ] && [ -d /run/systemd/system ]; then
    systemctl try-restart csi-loopback-freeze-guard csi-loopback csi-loopback-runtime-ops || :
fi
%files
%defattr(-,root,root)
%config(noreplace) /etc/default/csi-loopback
$(cd "$root" && find usr ! -type d -printf '/%p\n' | sort)
END
    # With the times of the commit and a fixed host, so that the same files give the same package. The files are given: the
    # steps of a build, which would strip and compress, are off.
    rpmbuild --quiet -bb --target "$2" --buildroot "$work/root" --define "_topdir $work" --define "_rpmdir $out" \
        --define "_rpmfilename csi-loopback-$version-1.$2.rpm" --define '_buildhost localhost' --define '_build_id_links none' \
        --define 'use_source_date_epoch_as_buildtime 1' --define 'clamp_mtime_to_source_date_epoch 1' \
        --define '__spec_install_post %{nil}' --define 'debug_package %{nil}' --define "_binary_payload w$level.gzdio" \
        "$work/csi-loopback.spec" >"$work/log" 2>&1 || { cat "$work/log" >&2 && die "rpmbuild failed"; }
    rm -rf "$work"
}
