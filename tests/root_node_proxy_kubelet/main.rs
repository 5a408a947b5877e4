//! What KEP-2857 asks of kubelet, with a released kubelet that knows nothing of it: our proxy stands between it and the driver, pods opt
//! in by an annotation, and containerd runs them by csi-loopback-runc in front of runc.

#[path = "../support/cluster/mod.rs"]
mod cluster;
#[path = "../support/mod.rs"]
mod support;

mod downgraded;
mod ends;
mod grown;
mod opted_in;
mod rig;

use std::process::ExitCode;

use cluster::suite::of_modules;

fn main() -> ExitCode {
    csi_loopback::kubernetes::tls::install_provider();
    cluster::suite::run(of_modules! {
        opted_in:
            a_claim_of_any_class_is_mounted_by_the_runtime_alone_since_its_pod_says_so
            each_volume_of_a_pod_is_mounted_by_whom_the_pod_has_named
            files_change_their_group_only_where_the_pods_policy_says_so
            a_pod_may_opt_in_until_its_volumes_are_there
            a_claim_whose_class_leaves_it_to_the_runtime_is_the_drivers_affair_whatever_its_pod_says
            a_pod_whose_runtime_knows_nothing_of_volumes_is_counted_as_abnormal;
        grown:
            a_volume_is_grown_while_only_its_containers_see_it_and_the_claim_says_so
            a_claim_that_grew_while_nobody_used_it_has_its_size_once_its_pod_runs;
        downgraded:
            after_a_downgrade_figures_and_growth_fail_aloud_until_the_upgrade_and_the_pod_ends_in_any_case
            a_pod_whose_volume_is_published_again_is_told_of_a_downgrade_and_grows_after_the_upgrade
            a_pod_that_begins_at_a_downgrade_is_told_why_and_runs_after_the_upgrade;
        ends:
            whoever_of_kubelet_proxy_driver_and_crust_ops_is_killed_the_pod_runs_on_and_all_is_as_before
            a_pod_that_goes_while_kubelet_and_proxy_are_away_leaves_nothing
            a_pod_that_begins_or_ends_while_the_proxy_is_away_does_so_once_it_is_back;
    })
}
