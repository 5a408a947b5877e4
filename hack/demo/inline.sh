# shellcheck shell=bash disable=SC2034,SC2154
# Scene: volumes that a pod declares: a kill, a secret swapped under a reader, limits

# target VOLUME: where kubelet would want it.
target() { printf '%s/pods/%s/mount' "$tmp" "${1/-//}"; }
publish() { show volume inline publish "$1" --target "$(target "$1")" "${@:2}"; } # publish VOLUME ARGUMENT...

begin
# The limits of this node for such volumes.
driver_flags=(--inline-max-size 256Mi --inline-max-volumes 3)
say "starting the driver, with its pool in \$tmp ($tmp)"
start_driver
say "a pod's scratch volume: one call creates, formats, attaches and mounts it"
publish pod1-scratch --attribute size=64Mi
echo "written by the pod" >"$(target pod1-scratch)/file"
show volume inline stats pod1-scratch --target "$(target pod1-scratch)"
say "it is no volume for the rest of CSI"
show volume list
say "the driver dies; the pod continues to write"
kill -KILL -- "-${pid_of[driver]}"
wait "${pid_of[driver]}" 2>/dev/null || true
stop driver
echo "written with no driver" >>"$(target pod1-scratch)/file"
start_driver
say "kubelet repeats its call, which finds everything in place"
publish pod1-scratch --attribute size=64Mi
shell cat "$(target pod1-scratch)/file"
say "a setting and a secret as files, in memory: the pod must mount them read-only"
printf monday >"$tmp/secret"
settings=(--attribute content/app.conf=colour=blue --attribute medium=Memory --secret "token=$tmp/secret")
refused "readonly" publish pod1-settings "${settings[@]}"
publish pod1-settings --read-only "${settings[@]}"
shell ls "$(target pod1-settings)"
say "the secret changes, and kubelet repeats its call: a reader sees the old or the new one"
# shellcheck disable=SC2016 # for the inner shell
start reader bash -c 'while :; do word=$(<"$0") || word="no file"; echo "$word"; done' "$(target pod1-settings)/token"
await "the secret" grep -qx monday reader.log
printf tuesday >"$tmp/secret"
publish pod1-settings --read-only "${settings[@]}"
await "the new secret" grep -qx tuesday reader.log
stop reader
shell uniq -c reader.log
[[ $(uniq reader.log) == $'monday\ntuesday' ]] || die "something else was read"
say "volumes that are too large or too many, and unknown attributes, are refused"
refused "--inline-max-size" publish pod2-scratch --attribute size=1Gi
refused "colour" publish pod2-scratch --attribute colour=red
publish pod2-scratch --attribute size=64Mi
refused "--inline-max-volumes" publish pod3-scratch
say "taking everything down: unpublishing deletes, and --if-published accepts a repetition"
for volume in pod1-scratch pod1-settings pod2-scratch pod1-scratch; do
    run "$driver" volume inline unpublish "$volume" --target "$(target "$volume")" --if-published
done
stop driver
show pool check --data-dir "$tmp/data"
