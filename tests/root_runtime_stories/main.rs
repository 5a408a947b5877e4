//! Runtime assisted mounting (KEP-2857) in pods that run: the proposal's six stories, one by one, with a released kubelet and
//! containerd, runc behind csi-loopback-runc, and our driver, crust_ops and webhooks.

#[path = "../support/cluster/mod.rs"]
mod cluster;
#[path = "../support/mod.rs"]
mod support;

mod deferred;
mod downgraded;
mod ends;
mod fallback;

use std::process::ExitCode;

use cluster::suite::of_modules;

fn main() -> ExitCode {
    csi_loopback::kubernetes::tls::install_provider();
    cluster::suite::run(of_modules! {
        deferred:
            story_1_a_claim_is_mounted_by_the_runtime_alone
            a_pod_of_another_runtime_does_not_use_an_empty_directory_unnoticed
            a_volume_is_grown_while_only_its_containers_see_it;
        fallback:
            story_2_what_the_runtime_does_not_do_the_driver_mounts
            story_3_what_the_driver_does_not_defer_it_mounts
            story_4_before_an_upgrade_the_driver_mounts_and_after_it_the_runtime;
        downgraded:
            story_5_a_pod_that_runs_outlives_a_downgrade_without_stats_and_growth
            story_6_a_pod_that_begins_at_a_downgrade_waits_for_the_upgrade;
        ends:
            whoever_of_kubelet_driver_and_crust_ops_is_killed_the_pod_runs_on_and_all_is_as_before
            a_pod_that_is_deleted_while_kubelet_is_away_leaves_its_claim_whole_and_nothing_handed_over;
    })
}
