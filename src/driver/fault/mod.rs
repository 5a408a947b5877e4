//! Faults on purpose, for people who build backup clients and want to see them fail. Off unless
//! `--enable-faults` is given; `--fault` says what goes wrong. Only answers are spoilt, never what is
//! on disk: the backend knows nothing of this.

mod rule;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, SystemTime};

use tonic::Status;

pub use rule::{Kind, Rule};

use super::call::Subject;
use crate::backend::{Backend, Extent, Snapshot};

/// The rules of this driver. Cheap to clone.
#[derive(Clone, Default)]
pub struct Faults(Arc<Vec<Armed>>);

/// A rule, and how often it may still act.
struct Armed {
    rule: Rule,
    left: AtomicU64,
}

impl Armed {
    fn concerns(&self, method: &str, subject: &Subject) -> bool {
        self.rule.method.as_deref().is_none_or(|wanted| wanted == method)
            && self.rule.about.as_deref().is_none_or(|text| subject.mentions(text))
    }

    /// Whether it acts now, which uses it up once.
    fn acts(&self, method: &str) -> bool {
        if self.rule.times.is_some() {
            let less = |left: u64| left.checked_sub(1);
            if self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_err() {
                return false;
            }
        }
        tracing::warn!(rpc = method, fault = self.rule.kind.name(), "a fault, on purpose");
        true
    }
}

/// What is done to a stream after so many extents.
#[derive(Clone)]
enum Spoil {
    Pause(Duration),
    End(Status),
}

impl Faults {
    pub fn new(rules: Vec<Rule>) -> Self {
        let arm = |rule: Rule| Armed { left: AtomicU64::new(rule.times.unwrap_or(0)), rule };
        let armed: Vec<_> = rules.into_iter().map(arm).collect();
        for Armed { rule, .. } in &armed {
            tracing::warn!(?rule, "answers of this driver are spoilt on purpose (--fault)");
        }
        Self(Arc::new(armed))
    }

    pub fn any(&self) -> bool {
        !self.0.is_empty()
    }

    /// The kinds of the rules, for people to read; `None` when there are no rules.
    pub fn kinds(&self) -> Option<String> {
        let kinds: BTreeSet<_> = self.0.iter().map(|armed| armed.rule.kind.name()).collect();
        self.any().then(|| Vec::from_iter(kinds).join(","))
    }

    fn concerning<'a>(
        &'a self,
        method: &'a str,
        subject: &'a Subject,
    ) -> impl Iterator<Item = &'a Armed> {
        self.0.iter().filter(move |armed| armed.concerns(method, subject))
    }

    /// Holds a call up, or fails it. Blocks.
    pub fn before(&self, method: &str, subject: &Subject) -> Result<(), Status> {
        for armed in self.concerning(method, subject) {
            match armed.rule.kind {
                Kind::SlowSnapshot { time } if cuts(method) && armed.acts(method) => sleep(time),
                Kind::IoError { after: None } if armed.acts(method) => return Err(io_error()),
                Kind::TrackingLost if compares(method, subject) && armed.acts(method) => {
                    return Err(Status::failed_precondition(
                        "the changes between these snapshots are not known (--fault \
                         tracking-lost); take a full backup",
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Spoils the stream of a call, if a rule says so.
    pub fn stream<I>(&self, method: &str, subject: &Subject, extents: I) -> Stream<I> {
        let mut spoils: Vec<(u64, Spoil)> = Vec::new();
        for armed in self.concerning(method, subject) {
            let (after, spoil) = match armed.rule.kind {
                Kind::StreamStall { after, time } => (after, Spoil::Pause(time)),
                Kind::StreamAbort { after, code } => {
                    let message = "the stream breaks off here (--fault stream-abort); go on from \
                                   the end of the last extent";
                    (after, Spoil::End(Status::new(code, message)))
                }
                Kind::IoError { after: Some(after) } => (after, Spoil::End(io_error())),
                _ => continue,
            };
            if armed.acts(method) {
                spoils.push((after, spoil));
            }
        }
        if spoils.is_empty() {
            return Stream::Whole(extents);
        }
        spoils.sort_by_key(|(after, _)| *after);
        Stream::Spoilt(Spoilt { extents, passed: 0, spoils, ended: false })
    }

    /// Whether a snapshot may be used yet (CSI Snapshot.ready_to_use).
    pub fn ready(&self, snapshot: &Snapshot) -> bool {
        self.0.iter().all(|Armed { rule, .. }| {
            let Kind::NotReady { time } = rule.kind else { return true };
            let about = rule.about.as_deref().unwrap_or_default();
            let concerned = [&snapshot.id, &snapshot.name, &snapshot.volume_id]
                .iter()
                .any(|text| text.contains(about));
            !concerned || age(snapshot) >= time
        })
    }

    /// `UNAVAILABLE` while one of the snapshots is not ready. One that is deleted, or unknown, is for
    /// the backend to judge.
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
                    "snapshot {id:?} is not ready to use yet (--fault not-ready); try again"
                )));
            }
        }
        Ok(())
    }
}

fn cuts(method: &str) -> bool {
    ["CreateSnapshot", "CreateVolumeGroupSnapshot"].contains(&method)
}

fn compares(method: &str, subject: &Subject) -> bool {
    // The last one reads what is allocated, too.
    ["GetMetadataDelta", "GetDelta", "ListSnapshotDeltas"].contains(&method) && subject.has_base()
}

fn io_error() -> Status {
    Status::internal("Input/output error (--fault io-error)")
}

/// Since the snapshot was cut; none when the clock was set back.
fn age(snapshot: &Snapshot) -> Duration {
    let (seconds, nanoseconds) = snapshot.created_at;
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    now.saturating_sub(Duration::new(seconds, nanoseconds.min(999_999_999)))
}

/// The extents of an answer. What is not spoilt pays nothing for those that are.
pub enum Stream<I> {
    Whole(I),
    Spoilt(Spoilt<I>),
}

/// Extents of which some come late, or after which comes a failure.
pub struct Spoilt<I> {
    extents: I,
    passed: u64,
    /// By number of extents.
    spoils: Vec<(u64, Spoil)>,
    ended: bool,
}

impl<I, E> Iterator for Spoilt<I>
where
    I: Iterator<Item = Result<Extent, E>>,
    E: Into<Status>,
{
    type Item = Result<Extent, Status>;

    fn next(&mut self) -> Option<Self::Item> {
        while let Some((after, spoil)) = self.spoils.first().cloned()
            && after <= self.passed
            && !self.ended
        {
            self.spoils.remove(0);
            match spoil {
                Spoil::Pause(time) => sleep(time),
                Spoil::End(status) => {
                    self.ended = true;
                    return Some(Err(status));
                }
            }
        }
        if self.ended {
            return None;
        }
        self.passed += 1;
        self.extents.next().map(|extent| extent.map_err(Into::into))
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    fn faults(rules: &[&str]) -> Faults {
        Faults::new(rules.iter().map(|rule| rule.parse().unwrap()).collect())
    }

    /// What a stream of five extents comes to: how many pass, and the code at the end.
    fn stream(faults: &Faults) -> (usize, Option<Code>) {
        let five = (0..5).map(|block| Ok::<_, Status>(Extent { offset: block * 8192, length: 1 }));
        let all: Vec<_> = match faults.stream("GetMetadataDelta", &Subject::default(), five) {
            Stream::Whole(extents) => extents.collect(),
            Stream::Spoilt(extents) => extents.collect(),
        };
        let failed = all.iter().find_map(|extent| extent.as_ref().err().map(Status::code));
        (all.iter().filter(|extent| extent.is_ok()).count(), failed)
    }

    #[test]
    fn a_stream_breaks_off_after_so_many_extents_and_so_many_times() {
        let faults = faults(&["stream-abort,after=3,code=ABORTED,times=2"]);
        assert_eq!(stream(&faults), (3, Some(Code::Aborted)));
        assert_eq!(stream(&faults), (3, Some(Code::Aborted)));
        assert_eq!(stream(&faults), (5, None));
    }

    #[test]
    fn the_earliest_of_several_failures_wins() {
        let faults = faults(&["stream-abort,after=4", "io-error,after=2", "stream-stall,for=1ms"]);
        assert_eq!(stream(&faults), (2, Some(Code::Internal)));
    }

    #[test]
    fn a_stream_shorter_than_the_rule_ends_whole() {
        assert_eq!(stream(&faults(&["stream-abort,after=9"])), (5, None));
    }

    #[test]
    fn a_rule_for_one_method_leaves_the_others_alone() {
        let faults = faults(&["io-error,method=CreateSnapshot,times=1"]);
        let subject = Subject::default();
        assert!(faults.before("DeleteSnapshot", &subject).is_ok());
        assert_eq!(faults.before("CreateSnapshot", &subject).unwrap_err().code(), Code::Internal);
        assert!(faults.before("CreateSnapshot", &subject).is_ok());
        assert_eq!(stream(&faults), (5, None));
    }

    #[test]
    fn a_rule_about_something_leaves_everything_else_alone() {
        let faults = faults(&["io-error,match=snap-a"]);
        assert!(faults.before("Probe", &Subject::default()).is_ok());
    }
}
