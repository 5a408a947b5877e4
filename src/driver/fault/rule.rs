//! A rule of `--fault`, as text: `KIND[,KEY=VALUE…]`, such as `stream-abort,after=1000,times=2`.

use std::str::FromStr;
use std::time::Duration;

use prost::Message;
use prost_types::FileDescriptorSet;
use tonic::Code;

use super::scenario;
use super::wrong::Way;
use grpc::code_named;
use grpc::proto::FILE_DESCRIPTOR_SET;

/// Maximum delay of a rule.
const MAX_TIME: Duration = Duration::from_secs(3600);

/// A fault, the calls it applies to, and how often it fires.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    pub kind: Kind,
    /// Only calls of this RPC.
    pub method: Option<String>,
    /// Only calls whose names, ids or paths contain this text.
    pub about: Option<String>,
    /// Maximum number of times.
    pub times: Option<u64>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Kind {
    /// A metadata stream fails after `after` extents.
    StreamAbort { after: u64, code: Code },
    /// A metadata stream pauses after `after` extents.
    StreamStall { after: u64, time: Duration },
    /// CreateSnapshot and CreateVolumeGroupSnapshot start after a delay.
    SlowSnapshot { time: Duration },
    /// A snapshot is not ready to use until it is this old.
    NotReady { time: Duration },
    /// A call fails like a disk error; with a number, a metadata stream fails after that many
    /// extents.
    IoError { after: Option<u64> },
    /// The changes between two snapshots are unknown: a delta fails with this code.
    TrackingLost { code: Code },
    /// A metadata response violates CSI; `at` selects a tuple by an offset in bytes.
    WrongMetadata { way: Way, at: Option<u64> },
}

impl Kind {
    /// The name in a rule.
    pub fn name(&self) -> &'static str {
        match self {
            Self::StreamAbort { .. } => "stream-abort",
            Self::StreamStall { .. } => "stream-stall",
            Self::SlowSnapshot { .. } => "slow-snapshot",
            Self::NotReady { .. } => "not-ready",
            Self::IoError { .. } => "io-error",
            Self::TrackingLost { .. } => "tracking-lost",
            Self::WrongMetadata { .. } => "wrong-metadata",
        }
    }
}

impl FromStr for Rule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (first, rest) = text.split_once(',').map_or((text, None), |(a, b)| (a, Some(b)));
        if let Some(rule) = scenario::rule(first) {
            let rest = rest.map(|rest| format!(",{rest}")).unwrap_or_default();
            return format!("{rule}{rest}").parse();
        }
        let mut parts = text.split(',');
        let name = parts.next().unwrap_or_default();
        let mut keys = Keys::read(parts)?;
        let kind = match name {
            "stream-abort" => Kind::StreamAbort {
                after: keys.number("after")?.unwrap_or(0),
                code: keys.code("code")?.unwrap_or(Code::Unavailable),
            },
            "stream-stall" => Kind::StreamStall {
                after: keys.number("after")?.unwrap_or(0),
                time: keys.time("for")?,
            },
            "slow-snapshot" => Kind::SlowSnapshot { time: keys.time("for")? },
            "not-ready" => Kind::NotReady { time: keys.time("for")? },
            "io-error" => Kind::IoError { after: keys.number("after")? },
            "tracking-lost" => {
                Kind::TrackingLost { code: keys.code("code")?.unwrap_or(Code::FailedPrecondition) }
            }
            "wrong-metadata" => Kind::WrongMetadata {
                way: Way::named(
                    &keys.take("how").ok_or("how=HOW is missing, such as lost-tuple")?,
                )?,
                at: keys.number("at")?,
            },
            _ => {
                let scenarios = scenario::SCENARIOS.iter().map(|one| one.name);
                let scenarios: Vec<_> =
                    scenarios.map(|one| format!("{}{one}", scenario::PREFIX)).collect();
                return Err(format!(
                    "unknown fault {name:?}; use stream-abort, stream-stall, slow-snapshot, \
                     not-ready, io-error, tracking-lost, wrong-metadata, {}",
                    scenarios.join(", ")
                ));
            }
        };
        // This fault is a state with a duration, not an event in a call: it has no method and no
        // count.
        let lasting = matches!(kind, Kind::NotReady { .. });
        let rule = Self {
            kind,
            method: if lasting { None } else { keys.method("method")? },
            about: keys.take("match"),
            times: if lasting { None } else { keys.number("times")? },
        };
        keys.finish(name).map(|()| rule)
    }
}

/// The keys of a rule that were not read yet.
struct Keys<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Keys<'a> {
    fn read(pairs: impl Iterator<Item = &'a str>) -> Result<Self, String> {
        let pair = |pair: &'a str| match pair.split_once('=') {
            Some((key, value)) if !key.is_empty() && !value.is_empty() => Ok((key, value)),
            _ => Err(format!("{pair:?} is not KEY=VALUE")),
        };
        Ok(Self(pairs.map(pair).collect::<Result<_, _>>()?))
    }

    fn take(&mut self, key: &str) -> Option<String> {
        let at = self.0.iter().position(|(found, _)| *found == key)?;
        Some(self.0.remove(at).1.to_owned())
    }

    fn number(&mut self, key: &str) -> Result<Option<u64>, String> {
        let wrong = |text| format!("{key}={text} is not a whole number");
        self.take(key).map(|text| text.parse().map_err(|_| wrong(text))).transpose()
    }

    fn time(&mut self, key: &str) -> Result<Duration, String> {
        let text = self.take(key).ok_or_else(|| format!("{key}=TIME is missing, such as 5s"))?;
        match humantime::parse_duration(&text) {
            Ok(time) if time <= MAX_TIME => Ok(time),
            _ => Err(format!("{key}={text} is not a time of at most 1h, such as 5s")),
        }
    }

    fn code(&mut self, key: &str) -> Result<Option<Code>, String> {
        let Some(text) = self.take(key) else { return Ok(None) };
        match code_named(&text) {
            Some(code) if code != Code::Ok => Ok(Some(code)),
            _ => Err(format!("{key}={text} is not a gRPC error such as UNAVAILABLE")),
        }
    }

    fn method(&mut self, key: &str) -> Result<Option<String>, String> {
        let Some(text) = self.take(key) else { return Ok(None) };
        let known = FileDescriptorSet::decode(FILE_DESCRIPTOR_SET).unwrap_or_default();
        let mut methods =
            known.file.iter().flat_map(|file| &file.service).flat_map(|service| &service.method);
        if methods.any(|method| method.name() == text) {
            return Ok(Some(text));
        }
        Err(format!("{key}={text} is not an RPC of CSI such as CreateSnapshot"))
    }

    /// Fails if a key is unknown or repeated.
    fn finish(self, name: &str) -> Result<(), String> {
        match self.0.first() {
            None => Ok(()),
            Some((key, _)) => Err(format!("{name} does not take {key:?}, or not more than once")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(text: &str) -> Rule {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn every_kind_is_parsed() {
        let bare = |kind| Rule { kind, method: None, about: None, times: None };
        let second = Duration::from_secs(1);
        let cases = [
            ("stream-abort", Kind::StreamAbort { after: 0, code: Code::Unavailable }),
            (
                "stream-abort,after=7,code=ABORTED",
                Kind::StreamAbort { after: 7, code: Code::Aborted },
            ),
            ("stream-stall,for=1s", Kind::StreamStall { after: 0, time: second }),
            ("slow-snapshot,for=1s", Kind::SlowSnapshot { time: second }),
            ("not-ready,for=1s", Kind::NotReady { time: second }),
            ("io-error", Kind::IoError { after: None }),
            ("io-error,after=3", Kind::IoError { after: Some(3) }),
            ("tracking-lost", Kind::TrackingLost { code: Code::FailedPrecondition }),
            ("tracking-lost,code=NOT_FOUND", Kind::TrackingLost { code: Code::NotFound }),
            (
                "wrong-metadata,how=lost-tuple,at=4096",
                Kind::WrongMetadata { way: Way::LostTuple, at: Some(4096) },
            ),
        ];
        for (text, kind) in cases {
            assert!(text.starts_with(kind.name()));
            assert_eq!(rule(text), bare(kind), "{text}");
        }
        let whole = rule("io-error,times=2,match=snap-a,method=CreateSnapshot");
        assert_eq!(whole.method.as_deref(), Some("CreateSnapshot"));
        assert_eq!((whole.about.as_deref(), whole.times), (Some("snap-a"), Some(2)));
    }

    #[test]
    fn a_malformed_rule_is_refused_with_the_reason() {
        for (text, expected) in [
            ("", "unknown fault"),
            ("oops", "stream-abort"),
            ("io-error,", "KEY=VALUE"),
            ("io-error,after", "KEY=VALUE"),
            ("io-error,after=-1", "after=-1"),
            ("io-error,after=1,after=2", "more than once"),
            ("io-error,for=1s", "does not take \"for\""),
            ("io-error,method=Nothing", "method=Nothing"),
            ("stream-stall", "for=TIME"),
            ("stream-stall,for=2h", "at most 1h"),
            ("stream-abort,code=OK", "code=OK"),
            ("wrong-metadata", "how=HOW"),
            ("wrong-metadata,how=other", "lost-tuple"),
            ("not-ready,for=1s,times=1", "does not take \"times\""),
        ] {
            let error = text.parse::<Rule>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
