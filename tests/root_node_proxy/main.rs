//! The node proxy with pods of a real API server: what it adds to kubelet's calls, remembers, refuses and tells. Behind it is the driver
//! of this project, or one of somebody else's that keeps what it is asked.

#[path = "../support/cluster/mod.rs"]
mod cluster;
#[path = "../support/mod.rs"]
mod support;

mod capabilities;
mod confined;
mod memory;
mod opt_in;
mod reports;

use std::process::ExitCode;

use cluster::suite::of_modules;

fn main() -> ExitCode {
    cluster::suite::run(of_modules! {
        opt_in:
            a_claim_a_generic_ephemeral_and_an_inline_volume_are_left_where_the_pod_names_them
            another_providers_driver_gets_kubelets_bytes_with_the_fields_behind_them
            calls_for_a_pod_that_did_not_opt_in_are_passed_on_byte_for_byte
            where_a_pod_names_some_of_its_claims_the_api_server_says_which_one_is_meant
            where_nobody_may_say_which_claim_is_meant_the_mount_waits_until_somebody_may
            a_raw_block_volume_beside_others_is_told_from_them_by_its_use
            a_raw_block_volume_that_is_named_is_refused_with_an_event
            a_pod_may_opt_in_until_its_volume_is_published
            a_pod_of_the_same_name_is_another_pod
            at_a_path_that_is_none_of_kubelets_the_pod_is_known_from_pod_info;
        capabilities:
            story_6_a_mount_fails_with_the_reason_and_an_event_until_the_driver_has_the_capability
            story_6_with_the_driver_of_this_project
            a_driver_without_the_call_for_capabilities_has_none
            a_group_is_filled_in_and_each_part_of_it_needs_its_capability
            the_group_that_kubelet_passes_on_itself_stays_as_it_is
            the_group_reaches_the_runtime
            a_driver_that_is_away_is_waited_for_and_no_event_is_told
            story_5_a_downgrade_costs_figures_and_growth_and_the_pod_ends_as_ever
            story_5_with_the_driver_of_this_project
            a_driver_that_does_not_say_what_it_can_is_told_to_take_the_volume_back_with_the_field;
        memory:
            what_is_left_is_written_down_before_the_driver_hears_of_it
            after_a_restart_of_the_proxy_each_call_has_the_field_though_the_pod_is_gone
            a_kubelet_that_starts_again_publishes_again_and_it_is_the_same_volume
            a_node_that_starts_again_leaves_the_volume_to_the_runtime_again
            an_entry_goes_when_the_driver_has_taken_the_volume_back_and_not_before
            a_target_that_is_gone_is_forgotten_and_none_while_kubelets_directory_is_not_to_be_seen
            a_publish_under_way_is_not_forgotten_however_long_it_takes
            a_publish_that_the_driver_refuses_is_forgotten_with_its_target
            figures_and_growth_find_the_volume_by_where_it_is_staged_too
            two_pods_of_one_volume_are_told_apart_by_their_targets
            what_the_host_has_mounted_already_is_not_left_as_well;
        confined:
            root_with_no_capability_is_enough;
        reports:
            each_publish_of_a_volume_that_is_left_is_counted_when_it_succeeds
            a_volumes_condition_is_told_from_its_first_measurement_until_it_is_taken_back
            what_the_driver_refuses_reaches_kubelet_as_it_is_and_is_counted_by_call
            the_api_server_is_asked_for_the_pods_of_the_node_and_told_events_and_no_more
            what_the_driver_says_of_itself_is_what_kubelet_hears
            a_proxy_that_may_not_tell_events_refuses_all_the_same;
    })
}
