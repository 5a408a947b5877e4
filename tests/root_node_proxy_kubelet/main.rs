//! What KEP-2857 asks of kubelet, with a released kubelet that knows nothing of it: our proxy stands between it and the driver, pods opt
//! in by an annotation, and containerd runs them by csi-loopback-runc in front of runc.

#[path = "../support/cluster/mod.rs"]
mod cluster;
#[path = "../support/mod.rs"]
mod support;

mod opted_in;
mod rig;

use std::process::ExitCode;

use cluster::suite::of_modules;

fn main() -> ExitCode {
    csi_loopback::kubernetes::tls::install_provider();
    cluster::suite::run(of_modules! {
        opted_in:
            a_claim_of_any_class_is_mounted_by_the_runtime_alone_since_its_pod_says_so;
    })
}
