//! The four calls to which the proposal's kubelet adds fields.

use prost::Message;

use grpc::call::{Describe, Subject, note};
use grpc::proto::csi::v1 as csi;

/// A call that the proxy decodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Call {
    Publish,
    Unpublish,
    Stats,
    Expand,
}

impl Call {
    pub const ALL: [Self; 4] = [Self::Publish, Self::Unpublish, Self::Stats, Self::Expand];

    /// The call with this HTTP/2 path. `None`: the proxy forwards it without decoding.
    pub fn at(path: &str) -> Option<Self> {
        let method = path.strip_prefix("/csi.v1.Node/")?;
        Self::ALL.into_iter().find(|call| call.method() == method)
    }

    /// The name of the RPC.
    pub fn method(self) -> &'static str {
        match self {
            Self::Publish => "NodePublishVolume",
            Self::Unpublish => "NodeUnpublishVolume",
            Self::Stats => "NodeGetVolumeStats",
            Self::Expand => "NodeExpandVolume",
        }
    }

    /// The value of the label `call` in the metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Publish => "publish",
            Self::Unpublish => "unpublish",
            Self::Stats => "stats",
            Self::Expand => "expand",
        }
    }
}

/// A decoded request.
#[derive(Debug, Clone, PartialEq)]
pub enum DecodedRequest {
    Publish(Box<csi::NodePublishVolumeRequest>),
    Unpublish(csi::NodeUnpublishVolumeRequest),
    Stats(csi::NodeGetVolumeStatsRequest),
    Expand(Box<csi::NodeExpandVolumeRequest>),
}

impl DecodedRequest {
    /// Decodes a request. `None`: it is invalid, and the driver must report why.
    pub fn decode(call: Call, message: &[u8]) -> Option<Self> {
        Some(match call {
            Call::Publish => Self::Publish(Message::decode(message).ok()?),
            Call::Unpublish => Self::Unpublish(Message::decode(message).ok()?),
            Call::Stats => Self::Stats(Message::decode(message).ok()?),
            Call::Expand => Self::Expand(Message::decode(message).ok()?),
        })
    }
}

impl Describe for DecodedRequest {
    fn describe(&self, subject: &mut Subject) {
        let (volume, path) = match self {
            Self::Publish(request) => (&request.volume_id, &request.target_path),
            Self::Unpublish(request) => (&request.volume_id, &request.target_path),
            Self::Stats(request) => (&request.volume_id, &request.volume_path),
            Self::Expand(request) => (&request.volume_id, &request.volume_path),
        };
        (subject.volume_id, subject.path) = (note(volume), note(path));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_four_calls_are_decoded() {
        for call in Call::ALL {
            assert_eq!(Call::at(&format!("/csi.v1.Node/{}", call.method())), Some(call));
        }
        for other in [
            "",
            "/csi.v1.Node/NodeStageVolume",
            "/csi.v1.Node/",
            "/csi.v1.Controller/NodePublishVolume",
            "/csi.v1.Node/NodePublishVolume/",
        ] {
            assert_eq!(Call::at(other), None, "{other}");
        }
    }
}
