//! Why a request is refused, and the only place that maps a reason to a gRPC code and to the
//! details for programs (google.rpc.ErrorInfo and RetryInfo). Tests compare the tables of
//! docs/reference/sidecar.md with this code.

use std::collections::HashMap;
use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use common::text::{MAX_MESSAGE, truncate};
use kubernetes::client;

/// Domain of ErrorInfo.
pub const DOMAIN: &str = "csi-loopback";

/// Each reason is a row of the table and a value of the metrics' label `reason`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    MissingArgument,
    InvalidArgument,
    OutOfRange,
    NoAudience,
    Unauthenticated,
    NotAllowed,
    DriverNotReady,
    NoMetadataService,
    SnapshotMissing,
    ContentMissing,
    SnapshotDeleting,
    SnapshotNotReady,
    OtherDriver,
    AmbiguousBase,
    ForeignBase,
    OtherVolume,
    SecretMissing,
    ApiServer,
    SidecarNotAllowed,
    TooMany,
    TooLong,
    Exiting,
    DriverDisconnected,
    MessageTooLarge,
    ContractBroken,
    SessionInvalid,
    NotInSession,
    SnapshotReplaced,
    OtherVolumeId,
    NoStyle,
    NoNode,
    NodeAway,
    NodeGone,
    NodeRefused,
    /// The driver's own error, with its code.
    Driver(Code),
}

impl Reason {
    #[cfg(test)]
    const ALL: [Self; 34] = [
        Self::MissingArgument,
        Self::InvalidArgument,
        Self::OutOfRange,
        Self::NoAudience,
        Self::Unauthenticated,
        Self::NotAllowed,
        Self::DriverNotReady,
        Self::NoMetadataService,
        Self::SnapshotMissing,
        Self::ContentMissing,
        Self::SnapshotDeleting,
        Self::SnapshotNotReady,
        Self::OtherDriver,
        Self::AmbiguousBase,
        Self::ForeignBase,
        Self::OtherVolume,
        Self::SecretMissing,
        Self::ApiServer,
        Self::SidecarNotAllowed,
        Self::TooMany,
        Self::TooLong,
        Self::Exiting,
        Self::DriverDisconnected,
        Self::MessageTooLarge,
        Self::ContractBroken,
        Self::SessionInvalid,
        Self::NotInSession,
        Self::SnapshotReplaced,
        Self::OtherVolumeId,
        Self::NoStyle,
        Self::NoNode,
        Self::NodeAway,
        Self::NodeGone,
        Self::NodeRefused,
    ];

    pub fn code(self) -> Code {
        match self {
            Self::MissingArgument
            | Self::InvalidArgument
            | Self::OtherDriver
            | Self::AmbiguousBase
            | Self::OtherVolume => Code::InvalidArgument,
            Self::OutOfRange => Code::OutOfRange,
            Self::Unauthenticated | Self::SessionInvalid => Code::Unauthenticated,
            Self::NotAllowed | Self::ForeignBase => Code::PermissionDenied,
            Self::NoMetadataService => Code::Unimplemented,
            Self::SnapshotMissing
            | Self::ContentMissing
            | Self::SnapshotDeleting
            | Self::NotInSession
            | Self::SnapshotReplaced
            | Self::OtherVolumeId
            | Self::NodeGone => Code::NotFound,
            Self::NoNode => Code::FailedPrecondition,
            Self::NoAudience
            | Self::DriverNotReady
            | Self::SnapshotNotReady
            | Self::SecretMissing
            | Self::ApiServer
            | Self::Exiting
            | Self::DriverDisconnected
            | Self::NodeAway => Code::Unavailable,
            Self::SidecarNotAllowed | Self::ContractBroken | Self::NoStyle | Self::NodeRefused => {
                Code::Internal
            }
            Self::TooMany | Self::MessageTooLarge => Code::ResourceExhausted,
            Self::TooLong => Code::DeadlineExceeded,
            Self::Driver(code) => code,
        }
    }

    /// Delay before a retry, if waiting is enough for the same request to succeed.
    fn retry_after(self) -> Option<Duration> {
        let seconds = match self {
            Self::DriverNotReady | Self::Exiting | Self::DriverDisconnected => 1,
            Self::SnapshotNotReady
            | Self::ApiServer
            | Self::TooMany
            | Self::NodeAway
            | Self::Driver(Code::Unavailable | Code::Aborted) => 5,
            _ => return None,
        };
        Some(Duration::from_secs(seconds))
    }

    /// The value in metrics, logs and the table.
    pub const fn label(self) -> &'static str {
        match self {
            Self::MissingArgument => "missing_argument",
            Self::InvalidArgument => "invalid_argument",
            Self::OutOfRange => "out_of_range",
            Self::NoAudience => "no_audience",
            Self::Unauthenticated => "unauthenticated",
            Self::NotAllowed => "not_allowed",
            Self::DriverNotReady => "driver_not_ready",
            Self::NoMetadataService => "no_metadata_service",
            Self::SnapshotMissing => "snapshot_missing",
            Self::ContentMissing => "content_missing",
            Self::SnapshotDeleting => "snapshot_deleting",
            Self::SnapshotNotReady => "snapshot_not_ready",
            Self::OtherDriver => "other_driver",
            Self::AmbiguousBase => "ambiguous_base",
            Self::ForeignBase => "foreign_base",
            Self::OtherVolume => "other_volume",
            Self::SecretMissing => "secret_missing",
            Self::ApiServer => "api_server",
            Self::SidecarNotAllowed => "sidecar_not_allowed",
            Self::TooMany => "too_many",
            Self::TooLong => "too_long",
            Self::Exiting => "exiting",
            Self::DriverDisconnected => "driver_broke_off",
            Self::MessageTooLarge => "message_too_large",
            Self::ContractBroken => "contract_broken",
            Self::SessionInvalid => "session_invalid",
            Self::NotInSession => "not_in_session",
            Self::SnapshotReplaced => "snapshot_replaced",
            Self::OtherVolumeId => "other_volume_id",
            Self::NoStyle => "no_style",
            Self::NoNode => "no_node",
            Self::NodeAway => "node_away",
            Self::NodeGone => "node_gone",
            Self::NodeRefused => "node_refused",
            Self::Driver(_) => "driver",
        }
    }
}

/// A reason, and a message for the caller: what is wrong and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub reason: Reason,
    message: String,
}

impl Refusal {
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }

    /// A failed call to the API server; `doing` is its purpose.
    pub fn api(doing: &str, error: &kube::Error) -> Self {
        let failure = client::failure("sidecar", doing, error);
        let reason =
            if failure.lacks_permission { Reason::SidecarNotAllowed } else { Reason::ApiServer };
        Self::new(reason, failure.message)
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    pub fn code(&self) -> Code {
        self.reason.code()
    }

    pub fn status(&self) -> Status {
        self.status_with(self.code())
    }

    /// Like [`Refusal::status`], with another code than the reason's.
    pub fn status_with(&self, code: Code) -> Status {
        let mut details = ErrorDetails::new();
        details.set_error_info(
            self.reason.label().to_uppercase(),
            DOMAIN,
            HashMap::<String, String>::new(),
        );
        if let Some(delay) = self.reason.retry_after() {
            details.set_retry_info(Some(delay));
        }
        Status::with_error_details(code, truncate(&self.message, MAX_MESSAGE), details)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use common::documented::{row, rows};
    use grpc::code_name;

    const PAGE: &str = include_str!("../../../docs/reference/sidecar.md");

    /// What the released sidecar does in this case (source of v1.1.0).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Released {
        /// It fails with the same code.
        Same,
        /// It fails with this code.
        As(Code),
        /// It answers the request.
        Answers,
        /// Its process exits.
        Ends,
        /// It does not have the API.
        Lacks,
    }

    fn released(reason: Reason) -> Released {
        use Released::{Answers, As, Ends, Lacks, Same};
        match reason {
            Reason::MissingArgument
            | Reason::Unauthenticated
            | Reason::NotAllowed
            | Reason::OtherDriver
            | Reason::SecretMissing
            | Reason::TooLong
            | Reason::DriverDisconnected
            | Reason::MessageTooLarge
            | Reason::Driver(_) => Same,
            Reason::NoAudience | Reason::ApiServer => As(Code::Internal),
            Reason::InvalidArgument
            | Reason::SnapshotMissing
            | Reason::ContentMissing
            | Reason::SidecarNotAllowed => As(Code::Unavailable),
            Reason::OutOfRange
            | Reason::SnapshotDeleting
            | Reason::AmbiguousBase
            | Reason::ForeignBase
            | Reason::OtherVolume
            | Reason::TooMany
            | Reason::Exiting
            | Reason::ContractBroken => Answers,
            Reason::DriverNotReady | Reason::NoMetadataService | Reason::SnapshotNotReady => Ends,
            Reason::SessionInvalid
            | Reason::NotInSession
            | Reason::SnapshotReplaced
            | Reason::OtherVolumeId
            | Reason::NoStyle
            | Reason::NoNode
            | Reason::NodeAway
            | Reason::NodeGone
            | Reason::NodeRefused => Lacks,
        }
    }

    /// The cells of each row of the table under this heading.
    fn table(heading: &str) -> Vec<Vec<&'static str>> {
        let (_, section) = PAGE.split_once(heading).expect(heading);
        let rows = section.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
        let rows = rows.take_while(|line| line.starts_with('|'));
        rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect()
    }

    #[test]
    fn differences_from_the_released_sidecar_are_documented() {
        let rows = table("### Codes that differ");
        for reason in Reason::ALL {
            let label = format!("`{}`", reason.label());
            let row = rows.iter().find(|row| row[2] == label);
            let before = match released(reason) {
                Released::Same | Released::Lacks => {
                    assert_eq!(row, None, "{label} is no difference");
                    continue;
                }
                Released::As(code) => code_name(code),
                Released::Answers => "answers",
                Released::Ends => "ends",
            };
            let row = row.unwrap_or_else(|| panic!("{label} is not in the table"));
            assert_eq!((row[0], row[1]), (before, code_name(reason.code())), "{label}");
        }
        let is_known = |row: &Vec<&str>| {
            Reason::ALL.iter().any(|reason| row[2] == format!("`{}`", reason.label()))
        };
        assert!(rows.iter().all(is_known), "a reason that does not exist");
    }

    #[test]
    fn a_refusal_has_its_reason_and_retry_delay_as_details() {
        let delays = table("### What programs read");
        let driver = [Code::Unavailable, Code::NotFound].map(Reason::Driver);
        for reason in Reason::ALL.into_iter().chain(driver) {
            let status = Refusal::new(reason, "why").status();
            assert_eq!((status.code(), status.message()), (reason.code(), "why"));
            let details = status.get_error_details();
            let info = details.error_info().expect("an ErrorInfo");
            assert_eq!(
                (info.reason.to_lowercase().as_str(), info.domain.as_str()),
                (reason.label(), DOMAIN)
            );
            // The pattern of google.rpc.ErrorInfo.
            let plain = |byte: u8| byte.is_ascii_uppercase() || byte == b'_';
            assert!(info.reason.bytes().all(plain) && info.reason.len() <= 63, "{}", info.reason);
            let delay = details.retry_info().and_then(|info| info.retry_delay);
            let label = format!("`{}`", reason.label());
            let documented = delays.iter().find(|row| match reason {
                Reason::Driver(code) => {
                    row[1].contains("`driver` with") && row[1].contains(code_name(code))
                }
                _ => row[1].contains(&label),
            });
            assert_eq!(
                delay.map(|delay| format!("{} s", delay.as_secs())).as_deref(),
                documented.map(|row| row[0]),
                "{label}"
            );
        }
    }

    #[test]
    fn a_refusal_with_another_code_keeps_its_reason() {
        let status = Refusal::new(Reason::NotAllowed, "why").status_with(Code::Unauthenticated);
        assert_eq!(status.code(), Code::Unauthenticated);
        assert_eq!(status.get_details_error_info().unwrap().reason, "NOT_ALLOWED");
    }

    #[test]
    fn every_reason_is_documented_with_its_code() {
        for reason in Reason::ALL {
            let label = reason.label();
            let row = row(PAGE, label);
            assert_eq!(row[2], code_name(reason.code()), "{label}");
        }
        let rows = rows(PAGE);
        let known =
            rows.iter().filter(|row| row[2].starts_with(|first: char| first.is_ascii_uppercase()));
        assert_eq!(known.count(), Reason::ALL.len(), "rows for reasons that do not exist");
    }
}
