//! The admission webhooks as a real API server calls them, with real pods: nothing runs them, which nobody needs here.

#[path = "../support/cluster/mod.rs"]
mod cluster;
#[path = "../support/mod.rs"]
mod support;

mod deferral;
mod opt_in;
mod policy;
mod read_only;
mod rig;
mod service;
mod snapshots;
mod undone;
mod workloads;

use std::process::ExitCode;

use cluster::suite::of_modules;

fn main() -> ExitCode {
    csi_loopback::kubernetes::tls::install_provider();
    cluster::suite::run(of_modules! {
        read_only:
            volumes_of_content_are_read_only_in_every_container
            other_volumes_and_other_drivers_are_left_as_they_are
            an_ephemeral_container_that_comes_later_gets_content_read_only_and_the_others_are_left_alone
            what_is_not_read_only_for_want_of_the_mutating_webhook_is_refused
            a_part_of_content_that_is_mounted_is_warned_of;
        undone:
            what_another_webhook_has_undone_is_mended_again_and_refused_where_it_insists;
        policy:
            each_namespace_is_held_to_its_rules
            attributes_that_mean_nothing_are_refused_by_field
            everything_that_is_wrong_is_told_at_once
            a_change_of_the_config_map_counts_and_nonsense_keeps_what_was
            nonsense_from_the_start_refuses_and_is_told_by_health
            namespaces_need_the_level_of_the_volume_profile
            the_label_of_the_csi_driver_is_the_profile_where_nobody_says_another;
        deferral:
            a_pod_whose_runtime_does_all_that_it_needs_is_opted_in
            a_pod_that_needs_what_its_runtime_does_not_do_is_left_as_it_is
            without_an_entry_for_inline_volumes_a_pod_is_left_as_it_is_and_with_one_the_next_is_opted_in
            what_a_pod_says_itself_and_what_cannot_be_deferred_are_left
            nonsense_among_the_entries_is_not_taken_and_its_place_is_told
            what_no_runtime_would_mount_is_warned_of;
        opt_in:
            only_volumes_that_a_runtime_could_mount_are_named
            a_volume_is_named_until_its_pod_is_initialised_and_stays_named
            a_scheduler_names_and_unnames_no_volume_by_a_binding
            by_way_of_ephemeral_containers_and_of_a_resize_no_annotation_changes
            while_the_webhook_is_away_only_what_changes_the_annotation_is_refused
            hostile_opt_ins_are_answered_and_hold_up_nobody;
        snapshots:
            a_pod_begins_with_snapshots_of_its_own_namespace_alone
            no_snapshot_is_taken_where_none_is_allowed;
        workloads:
            every_kind_of_template_is_warned_of_and_taken
            a_template_whose_pods_are_mended_or_good_is_not_warned_of;
        service:
            while_no_webhook_runs_only_pods_with_volumes_of_the_driver_are_refused
            the_webhooks_own_namespace_is_free
            dry_runs_are_judged_and_leave_nothing
            no_pod_is_refused_while_the_authority_is_replaced
            a_provided_certificate_is_shown
            hostile_reviews_are_answered_or_refused_and_hold_up_nobody
            reviews_are_counted_and_what_pods_say_is_never_logged;
    })
}
