//! The failures that a script or a Job must tell apart, by the exit code of `backup` and `restore`.

use std::fmt;

use crate::client::stop::Interrupted;

/// A failure with an exit code of its own. It may also be the context of another error.
#[derive(Debug)]
pub struct Failure {
    kind: Kind,
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// What the repository holds is not what was written.
    Damaged,
    /// There is no repository at this place, or one of another format.
    NoRepository,
    /// The repository does not open with this key, or without one.
    WrongKey,
    /// A signal ended the command; repeated, it continues.
    Interrupted,
}

/// Exit code of an interrupted command: another process may continue it.
const INTERRUPTED: u8 = 130;

/// Exit codes that no repetition changes: an error, a wrong command line, and the kinds above.
pub const FINAL: [u8; 5] =
    [1, 2, Kind::Damaged.code(), Kind::NoRepository.code(), Kind::WrongKey.code()];

impl Kind {
    const ALL: [Self; 4] = [Self::Damaged, Self::NoRepository, Self::WrongKey, Self::Interrupted];

    pub const fn code(self) -> u8 {
        match self {
            Self::Damaged => 3,
            Self::NoRepository => 10,
            Self::WrongKey => 12,
            Self::Interrupted => INTERRUPTED,
        }
    }

    /// The kind of an error; `None` for the others, whose code is 1.
    pub fn of(error: &anyhow::Error) -> Option<Self> {
        match error.downcast_ref::<Failure>() {
            Some(failure) => Some(failure.kind),
            None if error.is::<Interrupted>() => Some(Self::Interrupted),
            None => None,
        }
    }
}

impl Failure {
    pub fn damaged(text: impl Into<String>) -> Self {
        Self { kind: Kind::Damaged, text: text.into() }
    }

    pub fn no_repository(text: impl Into<String>) -> Self {
        Self { kind: Kind::NoRepository, text: text.into() }
    }

    pub fn wrong_key(text: impl Into<String>) -> Self {
        Self { kind: Kind::WrongKey, text: text.into() }
    }

    /// The failure of a process that ended with this code, as an error.
    pub fn of_code(code: i32, text: String) -> anyhow::Error {
        match Kind::ALL.into_iter().find(|kind| i32::from(kind.code()) == code) {
            Some(kind) => Self { kind, text }.into(),
            None => anyhow::Error::msg(text),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)
    }
}

impl std::error::Error for Failure {}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};

    use super::*;

    #[test]
    fn the_kind_of_a_failure_survives_contexts() {
        let kind = |error: anyhow::Error| Kind::of(&error.context("restore a").context("b"));
        assert_eq!(kind(Failure::damaged("a chunk").into()), Some(Kind::Damaged));
        let io = Err::<(), _>(anyhow!("zstd")).context(Failure::damaged("a chunk"));
        assert_eq!(kind(io.unwrap_err()), Some(Kind::Damaged));
        assert_eq!(kind(Interrupted.into()), Some(Kind::Interrupted));
        assert_eq!(kind(anyhow!("other")), None);
        for one in Kind::ALL {
            let code = i32::from(one.code());
            assert_eq!(kind(Failure::of_code(code, "x".to_owned())), Some(one));
            assert_eq!(FINAL.contains(&one.code()), one != Kind::Interrupted);
        }
    }
}
