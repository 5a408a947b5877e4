# shellcheck shell=bash disable=SC2154
# Scene: full and incremental backup and restore of a volume with real files, verified byte by byte

copy_files() { # copies files into the volume, and sets files to their paths
    mapfile -d '' files < <(find "$repo/src" "$repo/docs" "${CARGO_HOME:-$HOME/.cargo}/registry/src" /usr/share -xdev \
        -type f -size -64k -print0 2>/dev/null | head --zero-terminated --lines=8000)
    printf '%s\0' "${files[@]}" | xargs -0 cp --parents --preserve=timestamps -t "$tmp/target"
    sync -f "$tmp/target"
    printf '    %d files, %d MiB\n' "${#files[@]}" "$(du -sm "$tmp/target" | cut -f 1)"
}

change_files() { # edits, deletes, adds and trims files
    local index
    for ((index = 0; index < ${#files[@]}; index += 40)); do
        echo "edited by the demo" >>"$tmp/target${files[index]}"
    done
    for ((index = 3; index < ${#files[@]}; index += 7)); do
        rm -f "$tmp/target${files[index]}"
    done
    head -c 4M /dev/urandom >"$tmp/target/new-file"
    sync -f "$tmp/target"
    fstrim "$tmp/target"
    echo "    edited every 40th file, deleted every 7th, added 4 MiB, ran fstrim"
}

compare_restored() { # compare_restored SNAPSHOT FILE: byte by byte, with a volume that is made from the snapshot
    quietly run "$driver" volume create restored --from-snapshot "$1" --block
    quietly run "$driver" volume stage restored --staging "$tmp/restored-staging" --block
    quietly run "$driver" volume publish restored --staging "$tmp/restored-staging" --target "$tmp/restored-device" \
        --read-only --block
    run cmp "$tmp/restored-device" "$2" || die "the restored file is not the snapshot"
    echo "    the file is the snapshot, byte for byte"
    quietly run "$driver" volume unpublish restored --target "$tmp/restored-device"
    quietly run "$driver" volume unstage restored --staging "$tmp/restored-staging"
    quietly run "$driver" volume delete restored
}

begin
say "starting the driver, with its pool in \$tmp ($tmp)"
start_driver
say "creating a volume, staging and publishing it"
show volume create "$volume" --size 1Gi --fs ext4
publish_volume --fs ext4
say "copying a directory tree into it"
copy_files
say "taking snapshot A"
show snapshot create A --volume "$volume"
say "backing up A: all of its data"
show backup create A --repository "$tmp/backups"
say "editing, deleting, adding and trimming"
change_files
say "taking snapshot B"
show snapshot create B --volume "$volume"
show volume list
show snapshot list
say "listing the allocated blocks of A"
show snapshot allocated A --limit-rows 5
say "listing the blocks that changed from A to B"
show snapshot delta A B --limit-rows 5
say "drawing them"
show snapshot map A B
say "verifying the delta: comparing every byte of both snapshots"
show snapshot verify A B
say "backing up B: what changed since A"
show backup create B --repository "$tmp/backups"
show backup list --repository "$tmp/backups"
say "restoring B to a file, and comparing it with the snapshot"
show restore B --repository "$tmp/backups" --to "$tmp/restored.img"
compare_restored B "$tmp/restored.img"
say "verifying the repository; keeping the last backup and what it needs"
show backup verify --repository "$tmp/backups"
show backup prune --repository "$tmp/backups" --keep-last 1
remove_volume
