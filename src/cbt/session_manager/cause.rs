//! Why a session is not, or not yet, or no longer, available. Each cause is a row of the table in
//! docs/reference/session-manager.md, a reason of the request's condition and event, and a label of
//! the metrics; a test compares code and page.

use std::fmt;

/// Consequence of a cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The cause may disappear: the request stays Pending.
    Wait,
    /// The cause is permanent: the request becomes Failed.
    Fail,
}

/// The cause that prevents a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    SnapshotMissing,
    SnapshotDeleting,
    SnapshotNotReady,
    ContentMissing,
    SeveralDrivers,
    NoConfiguration,
    SeveralConfigurations,
    ConfigurationMisnamed,
    NamespaceMissing,
    DataRefused,
    ManagerNotAllowed,
    NotReadyInTime,
}

impl Cause {
    #[cfg(test)]
    pub const ALL: [Self; 12] = [
        Self::SnapshotMissing,
        Self::SnapshotDeleting,
        Self::SnapshotNotReady,
        Self::ContentMissing,
        Self::SeveralDrivers,
        Self::NoConfiguration,
        Self::SeveralConfigurations,
        Self::ConfigurationMisnamed,
        Self::NamespaceMissing,
        Self::DataRefused,
        Self::ManagerNotAllowed,
        Self::NotReadyInTime,
    ];

    pub const fn verdict(self) -> Verdict {
        match self {
            Self::SnapshotNotReady | Self::ManagerNotAllowed => Verdict::Wait,
            _ => Verdict::Fail,
        }
    }

    /// The value in conditions, events and metrics.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::SnapshotMissing => "SnapshotMissing",
            Self::SnapshotDeleting => "SnapshotDeleting",
            Self::SnapshotNotReady => "SnapshotNotReady",
            Self::ContentMissing => "ContentMissing",
            Self::SeveralDrivers => "SeveralDrivers",
            Self::NoConfiguration => "NoConfiguration",
            Self::SeveralConfigurations => "SeveralConfigurations",
            Self::ConfigurationMisnamed => "ConfigurationMisnamed",
            Self::NamespaceMissing => "NamespaceMissing",
            Self::DataRefused => "DataRefused",
            Self::ManagerNotAllowed => "ManagerNotAllowed",
            Self::NotReadyInTime => "NotReadyInTime",
        }
    }
}

/// A cause, and a message for the user: what is wrong and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    pub cause: Cause,
    pub message: String,
}

impl Obstacle {
    pub fn new(cause: Cause, message: impl Into<String>) -> Self {
        Self { cause, message: message.into() }
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.cause.reason(), self.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use common::documented::row;

    #[test]
    fn every_cause_is_documented_with_its_state() {
        let page = include_str!("../../../docs/reference/session-manager.md");
        for cause in Cause::ALL {
            let label = cause.reason();
            let row = row(page, label);
            let state = match cause.verdict() {
                Verdict::Wait => "Pending",
                Verdict::Fail => "Failed",
            };
            assert_eq!(row[2], state, "{label}");
        }
    }
}
