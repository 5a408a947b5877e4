//! The session API of the sidecar (KEP-3314, session design) against the real thing: a real API server, the released
//! snapshot-controller and csi-snapshotter, the driver of this project on real loop devices. The sessions are made by
//! hand, as the session manager would.

#[path = "../support/cluster/mod.rs"]
mod cluster;
#[path = "../support/mod.rs"]
mod support;

mod answers;
mod commands;
mod load;
mod older_driver;
mod provoked;
mod rig;
mod rows;
mod safety;
mod tokens;

use std::process::ExitCode;

use cluster::suite::of_modules;

fn main() -> ExitCode {
    cluster::suite::run(of_modules! {
        answers:
            a_session_is_answered_as_the_released_api_and_the_driver_are_in_both_styles
            a_driver_without_the_session_api_is_asked_through_csi_in_both_styles
            an_answer_starts_where_it_is_asked_to_and_comes_in_the_portions_asked_for
            each_api_can_be_switched_off;
        rows:
            get_allocated_missing_or_otherwise_invalid_argument
            get_allocated_invalid_volume_id_or_snapshot
            get_allocated_invalid_starting_offset
            get_allocated_invalid_session_token
            get_delta_missing_or_otherwise_invalid_argument
            get_delta_invalid_volume_id_base_snapshot_or_target_snapshot
            get_delta_invalid_starting_offset
            get_delta_invalid_session_token;
        tokens:
            a_session_of_another_namespace_or_driver_is_none
            a_session_that_expires_in_mid_stream_lets_the_answer_end
            a_session_that_is_revoked_in_mid_stream_refuses_the_next_call
            a_snapshot_that_was_made_again_under_the_same_name_is_not_the_sessions
            a_snapshot_that_is_brought_in_does_not_tell_its_volume;
        load:
            a_known_token_costs_the_api_server_nothing
            many_who_ask_for_the_same_at_once_cost_one_call
            the_right_to_get_is_enough
            a_sidecar_that_may_not_read_sessions_says_so
            an_api_server_that_is_away_is_unavailable_and_comes_back
            a_flood_of_guesses_stops_neither_good_tokens_nor_the_released_api;
        provoked:
            secrets_reach_the_driver_and_nobody_else
            the_driver_is_sent_a_fingerprint_of_the_token
            a_message_without_a_style_ends_the_answer;
        safety:
            session_tokens_are_never_shown;
        commands:
            a_listing_in_a_session_is_that_of_the_released_api_in_both_styles
            a_listing_goes_on_in_its_session_when_the_sidecar_is_killed;
    })
}
