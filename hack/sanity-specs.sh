# shellcheck shell=bash
# The specs of csi-sanity that do not pass, with the reasons.
# Sourced, never run.

# Specs that do not apply to the driver, by csi-sanity's reason. A skip for another reason is a
# failure: the driver would advertise a feature that csi-sanity does not test.
declare -A expected_skips=(
    # Volumes are files on the node: the driver has no ControllerPublishVolume.
    ["ControllerPublishVolume not supported"]=1
    ["ControllerUnpublishVolume not supported"]=1
    ["Controller Publish, UnpublishVolume not supported"]=1
)
# A spec that csi-sanity itself disables, by the end of its name.
expected_pending="pagination should detect volumes added between pages and accept tokens when the last volume from a page is deleted"
# The spec compares Go messages with their internal state: the topology in the request has a cached
# size, the one in the response does not. It fails with every driver that reports a topology. A test
# of the driver covers the same behavior (volumes_and_snapshots_are_created_on_this_node_only).
faulty_spec="should succeed when creating a snapshot with accessibility requirements"

# explanation STATE SPEC REASON: prints why a spec is skipped or pending. Fails if that is not expected.
explanation() {
    if [[ $1 == skipped && $2 == *"$faulty_spec" ]]; then
        echo "fails with every driver that reports a topology"
    elif [[ $1 == skipped && -n $3 && -n ${expected_skips[$3]:-} ]]; then
        printf '%s\n' "$3"
    elif [[ $1 == pending && $2 == *"$expected_pending" ]]; then
        echo "disabled by csi-sanity"
    else
        return 1
    fi
}
