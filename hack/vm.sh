#!/usr/bin/env bash
# hack/vm.sh KERNEL COMMAND [ARGUMENT...]: runs a command as root in a virtual machine with another
# kernel, to test the driver on that kernel.
#
# KERNEL  a Debian kernel package, such as linux-image-6.1.0-56-amd64. It is downloaded, not installed. `list` prints
#         the available packages
# VM_SUITE   another Debian release that has the package, such as bullseye for Linux 5.10
#
# The virtual machine sees the files of this machine read-only; its writes stay in its memory.
# TMPDIR is on a separate sparse disk, an ext4 of 20 GiB. The exit code is the command's. The
# virtual machine ends with this script.
#
#     hack/vm.sh linux-image-6.12-amd64 env ORACLE_POOL=image ORACLE_CASES=20 \
#         target/debug/deps/storage-0123456789abcdef --include-ignored --test-threads=1 failures
#
# VM_ROOT    a directory with a Debian tree, which boots with its systemd in place of this machine's files; the command
#            runs as a service
# VM_CPUS    processors (2)
# VM_MEMORY  memory in MiB (3072)
# VM_ACCEL   kvm, or tcg for software emulation, about twenty times slower (kvm if available)
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"

# The packages of another release, with own lists: nothing on this machine changes.
apt_options=()
if [[ -n ${VM_SUITE:-} ]]; then
    lists=$cache/apt/$VM_SUITE
    mkdir -p "$lists/partial"
    # shellcheck disable=SC2016 # a field of apt-get
    mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -m 1 '/debian/$') || die "no Debian mirror is configured"
    printf 'deb [signed-by=%s] %s %s main\n' /usr/share/keyrings/debian-archive-keyring.gpg "$mirror" "$VM_SUITE" \
        >"$lists.list"
    apt_options=(-o "Dir::Etc::sourcelist=$lists.list" -o Dir::Etc::sourceparts=/dev/null
        -o "Dir::State::lists=$lists" -o Dir::State::status=/dev/null -o APT::Sandbox::User=root
        -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache=)
    apt-get "${apt_options[@]}" -qq update
fi

case ${1:-} in
    '' | -h | --help) usage; exit ;;
    list) apt-cache "${apt_options[@]}" search --names-only '^linux-image-[0-9].*-amd64$' | grep -v -e -cloud- -e -rt-; exit ;;
esac
package=$1
shift
(($#)) || die "the command is missing; see --help"
is_root || die "needs root"
install_missing qemu-system-x86_64 busybox depmod mkfs.ext4 cpio xz || die "required commands are missing"

# Kernel modules for the shared files, the driver and its tests.
kernel_modules=(crc32c_generic virtio_pci virtio_blk 9p 9pnet_virtio overlay loop ext4 xfs btrfs fuse
    dm-mod dm-flakey dm-snapshot)

work=$(mktemp --directory --tmpdir csi-loopback-vm.XXXXXX)
trap 'rm -rf "$work"' EXIT

# --- The kernel ---------------------------------------------------------------------------------------

kernels=$cache/kernels
if [[ ! -d $kernels/$package ]]; then
    mkdir -p "$kernels"
    # A metapackage depends on the newest kernel package.
    real=$(apt-cache "${apt_options[@]}" depends --no-pre-depends --no-recommends --no-suggests "$package" |
        sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)
    (cd "$work" && apt-get "${apt_options[@]}" download "${real:-$package}") || die "$package: download failed; hack/vm.sh list prints the packages"
    dpkg-deb --extract "$work"/*.deb "$work/kernel"
    mv "$work/kernel" "$kernels/$package"
fi
release=$(ls "$kernels/$package/lib/modules")
modules=$kernels/$package/lib/modules/$release
[[ -f $modules/modules.dep ]] || depmod --basedir "$kernels/$package" "$release"

# --- The initramfs --------------------------------------------------------------------------------------

root=$work/root
mkdir -p "$root"/{bin,dev,host,modules,new,proc,rw,sys}
cp "$(command -v busybox)" "$root/bin/busybox"

# module NAME: copies a module and, before it, its dependencies, each once.
module() {
    local line file name
    # A built-in module has no file.
    line=$(grep -E "/${1//[-_]/[-_]}\.ko(\.xz)?:" "$modules/modules.dep") || return 0
    file=${line%%:*} name=${file##*/} name=${name%.xz}
    [[ ! -e $root/modules/$name ]] || return 0
    for dependency in ${line#*:}; do
        dependency=${dependency##*/}
        module "${dependency%%.ko*}"
    done
    case $file in
        *.xz) xz --decompress --stdout "$modules/$file" >"$root/modules/$name" ;;
        *) cp "$modules/$file" "$root/modules/$name" ;;
    esac
    echo "$name" >>"$root/modules/order"
}
for name in "${kernel_modules[@]}"; do module "$name"; done

printf '%q ' "$@" >"$root/command"
cat >"$root/init" <<END
#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r name; do insmod "/modules/\$name"; done </modules/order
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=524288,cache=loose host /host
mount -t tmpfs rw /rw
mkdir /rw/upper /rw/work
mount -t overlay -o lowerdir="/host${VM_ROOT:-}",upperdir=/rw/upper,workdir=/rw/work overlay /new
mkdir -p /new/scratch
mount -t ext4 /dev/vda /new/scratch
for name in proc sys dev; do mount --move "/\$name" "/new/\$name"; done
[ -z "${VM_ROOT:-}" ] || exec /boot-systemd
mkdir -p /new/dev/shm /new/dev/pts /new/run
mount -t tmpfs run /new/run
mount -t tmpfs shm /new/dev/shm
cp /command /new/run/command
chroot /new /bin/bash -c 'cd "$PWD" && export TMPDIR=/scratch HOME=/root PATH="$PATH" CARGO_MANIFEST_DIR="$repo" && eval "\$(</run/command)"' </new/dev/null
echo "exit code \$?"
poweroff -f
END
cat >"$root/boot-systemd" <<END
#!/bin/busybox sh
cp /command /new/root/command
cat >/new/etc/systemd/system/vm-command.service <<UNIT
[Unit]
After=multi-user.target
[Service]
Type=oneshot
Environment=TMPDIR=/scratch HOME=/root
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
ExecStart=/bin/bash -c '/bin/bash /root/command; echo "exit code \\\$\\\$?"'
ExecStopPost=/bin/systemctl --force --force poweroff
UNIT
mkdir -p /new/etc/systemd/system/default.target.wants
ln -s ../vm-command.service /new/etc/systemd/system/default.target.wants/vm-command.service
ln -sf multi-user.target /new/etc/systemd/system/default.target
# A login prompt hangs up the terminal, and ends the command with it.
ln -sf /dev/null /new/etc/systemd/system/serial-getty@ttyS0.service
# Its initrd would do this.
: >/new/etc/machine-id
exec switch_root /new /sbin/init
END
chmod +x "$root/init" "$root/boot-systemd"
(cd "$root" && find . | cpio --quiet --create --format=newc | gzip -1) >"$work/initramfs"

truncate --size=20G "$work/scratch"
mkfs.ext4 -q "$work/scratch"

# --- The virtual machine --------------------------------------------------------------------------------

accel=${VM_ACCEL:-}
if [[ -z $accel ]]; then
    accel=tcg
    if [[ -w /dev/kvm ]] && timeout 5 qemu-system-x86_64 -accel kvm -display none -S -qmp stdio </dev/null &>/dev/null; then
        accel=kvm
    fi
fi
echo "Linux $release in a virtual machine ($accel)" >&2
qemu-system-x86_64 -accel "$accel" -cpu max -smp "${VM_CPUS:-2}" -m "${VM_MEMORY:-3072}" -display none -no-reboot \
    -kernel "$kernels/$package/boot/vmlinuz-$release" -initrd "$work/initramfs" \
    -append "console=ttyS0 quiet loglevel=1 panic=-1" -serial stdio -monitor none -nic none \
    -drive "file=$work/scratch,format=raw,if=virtio,cache=unsafe" \
    -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap |
    tr -d '\r' | tee "$work/output"
code=$(sed -n 's/^exit code \([0-9]*\)$/\1/p' "$work/output" | tail -n 1)
[[ -n $code ]] || die "the virtual machine ended before the command"
exit "$code"
