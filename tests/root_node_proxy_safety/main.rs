//! What the node proxy does when others do not do their part: an API server that is away, says nothing or is behind, a proxy that is
//! killed in the middle of a call, a state directory that is damaged, full or read-only. Pods that never opted in notice none of it.

#[path = "../support/cluster/mod.rs"]
mod cluster;
#[path = "../support/mod.rs"]
mod support;

mod api_server;
mod host;
mod killed;
mod state_dir;

use std::process::ExitCode;

use cluster::suite::of_modules;

fn main() -> ExitCode {
    cluster::suite::run(of_modules! {
        api_server:
            a_pod_that_did_not_opt_in_needs_nothing_of_the_api_server
            a_pod_that_the_watch_has_told_of_is_known_while_the_api_server_is_away
            a_pod_that_has_opted_in_is_not_mounted_on_the_host_by_a_proxy_that_starts_without_the_api_server
            what_was_left_to_a_runtime_is_taken_back_measured_and_grown_without_the_api_server
            a_watch_that_is_behind_is_waited_for
            the_proxy_asks_for_pods_of_its_node_and_nothing_else;
        host:
            a_pod_that_nobody_told_of_in_time_is_mounted_on_the_host_and_told_so_once
            a_pod_that_opts_in_after_it_was_mounted_is_told_so_and_not_mounted_twice;
        killed:
            a_publish_in_whose_middle_the_proxy_is_killed_is_remembered_and_repeated
            a_publish_that_is_never_repeated_is_taken_back_as_what_it_was
            an_unpublish_in_whose_middle_the_proxy_is_killed_is_repeated_and_then_forgotten
            a_publish_whose_client_goes_away_is_remembered;
        state_dir:
            what_cannot_be_read_in_the_state_directory_is_told_left_alone_and_keeps_nobody_from_being_served
            a_state_directory_that_cannot_be_written_fails_those_who_opted_in_and_nobody_else;
    })
}
