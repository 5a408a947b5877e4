//! Reasons for a refused or failed call, each with one gRPC code (table in
//! docs/reference/node-proxy.md).

use tonic::{Code, Status};

use super::call::Call;
use common::text::{MAX_MESSAGE, truncate};
use kubernetes::defer_annotation::ANNOTATION;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The driver lacks a capability that `because` of the pod requires.
    #[error(
        "the pod defers the volume to its container runtime ({because}), and the CSI driver lacks the capability {capability}; \
         upgrade the driver, or recreate the pod without it"
    )]
    MissingCapability { capability: &'static str, because: &'static str },

    #[error("the CSI driver is unavailable ({0}); try again")]
    DriverUnavailable(String),

    /// The driver returned an error or an invalid response.
    #[error("the CSI driver failed: {0}")]
    DriverFailed(String),

    #[error(
        "the API server does not report the pod {0}, so the proxy cannot determine whether the pod defers its volumes; \
         check the API server and the permission to watch pods, and try again"
    )]
    PodUnknown(String),

    #[error(
        "the annotation {ANNOTATION} names some of the pod's claims and not others, and the claim of the PersistentVolume {volume:?} \
         is unknown: {why}; name all of them or none, or try again"
    )]
    ClaimsUnknown { volume: String, why: String },

    #[error(
        "{0} was mounted on the host before the pod deferred the volume to its container runtime; \
         delete the pod, and annotate its replacement before it starts"
    )]
    MountedOnHost(String),

    #[error(
        "the CSI driver mounted the volume on the host at {0} despite defer_fs_ops, and the proxy unpublished it; \
         upgrade the driver, or recreate the pod without the annotation"
    )]
    DriverMounted(String),

    #[error(
        "the annotation {ANNOTATION} names a raw block volume, which has no filesystem to mount; \
         recreate the pod without the name"
    )]
    RawBlock,

    /// The target path is not kubelet's, so the volume's name is unknown.
    #[error(
        "the annotation {ANNOTATION} names some of the pod's volumes and not others, and the path {0} does not identify the volume; \
         publish at kubelet's path (…/pods/UID/volumes/kubernetes.io~csi/NAME/mount), or name all of them or none"
    )]
    Ambiguous(String),

    #[error(
        "the state of the deferred volume cannot be read or written (--state-dir): {0}; correct this, then try again"
    )]
    StateUnavailable(String),

    #[error("the message has more than {0} bytes")]
    TooLarge(usize),
}

pub type Result<T, E = Refusal> = std::result::Result<T, E>;

impl Refusal {
    /// The gRPC code, and the value of the metrics label `reason`.
    pub fn kind(&self, call: Call) -> (Code, &'static str) {
        match self {
            // kubelet interprets FAILED_PRECONDITION of an expansion as a volume that cannot grow
            // while it is in use, and stops retrying. For any other code it marks the claim and
            // retries (pkg/volume/csi/expander.go).
            Self::MissingCapability { .. } if call == Call::Expand => {
                (Code::Unimplemented, "missing_capability")
            }
            Self::MissingCapability { .. } => (Code::FailedPrecondition, "missing_capability"),
            Self::DriverUnavailable(_) => (Code::Unavailable, "driver_away"),
            Self::DriverFailed(_) => (Code::Unavailable, "driver_refused"),
            Self::PodUnknown(_) => (Code::Unavailable, "pod_unknown"),
            Self::ClaimsUnknown { .. } => (Code::Unavailable, "claims_unknown"),
            Self::MountedOnHost(_) => (Code::FailedPrecondition, "mounted_on_host"),
            Self::DriverMounted(_) => (Code::FailedPrecondition, "driver_mounted"),
            Self::RawBlock => (Code::FailedPrecondition, "raw_block"),
            Self::Ambiguous(_) => (Code::FailedPrecondition, "ambiguous"),
            Self::StateUnavailable(_) => (Code::Unavailable, "not_remembered"),
            Self::TooLarge(_) => (Code::ResourceExhausted, "too_large"),
        }
    }

    /// Whether the failure persists until a user acts. Such failures are reported as events;
    /// transient ones are not.
    pub fn needs_user_action(&self) -> bool {
        self.kind(Call::Publish).0 == Code::FailedPrecondition
    }

    pub fn reason(&self, call: Call) -> &'static str {
        self.kind(call).1
    }

    pub fn status(&self, call: Call) -> Status {
        Status::new(self.kind(call).0, truncate(&self.to_string(), MAX_MESSAGE))
    }
}

#[cfg(test)]
pub mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use common::documented::{row, rows};
    use grpc::code_name;

    pub fn all() -> Vec<Refusal> {
        let words = || "words ".repeat(1000);
        vec![
            Refusal::MissingCapability { capability: "DEFER_FS_OPS", because: ANNOTATION },
            Refusal::DriverUnavailable(words()),
            Refusal::DriverFailed(words()),
            Refusal::PodUnknown(words()),
            Refusal::ClaimsUnknown { volume: words(), why: words() },
            Refusal::MountedOnHost(words()),
            Refusal::DriverMounted(words()),
            Refusal::RawBlock,
            Refusal::Ambiguous(words()),
            Refusal::StateUnavailable(words()),
            Refusal::TooLarge(1),
        ]
    }

    #[test]
    fn each_refusal_has_a_unique_reason_one_code_and_short_text() {
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
    fn the_documentation_lists_each_reason_with_its_codes() {
        let page = include_str!("../../../docs/reference/node-proxy.md");
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
    fn a_missing_capability_keeps_kubelet_retrying_expansion() {
        let missing = &all()[0];
        assert_eq!(missing.kind(Call::Expand).0, Code::Unimplemented);
        assert_eq!(missing.kind(Call::Stats).0, Code::FailedPrecondition);
    }
}
