#!/usr/bin/env bash
# hack/release-check.sh [--docker] [--vm] DIRECTORY: tests the files that hack/release.sh made, from these files alone:
# checksums; the Debian package in a bare Debian tree, with its units; the RPM package; chart, manifests and images; of the
# image for aarch64, if there is one, that its programs start in qemu-user.
#
#   --docker  also runs the docker commands of README.md, with the docker daemon of this machine: the driver takes a
#             snapshot through the socket
#   --vm      also boots that tree with systemd in a virtual machine (hack/vm.sh): the driver starts as a service,
#             survives a kill, and backs up and restores a snapshot
#
# DEBIAN_SUITE   the Debian release of the tree, by default that of deploy/Dockerfile
# RELEASE_KERNEL Debian kernel package of the virtual machine (linux-image-amd64)
#
# Needs root. The Debian tree is kept in ~/.cache/csi-loopback/images.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/oci.sh
source "$repo/hack/oci.sh"

in_docker='' in_vm=''
while [[ ${1:-} == -* ]]; do
    case $1 in
    -h | --help) usage && exit ;;
    --docker) in_docker=1 ;;
    --vm) in_vm=1 ;;
    *) die "unknown option $1; see --help" ;;
    esac
    shift
done
[[ $# == 1 && -e ${1:-}/SHA256SUMS ]] || die "DIRECTORY of hack/release.sh is required; see --help"
release=$(realpath "$1")
is_root || die "needs root, for a Debian tree"
install_missing mmdebstrap jq rpm >&2 || die "required commands are missing"
work=$(mktemp --directory --tmpdir csi-loopback-release.XXXXXX)
container=
trap '[[ -z $container ]] || docker rm --force --volumes "$container"; umount --quiet "$work"/root/{proc,dev} || true; rm -rf --one-file-system "$work"' EXIT
root=$work/root

step() { printf '%4d s  %s\n' "$SECONDS" "$*"; }

# one GLOB: the only file of that name.
one() {
    local files
    mapfile -t files < <(compgen -G "$release/$1")
    ((${#files[@]} == 1)) || die "$1: expected one file, found ${#files[@]}"
    printf '%s\n' "${files[0]}"
}

# bare_tree: a Debian tree with systemd and what the package depends on, as in a new machine.
bare_tree() {
    local suite layer
    suite=${DEBIAN_SUITE:-$(sed -n 's/^ARG RUNTIME_IMAGE=debian:\(.*\)-slim$/\1/p' "$repo/deploy/Dockerfile")}
    layer=$(debian_layer "$suite" apt systemd systemd-sysv udev kmod e2fsprogs mount util-linux xfsprogs) || die "no Debian tree; next: set DEBIAN_MIRROR"
    mkdir "$root"
    tar --extract --file="$layer" --directory="$root"
    # dpkg and systemd-analyze in the tree need these.
    mkdir -p "$root"/{dev,proc,var/cache/apt/archives/partial,var/lib/apt/lists/partial,var/log/apt}
    mount --bind /dev "$root/dev"
    mount -t proc proc "$root/proc"
}

in_tree() { chroot "$root" /usr/bin/env PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"; }

# readme PATTERN: the command in the block of README.md under "Install".
readme() {
    local line
    line=$(sed -n '/^## Install/,/^## /s/^    //p' "$repo/README.md" | grep -E "^$1" | head -n 1)
    [[ -n $line ]] || die "README.md has no command $1 under Install"
    printf '%s\n' "$line"
}

# test_package: the package installs by README.md, its units are valid, and its programs run.
test_package() {
    local package unit found
    package=$(one 'csi-loopback_*_amd64.deb')
    cp "$package" "$root/root/"
    in_tree env DEBIAN_FRONTEND=noninteractive bash -euc "cd /root && $(readme 'apt-get install') --yes" >"$work/apt.log" 2>&1 ||
        { cat "$work/apt.log" >&2 && die "the package does not install"; }
    for unit in csi-loopback csi-loopback-freeze-guard csi-loopback-runtime-ops; do
        # It reports nothing about a valid unit. Man pages are not in the tree.
        found=$(in_tree systemd-analyze verify --man=no "$unit.service" 2>&1) || die "$unit.service: $found"
        [[ -z $found ]] || die "$unit.service: $found"
        [[ ! -e $root/etc/systemd/system/multi-user.target.wants/$unit.service ]] || die "$unit.service is enabled"
    done
    in_tree csi-loopback --version
    # As an OCI runtime, under the other name, it looks for runc.
    found=$(in_tree csi-loopback-runc --version 2>&1) && die "csi-loopback-runc started a runtime that is not in the tree"
    [[ $found == *"starting runc"* ]] || die "csi-loopback-runc: $found"
    in_tree bash -n /usr/share/bash-completion/completions/csi-loopback
    dpkg-deb --contents "$package" | grep '/usr/share/man/man1/csi-loopback-driver.1.gz$' >/dev/null || die "the package has no man page"
}

# test_rpm: the other package has the same files, but for Debian's directory of completions.
test_rpm() {
    local package
    package=$(one 'csi-loopback-*.x86_64.rpm')
    diff <(dpkg-deb --fsys-tarfile "$(one 'csi-loopback_*_amd64.deb')" | tar --list | sed -n 's|^\.||; s|zsh/vendor-completions|zsh/site-functions|; /[^/]$/p' | sort) \
        <(rpm --query --package --list "$package" 2>/dev/null | sort) || die "$package has other files than the Debian package"
}

# test_deployment: every image of chart and manifests that is ours has the digest of the index.
test_deployment() {
    local file digest images helm words
    file=$(one 'images/csi-loopback-*.digest')
    digest=$(<"$file")
    [[ $(tar -xOf "${file%.digest}.tar" index.json | jq -r '.manifests[0].digest') == "$digest" ]] ||
        die "the index of the image is not the one of its digest"
    images=$(grep -hoE 'image[:=] ?\S*csi-loopback:\S+' "$release"/manifests/*.yaml)
    [[ -n $images ]] || die "no manifest has an image"
    ! grep -v "@$digest$" <<<"$images" || die "images that are not pinned"
    if helm=$(go_tool helm); then
        read -ra words <<<"$(readme 'helm install')"
        images=$(cd "$release" && "$helm" template "${words[@]:2}" --set inline.enabled=true | grep -oE 'image: "\S*csi-loopback:\S+"')
        [[ -n $images ]] || die "the chart has no image"
        ! grep -v "@$digest\"$" <<<"$images" || die "images of the chart that are not pinned"
    fi
}

# test_foreign ARCHIVE: in the image for aarch64 the binary, a shell and what the driver calls start, with their libraries.
test_foreign() {
    local tree=$work/foreign layer program
    install_missing qemu-aarch64-static >&2 || die "needs qemu-aarch64-static; next: apt-get install qemu-user-static"
    mkdir "$tree"
    for layer in $(tar -xOf "$1" manifest.json | jq -r '.[0].Layers[]'); do
        tar -xOf "$1" "$layer" | tar --extract --directory="$tree"
    done
    for program in csi-loopback usr/bin/bash usr/bin/mount usr/sbin/{blkid,losetup,mkfs.btrfs}; do
        qemu-aarch64-static -L "$tree" "$tree/$program" --version >/dev/null || die "$program of $1 does not start"
    done
    for program in mkfs.{ext4,xfs} xfs_growfs; do
        qemu-aarch64-static -L "$tree" "$tree/usr/sbin/$program" -V >"$work/version" 2>&1 || die "$program of $1: $(<"$work/version")"
    done
    [[ $(grep -c 'BEGIN CERTIFICATE' "$tree/etc/ssl/certs/ca-certificates.crt") -gt 100 ]] || die "$1 has no certificate authorities"
    grep -q '^root:.*:0:0:' "$tree/etc/passwd" || die "$1 has no root user"
    dpkg-query --admindir="$tree/var/lib/dpkg" --show xfsprogs >/dev/null || die "$1 does not list its packages"
}

# test_docker: the commands for CI give a driver that serves on ./csi/csi.sock.
test_docker() {
    local socket=$work/csi/csi.sock command
    ln -s "$release/images" "$work/images"
    (cd "$work" && bash -euc "$(readme 'docker load')")
    # A container that does not start has an id, too, and is removed at the end.
    container=$(cd "$work" && bash -euc "$(readme 'docker run')")
    for _ in {1..100}; do [[ ! -S $socket ]] || break; sleep 0.2; done
    docker logs "$container"
    for command in "volume create data --size 64Mi" "snapshot create monday --volume data" "snapshot allocated monday"; do
        # shellcheck disable=SC2086 # words
        CSI_ENDPOINT=unix://$socket "$root/usr/bin/csi-loopback" $command
    done
    docker rm --force --volumes "$container"
    container=
}

step "checksums"
(cd "$release" && sha256sum --quiet --check SHA256SUMS)
step "the package in a bare Debian tree"
bare_tree
test_package
step "the RPM package, images, chart and manifests"
test_rpm
test_deployment
if [[ $(uname -m) != aarch64 ]] && foreign=$(compgen -G "$release/images/csi-loopback-*-aarch64.tar"); then
    step "the image for aarch64"
    test_foreign "$foreign"
fi
if [[ -n $in_docker ]]; then
    step "the driver in a container of docker"
    test_docker
fi
if [[ -n $in_vm ]]; then
    step "the service in a virtual machine"
    umount "$root/dev" "$root/proc"
    install -m 755 "$repo/hack/release/service-test.sh" "$root/root/service-test.sh"
    readme 'systemctl' >"$root/root/readme-start"
    VM_ROOT=$root "$repo/hack/vm.sh" "${RELEASE_KERNEL:-linux-image-amd64}" /root/service-test.sh
fi
step "passed"
