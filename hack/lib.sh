# shellcheck shell=bash
# Shared by the scripts of hack/: where things are cached, how what is missing gets installed, and
# how to tell which loop devices and mounts a run has left behind.
# Sourced, never run.

export LC_ALL=C

# A root shell without a login often lacks the directories of mkfs and losetup.
PATH=$PATH:/usr/sbin:/sbin:$HOME/.cargo/bin
export PATH

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Outlives the clone, so that a second run anywhere on the machine finds its tools built.
cache=${XDG_CACHE_HOME:-$HOME/.cache}/csi-loopback

# The version is part of the path in the cache: raising it here builds the new one.
cargo_deny_version=0.20.2
cargo_fuzz_version=0.13.2

is_root() { ((EUID == 0)); }

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# Where a command comes from on Debian, if not from the package of its own name.
declare -A package_of=(
    [blkdiscard]=util-linux
    [busybox]=busybox-static
    [chattr]=e2fsprogs
    [ctr]=containerd
    [depmod]=kmod
    [findmnt]=util-linux
    [fsfreeze]=util-linux
    [fstrim]=util-linux
    [setpriv]=util-linux
    [setsid]=util-linux
    [unshare]=util-linux
    [losetup]=mount
    [mkfs.btrfs]=btrfs-progs
    [mkfs.ext4]=e2fsprogs
    [mkfs.xfs]=xfsprogs
    [qemu-system-x86_64]=qemu-system-x86
    [resize2fs]=e2fsprogs
    [xfs_io]=xfsprogs
    [xz]=xz-utils
)

# What the driver and its tests call: filesystem tools for volumes and pools, loop devices, mounts.
# shellcheck disable=SC2034 # used by the scripts that source this file
storage_commands=(
    blkdiscard chattr findmnt fsfreeze fstrim losetup mkfs.btrfs mkfs.ext4 mkfs.xfs mount resize2fs
    xfs_io
)

# What tests put load on filesystems with; without them these tests are skipped.
# shellcheck disable=SC2034 # used by the scripts that source this file
load_commands=(fio stress-ng faketime)

# What hack/kubelet.sh runs pods with, and tests and a demonstration containers; without it they are skipped.
# shellcheck disable=SC2034 # used by the scripts that source this file
node_commands=(busybox containerd ctr runc)

# install_missing COMMAND...: sees to it that every command exists. Nothing is fetched when all do.
# Fails when one is still missing: the caller knows whether that is a skip or the end.
install_missing() {
    local command packages=()
    for command; do
        command -v "$command" >/dev/null || packages+=("${package_of[$command]:-$command}")
    done
    ((${#packages[@]})) || return 0
    mapfile -t packages < <(printf '%s\n' "${packages[@]}" | sort -u)
    if ! is_root || ! command -v apt-get >/dev/null; then
        echo "missing, and not to be installed without root and apt-get: ${packages[*]}" >&2
        return 1
    fi
    echo "installing ${packages[*]}" >&2
    local log
    log=$(mktemp)
    # Exported, so that the scripts called by this one do not fetch the lists again.
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

# cargo_component NAME SUBCOMMAND: sees to it that `cargo SUBCOMMAND` works.
cargo_component() {
    cargo "$2" --version >/dev/null 2>&1 && return
    command -v rustup >/dev/null && rustup component add "$1" >&2 &&
        cargo "$2" --version >/dev/null 2>&1
}

# go_cached TARGET WHAT TIME BUILDER ARGUMENT...: prints the directory TARGET of the cache, which
# `BUILDER ARGUMENT... DIRECTORY` fills if it is not there yet. On failure the last line of stderr is the
# reason. Any failure counts as "cannot be had": the versions are pinned, so what fails is Go itself or
# the download.
go_cached() {
    local target=$cache/tools/$1 what=$2 time=$3 build
    shift 3
    if [[ ! -d $target ]]; then
        if ! command -v go >/dev/null; then
            echo "Go is not installed" >&2
            return 1
        fi
        mkdir -p "$cache/tools"
        # What runs that were killed have left there.
        find "$cache/tools" -maxdepth 1 -name '.build.*' -mmin +1440 -exec rm -rf {} +
        # Built aside and renamed: a run that is interrupted, or one beside it, never meets half of it.
        build=$(mktemp -d "$cache/tools/.build.XXXXXX")
        mkdir "$build/out"
        echo "building $what (once per version, $time)" >&2
        if ! "$@" "$build/out" >"$build/log" 2>&1; then
            echo "$what cannot be had: $(tail -n 1 "$build/log" | sed 's|^\s*||')" >&2
            rm -rf "$build"
            return 1
        fi
        # It fails when another run was faster, whose directory is as good.
        mv -T "$build/out" "$target" 2>/dev/null || [[ -d $target ]]
        rm -rf "$build"
    fi
    printf '%s\n' "$target"
}

# go_key NAME...: a name in the cache for the tools of hack/tools/NAME, which changes with what they are built from.
go_key() {
    printf '%s-%s\n' "$1" "$(cd "$repo/hack/tools" && find "$@" -name '*.go' -o -name 'go.*' | sort |
        xargs sha256sum | sha256sum | cut -c1-16)"
}

# kubernetes_key: the name in the cache of what build_kubernetes builds.
kubernetes_key() { go_key kubernetes snapshot-metadata; }

# go_build NAME DIRECTORY [LDFLAGS]: the tools of hack/tools/NAME, at the versions of its go.mod and go.sum.
go_build() {
    (cd "$repo/hack/tools/$1" && CGO_ENABLED=0 go build -mod=readonly -trimpath -buildvcs=false \
        -ldflags "-s -w ${3:-}" -o "$2/" tool)
}

# go_tool NAME: prints the path of the tool that hack/tools/NAME is about.
go_tool() {
    local directory
    directory=$(go_cached "$(go_key "$1")" "$1" "about a minute" go_build "$1") || return 1
    printf '%s\n' "$directory/$1"
}

# build_kubernetes DIRECTORY: see kubernetes_tools.
build_kubernetes() {
    local source=$repo/hack/tools/kubernetes version
    version=$(cd "$source" && go list -m -f '{{.Version}}' k8s.io/kubernetes) || return 1
    # Without it the API server says that it is of no version.
    go_build kubernetes "$1" "-X k8s.io/component-base/version.gitVersion=$version" || return 1
    mv "$1/server" "$1/etcd" || return 1
    go_build snapshot-metadata "$1" || return 1
    install_crds kubernetes external-snapshotter/client/v8 "$1" &&
        install_crds snapshot-metadata external-snapshot-metadata/client "$1"
}

# install_crds NAME MODULE DIRECTORY: the custom resource definitions of a module that hack/tools/NAME names.
install_crds() {
    local directory=$3/crds/${2%%/*} module
    module=$(cd "$repo/hack/tools/$1" && go list -m -f '{{.Dir}}' "github.com/kubernetes-csi/$2") || return 1
    mkdir -p "$directory" && install -m 644 -t "$directory" "$module"/config/crd/*.io_*.yaml
}

# kubernetes_tools: prints a directory with what hack/tools/kubernetes and hack/tools/snapshot-metadata build:
# kube-apiserver, etcd, kubectl, snapshot-controller, csi-snapshotter, csi-snapshot-metadata,
# snapshot-metadata-lister, snapshot-metadata-verifier, kubelet, node-driver-registrar, and below crds/ the custom
# resource definitions that they serve. Where CSI_LOOPBACK_KUBERNETES names a directory, it is that. Fails like
# go_cached.
kubernetes_tools() {
    if [[ -n ${CSI_LOOPBACK_KUBERNETES:-} ]]; then
        printf '%s\n' "$CSI_LOOPBACK_KUBERNETES"
    else
        go_cached "$(kubernetes_key)" "the Kubernetes tools" "about five minutes" build_kubernetes
    fi
}

# go_command NAME MODULE VERSION PACKAGE [LDFLAGS]: prints the path of a command that is built from its
# module as published, with that module's own replacements, which `go install` refuses. Fails like go_cached.
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

# cargo_tool NAME VERSION: prints the path of a tool of cargo's, built once per version. On failure
# the last line of stderr is the reason.
cargo_tool() {
    local root=$cache/$1-$2 log
    if [[ ! -x $root/bin/$1 ]]; then
        echo "building $1 $2 (once per version, some minutes)" >&2
        log=$(mktemp)
        # Not the clone's target directory: cargo install would fill it with the tool.
        if ! (cd / && env -u CARGO_TARGET_DIR cargo install "$1" \
            --version "=$2" --locked --quiet --root "$root") >"$log" 2>&1; then
            echo "$1 does not build: $(tail -n 1 "$log")" >&2
            rm -f "$log"
            return 1
        fi
        rm -f "$log"
    fi
    printf '%s\n' "$root/bin/$1"
}

cargo_deny() { cargo_tool cargo-deny "$cargo_deny_version"; }

cargo_fuzz() { cargo_tool cargo-fuzz "$cargo_fuzz_version"; }

# list_loops: every loop device as "/dev/loopN MAJOR:MINOR MAJOR:MINOR_OF_THE_FILE'S_FILESYSTEM FILE".
list_loops() {
    # losetup pads the numbers, and --raw writes the padding out.
    losetup --list --noheadings --raw --output NAME,MAJ:MIN,BACK-MAJ:MIN,BACK-FILE |
        sed 's/\\x20/ /g' | awk '{ print $1, $2, $3, $4 }'
}

# loops_of DIR: "/dev/loopN FILE" of each loop device that stands on a file below DIR, and of each
# that stands on a filesystem on such a device: once a pool image is no longer mounted, the names
# of the files in it lead nowhere. What stands on another comes first.
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

# list_mounts: every mount as "MOUNT_POINT SOURCE".
list_mounts() {
    # Between the fields and the source stand optional ones, closed by a lone dash.
    awk '{ for (i = 7; $i != "-"; i++); print $5, $(i + 2) }' /proc/self/mountinfo
}

# mounts_below DIR: mount points below DIR, innermost first.
mounts_below() {
    list_mounts | awk -v dir="$1/" 'index($1, dir) == 1 { at[n++] = $1 }
        END { while (n > 0) print at[--n] }'
}

# processes_of DIR: processes that were started with DIR as TMPDIR, and this shell is not among them.
processes_of() {
    local pid
    for pid in /proc/[0-9]*; do
        pid=${pid#/proc/}
        [[ $pid == "$$" || $pid == "$BASHPID" ]] && continue
        grep -qzxF "TMPDIR=$1" "/proc/$pid/environ" 2>/dev/null || continue
        printf '%s %s\n' "$pid" "$(tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" || true)"
    done
}

# clear_directory DIR: undoes whatever a killed driver may have left below DIR, then removes it.
# Only what is below DIR is touched: the machine may carry the loop devices of others.
clear_directory() {
    local dir=$1 point device
    [[ -n $dir && -d $dir ]] || return 0
    for _ in 1 2 3; do
        while read -r point; do
            # A filesystem that was being cut when its driver died is frozen: umount would wait.
            fsfreeze --unfreeze "$point" 2>/dev/null || true
            umount "$point" 2>/dev/null || umount --lazy "$point" 2>/dev/null || true
        done < <(mounts_below "$dir")
        while read -r device _; do
            losetup --detach "$device" 2>/dev/null || true
        done < <(loops_of "$dir")
        [[ -z $(mounts_below "$dir") ]] && break
        sleep 1
    done
    # Snapshots in a pool are immutable files.
    rm -rf --one-file-system "$dir" 2>/dev/null && return
    chattr -R -f -i "$dir" 2>/dev/null || true
    rm -rf --one-file-system "$dir"
}
