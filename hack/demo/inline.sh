# shellcheck shell=bash disable=SC2034,SC2154
# Scene: inline volumes of pods: a killed driver, an update of a Secret during reads, limits

# target VOLUME: prints the target path that kubelet would use.
target() { printf '%s/pods/%s/mount' "$tmp" "${1/-//}"; }
publish() { show volume inline publish "$1" --target "$(target "$1")" "${@:2}"; } # publish VOLUME ARGUMENT...

begin
# Limits of inline volumes.
driver_flags=(--inline-max-size 256Mi --inline-max-volumes 3)
say "starting the driver, with its pool in \$tmp ($tmp)"
start_driver
say "publishing a scratch volume: one call creates, formats, attaches and mounts it"
publish pod1-scratch --attribute size=64Mi
echo "written by the pod" >"$(target pod1-scratch)/file"
show volume inline stats pod1-scratch --target "$(target pod1-scratch)"
say "ListVolumes does not contain inline volumes"
show volume list
say "killing the driver; the pod continues to write"
kill -KILL -- "-${pid_of[driver]}"
wait "${pid_of[driver]}" 2>/dev/null || true
stop driver
echo "written with no driver" >>"$(target pod1-scratch)/file"
start_driver
say "kubelet repeats its call, which changes nothing"
publish pod1-scratch --attribute size=64Mi
shell cat "$(target pod1-scratch)/file"
say "publishing a setting and a secret as files in memory; the volume must be read-only"
printf monday >"$tmp/secret"
settings=(--attribute content/app.conf=colour=blue --attribute medium=Memory --secret "token=$tmp/secret")
rejected "readonly" publish pod1-settings "${settings[@]}"
publish pod1-settings --read-only "${settings[@]}"
shell ls "$(target pod1-settings)"
say "changing the secret; kubelet repeats its call, and a reader sees either the old or the new value"
# shellcheck disable=SC2016 # for the inner shell
start reader bash -c 'while :; do word=$(<"$0") || word="no file"; echo "$word"; done' "$(target pod1-settings)/token"
await "the secret" grep -qx monday reader.log
printf tuesday >"$tmp/secret"
publish pod1-settings --read-only "${settings[@]}"
await "the new secret" grep -qx tuesday reader.log
stop reader
shell uniq -c reader.log
[[ $(uniq reader.log) == $'monday\ntuesday' ]] || die "the reader read another value"
say "the driver rejects volumes that are too large or too many, and unknown attributes"
rejected "--inline-max-size" publish pod2-scratch --attribute size=1Gi
rejected "colour" publish pod2-scratch --attribute colour=red
publish pod2-scratch --attribute size=64Mi
rejected "--inline-max-volumes" publish pod3-scratch
say "unpublishing all volumes, which deletes them; --if-published accepts a repetition"
for volume in pod1-scratch pod1-settings pod2-scratch pod1-scratch; do
    run "$driver" volume inline unpublish "$volume" --target "$(target "$volume")" --if-published
done
stop driver
show pool check --data-dir "$tmp/data"
