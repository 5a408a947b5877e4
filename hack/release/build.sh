# shellcheck shell=bash disable=SC2154
# The binaries of a release, stripped, in $out/.build/ARCHITECTURE/csi-loopback with csi-loopback.debug.
# Sourced by hack/release.sh, never run.

cargo_auditable_version=0.7.7

# release_tool NAME VERSION [FEATURE]: cargo_tool, in a trial only if it was built before: that takes minutes.
release_tool() {
    [[ -z $trial || -x $cache/$1-$2/bin/$1 ]] && cargo_tool "$@"
}

# build_binaries: sets architectures to those that have a binary.
build_binaries() {
    local architecture
    if [[ -n ${RELEASE_BINARY:-} ]]; then
        say "taking $RELEASE_BINARY, which was not built here"
        missing+=("two builds: the binary is a given one")
        architectures=("$(uname -m)")
        mkdir -p "$out/.build/${architectures[0]}"
        split_debug "$RELEASE_BINARY" "$out/.build/${architectures[0]}"
        return
    fi
    for architecture in x86_64 aarch64; do
        if build_twice "$architecture"; then
            architectures+=("$architecture")
        elif [[ $architecture == "$(uname -m)" ]]; then
            die "no binary for this machine; next: see the messages of cargo above"
        else
            missing+=("$architecture: its compiler or standard library is missing here")
        fi
    done
}

# compiler ARCHITECTURE: the C compiler, which also links.
compiler() {
    if [[ $1 == "$(uname -m)" ]]; then
        echo gcc
    else
        install_missing "$1-linux-gnu-gcc" >&2 && echo "$1-linux-gnu-gcc"
    fi
}

# triple ARCHITECTURE: the target of a static build: musl, or glibc where rustup has no musl.
triple() {
    local triple=$1-unknown-linux-musl
    rustup target list --installed 2>/dev/null | grep -qx "$triple" || rustup target add "$triple" >&2 || {
        [[ $1 == "$(uname -m)" ]] || return 1
        triple=$1-unknown-linux-gnu
    }
    echo "$triple"
}

# build_twice ARCHITECTURE: builds in two directories, and compares the results.
build_twice() {
    local architecture=$1 directory=$out/.build/$1 gcc target
    gcc=$(compiler "$architecture") && target=$(triple "$architecture") || return 1
    [[ $target == *musl ]] || missing+=("$architecture with musl: rustup has no standard library; linked with glibc")
    # Names of different lengths: a path that remains in a file changes it.
    build_in "$directory/one" "$target" "$gcc" && build_in "$directory/the-other" "$target" "$gcc" || return 1
    split_debug "$directory/one/target/$target/release/csi-loopback" "$directory" &&
        mkdir -p "$directory/again" &&
        split_debug "$directory/the-other/target/$target/release/csi-loopback" "$directory/again" || return 1
    compare_builds "$directory" "$directory/again" || die "$architecture: two builds differ; next: diffoscope $directory{,/again}/csi-loopback"
    say "$architecture: two builds are equal"
}

# compare_builds DIRECTORY OTHER: whether binary and debug information have the same bytes.
compare_builds() {
    cmp "$1/csi-loopback" "$2/csi-loopback" && cmp "$1/csi-loopback.debug" "$2/csi-loopback.debug"
}

# build_in DIRECTORY TARGET GCC: builds the commit in a directory that no file of the result names.
build_in() {
    local directory=$1 target=$2 gcc=$3 upper=${2//-/_} maps tool auditable
    mkdir -p "$directory"
    git archive HEAD | tar --extract --directory="$directory" || return 1
    maps=("$directory=/src" "${CARGO_HOME:-$HOME/.cargo}=/cargo" "$(rustc --print sysroot)=/rust")
    if tool=$(release_tool cargo-auditable "$cargo_auditable_version"); then
        auditable=("$tool" auditable)
    else
        lacks "list of crates in the binary (cargo-auditable)"
        auditable=(cargo)
    fi
    say "building for $target in $directory"
    (
        cd "$directory" || exit
        export RUSTFLAGS="${maps[*]/#/--remap-path-prefix=}" CFLAGS="${maps[*]/#/-ffile-prefix-map=}"
        [[ $target == *musl ]] || RUSTFLAGS+=" -C target-feature=+crt-static"
        RUSTFLAGS+=" $(packed_relocations "$target")"
        export "CC_$upper=$gcc" "CARGO_TARGET_${upper^^}_LINKER=$gcc" CARGO_PROFILE_RELEASE_DEBUG=line-tables-only
        CARGO_INCREMENTAL=0 CSI_LOOPBACK_COMMIT=$(git -C "$repo" rev-parse HEAD) "${auditable[@]}" build --release \
            --locked --bin csi-loopback --target "$target" --target-dir "$directory/target" >&2
    )
}

# packed_relocations TARGET: the flag of relocations in one MiB less, if the C library that is linked can read them at the start:
# glibc 2.36, or the musl 1.2.5 that came with Rust 1.93.
packed_relocations() {
    local has needs=2.36
    has=$(getconf GNU_LIBC_VERSION | cut -d ' ' -f 2)
    [[ $1 != *musl ]] || { has=$(rustc --version | cut -d ' ' -f 2) && needs=1.93.0; }
    if printf '%s\n' "$needs" "$has" | sort -VC; then
        echo '-C link-arg=-Wl,-z,pack-relative-relocs'
    fi
}

# split_debug BINARY DIRECTORY: writes csi-loopback, stripped, and csi-loopback.debug to the directory.
split_debug() {
    local objcopy=objcopy
    [[ $2 != *aarch64* || $(uname -m) == aarch64 ]] || objcopy=aarch64-linux-gnu-objcopy
    (
        cd "$2" || exit
        "$objcopy" --only-keep-debug --compress-debug-sections "$1" csi-loopback.debug &&
            "$objcopy" --strip-all "$1" csi-loopback &&
            "$objcopy" --add-gnu-debuglink=csi-loopback.debug csi-loopback
    )
}
