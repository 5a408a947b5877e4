#!/usr/bin/env bash
# hack/demo.sh: the driver's main job on real data. Starts a driver with its pool in a temporary
# directory, fills a volume, cuts a snapshot, edits, deletes and trims, cuts another, shows which
# blocks are allocated and which changed, and proves by bytes that the answer is true. Leaves
# nothing behind, also when it is interrupted.
#
# CSI_LOOPBACK_BIN  the binary to show; without it, the one of this tree is built
# Needs root, for loop devices and mounts.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=hack/stage.sh
source "$(dirname "$0")/stage.sh"

# What is copied into the volume, in bytes, at most.
tree_bytes=$((100 << 20))
volume=demo

# take_down HOW: takes away what the demo made, as its user would. Each call does nothing where nothing is to be
# done, so it may be repeated, and begun wherever the demo ended.
take_down() {
    local how=$1 snapshot
    "$how" "$driver" volume unpublish "$volume" --target "$tmp/target" --timeout 30s
    "$how" "$driver" volume unstage "$volume" --staging "$tmp/staging" --timeout 30s
    for snapshot in A B; do
        "$how" "$driver" snapshot delete "$snapshot" --timeout 30s
    done
    "$how" "$driver" volume delete "$volume" --timeout 30s
}

# Copies real files into the volume; sets files, to what was copied, and copied, in bytes.
copy_tree() {
    local size file sources=()
    for file in "$repo/src" "$repo/docs" "${CARGO_HOME:-$HOME/.cargo}/registry/src" /usr/share/doc \
        /usr/share; do
        [[ ! -d $file ]] || sources+=("$file")
    done
    files=()
    copied=0
    while IFS=$'\t' read -r -d '' size file; do
        ((copied + size <= tree_bytes)) || break
        files+=("$file")
        copied=$((copied + size))
    done < <(find "${sources[@]}" -xdev -type f -size -4M -printf '%s\t%p\0' 2>/dev/null || true)
    ((${#files[@]})) || die "found no files to copy"
    printf '%s\0' "${files[@]}" | xargs -0 cp --parents --preserve=timestamps -t "$tmp/target"
    sync -f "$tmp/target"
}

# Edits, deletes and adds files, then gives the freed blocks back; sets edited and deleted.
change_tree() {
    local index
    edited=0
    deleted=0
    for ((index = 0; index < ${#files[@]}; index++)); do
        if ((index % 7 == 3)); then
            rm -f "$tmp/target${files[index]}"
            deleted=$((deleted + 1))
        elif ((index % 40 == 0)); then
            printf 'edited by the demo\n' >>"$tmp/target${files[index]}"
            edited=$((edited + 1))
        fi
    done
    head -c $((4 << 20)) /dev/urandom >"$tmp/target/new-file"
    sync -f "$tmp/target"
    fstrim "$tmp/target"
}

begin_demo "${storage_commands[@]}" setsid

say "starting the driver, with its pool in \$tmp ($tmp)"
start_driver

say "creating a volume, staging and publishing it"
show volume create "$volume" --size 1Gi --fs ext4
show volume stage "$volume" --staging "$tmp/staging" --fs ext4
show volume publish "$volume" --staging "$tmp/staging" --target "$tmp/target" --fs ext4

say "copying a directory tree into it"
copy_tree
printf '    %d files, %d MiB\n' "${#files[@]}" $((copied >> 20))

say "cutting snapshot A"
show snapshot create A --volume "$volume"

say "editing, deleting, adding and trimming"
change_tree
printf '    %d files edited, %d deleted, 4 MiB added, fstrim\n' "$edited" "$deleted"

say "cutting snapshot B"
show snapshot create B --volume "$volume"
show volume list
show snapshot list

say "which blocks hold data in A?"
show snapshot allocated A --limit-rows 5

say "which blocks changed from A to B?"
show snapshot delta A B --limit-rows 5

say "is that true? Comparing every byte of both"
show snapshot verify A B

say "taking everything down"
take_down run
end_demo
