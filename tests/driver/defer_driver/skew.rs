//! A node proxy from before CSI v1.13, represented by the bytes that it sends: it treats capability
//! 7 as DEFER_FS_OPS, and its `defer_fs_ops` of NodePublishVolume has number 9.

use csi_loopback::grpc::RawMessage;
use csi_loopback::proto::csi::v1 as csi;
use prost::Message as _;
use support::MIB;
use support::driver::*;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

use super::rig::{is_gone, one_pod, with_rig};

/// `defer_fs_ops: true` as such a proxy appends it to kubelet's request.
const FORMER_FIELD: [u8; 2] = [9 << 3, 1];

/// A request of such a proxy.
#[derive(Debug)]
struct FormerPublish(csi::NodePublishVolumeRequest);

impl Rpc for FormerPublish {
    type Response = csi::NodePublishVolumeResponse;

    async fn send(self, channel: Channel) -> Result<Self::Response, Status> {
        let bytes = [self.0.encode_to_vec(), FORMER_FIELD.to_vec()].concat();
        let mut wire = tonic::client::Grpc::new(channel);
        wire.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let path = "/csi.v1.Node/NodePublishVolume".parse().unwrap();
        let codec = ProstCodec::<RawMessage, Self::Response>::default();
        let request = Request::new(RawMessage(bytes.into()));
        wire.unary(request, path, codec).await.map(tonic::Response::into_inner)
    }
}

#[test]
fn a_node_proxy_with_legacy_field_numbers_is_refused() {
    with_rig("30s", |rig| {
        let volume = rig.staged("v");
        let target = rig.driver.target(&volume);
        let kubelets = rig.driver.publishing(&volume, &target, &one_pod());
        for on in [false, true] {
            rig.restart(on);
            rig.driver.note(&kubelets);
            let former = FormerPublish(kubelets.clone());
            rig.driver.refused(former, Code::FailedPrecondition, "upgrade the node proxy");
            rig.assert_not_mounted(&volume);
            assert!(is_gone(&target) && rig.crust.staged(&target).is_none());
        }
        // The driver's rows identify volumes that such a proxy deferred before the upgrade.
        rig.driver.ok(rig.deferring(&volume));
        rig.driver.ok(expand(&volume, 64 * MIB));
        assert_eq!(rig.driver.ok(rig.stats(&volume)).usage[0].total, 1000);
        rig.driver.ok(expand_on_node(&volume, &target));
        rig.assert_not_mounted(&volume);
        rig.driver.take_down(&volume);
        assert!(rig.crust.staged(&target).is_none());
    });
}
