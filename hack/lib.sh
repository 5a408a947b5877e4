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
    [chattr]=e2fsprogs
    [findmnt]=util-linux
    [fsfreeze]=util-linux
    [fstrim]=util-linux
    [losetup]=mount
    [mkfs.btrfs]=btrfs-progs
    [mkfs.ext4]=e2fsprogs
    [mkfs.xfs]=xfsprogs
    [resize2fs]=e2fsprogs
    [xfs_io]=xfsprogs
)

# What the driver and its tests call: filesystem tools for volumes and pools, loop devices, mounts.
# shellcheck disable=SC2034 # used by the scripts that source this file
storage_commands=(
    blkdiscard chattr findmnt fsfreeze fstrim losetup mkfs.btrfs mkfs.ext4 mkfs.xfs mount resize2fs
    xfs_io
)

# What tests put load on filesystems with; without them these tests are skipped.
# shellcheck disable=SC2034 # used by the scripts that source this file
load_commands=(fio stress-ng)

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

# go_tool NAME: builds the tool of hack/tools/NAME at the versions of its go.mod and go.sum and
# prints the path of the binary. On failure the last line of stderr is the reason. Any failure
# counts as "cannot be had": the versions are pinned, so what fails is Go itself or the download.
go_tool() {
    local name=$1 source=$repo/hack/tools/$1 key target build
    key=$(cat "$source/go.mod" "$source/go.sum" | sha256sum | cut -c1-16)
    target=$cache/tools/$name-$key
    if [[ ! -x $target/$name ]]; then
        if ! command -v go >/dev/null; then
            echo "Go is not installed" >&2
            return 1
        fi
        mkdir -p "$cache/tools"
        # Built aside and renamed: a run that is interrupted, or one beside it, never meets half a
        # binary.
        build=$(mktemp -d "$cache/tools/.build.XXXXXX")
        echo "building $name (once per version, about a minute)" >&2
        if ! (cd "$source" && CGO_ENABLED=0 go build -mod=readonly -trimpath -o "$build/" tool) \
            >"$build/log" 2>&1; then
            echo "$name does not build: $(tail -n 1 "$build/log")" >&2
            rm -rf "$build"
            return 1
        fi
        mkdir -p "$target"
        mv -f "$build/$name" "$target/$name"
        rm -rf "$build"
    fi
    printf '%s\n' "$target/$name"
}

# go_command NAME MODULE VERSION PACKAGE [LDFLAGS]: builds a command from its module as published, with
# that module's own replacements, which `go install` refuses, and prints the path of the binary. On
# failure the last line of stderr is the reason.
go_command() {
    local name=$1 module=$2 version=$3 package=$4 ldflags=${5:-} target=$cache/tools/$1-$3 build source
    if [[ ! -x $target/$name ]]; then
        if ! command -v go >/dev/null; then
            echo "Go is not installed" >&2
            return 1
        fi
        mkdir -p "$cache/tools"
        build=$(mktemp -d "$cache/tools/.build.XXXXXX")
        if ! source=$(cd "$build" && go mod download -json "$module@$version" 2>&1); then
            echo "$module $version cannot be had: $(jq -r .Error <<<"$source" | tail -n 1 | xargs)" >&2
            rm -rf "$build"
            return 1
        fi
        cp -r "$(jq -r .Dir <<<"$source")" "$build/source"
        chmod -R u+w "$build/source"
        echo "building $name (once per version, some minutes)" >&2
        if ! (cd "$build/source" && CGO_ENABLED=0 go build -mod=mod -trimpath -ldflags "$ldflags" \
            -o "$build/$name" "$package") >"$build/log" 2>&1; then
            echo "$name does not build: $(tail -n 1 "$build/log")" >&2
            rm -rf "$build"
            return 1
        fi
        mkdir -p "$target"
        mv -f "$build/$name" "$target/$name"
        rm -rf "$build"
    fi
    printf '%s\n' "$target/$name"
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
