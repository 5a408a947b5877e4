# shellcheck shell=bash
# Shared functions of the scripts in hack/: the cache, installation of missing tools, and the list
# of processes, loop devices and mounts that remain after a run. Source this file; do not run it.

export LC_ALL=C

# The PATH of a non-login root shell often lacks the directories of mkfs and losetup.
PATH=$PATH:/usr/sbin:/sbin:$HOME/.cargo/bin
export PATH

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Outside of the clone: all clones on the machine share the built tools.
cache=${XDG_CACHE_HOME:-$HOME/.cache}/csi-loopback

# The cache path includes the version: a new version here is built at its first use.
cargo_cyclonedx_version=0.5.9
cargo_deny_version=0.20.2
cargo_fuzz_version=0.13.2
grpcio_version=1.85.3
grpcio_tools_version=1.85.1

is_root() { ((EUID == 0)); }

usage() { sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; } # prints the comment at the start of the script

handle_help() { # handle_help [ARGUMENT...]: ends the script with its usage, if that is requested
    [[ ${1:-} != -h && ${1:-} != --help ]] || { usage && exit; }
}

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# Debian packages of commands whose package has another name.
declare -A package_of=(
    [aarch64-linux-gnu-gcc]=crossbuild-essential-arm64
    [blkdiscard]=util-linux
    [busybox]=busybox-static
    [chattr]=e2fsprogs
    [ctr]=containerd
    [depmod]=kmod
    [findmnt]=util-linux
    [fsfreeze]=util-linux
    [fstrim]=util-linux
    [ip]=iproute2
    [setpriv]=util-linux
    [setsid]=util-linux
    [unshare]=util-linux
    [losetup]=mount
    [mkfs.btrfs]=btrfs-progs
    [python3]=python3-venv
    [mkfs.ext4]=e2fsprogs
    [mkfs.xfs]=xfsprogs
    [nft]=nftables
    [nsenter]=util-linux
    [objcopy]=binutils
    [qemu-aarch64-static]=qemu-user-static
    [qemu-system-x86_64]=qemu-system-x86
    [resize2fs]=e2fsprogs
    [rpmbuild]=rpm
    [xfs_io]=xfsprogs
    [xz]=xz-utils
)

# Commands that the driver and its tests run: filesystem tools, loop devices, mounts.
# shellcheck disable=SC2034 # used by the scripts that source this file
storage_commands=(
    blkdiscard chattr findmnt fsfreeze fstrim losetup mkfs.btrfs mkfs.ext4 mkfs.xfs mount resize2fs
    xfs_io
)

# Commands that load filesystems. Tests that need a missing one are skipped.
# shellcheck disable=SC2034 # used by the scripts that source this file
load_commands=(fio stress-ng faketime)

# Commands of hack/kubelet.sh, of tests with containers, and of demos. Without them these are
# skipped.
# shellcheck disable=SC2034 # used by the scripts that source this file
node_commands=(busybox containerd ctr runc)

# Further commands of hack/e2e.sh, and those that rows of hack/bench.sh need.
# shellcheck disable=SC2034 # used by the scripts that source this file
e2e_commands=(ip jq mmdebstrap nft nsenter openssl setpriv setsid unshare)
# shellcheck disable=SC2034 # used by the scripts that source this file
bench_commands=(fio restic sqlite3)

# install_missing COMMAND...: installs the packages of missing commands. Fails if a command is still
# missing afterwards; the caller decides whether to skip or to stop.
install_missing() {
    local command packages=()
    for command; do
        command -v "$command" >/dev/null || packages+=("${package_of[$command]:-$command}")
    done
    ((${#packages[@]})) || return 0
    mapfile -t packages < <(printf '%s\n' "${packages[@]}" | sort -u)
    if ! is_root || ! command -v apt-get >/dev/null; then
        echo "missing packages: ${packages[*]}; install them, or run as root on a system with apt-get" >&2
        return 1
    fi
    echo "installing ${packages[*]}" >&2
    local log
    log=$(mktemp)
    # Exported: scripts that this one calls do not update the package lists again.
    if [[ -z ${CSI_LOOPBACK_APT_UPDATED:-} ]] && apt-get update >"$log" 2>&1; then
        export CSI_LOOPBACK_APT_UPDATED=1
    fi
    if ! DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        -o DPkg::Lock::Timeout=300 "${packages[@]}" >>"$log" 2>&1; then
        tail -n 5 "$log" >&2
        rm -f "$log"
        return 1
    fi
    rm -f "$log"
    hash -r
    for command; do
        command -v "$command" >/dev/null || return 1
    done
}

# cargo_component NAME SUBCOMMAND: installs the rustup component if `cargo SUBCOMMAND` fails.
cargo_component() {
    cargo "$2" --version >/dev/null 2>&1 && return
    command -v rustup >/dev/null && rustup component add "$1" >&2 &&
        cargo "$2" --version >/dev/null 2>&1
}

# cached TARGET WHAT TIME BUILDER ARGUMENT...: prints the path of the cache directory TARGET. If it is
# missing, `BUILDER ARGUMENT... DIRECTORY` builds it. On failure, the last line of stderr is the
# reason. Callers treat every failure as "not available": versions are pinned, so only a missing
# compiler or a download can fail.
cached() {
    local target=$cache/tools/$1 what=$2 time=$3 build
    shift 3
    if [[ ! -d $target ]]; then
        mkdir -p "$cache/tools"
        # Build directories of killed runs.
        find "$cache/tools" -maxdepth 1 -name '.build.*' -mmin +1440 -exec rm -rf {} +
        # Renamed when complete: interrupted and parallel runs never see a partial directory.
        build=$(mktemp -d "$cache/tools/.build.XXXXXX")
        mkdir "$build/out"
        echo "building $what (once per version, $time)" >&2
        if ! "$@" "$build/out" >"$build/log" 2>&1; then
            echo "$what: build failed: $(tail -n 1 "$build/log" | sed 's|^\s*||')" >&2
            rm -rf "$build"
            return 1
        fi
        # Fails if a parallel run was faster; its directory is equivalent.
        mv -T "$build/out" "$target" 2>/dev/null || [[ -d $target ]]
        rm -rf "$build"
    fi
    printf '%s\n' "$target"
}

# go_cached TARGET ...: `cached` for what Go builds.
go_cached() {
    if [[ ! -d $cache/tools/$1 ]] && ! command -v go >/dev/null; then
        echo "Go is not installed" >&2
        return 1
    fi
    cached "$@"
}

# python_grpc: prints the path of a Python interpreter with grpcio and grpcio-tools.
# CSI_LOOPBACK_PYTHON overrides it. Fails like cached.
python_grpc() {
    local directory
    if [[ -n ${CSI_LOOPBACK_PYTHON:-} ]]; then
        printf '%s\n' "$CSI_LOOPBACK_PYTHON"
    else
        directory=$(cached "python-grpcio-$grpcio_version" "Python's grpcio" "half a minute" build_python_grpc) || return 1
        printf '%s\n' "$directory/bin/python"
    fi
}

build_python_grpc() { # build_python_grpc DIRECTORY
    install_missing python3 || return 1
    # A Python without venv is Debian's.
    python3 -c 'import ensurepip' 2>/dev/null ||
        apt-get install --yes --no-install-recommends -o DPkg::Lock::Timeout=300 python3-venv >&2 || return 1
    python3 -m venv "$1" && "$1/bin/python" -m pip install --disable-pip-version-check --only-binary :all: \
        "grpcio==$grpcio_version" "grpcio-tools==$grpcio_tools_version"
}

# example_clients: prints a directory with the programs of examples/go. Fails like cached.
example_clients() {
    go_cached "$(go_key ../../examples/go)" "examples/go" "half a minute" go_build ../../examples/go
}

# go_key NAME...: the cache key of the tools in hack/tools/NAME, with a hash of their sources.
go_key() {
    printf '%s-%s\n' "${1##*/}" "$(cd "$repo/hack/tools" && find "$@" -name '*.go' -o -name 'go.*' | sort |
        xargs sha256sum | sha256sum | cut -c1-16)"
}

# kubernetes_key: the cache key of build_kubernetes.
kubernetes_key() { go_key kubernetes snapshot-metadata; }

# go_module NAME MODULE: prints the directory of a module at the version in the go.mod of hack/tools/NAME. Downloads it: tools
# may be in the cache without their sources.
go_module() {
    (cd "$repo/hack/tools/$1" && go mod download "$2" >&2 && go list -m -f '{{.Dir}}' "$2")
}

# snapshot_controller_image: the image of the snapshot-controller in the release that hack/tools/kubernetes names.
snapshot_controller_image() {
    local directory
    directory=$(go_module kubernetes github.com/kubernetes-csi/external-snapshotter/v8) || return 1
    printf 'registry.k8s.io/sig-storage/snapshot-controller:%s\n' "${directory##*@}"
}

# snapshot_controller: prints the released manifests of snapshot-controller with the image of the same release. Those of
# v8.7.0 name v8.6.0, in which VolumeGroupSnapshots are off: they get no content, no status and no event.
snapshot_controller() {
    local directory image
    image=$(snapshot_controller_image) || return 1
    directory=$(go_module kubernetes github.com/kubernetes-csi/external-snapshotter/v8) || return 1
    directory=$directory/deploy/kubernetes/snapshot-controller
    cat "$directory/rbac-snapshot-controller.yaml" && echo --- &&
        sed -E "s|^( *image: ).*/snapshot-controller:.*|\1$image|" "$directory/setup-snapshot-controller.yaml"
}

# Debug information costs a quarter of the time, and the linker drops it. The tag is for promtool:
# without its service discovery, which has the clients of all clouds.
go_flags=(-mod=readonly -trimpath -buildvcs=false -gcflags=all=-dwarf=false -tags=remove_all_sd)

# go_build NAME DIRECTORY [LDFLAGS]: builds the tools of hack/tools/NAME at the versions of its
# go.mod.
go_build() {
    (cd "$repo/hack/tools/$1" &&
        CGO_ENABLED=0 go build "${go_flags[@]}" -ldflags "-s -w ${3:-}" -o "$2/" tool)
}

# go_tool NAME: prints the path of the tool NAME, built from hack/tools/NAME.
go_tool() {
    local directory
    directory=$(go_cached "$(go_key "$1")" "$1" "about a minute" go_build "$1") || return 1
    printf '%s\n' "$directory/$1"
}

# csi_sanity: prints the path of csi-sanity with the specs of hack/tools/csi-sanity/*.go, which belong into its package
# sanity. Fails like go_cached.
csi_sanity() {
    local directory
    directory=$(go_cached "$(go_key csi-sanity)" csi-sanity "about a minute" build_csi_sanity) || return 1
    printf '%s\n' "$directory/csi-sanity"
}

# build_csi_sanity DIRECTORY: builds a copy of the module, because Go accepts no overlay for its module cache.
build_csi_sanity() {
    local module=github.com/kubernetes-csi/csi-test/v5 source copy status=0
    source=$(go_module csi-sanity "$module") || return 1
    copy=$(mktemp -d) || return 1
    cp -r "$source" "$copy/csi-test" && chmod -R u+w "$copy" &&
        cp "$repo"/hack/tools/csi-sanity/*.go "$copy/csi-test/pkg/sanity/" &&
        cp "$repo"/hack/tools/csi-sanity/go.{mod,sum} "$copy/" &&
        go mod edit -replace "$module=$copy/csi-test" "$copy/go.mod" &&
        (cd "$repo/hack/tools/csi-sanity" &&
            CGO_ENABLED=0 go build "${go_flags[@]}" -modfile "$copy/go.mod" -ldflags "-s -w" -o "$1/" tool) || status=1
    rm -r "$copy"
    return "$status"
}

# go_build_kubernetes NAME DIRECTORY: go_build for a module of hack/tools that has k8s.io/kubernetes.
go_build_kubernetes() {
    local version
    version=$(cd "$repo/hack/tools/$1" && go list -m -f '{{.Version}}' k8s.io/kubernetes) || return 1
    # Otherwise the API server reports no version.
    go_build "$1" "$2" "-X k8s.io/component-base/version.gitVersion=$version"
}

# e2e_tools: prints a directory with what hack/tools/e2e builds: kube-controller-manager, kube-scheduler, kube-proxy,
# coredns, CNI plugins (ptp, host-local, loopback), csi-provisioner, csi-resizer and livenessprobe. Fails like go_cached.
e2e_tools() {
    go_cached "$(go_key e2e)" "the tools of hack/e2e.sh" "about five minutes" go_build_kubernetes e2e
}

# kind_tools: prints a directory with what hack/tools/kind builds: kind, kubeadm and crictl. Fails like go_cached.
kind_tools() {
    go_cached "$(go_key kind)" kind "about a minute" go_build_kubernetes kind
}

# build_kubernetes DIRECTORY: the builder of kubernetes_tools.
build_kubernetes() {
    go_build_kubernetes kubernetes "$1" || return 1
    mv "$1/server" "$1/etcd" || return 1
    go_build snapshot-metadata "$1" || return 1
    install_crds kubernetes external-snapshotter/client/v8 "$1" &&
        install_crds snapshot-metadata external-snapshot-metadata/client "$1"
}

# install_crds NAME MODULE DIRECTORY: copies the CustomResourceDefinitions of a module that the
# go.mod of hack/tools/NAME requires.
install_crds() {
    local directory=$3/crds/${2%%/*} module
    module=$(go_module "$1" "github.com/kubernetes-csi/$2") || return 1
    mkdir -p "$directory" && install -m 644 -t "$directory" "$module"/config/crd/*.io_*.yaml
}

# kubernetes_tools: prints a directory with the tools of hack/tools/kubernetes and
# hack/tools/snapshot-metadata: kube-apiserver, etcd, kubectl, snapshot-controller, csi-snapshotter,
# csi-snapshot-metadata, snapshot-metadata-lister, snapshot-metadata-verifier, kubelet,
# node-driver-registrar, and in crds/ their CustomResourceDefinitions. CSI_LOOPBACK_KUBERNETES
# overrides the directory. Fails like go_cached.
kubernetes_tools() {
    if [[ -n ${CSI_LOOPBACK_KUBERNETES:-} ]]; then
        printf '%s\n' "$CSI_LOOPBACK_KUBERNETES"
    else
        go_cached "$(kubernetes_key)" "the Kubernetes tools" "about five minutes" build_kubernetes
    fi
}

# go_command NAME MODULE VERSION PACKAGE [LDFLAGS]: prints the path of a command, built from its
# published module. `go install` rejects modules with replace directives; this function applies
# them. Fails like go_cached.
go_command() {
    local directory
    directory=$(go_cached "$1-$3" "$1 $3" "some minutes" \
        build_command "$1" "$2" "$3" "$4" "${5:-}") || return 1
    printf '%s\n' "$directory/$1"
}

build_command() { # build_command NAME MODULE VERSION PACKAGE LDFLAGS DIRECTORY
    local source directory=$6
    if ! source=$(cd "$directory" && go mod download -json "$2@$3" 2>/dev/null); then
        jq -r .Error <<<"$source"
        return 1
    fi
    cp -r "$(jq -r .Dir <<<"$source")" "$directory/.source" && chmod -R u+w "$directory/.source" &&
        (cd "$directory/.source" && CGO_ENABLED=0 go build -mod=mod -trimpath -ldflags "$5" \
            -o "$directory/$1" "$4") && rm -rf "$directory/.source"
}

# cargo_tool NAME VERSION [FEATURE]: prints the path of a cargo tool, built once per version. On failure, the
# last line of stderr is the reason.
cargo_tool() {
    local root=$cache/$1-$2 log
    if [[ ! -x $root/bin/$1 ]]; then
        echo "building $1 $2 (once per version, some minutes)" >&2
        log=$(mktemp)
        # Without CARGO_TARGET_DIR: the tool's build must not fill the clone's target directory.
        # A debug build takes a third of the time, and the tools read small files.
        if ! (cd / && env -u CARGO_TARGET_DIR -u RUSTC_WORKSPACE_WRAPPER -u CLIPPY_ARGS cargo install "$1" --debug \
            --version "=$2" ${3:+--features "$3"} --locked --quiet --root "$root") >"$log" 2>&1; then
            echo "$1: build failed: $(tail -n 1 "$log")" >&2
            rm -f "$log"
            return 1
        fi
        rm -f "$log"
    fi
    printf '%s\n' "$root/bin/$1"
}

cargo_cyclonedx() { cargo_tool cargo-cyclonedx "$cargo_cyclonedx_version"; }

cargo_deny() { cargo_tool cargo-deny "$cargo_deny_version"; }

cargo_fuzz() { cargo_tool cargo-fuzz "$cargo_fuzz_version"; }

free_port() { # prints a free port of 127.0.0.1 below the ephemeral ports
    local port
    until port=$((20000 + SRANDOM % 12000)) && ! (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do :; done
    printf '%s\n' "$port"
}

# first_child PID: prints the child of a process, if it has one.
first_child() {
    awk -v parent="$1" '/^PPid:/ && $2 == parent { split(FILENAME, at, "/"); print at[3] }' \
        /proc/[0-9]*/status 2>/dev/null || true
}

# list_loops: prints each loop device as "/dev/loopN MAJOR:MINOR
# MAJOR:MINOR_OF_THE_FILE'S_FILESYSTEM FILE".
list_loops() {
    # losetup pads the numbers, and --raw escapes the padding.
    losetup --list --noheadings --raw --output NAME,MAJ:MIN,BACK-MAJ:MIN,BACK-FILE |
        sed 's/\\x20/ /g' | awk '{ print $1, $2, $3, $4 }'
}

# loops_of DIR: prints "/dev/loopN FILE" for each loop device with a backing file below DIR, and for
# each with a backing file in a filesystem on such a device: after a pool image is unmounted, the
# paths of its files no longer exist. Devices on top of others come first.
loops_of() {
    list_loops | awk -v dir="$1/" '
        { name[NR] = $1; number[NR] = $2; on[NR] = $3; file[NR] = $4 }
        END {
            for (round = 0; round < 3; round++)
                for (i = 1; i <= NR; i++)
                    if (!(i in found) && (index(file[i], dir) == 1 || on[i] in ours)) {
                        found[i] = 1; ours[number[i]] = 1; order[++n] = i
                    }
            for (; n > 0; n--) print name[order[n]], file[order[n]]
        }'
}

# list_mounts: prints each mount as "MOUNT_POINT SOURCE".
list_mounts() {
    # A dash ends the optional fields before the source.
    awk '{ for (i = 7; $i != "-"; i++); print $5, $(i + 2) }' /proc/self/mountinfo
}

# mounts_below DIR: prints the mount points below DIR, innermost first.
mounts_below() {
    list_mounts | awk -v dir="$1/" 'index($1, dir) == 1 { at[n++] = $1 }
        END { while (n > 0) print at[--n] }'
}

# processes_of DIR: prints the processes with TMPDIR=DIR in their environment, without this shell.
processes_of() {
    local pid
    for pid in /proc/[0-9]*; do
        pid=${pid#/proc/}
        [[ $pid == "$$" || $pid == "$BASHPID" ]] && continue
        grep -qzxF "TMPDIR=$1" "/proc/$pid/environ" 2>/dev/null || continue
        printf '%s %s\n' "$pid" "$(tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" || true)"
    done
}

# detach_loops COMMAND...: detaches the loop devices that the command lists, one per line. A device that was detached or
# got another file since is not touched: the detach of a volume can free that of its pool image, and another program
# takes the lowest free device.
detach_loops() {
    local at device
    local -A attachment=()
    for at in /sys/block/loop*/diskseq; do
        [[ -e $at ]] || continue
        # The kernel counts on with each attach and detach.
        device=${at#/sys/block/}
        attachment[/dev/${device%/diskseq}]=$(<"$at")
    done
    while read -r device _; do
        (
            # An open device cannot get another file.
            exec 3<"$device"
            [[ ${attachment[$device]-} == "$(<"/sys/block/${device#/dev/}/diskseq")" ]] || exit
            losetup --detach "$device"
        ) 2>/dev/null || true
    done < <("$@")
}

# clear_directory DIR: unmounts and detaches everything below DIR, then removes DIR. Loop devices
# and mounts outside of DIR are not touched: they can belong to other users of the machine.
clear_directory() {
    local dir=$1 point
    [[ -n $dir && -d $dir ]] || return 0
    for _ in 1 2 3; do
        while read -r point; do
            # A driver killed during a snapshot leaves the filesystem frozen, and umount would hang.
            fsfreeze --unfreeze "$point" 2>/dev/null || true
            umount "$point" 2>/dev/null || umount --lazy "$point" 2>/dev/null || true
        done < <(mounts_below "$dir")
        detach_loops loops_of "$dir"
        [[ -z $(mounts_below "$dir") ]] && break
        sleep 1
    done
    # Snapshots in a pool have the immutable attribute.
    rm -rf --one-file-system "$dir" 2>/dev/null && return
    chattr -R -f -i "$dir" 2>/dev/null || true
    rm -rf --one-file-system "$dir"
}
