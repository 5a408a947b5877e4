//! The node proxy with pods of a real API server: what it adds to kubelet's calls, remembers, refuses and tells.

#[path = "../support/cluster/mod.rs"]
mod cluster;
#[path = "../support/mod.rs"]
mod support;

mod opt_in;

use std::process::ExitCode;

use cluster::suite::of_modules;

fn main() -> ExitCode {
    cluster::suite::run(of_modules! {
        opt_in:
            a_volume_that_the_pod_names_is_left_to_its_runtime_and_any_other_is_mounted
            another_providers_driver_gets_kubelets_request_with_the_fields_behind_it;
    })
}
