//! Why a request gets no answer, and the one place where a reason becomes a gRPC code. The table of
//! docs/sidecar.md says the same, and a test holds the two together.

use tonic::{Code, Status};

use crate::grpc::{MAX_MESSAGE, cut};
use crate::kubernetes::client;

/// Each is a row of the table and a value of the label `reason` in the metrics.
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
    BaseNewer,
    SecretMissing,
    ApiServer,
    SidecarNotAllowed,
    TooMany,
    TooLong,
    Exiting,
    DriverBrokeOff,
    MessageTooLarge,
    SessionInvalid,
    NotInSession,
    SnapshotReplaced,
    OtherVolumeId,
    NoStyle,
    /// The driver's own error: its code.
    Driver(Code),
}

impl Reason {
    #[cfg(test)]
    const ALL: [Self; 30] = [
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
        Self::BaseNewer,
        Self::SecretMissing,
        Self::ApiServer,
        Self::SidecarNotAllowed,
        Self::TooMany,
        Self::TooLong,
        Self::Exiting,
        Self::DriverBrokeOff,
        Self::MessageTooLarge,
        Self::SessionInvalid,
        Self::NotInSession,
        Self::SnapshotReplaced,
        Self::OtherVolumeId,
        Self::NoStyle,
    ];

    pub fn code(self) -> Code {
        match self {
            Self::MissingArgument
            | Self::InvalidArgument
            | Self::OtherDriver
            | Self::AmbiguousBase
            | Self::OtherVolume
            | Self::BaseNewer => Code::InvalidArgument,
            Self::OutOfRange => Code::OutOfRange,
            Self::Unauthenticated | Self::SessionInvalid => Code::Unauthenticated,
            Self::NotAllowed | Self::ForeignBase => Code::PermissionDenied,
            Self::NoMetadataService => Code::Unimplemented,
            Self::SnapshotMissing
            | Self::ContentMissing
            | Self::SnapshotDeleting
            | Self::NotInSession
            | Self::SnapshotReplaced
            | Self::OtherVolumeId => Code::NotFound,
            Self::NoAudience
            | Self::DriverNotReady
            | Self::SnapshotNotReady
            | Self::SecretMissing
            | Self::ApiServer
            | Self::Exiting
            | Self::DriverBrokeOff => Code::Unavailable,
            Self::SidecarNotAllowed | Self::NoStyle => Code::Internal,
            Self::TooMany | Self::MessageTooLarge => Code::ResourceExhausted,
            Self::TooLong => Code::DeadlineExceeded,
            Self::Driver(code) => code,
        }
    }

    /// As it stands in metrics, logs and the table.
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
            Self::BaseNewer => "base_newer",
            Self::SecretMissing => "secret_missing",
            Self::ApiServer => "api_server",
            Self::SidecarNotAllowed => "sidecar_not_allowed",
            Self::TooMany => "too_many",
            Self::TooLong => "too_long",
            Self::Exiting => "exiting",
            Self::DriverBrokeOff => "driver_broke_off",
            Self::MessageTooLarge => "message_too_large",
            Self::SessionInvalid => "session_invalid",
            Self::NotInSession => "not_in_session",
            Self::SnapshotReplaced => "snapshot_replaced",
            Self::OtherVolumeId => "other_volume_id",
            Self::NoStyle => "no_style",
            Self::Driver(_) => "driver",
        }
    }
}

/// A reason, and words for the caller: what is wrong and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub reason: Reason,
    message: String,
}

impl Refusal {
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }

    /// A call to the API server that failed; `doing` is what it was for.
    pub fn api(doing: &str, error: &kube::Error) -> Self {
        let failure = client::failure("sidecar", doing, error);
        let reason =
            if failure.is_own_right { Reason::SidecarNotAllowed } else { Reason::ApiServer };
        Self::new(reason, failure.message)
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    pub fn code(&self) -> Code {
        self.reason.code()
    }

    pub fn status(&self) -> Status {
        Status::new(self.code(), cut(&self.message, MAX_MESSAGE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::documented::{row, rows};
    use crate::grpc::code_name;

    #[test]
    fn the_table_of_the_documentation_has_each_reason_with_its_code() {
        let page = include_str!("../../docs/sidecar.md");
        for reason in Reason::ALL {
            let label = reason.label();
            let row = row(page, label);
            assert_eq!(row[2], code_name(reason.code()), "{label}");
        }
        let rows = rows(page);
        let known =
            rows.iter().filter(|row| row[2].starts_with(|first: char| first.is_ascii_uppercase()));
        assert_eq!(known.count(), Reason::ALL.len(), "rows for reasons that do not exist");
    }
}
