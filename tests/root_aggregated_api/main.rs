//! VolumeSnapshotDelta with all parts real: kubectl or an application, the API server, the aggregated API server, cbt-http in the
//! driver's sidecar, the driver. What each part does by itself: root_aggregated_surface, root_snapshot_delta_flow, root_cbt_http.

#[path = "../support/cluster/mod.rs"]
mod cluster;
#[path = "../support/mod.rs"]
mod support;

mod answers;
mod cost;
mod rig;
mod troubles;

use std::process::ExitCode;

use cluster::suite::of_modules;
use csi_loopback::kubernetes::tls;

fn main() -> ExitCode {
    tls::install_provider();
    cluster::suite::run(of_modules! {
        answers:
            kubectl_create_prints_the_answer
            all_three_apis_give_the_same_extents_in_both_styles
            a_filesystem_volume_is_answered_as_any_other
            a_delta_of_over_100_000_blocks_is_paged_to_its_end;
        cost:
            what_a_page_costs_the_api_server_beside_a_stream;
        troubles:
            who_may_not_is_told_by_kubectl_what_is_missing
            who_asks_too_fast_is_told_when_to_come_again
            a_driver_that_fails_is_told_in_the_status
            a_listing_goes_on_when_an_aggregated_server_is_killed
            a_listing_goes_on_when_the_leading_sidecar_is_killed
            an_api_server_that_is_away_for_a_while_is_waited_for;
    })
}
