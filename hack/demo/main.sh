# shellcheck shell=bash disable=SC2154
# Scene: which blocks of a volume with real files hold data and which changed, and the proof by bytes

copy_files() { # sets files to what it copies into the volume
    mapfile -d '' files < <(find "$repo/src" "$repo/docs" "${CARGO_HOME:-$HOME/.cargo}/registry/src" /usr/share -xdev \
        -type f -size -64k -print0 2>/dev/null | head --zero-terminated --lines=8000)
    printf '%s\0' "${files[@]}" | xargs -0 cp --parents --preserve=timestamps -t "$tmp/target"
    sync -f "$tmp/target"
    printf '    %d files, %d MiB\n' "${#files[@]}" "$(du -sm "$tmp/target" | cut -f 1)"
}

change_files() { # edits, deletes and adds, and gives the freed blocks back
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
    echo "    each 40th file edited, each 7th deleted, 4 MiB added, fstrim"
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
say "editing, deleting, adding and trimming"
change_files
say "taking snapshot B"
show snapshot create B --volume "$volume"
show volume list
show snapshot list
say "which blocks hold data in A?"
show snapshot allocated A --limit-rows 5
say "which blocks changed from A to B?"
show snapshot delta A B --limit-rows 5
say "and where are they?"
show snapshot map A B
say "is that true? Comparing every byte of both"
show snapshot verify A B
remove_volume
