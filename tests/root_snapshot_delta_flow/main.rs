//! How a VolumeSnapshotDelta is answered and how DriverDiscoveries get their conditions, against a real API server and an endpoint that a
//! test can make say anything. The aggregation layer is not part of it.

#[path = "../support/cluster/mod.rs"]
mod cluster;
#[path = "../support/mod.rs"]
mod support;

mod answers;
mod causes;
mod controller;
mod endpoint;
mod rig;

use std::process::ExitCode;

use cluster::suite::of_modules;

fn main() -> ExitCode {
    cluster::suite::run(of_modules! {
        answers:
            a_page_is_the_drivers_with_what_was_used_for_it
            what_the_driver_refuses_is_an_answer_without_the_secrets
            not_allowed_who_may_not_create_gets_nothing
            not_allowed_who_may_not_get_a_snapshot_does_not_learn_whether_it_exists
            not_allowed_who_may_not_get_the_secret_does_not_learn_whether_it_exists
            a_token_is_good_for_this_driver_alone_and_used_again
            a_token_that_is_refused_is_renewed_once
            the_same_page_is_asked_of_the_driver_once
            what_failed_or_came_with_a_secret_is_never_kept
            without_room_no_page_is_kept
            who_asks_for_the_same_at_once_shares_a_call
            too_many_a_user_who_asks_too_often_is_told_when_to_come_again
            too_many_all_together_have_a_rate_too;
        causes:
            invalid_a_name_that_is_none_and_a_secret_of_elsewhere_are_refused
            snapshot_missing_one_that_does_not_exist_is_named
            snapshot_not_ready_one_that_may_be_later_is_told_so
            snapshot_deleting_a_target_on_its_way_out_is_refused_and_a_base_is_not
            content_missing_a_content_that_is_gone_is_named
            base_unfit_one_that_is_newer_or_of_another_driver_is_refused
            secret_missing_one_that_does_not_exist_is_named
            discovery_missing_a_driver_without_an_endpoint_is_named
            discovery_unusable_without_certificates_or_with_another_driver_behind_it
            endpoint_unavailable_one_that_is_away_or_not_the_one_to_be_trusted
            endpoint_unavailable_one_that_lies_is_named
            each_kind_of_problem_of_an_endpoint_has_its_cause
            unsupported_a_driver_that_cannot_tell_is_said_so
            api_server_a_right_that_the_server_lacks_is_named
            timed_out_there_is_a_deadline_for_all_of_it
            too_many_a_driver_that_is_slow_holds_up_itself_alone
            exiting_what_still_runs_when_all_ends_is_told_so;
        controller:
            a_driver_that_answers_has_three_conditions_and_others_stay_as_they_are
            a_change_is_seen_at_once_and_what_is_written_is_no_reason_to_look
            an_endpoint_that_goes_or_changes_is_seen_at_the_next_look
            an_endpoint_that_is_late_is_looked_at_again_soon
            a_certificate_that_cannot_be_trusted_or_not_for_long_is_said
            an_object_that_cannot_be_used_is_said_so_and_harms_no_other
            only_the_leader_looks_and_another_takes_over;
    })
}
