# shellcheck shell=bash disable=SC2154
# Starts, enters, reboots and ends the cluster of hack/e2e.sh, and builds its images.
# Sourced, never run, after hack/lib.sh.

# shellcheck source=hack/oci.sh
source "$repo/hack/oci.sh"

e2e=$(realpath --canonicalize-missing "${CSI_LOOPBACK_E2E_DIR:-/var/tmp/csi-loopback-e2e}")
# Seconds for the slowest step, on a machine that is busy with other work.
patience=180

say() { printf '%4d s  %s\n' "$SECONDS" "$*"; }

lacking() {
    echo "$*" >&2
    exit 77
}

# first_process: the first process of the namespaces, if it runs.
first_process() {
    [[ -s $e2e/pid ]] && [[ -e /proc/$(<"$e2e/pid")/ns/net ]] && cat "$e2e/pid"
}

cluster_runs() { first_process >/dev/null && [[ -e $e2e/ready ]]; }

# in_network COMMAND...: runs a command with the network of the cluster and the files of the machine.
in_network() {
    local pid
    pid=$(first_process) || die "the cluster does not run; next: hack/e2e.sh up"
    nsenter --target "$pid" --net -- "$@"
}

# on_node COMMAND...: runs a command as a process of the node.
on_node() {
    local pid
    pid=$(first_process) || die "the cluster does not run; next: hack/e2e.sh up"
    nsenter --target "$pid" --net --mount --pid -- "$@"
}

# on_worker NUMBER COMMAND...: runs a command as a process of another node.
on_worker() {
    nsenter --target "$(<"$e2e/nodes/$1/pid")" --net --mount --pid -- "${@:2}"
}

kubectl() {
    in_network "$e2e/tools/kubectl" --kubeconfig "$e2e/kubeconfig" --cache-dir "$e2e/cache" "$@"
}

# --- Images ---------------------------------------------------------------------------------------

# image_of NAME: the image of that name in deploy/, with registry and tag.
image_of() {
    grep -rhoE "image: \S*\b$1:\S+" "$repo/deploy" --include='*.yaml' | sed 's/^image: //' | sort -u | head -n 1
}

program_image() { # program_image PROGRAM IMAGE ENTRYPOINT: an image with one static program
    local root=$e2e/images/root
    rm -rf "$root"
    mkdir -p "$root"
    install -m 755 "$1" "$root/$3"
    chmod 755 "$root"
    oci_layer "$root" "$e2e/images/layer"
    oci_image "$e2e/images/$3.tar" "$2" "{\"Entrypoint\": [\"/$3\"], \"Env\": [\"PATH=/\"]}" "$e2e/images/layer"
    rm -r "$root" "$e2e/images/layer"
}

# released_image PROGRAM IMAGE ENTRYPOINT: program_image, after a check that the program is of the release that the tag of the
# image names: where images are pulled, another program would run. Stand-ins have no release.
released_image() {
    local built release
    built=$(go version -m "$1") || die "$1: its version cannot be read"
    release=$(awk '$1 == "path" { path = $2 } ($1 == "mod" || $1 == "dep") && index(path "/", $2 "/") == 1 { print $3 }' <<<"$built")
    [[ $release == "(devel)" || $release == "${2##*:}" ]] ||
        die "$3 was built from ${release:-an unknown release}, but its image is $2; next: correct the tag, or hack/tools"
    program_image "$@"
}

# add_on_images: the images of other projects that the manifests of deploy/ and of snapshot-controller name.
add_on_images() {
    local name tools=$e2e/tools
    mkdir -p "$e2e/images"
    for name in csi-provisioner csi-resizer csi-snapshotter livenessprobe; do
        released_image "$tools/$name" "$(image_of "$name")" "$name"
    done
    released_image "$tools/node-driver-registrar" "$(image_of csi-node-driver-registrar)" csi-node-driver-registrar
    released_image "$tools/snapshot-controller" "$(snapshot_controller_image)" snapshot-controller
}

make_images() {
    local index
    add_on_images
    program_image "$e2e/tools/coredns" registry.k8s.io/coredns/coredns:e2e coredns
    pause_image localhost/pause:e2e
    if [[ -n ${CSI_LOOPBACK_RELEASE:-} ]]; then
        # Only the index of all architectures has a digest file. The images of one architecture have its name too.
        index=$(echo "$CSI_LOOPBACK_RELEASE"/images/csi-loopback-*.digest)
        cp "${index%.digest}.tar" "$e2e/images/" || die "$CSI_LOOPBACK_RELEASE has no image"
        return
    fi
    # Without the commit, with which each commit would rebuild the binary.
    CSI_LOOPBACK_COMMIT='' IMAGE_DIR=$e2e/images "$repo/hack/image.sh" csi-loopback >/dev/null
}

# pause_image IMAGE: what holds the namespaces of a pod. It waits and does nothing else.
pause_image() {
    local root=$e2e/images/root
    mkdir -p "$root"
    install -m 755 "$(command -v busybox)" "$root/busybox"
    chmod 755 "$root"
    oci_layer "$root" "$e2e/images/layer"
    oci_image "$e2e/images/pause.tar" "$1" \
        '{"Entrypoint": ["/busybox", "sleep", "2147483647"]}' "$e2e/images/layer"
    rm -r "$root" "$e2e/images/layer"
}

# --- Add-ons --------------------------------------------------------------------------------------

install_add_ons() {
    kubectl apply --server-side -f "$repo/hack/e2e/coredns.yaml"
    kubectl apply --server-side -f "$e2e/tools/crds/external-snapshotter"
    kubectl wait --for=condition=Established --timeout="${patience}s" -f "$e2e/tools/crds/external-snapshotter"
    snapshot_controller | kubectl apply --server-side -f -
    kubectl -n kube-system rollout status --timeout="${patience}s" deployment/coredns
    # Its manifest counts a pod as available only after 35 s.
    kubectl -n kube-system wait --for=create --timeout="${patience}s" pod --selector app.kubernetes.io/name=snapshot-controller
    kubectl -n kube-system wait --for=condition=Ready --timeout="${patience}s" pod \
        --selector app.kubernetes.io/name=snapshot-controller
}

# --- Up and down ----------------------------------------------------------------------------------

check_machine() {
    is_root || lacking "needs root, for containers"
    [[ $e2e != /run/* && $e2e != /var/l* && $e2e != /etc/* && $e2e != /usr/local/* ]] ||
        die "$e2e: is covered on the node; next: set CSI_LOOPBACK_E2E_DIR elsewhere than in /run, /var/lib, /var/log, /etc"
    ((${#e2e} <= 60)) || die "$e2e: too long for the path of a socket; next: set CSI_LOOPBACK_E2E_DIR to a shorter path"
    install_missing "${node_commands[@]}" "${e2e_commands[@]}" >&2 ||
        lacking "programs are missing that could not be installed"
    ! ldd "$(command -v busybox)" >/dev/null 2>&1 || lacking "busybox is not statically linked; Debian's busybox-static is"
}

link_tools() {
    local built directory
    mkdir -p "$e2e/tools"
    for built in kubernetes_tools e2e_tools; do
        directory=$($built) || lacking "the Kubernetes tools cannot be built"
        ln -sfn "$directory"/* "$e2e/tools/"
    done
    ln -sfn "$(go_tool helm)" "$e2e/tools/helm" || lacking "helm cannot be built"
}

# start_node: starts the first node in new namespaces, which outlive this script.
start_node() {
    rm -f "$e2e/ready"
    launch "$e2e"
    await_node "$e2e"
}

# start_worker NUMBER: another node, from 2, with the images of the first.
start_worker() {
    local home=$e2e/nodes/$1 names
    mkdir -p "$home/images"
    mapfile -t names < <(on_node ctr --namespace k8s.io images ls -q | grep -v '^sha256:')
    on_node ctr --namespace k8s.io images export "$home/images/all.tar" "${names[@]}"
    launch "$home" "$1"
    link_node "$1"
    await_node "$home"
}

# launch HOME [NUMBER]: starts hack/e2e/node.sh in new namespaces, and writes its process to HOME/pid.
launch() {
    local parent deadline=$((SECONDS + patience))
    rm -f "$1/pid"
    mkdir -p "$1/log"
    setsid unshare --pid --fork --kill-child --mount --net --mount-proc bash "$repo/hack/e2e/node.sh" "$e2e" "${@:2}" \
        >>"$1/log/node.log" 2>&1 </dev/null &
    parent=$!
    disown "$parent"
    until [[ -s $1/pid ]]; do
        first_child "$parent" >"$1/pid"
        ((SECONDS < deadline)) || die "the node does not start; see $1/log"
        sleep 0.1
    done
}

# await_node HOME: waits until the node is ready.
await_node() {
    local pid deadline=$((SECONDS + patience))
    pid=$(<"$1/pid")
    until [[ -e $1/ready ]]; do
        kill -0 "$pid" 2>/dev/null || { tail -n 30 "$1/log/node.log" >&2 && die "the node has ended; see $1/log"; }
        ((SECONDS < deadline)) || die "the node is not ready after $patience s; see $1/log"
        sleep 0.2
    done
}

# link_node NUMBER: a link between the first machine, which routes, and another one.
link_node() {
    ip link add "node-$1" netns "$(first_process)" type veth peer name node0 netns "$(<"$e2e/nodes/$1/pid")"
    connect_node "$1"
}

# connect_node NUMBER: connects a node, at first or after disconnect_node.
connect_node() {
    in_network ip link set "node-$1" up
    in_network ip route replace "192.0.2.$1/32" dev "node-$1" src 192.0.2.1
    in_network ip route replace "10.244.$(($1 - 1)).0/24" via "192.0.2.$1" dev "node-$1" onlink src 192.0.2.1
}

# disconnect_node NUMBER: nothing reaches the node, and it reaches nothing.
disconnect_node() { in_network ip link set "node-$1" down; }

# end_worker NUMBER: kills all processes of another node, as a machine that burns down, and detaches its loop devices.
end_worker() {
    local pid
    pid=$(<"$e2e/nodes/$1/pid")
    kill -KILL "$pid" 2>/dev/null || true
    while [[ -e /proc/$pid/ns/net ]]; do sleep 0.1; done
    rm -f "$e2e/nodes/$1"/{pid,ready}
}

cluster_up() {
    ! cluster_runs || die "the cluster runs already; next: hack/e2e.sh run, or hack/e2e.sh down"
    check_machine
    [[ ! -d $e2e ]] || cluster_down
    mkdir -p "$e2e"
    link_tools
    say "making images"
    make_images
    say "starting etcd, API server, controllers, containerd, kubelet"
    start_node
    say "installing CoreDNS and snapshot-controller (stand-ins: node-driver-registrar, livenessprobe)"
    install_add_ons >"$e2e/log/add-ons.log" 2>&1 || { tail -n 20 "$e2e/log/add-ons.log" >&2 && die "see $e2e/log"; }
    say "ready: hack/e2e.sh kubectl get pods --all-namespaces"
}

# end_node: kills all processes of the namespaces, detaches loop devices, and removes cgroups.
end_node() {
    local pid at worker
    for worker in "$e2e"/nodes/*/pid; do
        [[ ! -e $worker ]] || end_worker "$(basename "$(dirname "$worker")")"
    done
    if pid=$(first_process); then
        # With the first process all others end, and the mounts with the last of them.
        kill -KILL "$pid" 2>/dev/null || true
        while [[ -e /proc/$pid/ns/net ]]; do sleep 0.1; done
    fi
    rm -f "$e2e/pid" "$e2e/ready"
    for _ in {1..50}; do
        detach_loops our_loops
        [[ -n $(our_loops) ]] || break
        sleep 0.2
    done
    find /sys/fs/cgroup -depth -type d -path "*/csi-loopback-e2e-$(cut -c1-8 <<<"$(sha256sum <<<"$e2e")")*" \
        -exec rmdir {} \; 2>/dev/null || true
    at=$(our_loops)
    [[ -z $at ]] || die "loop devices are still in use: ${at//$'\n'/ }"
}

# our_loops: the loop devices on files below the directory, and those on filesystems on such devices or, as kubelet makes for
# volumes of mode Block, on such devices themselves; a device after those that depend on it. Files are found by inode: their
# names led through mounts that are gone.
our_loops() {
    [[ -d $e2e/machine ]] || return 0
    {
        stat --format 'filesystem %Hd:%Ld' "$e2e/machine"
        # There need not be other nodes.
        find "$e2e"/{,nodes/*/}machine/var/lib -maxdepth 3 -name '*.img' -type f -printf 'file %i\n' 2>/dev/null || true
        stat --format 'device %Hd:%Ld %i %n' /dev/loop[0-9]*
        losetup --list --noheadings --raw --output NAME,MAJ:MIN,BACK-MAJ:MIN,BACK-INO | sed 's/\\x20//g'
    } | awk '
        $1 == "filesystem" { here = $2; next }
        $1 == "file" { file[here " " $2] = 1; next }
        $1 == "device" { device[$2 " " $3] = $4; next }
        { name[NR] = $1; number[NR] = $2; on[NR] = $3; at[NR] = $3 " " $4 }
        END {
            for (round = 0; round < 4; round++)
                for (i in name)
                    if (!(i in found) && (at[i] in file || on[i] in ours || (at[i] in device && device[at[i]] in ours))) {
                        found[i] = 1; ours[number[i]] = ours[name[i]] = 1; order[++n] = name[i]
                    }
            for (; n > 0; n--) print order[n]
        }'
}

cluster_down() {
    [[ -d $e2e ]] || return 0
    end_node
    chattr -R -f -i "$e2e/machine" "$e2e/nodes" 2>/dev/null || true
    rm -rf --one-file-system "$e2e"
    say "no process, mount, loop device, cgroup or file of the cluster remains"
}

# reboot: what a node's sudden reboot does: all processes end, mounts and loop devices are gone, files remain.
reboot() {
    end_node
    start_node
}

# report_failure SCENARIO: what a reader needs first, after a scenario failed.
report_failure() {
    cluster_runs || return 0
    kubectl get pods --all-namespaces --output wide 2>&1 | tail -n 40
    kubectl get events --all-namespaces --sort-by=.lastTimestamp 2>&1 | grep -v Normal | tail -n 15
}
