//! cbt-http against the real thing: a real API server with real tokens, roles and leases, the driver of this project on real
//! loop devices; and a driver that is made for it where ours would never behave so.

#[path = "../support/cluster/mod.rs"]
mod cluster;
#[path = "../support/mod.rs"]
mod support;

mod door;
mod leaders;
mod pages;
mod provoked;
mod published;
mod rig;

use std::process::ExitCode;

use cluster::suite::of_modules;

fn main() -> ExitCode {
    csi_loopback::kubernetes::tls::install_provider();
    cluster::suite::run(of_modules! {
        pages:
            pages_put_together_are_what_the_driver_streams
            a_driver_without_the_list_gives_the_same_pages_by_its_streams
            extents_of_a_driver_with_large_blocks_are_counted_in_those
            a_page_may_begin_at_any_block_and_not_past_the_end
            a_page_costs_the_driver_one_call
            pages_go_on_after_the_driver_was_killed
            a_driver_whose_blocks_have_another_size_by_now_says_so
            a_drivers_refusal_is_told_with_its_code
            a_driver_that_is_away_is_unavailable_and_comes_back;
        door:
            only_a_good_token_for_this_driver_is_let_in
            a_user_without_the_right_is_refused_and_one_for_this_driver_alone_is_not
            a_request_for_another_driver_is_refused
            limits_and_names_out_of_bounds_are_named
            bodies_that_are_none_are_refused_without_being_told
            other_verbs_and_paths_are_refused
            what_the_driver_can_do_is_told
            an_api_server_that_is_away_is_unavailable
            tokens_and_secrets_are_never_shown;
        provoked:
            tokens_of_another_driver_are_remembered_and_else_looked_for_from_the_start
            a_remembered_token_that_is_stale_is_looked_for_anew
            a_page_ends_before_blocks_of_another_size
            tokens_for_data_are_passed_on
            a_driver_that_leads_in_circles_is_told_as_such
            a_driver_that_never_comes_to_the_page_is_cut_off_in_time
            a_driver_that_breaks_the_rules_of_a_page_is_told_as_such
            extents_of_any_length_are_widened_and_read_no_further_than_needed
            a_driver_with_neither_call_is_unsupported
            secrets_reach_the_driver_and_nobody_else
            requests_beyond_the_limit_are_turned_away;
        leaders:
            one_replica_leads_and_the_others_pass_requests_on
            a_standby_takes_over_when_the_leader_is_killed
            a_leader_that_is_told_to_end_hands_over
            a_standby_that_cannot_reach_the_leader_says_so
            a_request_is_passed_on_to_nobody_whom_the_authority_does_not_vouch_for;
        published:
            the_discovery_says_where_and_is_put_right
            a_discovery_of_a_service_names_it
            certificates_serve_both_hosts_and_the_bundle_follows_the_authority;
    })
}
