//! Why a call does not reach the driver, or comes to nothing there: one reason, one code (docs/reference/node-proxy.md has the table).

use tonic::{Code, Status};

use super::call::Call;
use crate::grpc::{MAX_MESSAGE, cut};
use crate::kubernetes::defer_annotation::ANNOTATION;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The driver answers, and does not have what the pod needs; `because` is what of the pod needs it.
    #[error(
        "the pod wants the volume left to its container runtime ({because}), and the CSI driver does not have the capability \
         {capability}: upgrade the driver, or delete the pod and make it without"
    )]
    MissingCapability { capability: &'static str, because: &'static str },

    #[error("the CSI driver does not answer ({0}); try again")]
    DriverAway(String),

    /// The driver has answered with an error, or with something that is no answer.
    #[error("the CSI driver: {0}")]
    DriverRefused(String),

    #[error(
        "the API server does not report the pod {0}, so that whether its volumes are left to its container runtime is not known; \
         check the API server and the right to watch pods, and try again"
    )]
    PodUnknown(String),

    #[error(
        "the annotation {ANNOTATION} names some of the pod's claims and not others, and which one is bound to the PersistentVolume {volume:?} \
         is not known: {why}; name all of them or none, or try again"
    )]
    ClaimsUnknown { volume: String, why: String },

    #[error(
        "{0} is mounted on the host, from before the pod left the volume to its container runtime, and a volume is mounted in one place: \
         delete the pod, and annotate the new one before it is started"
    )]
    MountedOnHost(String),

    #[error(
        "the CSI driver mounted the volume on the host at {0}, although it has DEFER_FS_OPS and the pod leaves the volume to its \
         container runtime; it was unpublished: upgrade the driver, or delete the pod and make it without the annotation"
    )]
    DriverMounted(String),

    #[error(
        "the annotation {ANNOTATION} names a raw block volume, which has no filesystem to be left to a container runtime: \
         leave it out and make the pod anew"
    )]
    RawBlock,

    /// The target path is none of kubelet's, so that the name of the volume is not known.
    #[error(
        "the annotation {ANNOTATION} names some of the pod's volumes and not others, and {0} does not say which one is meant: \
         publish at the path that kubelet has for it (…/pods/UID/volumes/kubernetes.io~csi/NAME/mount), or name all of them or none"
    )]
    Ambiguous(String),

    #[error(
        "that the volume is left to a container runtime cannot be written down (--state-dir): {0}; try again when that is mended"
    )]
    NotRemembered(String),

    #[error("the message has more than {0} bytes; send less")]
    TooLarge(usize),
}

pub type Result<T, E = Refusal> = std::result::Result<T, E>;

impl Refusal {
    /// The one translation: the gRPC code, and the value of the label `reason` in the metrics.
    pub fn kind(&self, call: Call) -> (Code, &'static str) {
        match self {
            // Kubelet takes FAILED_PRECONDITION of an expansion for a volume that cannot grow while it is used, and stops
            // trying; with any other code it marks the claim and goes on (pkg/volume/csi/expander.go).
            Self::MissingCapability { .. } if call == Call::Expand => {
                (Code::Unimplemented, "missing_capability")
            }
            Self::MissingCapability { .. } => (Code::FailedPrecondition, "missing_capability"),
            Self::DriverAway(_) => (Code::Unavailable, "driver_away"),
            Self::DriverRefused(_) => (Code::Unavailable, "driver_refused"),
            Self::PodUnknown(_) => (Code::Unavailable, "pod_unknown"),
            Self::ClaimsUnknown { .. } => (Code::Unavailable, "claims_unknown"),
            Self::MountedOnHost(_) => (Code::FailedPrecondition, "mounted_on_host"),
            Self::DriverMounted(_) => (Code::FailedPrecondition, "driver_mounted"),
            Self::RawBlock => (Code::FailedPrecondition, "raw_block"),
            Self::Ambiguous(_) => (Code::FailedPrecondition, "ambiguous"),
            Self::NotRemembered(_) => (Code::Unavailable, "not_remembered"),
            Self::TooLarge(_) => (Code::ResourceExhausted, "too_large"),
        }
    }

    /// Whether it stays until somebody mends it: what is to be told of the pod, and not what a moment later may be otherwise.
    pub fn is_to_be_mended(&self) -> bool {
        self.kind(Call::Publish).0 == Code::FailedPrecondition
    }

    pub fn reason(&self, call: Call) -> &'static str {
        self.kind(call).1
    }

    pub fn status(&self, call: Call) -> Status {
        Status::new(self.kind(call).0, cut(&self.to_string(), MAX_MESSAGE))
    }
}

#[cfg(test)]
pub mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::documented::{row, rows};
    use crate::grpc::code_name;

    pub fn all() -> Vec<Refusal> {
        let words = || "words ".repeat(1000);
        vec![
            Refusal::MissingCapability { capability: "DEFER_FS_OPS", because: ANNOTATION },
            Refusal::DriverAway(words()),
            Refusal::DriverRefused(words()),
            Refusal::PodUnknown(words()),
            Refusal::ClaimsUnknown { volume: words(), why: words() },
            Refusal::MountedOnHost(words()),
            Refusal::DriverMounted(words()),
            Refusal::RawBlock,
            Refusal::Ambiguous(words()),
            Refusal::NotRemembered(words()),
            Refusal::TooLarge(1),
        ]
    }

    #[test]
    fn each_refusal_has_a_reason_of_its_own_one_code_and_a_short_message() {
        let reasons: BTreeSet<_> =
            all().iter().map(|refusal| refusal.reason(Call::Publish)).collect();
        assert_eq!(reasons.len(), all().len());
        for (refusal, call) in all().iter().flat_map(|one| Call::ALL.map(|call| (one, call))) {
            assert_eq!(refusal.reason(call), refusal.reason(Call::Publish));
            let status = refusal.status(call);
            assert!(status.message().len() <= MAX_MESSAGE + '…'.len_utf8());
            let differs = status.code() != refusal.status(Call::Publish).code();
            let is_the_one =
                matches!(refusal, Refusal::MissingCapability { .. }) && call == Call::Expand;
            assert_eq!(differs, is_the_one, "{refusal:?} {call:?}");
        }
    }

    #[test]
    fn the_table_of_the_documentation_has_each_reason_with_its_codes() {
        let page = include_str!("../../docs/reference/node-proxy.md");
        let (_, page) = page.split_once("## Refusals").unwrap();
        let (table, _) = page.split_once("\n## ").unwrap();
        for refusal in all() {
            let label = refusal.reason(Call::Publish);
            let row = row(table, label);
            for call in Call::ALL {
                let code = code_name(refusal.kind(call).0);
                assert!(row[2].contains(code), "{label}: {call:?} is {code}");
            }
        }
        assert_eq!(rows(table).len(), all().len(), "rows for reasons that do not exist");
    }

    #[test]
    fn an_expansion_without_the_capability_is_not_taken_for_a_volume_in_use() {
        let missing = &all()[0];
        assert_eq!(missing.kind(Call::Expand).0, Code::Unimplemented);
        assert_eq!(missing.kind(Call::Stats).0, Code::FailedPrecondition);
    }
}
