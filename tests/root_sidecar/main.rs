//! The sidecar against the real thing: a real API server with real tokens and roles, the released
//! snapshot-controller and csi-snapshotter, the driver of this project on real loop devices.

#[path = "../support/cluster/mod.rs"]
mod cluster;
#[path = "../support/mod.rs"]
mod support;

mod answers;
mod commands;
mod provoked;
mod refusals;
mod relay;
mod released;
mod rig;
mod safety;

use std::process::ExitCode;

use cluster::suite::of_modules;

fn main() -> ExitCode {
    cluster::suite::run(of_modules! {
        answers:
            allocated_blocks_are_those_that_the_driver_reports
            changed_blocks_are_found_from_a_handle_and_from_a_name
            a_name_that_exists_wins_over_a_handle
            an_empty_volume_and_no_change_still_tell_style_and_capacity
            an_answer_starts_where_it_is_asked_to_and_comes_in_the_portions_asked_for
            a_base_may_be_deleted_or_on_its_way_out;
        refusals:
            a_missing_or_impossible_argument_is_named
            only_a_good_token_for_this_audience_is_let_in
            a_user_without_the_right_to_the_namespace_is_denied
            a_snapshot_that_cannot_be_asked_about_says_why
            a_content_that_is_not_ready_says_so
            another_drivers_snapshot_is_refused
            a_base_has_to_be_of_the_same_volume_and_not_newer
            a_base_of_another_namespace_is_refused
            a_broken_chain_asks_for_a_full_backup
            a_revoked_token_or_right_is_refused_within_the_stated_time
            a_token_is_refused_from_its_own_end_on
            an_empty_or_missing_audience_lets_nobody_in
            an_api_server_that_is_away_is_unavailable_and_comes_back
            a_flood_of_bad_tokens_is_over_when_it_is_over
            the_released_cluster_role_is_enough
            a_sidecar_without_rights_of_its_own_says_which_one_it_lacks;
        released:
            the_released_verifier_finds_full_and_delta_true_in_both_styles
            the_released_lister_prints_what_there_is
            the_released_command_line_starts_this_sidecar;
        relay:
            a_driver_that_ends_in_mid_stream_is_an_error_and_the_answer_can_be_gone_on_with
            a_client_that_stops_reading_costs_little_memory
            the_clients_deadline_reaches_the_driver
            a_client_that_goes_away_ends_the_drivers_work
            streams_beyond_the_limit_are_turned_away
            many_streams_share_fairly
            a_client_that_does_not_read_holds_up_nobody_else
            a_sidecar_that_is_told_to_end_lets_answers_finish_and_cuts_off_the_rest
            a_new_certificate_serves_new_connections_and_drops_no_stream
            a_driver_that_comes_late_or_comes_back_is_found
            requests_cost_the_api_server_nothing_once_they_are_known;
        commands:
            the_commands_find_the_service_by_the_names_of_snapshots
            the_commands_go_on_when_sidecar_and_driver_are_killed;
        provoked:
            a_driver_without_the_service_is_unimplemented
            secrets_reach_the_driver_and_nobody_else
            an_unknown_error_is_internal
            an_end_that_the_driver_did_not_declare_is_an_error
            an_answer_without_a_message_is_passed_on
            a_message_that_is_too_large_says_what_to_do
            a_secret_that_is_missing_is_named;
        safety:
            tokens_and_secrets_are_never_shown;
    })
}
