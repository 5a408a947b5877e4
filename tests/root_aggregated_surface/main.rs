//! The outside of the aggregated API server, as a real API server and kubectl meet it, and as somebody does who goes past
//! the API server. The APIService is one per cluster, so each test has it for itself.

#[path = "../support/cluster/mod.rs"]
mod cluster;
#[path = "../support/mod.rs"]
mod support;

mod front_proxy;
mod kubectl;
mod outage;

use std::process::ExitCode;

use cluster::suite::of_modules;

fn main() -> ExitCode {
    csi_loopback::kubernetes::tls::install_provider();
    cluster::suite::run(of_modules! {
        kubectl:
            kubectl_create_reaches_the_server_and_is_told_by_field_what_is_wrong
            every_verb_but_create_is_refused_with_a_status
            kubectl_finds_and_explains_the_resource
            unknown_fields_are_found_by_kubectl_and_by_the_server
            other_formats_and_bodies_that_are_too_large_are_refused_with_a_status;
        front_proxy:
            a_forged_header_is_refused
            whom_to_believe_follows_the_config_map
            health_is_told_to_anybody_and_nothing_else_is
            the_last_word_counts_while_the_api_server_is_away
            garbage_and_slow_clients_hold_up_nobody;
        outage:
            while_the_server_is_away_only_its_group_version_stops
            without_the_api_service_discovery_is_whole
            the_server_outlives_the_api_server
            the_ca_bundle_is_published_and_nothing_else_is_written
            no_request_fails_while_the_authority_is_replaced;
    })
}
