# shellcheck shell=bash
# How hack/cluster.sh and hack/kubelet.sh run the parts that they consist of: each with a log in $dir, waited for
# until it answers, and ended with the script however that ends.
# Sourced, never run; dir is set by whoever does so.

# Seconds that a part may take to answer. On an idle machine all of them together take ten.
patience=120

declare -A pid_of=()
parent=$PPID

# start NAME COMMAND ARGUMENT...: starts it in DIR with its output in DIR/NAME.log. It ends with this script,
# however that ends, and hears nothing of an interrupt from the terminal, which is this script's to deal with.
start() {
    local name=$1
    shift
    # shellcheck disable=SC2154 # dir: see above
    (cd "$dir" && exec setpriv --pdeathsig KILL setsid "$@") >>"$dir/$name.log" 2>&1 </dev/null &
    pid_of[$name]=$!
}

give_up() { # give_up NAME WHAT: ends with the last lines of a part's log
    echo "the last lines of $dir/$1.log:" >&2
    tail -n 20 "$dir/$1.log" >&2 || true
    die "$1 $2; see $dir/$1.log"
}

# orphaned: whether the process that has started this one is gone. The kernel gives it another parent then.
orphaned() {
    local now
    now=$(sed 's/.*) //' "/proc/$$/stat" | cut -d ' ' -f 2)
    [[ $now != "$parent" ]]
}

# await NAME COMMAND...: waits until the command succeeds; its last words are in the log of that name.
await() {
    local name=$1 deadline=$((SECONDS + patience)) running
    shift
    until "$@" >"$dir/await.log" 2>&1; do
        for running in "${!pid_of[@]}"; do
            kill -0 "${pid_of[$running]}" 2>/dev/null || give_up "$running" "has ended"
        done
        if ((SECONDS >= deadline)); then
            cat "$dir/await.log" >>"$dir/$name.log"
            give_up "$name" "does not answer within $patience s"
        fi
        ! orphaned || exit 0
        sleep 0.1
    done
}
