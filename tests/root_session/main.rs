//! The session manager against a real API server, with the released snapshot-controller.

#[path = "../support/cluster/mod.rs"]
mod cluster;
#[path = "../support/mod.rs"]
mod support;

mod commands;
mod expiry;
mod failures;
mod life;
mod rig;
mod several;

use std::process::ExitCode;

use cluster::suite::of_modules;

fn main() -> ExitCode {
    cluster::suite::run(of_modules! {
        life:
            a_request_becomes_ready_with_address_ca_and_token
            the_data_says_what_the_token_stands_for
            what_a_creator_says_of_the_state_counts_for_nothing
            a_snapshot_that_is_not_ready_keeps_the_request_pending
            a_request_that_waits_for_too_long_is_failed
            ready_and_failed_are_final
            deleting_a_request_deletes_its_data_before_it_goes
            each_turn_of_a_request_is_an_event
            a_session_whose_data_somebody_deletes_says_so
            data_that_no_request_accounts_for_is_deleted
            an_api_server_that_is_away_is_waited_for
            a_right_that_the_manager_lacks_is_said_on_the_request
            tokens_are_never_logged
            cleaning_up_leaves_no_session_with_or_without_a_manager;
        failures:
            snapshot_missing_a_volume_snapshot_that_does_not_exist_fails_the_request
            snapshot_deleting_a_volume_snapshot_on_its_way_out_fails_the_request
            content_missing_a_content_that_is_gone_fails_the_request
            several_drivers_snapshots_of_two_drivers_fail_the_request
            no_configuration_a_driver_that_offers_no_sessions_fails_the_request
            several_configurations_for_one_driver_fail_the_request
            configuration_misnamed_one_that_speaks_for_another_driver_fails_the_request
            namespace_missing_a_configuration_that_names_no_namespace_there_is_fails_the_request
            data_refused_a_handle_that_is_too_long_fails_the_request
            data_refused_a_token_that_the_manager_has_not_made_fails_the_request
            one_snapshot_that_fails_is_not_hidden_by_one_that_is_waited_for;
        expiry:
            an_expired_request_is_deleted_with_its_data
            a_manager_whose_clock_was_moved_ends_what_has_expired_by_it
            lifetimes_are_those_of_the_config_map_and_follow_it
            data_that_has_expired_goes_even_if_its_request_cannot;
        several:
            a_standby_takes_over_when_the_leader_is_killed
            a_leader_that_is_told_to_end_hands_over_at_once
            a_leader_that_cannot_renew_stops_before_another_begins
            a_manager_that_is_killed_again_and_again_makes_one_data_for_each_request
            a_thousand_requests_at_once_have_one_data_each_and_cost_few_calls;
        commands:
            a_command_whose_session_fails_says_why_and_leaves_no_request
            a_command_that_is_interrupted_or_out_of_time_leaves_no_request
            a_command_leaves_a_session_that_it_was_given;
    })
}
