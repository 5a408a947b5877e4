# shellcheck shell=bash
# Process functions of hack/cluster.sh, hack/kubelet.sh and hack/e2e.sh. They start programs with a log in $dir,
# wait until they are ready, and end them with the script, however it ends. Source this file; do not
# run it. The caller sets dir.

# Seconds to wait for a program. On an idle machine, all of them start within ten.
patience=120

declare -A pid_of=()
parent=$PPID

# start NAME COMMAND ARGUMENT...: starts a program in $dir with its output in $dir/NAME.log. The
# kernel kills it when this script ends. In its own session, so that only this script gets an
# interrupt from the terminal.
start() {
    local name=$1
    shift
    # shellcheck disable=SC2154 # the caller sets dir
    (cd "$dir" && exec setpriv --pdeathsig KILL setsid "$@") >>"$dir/$name.log" 2>&1 </dev/null &
    pid_of[$name]=$!
}

give_up() { # give_up NAME PROBLEM: prints the last lines of $dir/NAME.log and ends the script
    echo "last lines of $dir/$1.log:" >&2
    tail -n 20 "$dir/$1.log" >&2 || true
    die "$1 $2; see $dir/$1.log"
}

# orphaned: whether the parent of this script has ended. The kernel then assigns another parent.
orphaned() {
    local now
    now=$(sed 's/.*) //' "/proc/$$/stat" | cut -d ' ' -f 2)
    [[ $now != "$parent" ]]
}

# await NAME COMMAND...: waits until the command succeeds. On a timeout, appends its last output to
# $dir/NAME.log.
await() {
    local name=$1 deadline=$((SECONDS + patience)) running
    shift
    until "$@" >"$dir/await.log" 2>&1; do
        for running in "${!pid_of[@]}"; do
            kill -0 "${pid_of[$running]}" 2>/dev/null || give_up "$running" "ended unexpectedly"
        done
        if ((SECONDS >= deadline)); then
            cat "$dir/await.log" >>"$dir/$name.log"
            give_up "$name" "was not ready within $patience s"
        fi
        ! orphaned || exit 0
        sleep 0.1
    done
}

# make_cgroups NAME: creates the cgroup that kubelet requires (cgroupRoot), in each hierarchy.
make_cgroups() {
    local at
    while read -r at; do
        mkdir -p "$at/$1" 2>/dev/null || true
    done < <(awk '/ - cgroup2? / && $5 ~ "^/sys/fs/cgroup" { print $5 }' /proc/self/mountinfo)
    # A new cpuset accepts processes only with these set.
    at=/sys/fs/cgroup/cpuset
    if [[ -d $at/$1 ]]; then
        cat "$at/cpuset.cpus" >"$at/$1/cpuset.cpus"
        cat "$at/cpuset.mems" >"$at/$1/cpuset.mems"
    fi
}
