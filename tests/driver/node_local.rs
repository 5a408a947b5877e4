//! One driver of many with the same name (`--node-local`).

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use support::driver::*;
use support::{MIB, path};
use tonic::Code;

use csi::controller_service_capability::rpc;
use csi::plugin_capability::{Type as PluginCapability, service};

fn node_local() -> Driver {
    Driver::with(PoolKind::Reflink, &["--node-local"])
}

#[test]
fn a_node_local_driver_advertises_what_its_controllers_can_do() {
    let capabilities = |driver: &Driver| {
        let all = controller_capabilities(driver);
        let has = |wanted: rpc::Type| all.contains(&wanted.into());
        let controller = [rpc::Type::ExpandVolume, rpc::Type::ModifyVolume].map(has);
        let all = driver.ok(csi::GetPluginCapabilitiesRequest {}).capabilities;
        let has_groups = all.iter().any(|one| match &one.r#type {
            Some(PluginCapability::Service(found)) => {
                found.r#type() == service::Type::GroupControllerService
            }
            _ => false,
        });
        [controller[0], controller[1], has_groups]
    };
    with_driver(|driver| assert_eq!(capabilities(driver), [true; 3]));
    assert_eq!(capabilities(&node_local()), [false; 3]);
}

#[test]
fn a_volume_grows_on_its_node_without_a_controller() {
    let driver = node_local();
    let wanted = mounted("xfs");
    let volume = driver.volume("v", 300 * MIB, wanted.clone());
    let target = driver.publish(&volume, &wanted);
    let request = |bytes: u64, limit: u64| csi::NodeExpandVolumeRequest {
        capacity_range: Some(csi::CapacityRange {
            required_bytes: bytes as i64,
            limit_bytes: limit as i64,
        }),
        ..expand_on_node(&volume, &target)
    };
    for _ in 0..2 {
        assert_eq!(driver.ok(request(600 * MIB, 0)).capacity_bytes as u64, 600 * MIB);
    }
    let total = driver.ok(stats(&volume, path(&target))).usage[0].total as u64;
    assert!(total > 500 * MIB, "{total}");
    // Never smaller, and never more than the pool may hold.
    assert_eq!(driver.ok(request(300 * MIB, 0)).capacity_bytes as u64, 600 * MIB);
    driver.refused(request(1 << 50, 0), Code::OutOfRange, "capacity_range");
    driver.take_down(&volume);
}

#[test]
fn a_clone_of_another_pools_snapshot_is_for_another_node() {
    let [here, elsewhere] = [node_local(), node_local()];
    let foreign = elsewhere.volume("v", MIB, block());
    let foreign_snapshot = elsewhere.snapshot("s", &foreign);
    let own = here.volume("v", MIB, block());
    let own_snapshot = here.snapshot("s", &own);
    let clone = |name: &str, source: Source<'_>| csi::CreateVolumeRequest {
        volume_content_source: Some(source.into()),
        ..create(name, 0, block())
    };
    here.ok(clone("of-own", Source::Snapshot(&own_snapshot)));
    for source in [Source::Snapshot(&foreign_snapshot), Source::Volume(&foreign)] {
        here.refused(clone("a", source), Code::ResourceExhausted, "another node");
    }
    // A deleted one of its own pool is gone, also after a restart.
    let mut here = here;
    here.ok(delete_snapshot(&own_snapshot));
    here.restart();
    here.refused(clone("b", Source::Snapshot(&own_snapshot)), Code::NotFound, "snapshot");
    // Without the flag there is no other node to select.
    here.restart_with(&[]);
    here.refused(clone("c", Source::Snapshot(&foreign_snapshot)), Code::NotFound, "snapshot");
}
