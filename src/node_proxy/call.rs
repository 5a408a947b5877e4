//! The four calls that the proposal has kubelet add something to.

use prost::Message;

use crate::grpc::call::{Describe, Subject, note};
use crate::proto::csi::v1 as csi;

/// Which of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Call {
    Publish,
    Unpublish,
    Stats,
    Expand,
}

impl Call {
    pub const ALL: [Self; 4] = [Self::Publish, Self::Unpublish, Self::Stats, Self::Expand];

    /// The call with this path of HTTP/2. None: not one that is looked at.
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

/// What is asked.
#[derive(Debug, Clone, PartialEq)]
pub enum Asked {
    Publish(Box<csi::NodePublishVolumeRequest>),
    Unpublish(csi::NodeUnpublishVolumeRequest),
    Stats(csi::NodeGetVolumeStatsRequest),
    Expand(Box<csi::NodeExpandVolumeRequest>),
}

impl Asked {
    /// Decodes a request. None where it is none: the driver says better what is wrong with it.
    pub fn read(call: Call, message: &[u8]) -> Option<Self> {
        Some(match call {
            Call::Publish => Self::Publish(Message::decode(message).ok()?),
            Call::Unpublish => Self::Unpublish(Message::decode(message).ok()?),
            Call::Stats => Self::Stats(Message::decode(message).ok()?),
            Call::Expand => Self::Expand(Message::decode(message).ok()?),
        })
    }
}

impl Describe for Asked {
    fn describe(&self, subject: &mut Subject) {
        let (volume, path) = match self {
            Self::Publish(asked) => (&asked.volume_id, &asked.target_path),
            Self::Unpublish(asked) => (&asked.volume_id, &asked.target_path),
            Self::Stats(asked) => (&asked.volume_id, &asked.volume_path),
            Self::Expand(asked) => (&asked.volume_id, &asked.volume_path),
        };
        (subject.volume_id, subject.path) = (note(volume), note(path));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_four_calls_are_looked_at() {
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
