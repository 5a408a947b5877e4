# shellcheck shell=bash disable=SC2154
# Scene: which blocks of a volume with real files are in use and which changed, and the proof by bytes

# copy_files: copies up to 100 MiB of this machine's files into the volume, and sets files to them.
copy_files() {
    local sources=() source size file copied=0
    for source in "$repo/src" "$repo/docs" "${CARGO_HOME:-$HOME/.cargo}/registry/src" /usr/share/doc /usr/share; do
        [[ ! -d $source ]] || sources+=("$source")
    done
    files=()
    while IFS=$'\t' read -r -d '' size file; do
        ((copied + size <= 100 << 20)) || break
        files+=("$file")
        copied=$((copied + size))
    done < <(find "${sources[@]}" -xdev -type f -size -4M -printf '%s\t%p\0' 2>/dev/null || true)
    printf '%s\0' "${files[@]}" | xargs -0 cp --parents --preserve=timestamps -t "$tmp/target"
    sync -f "$tmp/target"
    printf '    %d files, %d MiB\n' "${#files[@]}" $((copied >> 20))
}

# change_files: also gives the freed blocks back.
change_files() {
    local index edited=0 deleted=0
    for ((index = 0; index < ${#files[@]}; index++)); do
        if ((index % 7 == 3)); then
            rm -f "$tmp/target${files[index]}"
            deleted=$((deleted + 1))
        elif ((index % 40 == 0)); then
            printf 'edited by the demo\n' >>"$tmp/target${files[index]}"
            edited=$((edited + 1))
        fi
    done
    head -c 4M /dev/urandom >"$tmp/target/new-file"
    sync -f "$tmp/target"
    fstrim "$tmp/target"
    printf '    %d files edited, %d deleted, 4 MiB added, fstrim\n' "$edited" "$deleted"
}

begin
say "starting the driver, with its pool in \$tmp ($tmp)"
start_driver
say "creating a volume, staging and publishing it"
make_volume 1Gi --fs ext4

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
say "is that true? Comparing every byte of both"
show snapshot verify A B
remove_volume
