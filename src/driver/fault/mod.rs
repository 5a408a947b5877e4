//! Fault injection for developers of backup clients. Disabled unless `--enable-faults` is set;
//! `--fault` defines the rules. Only responses are changed, never data on disk: the backend does
//! not know about faults.

mod rule;
mod scenario;
mod wrong;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, SystemTime};

use tonic::Status;

pub use rule::{Kind, Rule};
pub use scenario::{SCENARIOS, checklist};
pub use wrong::{Requested, Wrong};

use crate::status::{self, Failure};
use grpc::call::Subject;
use storage::{Backend, Extent, Snapshot};

/// The fault rules of a driver, shared by all clones.
#[derive(Clone, Default)]
pub struct Faults(Arc<Vec<Armed>>);

/// A rule, and how often it may still fire.
struct Armed {
    rule: Rule,
    remaining: AtomicU64,
    seen: Arc<wrong::Seen>,
}

impl Armed {
    fn matches(&self, method: &str, subject: &Subject) -> bool {
        self.rule.method.as_deref().is_none_or(|wanted| wanted == method)
            && self.rule.about.as_deref().is_none_or(|text| subject.mentions(text))
    }

    /// Whether the rule fires now. Decrements a rule with `times`.
    fn fires(&self, method: &str) -> bool {
        if self.rule.times.is_some() {
            let less = |remaining: u64| remaining.checked_sub(1);
            if self.remaining.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_err() {
                return false;
            }
        }
        tracing::warn!(rpc = method, fault = self.rule.kind.name(), "injected a fault");
        true
    }
}

/// An action on a stream after a number of extents.
#[derive(Clone)]
enum StreamFault {
    Pause(Duration),
    End(Status),
}

impl Faults {
    pub fn new(rules: Vec<Rule>) -> Self {
        let arm = |rule: Rule| Armed {
            remaining: AtomicU64::new(rule.times.unwrap_or(0)),
            rule,
            seen: Arc::default(),
        };
        let armed: Vec<_> = rules.into_iter().map(arm).collect();
        for Armed { rule, .. } in &armed {
            tracing::warn!(?rule, "fault injection is enabled (--fault)");
        }
        Self(Arc::new(armed))
    }

    pub fn any(&self) -> bool {
        !self.0.is_empty()
    }

    /// The kinds of the rules, comma separated; `None` without rules.
    pub fn kinds(&self) -> Option<String> {
        let kinds: BTreeSet<_> = self.0.iter().map(|armed| armed.rule.kind.name()).collect();
        self.any().then(|| Vec::from_iter(kinds).join(","))
    }

    fn matching<'a>(
        &'a self,
        method: &'a str,
        subject: &'a Subject,
    ) -> impl Iterator<Item = &'a Armed> {
        self.0.iter().filter(move |armed| armed.matches(method, subject))
    }

    /// Delays a call or fails it, as the rules define. Blocks.
    pub fn before(&self, method: &str, subject: &Subject) -> Result<(), Status> {
        for armed in self.matching(method, subject) {
            match armed.rule.kind {
                Kind::SlowSnapshot { time } if takes_snapshot(method) && armed.fires(method) => {
                    sleep(time)
                }
                Kind::IoError { after: None } if armed.fires(method) => return Err(io_error()),
                Kind::TrackingLost { code }
                    if reads_delta(method, subject) && armed.fires(method) =>
                {
                    return Err(Status::new(
                        code,
                        "the changes between these snapshots are unknown (--fault \
                         tracking-lost); take a full backup",
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Applies the rules to the stream of a call.
    pub fn stream<I>(&self, method: &str, subject: &Subject, extents: I) -> Stream<I> {
        let mut faults: Vec<(u64, StreamFault)> = Vec::new();
        for armed in self.matching(method, subject) {
            let (after, fault) = match armed.rule.kind {
                Kind::StreamStall { after, time } => (after, StreamFault::Pause(time)),
                Kind::StreamAbort { after, code } => {
                    let message = "the stream was aborted (--fault stream-abort); resume at the \
                                   end of the last extent";
                    (after, StreamFault::End(Status::new(code, message)))
                }
                Kind::IoError { after: Some(after) } => (after, StreamFault::End(io_error())),
                _ => continue,
            };
            if armed.fires(method) {
                faults.push((after, fault));
            }
        }
        if faults.is_empty() {
            return Stream::Intact(extents);
        }
        faults.sort_by_key(|(after, _)| *after);
        Stream::Faulty(FaultyStream { extents, passed: 0, faults, ended: false })
    }

    /// How the response to a metadata call is made wrong, if it is.
    pub fn wrong(&self, method: &str, subject: &Subject) -> Option<Wrong> {
        self.matching(method, subject).find_map(|armed| match armed.rule.kind {
            Kind::WrongMetadata { way, at } if armed.fires(method) => {
                Some(Wrong { way, at, seen: armed.seen.clone() })
            }
            _ => None,
        })
    }

    /// Whether a snapshot is ready to use (CSI Snapshot.ready_to_use).
    pub fn ready(&self, snapshot: &Snapshot) -> bool {
        self.0.iter().all(|Armed { rule, .. }| {
            let Kind::NotReady { time } = rule.kind else { return true };
            let about = rule.about.as_deref().unwrap_or_default();
            let matched = [&snapshot.id, &snapshot.name, &snapshot.volume_id]
                .iter()
                .any(|text| text.contains(about));
            !matched || age(snapshot) >= time
        })
    }

    /// `UNAVAILABLE` while one of the snapshots is not ready. The backend handles deleted and
    /// unknown snapshots.
    pub fn check_ready<'a>(
        &self,
        backend: &Backend,
        ids: impl IntoIterator<Item = &'a str>,
    ) -> Result<(), Status> {
        if !self.any() {
            return Ok(());
        }
        for id in ids {
            if backend.snapshot(id).is_ok_and(|snapshot| !self.ready(&snapshot)) {
                return Err(Status::unavailable(format!(
                    "snapshot {id:?} is not ready to use (--fault not-ready); try again"
                )));
            }
        }
        Ok(())
    }
}

fn takes_snapshot(method: &str) -> bool {
    ["CreateSnapshot", "CreateVolumeGroupSnapshot"].contains(&method)
}

fn reads_delta(method: &str, subject: &Subject) -> bool {
    // ListSnapshotDeltas without a base reads the allocated blocks.
    ["GetMetadataDelta", "GetDelta", "ListSnapshotDeltas"].contains(&method) && subject.has_base()
}

fn io_error() -> Status {
    Status::internal("Input/output error (--fault io-error)")
}

/// Age of the snapshot; zero if the clock was set back.
fn age(snapshot: &Snapshot) -> Duration {
    let (seconds, nanoseconds) = snapshot.created_at;
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    now.saturating_sub(Duration::new(seconds, nanoseconds.min(999_999_999)))
}

/// The extents of a response. A stream without faults has no overhead.
pub enum Stream<I> {
    Intact(I),
    Faulty(FaultyStream<I>),
}

/// Extents with delays or a final error.
pub struct FaultyStream<I> {
    extents: I,
    passed: u64,
    /// Sorted by number of extents.
    faults: Vec<(u64, StreamFault)>,
    ended: bool,
}

impl<I, E> Iterator for FaultyStream<I>
where
    I: Iterator<Item = Result<Extent, E>>,
    E: Into<Failure>,
{
    type Item = Result<Extent, Status>;

    fn next(&mut self) -> Option<Self::Item> {
        while let Some((after, fault)) = self.faults.first().cloned()
            && after <= self.passed
            && !self.ended
        {
            self.faults.remove(0);
            match fault {
                StreamFault::Pause(time) => sleep(time),
                StreamFault::End(status) => {
                    self.ended = true;
                    return Some(Err(status));
                }
            }
        }
        if self.ended {
            return None;
        }
        self.passed += 1;
        self.extents.next().map(|extent| extent.map_err(status::of))
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    fn faults(rules: &[&str]) -> Faults {
        Faults::new(rules.iter().map(|rule| rule.parse().unwrap()).collect())
    }

    /// Reads a stream of five extents: how many arrive, and the code at the end.
    fn stream(faults: &Faults) -> (usize, Option<Code>) {
        let five = (0..5).map(|block| Ok::<_, Status>(Extent { offset: block * 8192, length: 1 }));
        let all: Vec<_> = match faults.stream("GetMetadataDelta", &Subject::default(), five) {
            Stream::Intact(extents) => extents.collect(),
            Stream::Faulty(extents) => extents.collect(),
        };
        let failed = all.iter().find_map(|extent| extent.as_ref().err().map(Status::code));
        (all.iter().filter(|extent| extent.is_ok()).count(), failed)
    }

    #[test]
    fn an_abort_rule_counts_extents_and_times() {
        let faults = faults(&["stream-abort,after=3,code=ABORTED,times=2"]);
        assert_eq!(stream(&faults), (3, Some(Code::Aborted)));
        assert_eq!(stream(&faults), (3, Some(Code::Aborted)));
        assert_eq!(stream(&faults), (5, None));
    }

    #[test]
    fn the_earliest_of_several_faults_wins() {
        let faults = faults(&["stream-abort,after=4", "io-error,after=2", "stream-stall,for=1ms"]);
        assert_eq!(stream(&faults), (2, Some(Code::Internal)));
    }

    #[test]
    fn a_stream_shorter_than_the_rule_is_complete() {
        assert_eq!(stream(&faults(&["stream-abort,after=9"])), (5, None));
    }

    #[test]
    fn a_method_rule_does_not_affect_other_methods() {
        let faults = faults(&["io-error,method=CreateSnapshot,times=1"]);
        let subject = Subject::default();
        assert!(faults.before("DeleteSnapshot", &subject).is_ok());
        assert_eq!(faults.before("CreateSnapshot", &subject).unwrap_err().code(), Code::Internal);
        assert!(faults.before("CreateSnapshot", &subject).is_ok());
        assert_eq!(stream(&faults), (5, None));
    }

    #[test]
    fn a_match_rule_does_not_affect_other_objects() {
        let faults = faults(&["io-error,match=snap-a"]);
        assert!(faults.before("Probe", &Subject::default()).is_ok());
    }
}
