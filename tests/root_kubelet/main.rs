//! Inline ephemeral volumes (KEP-596) in pods that run: a released kubelet and containerd on this machine, and our driver
//! registered with them as on any node.

#[path = "../support/cluster/mod.rs"]
mod cluster;
#[path = "../support/mod.rs"]
mod support;

mod content;
mod cost;
mod ends;
mod life;

use std::process::ExitCode;

use cluster::suite::of_modules;

fn main() -> ExitCode {
    cluster::suite::run(of_modules! {
        life:
            a_pod_writes_to_its_volume_and_nothing_of_it_outlives_the_pod
            volumes_with_equal_attributes_are_volumes_of_their_own
            persistent_volumes_of_the_driver_stand_beside_inline_ones
            a_pod_of_any_user_and_group_writes_to_its_volume
            pods_begin_with_a_snapshots_data_and_each_has_its_own_copy
            what_the_driver_refuses_is_an_event_of_the_pod
            kubelet_refuses_inline_volumes_of_a_driver_that_does_not_offer_them;
        content:
            a_pod_reads_its_secret_and_cannot_write_where_it_is
            a_secret_that_changes_reaches_the_pod_that_runs
            content_belongs_to_the_group_of_the_pod
            a_pod_that_says_nothing_of_read_only_runs_as_the_webhooks_have_mended_it;
        cost:
            what_a_pod_waits_for_five_secrets_of_each_kind_is_told;
        ends:
            a_driver_that_is_killed_does_not_disturb_the_pod_and_takes_its_volume_away_later
            a_pod_that_is_deleted_while_kubelet_is_away_leaves_no_volume
            a_driver_that_offers_inline_volumes_no_more_gets_no_new_ones_and_is_rid_of_the_old;
    })
}
