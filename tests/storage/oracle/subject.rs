//! The interface of a test subject, and its implementation by the backend in this process.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use csi_loopback::backend::{
    Capability, Error, FsType, PoolKind, Source, Style, VolumeRequest, check,
};

use super::operation::Ending;
use support::{Attached, Pool, block_size_of, mounted, raw, request, tracking};

/// A query of snapshot metadata, by snapshot ids.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Question {
    Allocated(String),
    Delta(String, String),
}

/// The requested part of a result and its messages.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// The starting offset in bytes.
    pub from: u64,
    /// Maximum extents in a message; 0 for the subject's default.
    pub page: usize,
    /// The client disconnects after this number of messages.
    pub messages: Option<usize>,
}

impl Window {
    pub const WHOLE: Self = Self { from: 0, page: 0, messages: None };
}

#[derive(Debug)]
pub struct Answer {
    /// Capacity of the (target) snapshot, in bytes.
    pub capacity: u64,
    /// Offset and length in bytes, by message.
    pub messages: Vec<Vec<(u64, u64)>>,
}

impl Answer {
    pub fn extents(&self) -> Vec<(u64, u64)> {
        self.messages.concat()
    }
}

/// The reason of a refusal. Any other error fails the test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The changes are unknown.
    NotKnown,
    /// The snapshot does not exist.
    Missing,
}

/// A driver or the backend. A failed call panics.
pub trait Subject {
    fn kind(&self) -> PoolKind;
    /// Block size of the pool, in bytes.
    fn block_size(&self) -> u64;
    /// Creates a volume, raw without a filesystem type, and returns its id.
    fn create(&mut self, name: &str, bytes: u64, fs_type: Option<FsType>) -> String;
    fn copy(&mut self, name: &str, source: Source, fs_type: Option<FsType>) -> String;
    fn delete_volume(&mut self, id: &str);
    /// Stages and publishes a volume, and returns the target.
    fn attach(&mut self, id: &str, fs_type: Option<FsType>) -> PathBuf;
    fn detach(&mut self, id: &str);
    /// Grows an attached volume and its filesystem.
    fn expand(&mut self, id: &str, bytes: u64, fs_type: Option<FsType>);
    fn track(&mut self, id: &str, on: bool);
    fn snapshot(&mut self, name: &str, volume: &str) -> String;
    /// Returns the id of the group, and the ids of its snapshots in the order of the volumes.
    fn group(&mut self, name: &str, volumes: &[&str]) -> (String, Vec<String>);
    fn delete_snapshot(&mut self, id: &str);
    fn delete_group(&mut self, id: &str);
    /// Restarts. Sets the style of results, if that needs a start.
    fn restart(&mut self, ending: Ending, style: Style);
    /// The actual style of results for a requested style.
    fn style(&self, wanted: Style) -> Style;
    fn query(&self, question: &Question, window: Window, wanted: Style) -> Result<Answer, Refused>;
    /// Drops records of deleted snapshots, if the subject supports that.
    fn forget(&mut self);
    /// Stops it and checks its pool.
    fn finish(&mut self);
}

/// Checks a closed pool.
pub fn check_pool(data_dir: &Path) {
    let report = check::check(data_dir).unwrap();
    assert!(report.findings.is_empty(), "pool check: {:?}", report.findings);
}

/// The backend in this process.
pub struct InProcess {
    pool: Pool,
    attached: BTreeMap<String, Attached>,
}

impl InProcess {
    pub fn new(kind: PoolKind) -> Self {
        let pool = Pool::with(kind, |config| config.retention = Duration::ZERO);
        Self { pool, attached: BTreeMap::new() }
    }
}

fn capability(fs_type: Option<FsType>) -> Capability {
    fs_type.map_or_else(raw, mounted)
}

impl Subject for InProcess {
    fn kind(&self) -> PoolKind {
        self.pool.kind()
    }

    fn block_size(&self) -> u64 {
        block_size_of(self.kind())
    }

    fn create(&mut self, name: &str, bytes: u64, fs_type: Option<FsType>) -> String {
        self.pool.create(name, VolumeRequest { required_bytes: bytes, fs_type, ..request() }).id
    }

    fn copy(&mut self, name: &str, source: Source, fs_type: Option<FsType>) -> String {
        self.pool.create(name, VolumeRequest { source: Some(source), fs_type, ..request() }).id
    }

    fn delete_volume(&mut self, id: &str) {
        self.pool.backend().delete_volume(id).unwrap();
    }

    fn attach(&mut self, id: &str, fs_type: Option<FsType>) -> PathBuf {
        let attached = self.pool.attach_as(id, &capability(fs_type));
        let at = attached.target.clone();
        self.attached.insert(id.to_owned(), attached);
        at
    }

    fn detach(&mut self, id: &str) {
        let attached = self.attached.remove(id).unwrap();
        self.pool.detach(&attached);
    }

    fn expand(&mut self, id: &str, bytes: u64, fs_type: Option<FsType>) {
        let grown = self.pool.backend().expand_volume(id, bytes, 0).unwrap();
        assert_eq!(grown.capacity_bytes, bytes);
        if fs_type.is_some() {
            let staging = &self.attached[id].staging;
            assert_eq!(self.pool.backend().expand_on_node(id, staging).unwrap(), bytes);
        }
    }

    fn track(&mut self, id: &str, on: bool) {
        self.pool.backend().modify_volume(id, tracking(on)).unwrap();
    }

    fn snapshot(&mut self, name: &str, volume: &str) -> String {
        self.pool.backend().create_snapshot(name, volume).unwrap().id
    }

    fn group(&mut self, name: &str, volumes: &[&str]) -> (String, Vec<String>) {
        let volumes: Vec<String> = volumes.iter().map(|id| (*id).to_owned()).collect();
        let made = self.pool.backend().create_group(name, &volumes).unwrap();
        let ids = volumes.iter().map(|volume| {
            let mut members = made.snapshots.iter();
            members.find(|member| member.volume_id == *volume).unwrap().id.clone()
        });
        (made.group.id.clone(), ids.collect())
    }

    fn delete_snapshot(&mut self, id: &str) {
        self.pool.backend().delete_snapshot(id).unwrap();
        assert!(matches!(self.pool.backend().snapshot(id), Err(Error::NotFound { .. })));
    }

    fn delete_group(&mut self, id: &str) {
        self.pool.backend().delete_group(id, &[]).unwrap();
        assert!(matches!(self.pool.backend().group(id, &[]), Err(Error::NotFound { .. })));
    }

    fn restart(&mut self, _ending: Ending, _style: Style) {
        self.pool.restart();
    }

    fn style(&self, wanted: Style) -> Style {
        wanted
    }

    fn query(&self, question: &Question, window: Window, wanted: Style) -> Result<Answer, Refused> {
        let map = match question {
            Question::Allocated(id) => self.pool.backend().allocated(id),
            Question::Delta(base, target) => self.pool.backend().delta(base, target),
        };
        let map = map.map_err(|error| match error {
            Error::Precondition(_) => Refused::NotKnown,
            Error::NotFound { .. } => Refused::Missing,
            error => panic!("{question:?}: {error:?}"),
        })?;
        let capacity = map.capacity_bytes();
        let Window { from, page, messages } = window;
        let page = if page == 0 { usize::MAX } else { page };
        // Lazily, like the driver's stream: unread extents are not produced.
        let extents = map.extents(wanted, from).unwrap();
        let wanted = messages.map_or(usize::MAX, |messages| messages.saturating_mul(page));
        let extents = extents.take(wanted).map(|extent| extent.unwrap());
        let extents: Vec<_> = extents.map(|extent| (extent.offset, extent.length)).collect();
        Ok(Answer { capacity, messages: extents.chunks(page).map(<[_]>::to_vec).collect() })
    }

    fn forget(&mut self) {
        self.pool.backend().forget_expired().unwrap();
    }

    fn finish(&mut self) {
        self.pool.stop();
        check_pool(self.pool.data_dir());
    }
}
