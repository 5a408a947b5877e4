//! The real binary, tested through its socket like by a CSI client.

use std::path::PathBuf;

use csi_loopback::backend::{FsType, PoolKind, Source, Style};
use csi_loopback::proto::csi::v1 as csi;
use tonic::{Code, Status, Streaming};

use super::operation::Ending;
use super::subject::{Answer, Question, Refused, Subject, Window, check_pool};
use support::driver::{self, Driver};
use support::{BLOCK, pool_block_size};

pub struct Socket {
    driver: Driver,
    style: Style,
}

impl Socket {
    pub fn new(kind: PoolKind) -> Self {
        Self { driver: Driver::start(kind), style: Style::Variable }
    }
}

fn capability(fs_type: Option<FsType>) -> csi::VolumeCapability {
    fs_type.map_or_else(driver::block, |fs_type| driver::mounted(fs_type.name()))
}

fn flags(style: Style) -> Vec<String> {
    match style {
        Style::Variable => Vec::new(),
        Style::Fixed(size) => {
            let size = size.to_string();
            ["--block-metadata-type", "fixed", "--block-size", &size].map(str::to_owned).into()
        }
    }
}

impl Subject for Socket {
    fn kind(&self) -> PoolKind {
        self.driver.kind()
    }

    fn block_size(&self) -> u64 {
        pool_block_size().unwrap_or(BLOCK)
    }

    fn create(&mut self, name: &str, bytes: u64, fs_type: Option<FsType>) -> String {
        self.driver.volume(name, bytes, capability(fs_type))
    }

    fn copy(&mut self, name: &str, source: Source, fs_type: Option<FsType>) -> String {
        let source = match &source {
            Source::Snapshot(id) => driver::Source::Snapshot(id),
            Source::Volume(id) => driver::Source::Volume(id),
        };
        self.driver.copy(name, source, capability(fs_type))
    }

    fn delete_volume(&mut self, id: &str) {
        self.driver.ok(driver::delete_volume(id));
    }

    fn attach(&mut self, id: &str, fs_type: Option<FsType>) -> PathBuf {
        self.driver.publish(id, &capability(fs_type))
    }

    fn detach(&mut self, id: &str) {
        self.driver.take_down(id);
    }

    fn expand(&mut self, id: &str, bytes: u64, _fs_type: Option<FsType>) {
        let grown = self.driver.ok(driver::expand(id, bytes));
        assert!(grown.node_expansion_required);
        let staging = self.driver.staging(id);
        let grown = self.driver.ok(driver::expand_on_node(id, &staging));
        assert_eq!(grown.capacity_bytes as u64, bytes);
    }

    fn track(&mut self, id: &str, on: bool) {
        self.driver.ok(driver::modify(id, &[("changeTracking", &on.to_string())]));
    }

    fn snapshot(&mut self, name: &str, volume: &str) -> String {
        self.driver.snapshot(name, volume)
    }

    fn group(&mut self, name: &str, volumes: &[&str]) -> (String, Vec<String>) {
        let made =
            self.driver.ok(driver::create_group_snapshot(name, volumes)).group_snapshot.unwrap();
        let ids = volumes.iter().map(|volume| {
            let mut members = made.snapshots.iter();
            members.find(|member| member.source_volume_id == *volume).unwrap().snapshot_id.clone()
        });
        (made.group_snapshot_id.clone(), ids.collect())
    }

    fn delete_snapshot(&mut self, id: &str) {
        self.driver.ok(driver::delete_snapshot(id));
    }

    fn delete_group(&mut self, id: &str) {
        self.driver.ok(csi::DeleteVolumeGroupSnapshotRequest {
            group_snapshot_id: id.to_owned(),
            ..Default::default()
        });
    }

    fn restart(&mut self, ending: Ending, style: Style) {
        if ending == Ending::Killed {
            self.driver.kill();
            self.driver.start_again();
        }
        // Other flags require a clean restart.
        if ending == Ending::Orderly || style != self.style {
            let flags = flags(style);
            self.driver.restart_with(&flags.iter().map(String::as_str).collect::<Vec<_>>());
            self.style = style;
        }
    }

    fn style(&self, _wanted: Style) -> Style {
        self.style
    }

    fn query(
        &self,
        question: &Question,
        window: Window,
        _wanted: Style,
    ) -> Result<Answer, Refused> {
        let (starting_offset, max_results) = (window.from as i64, window.page as i32);
        let mut client = self.driver.metadata();
        let answer = self.driver.block_on(async {
            match question {
                Question::Allocated(id) => {
                    let request = csi::GetMetadataAllocatedRequest {
                        starting_offset,
                        max_results,
                        ..driver::allocated(id)
                    };
                    let stream = client.get_metadata_allocated(request).await?.into_inner();
                    read(stream, window.messages, |m| (m.volume_capacity_bytes, m.block_metadata))
                        .await
                }
                Question::Delta(base, target) => {
                    let request = csi::GetMetadataDeltaRequest {
                        starting_offset,
                        max_results,
                        ..driver::delta(base, target)
                    };
                    let stream = client.get_metadata_delta(request).await?.into_inner();
                    read(stream, window.messages, |m| (m.volume_capacity_bytes, m.block_metadata))
                        .await
                }
            }
        });
        answer.map_err(|status| match status.code() {
            Code::FailedPrecondition => Refused::NotKnown,
            Code::NotFound => Refused::Missing,
            _ => panic!("{question:?}: {status:?}"),
        })
    }

    /// The driver does this by itself, long after this run.
    fn forget(&mut self) {}

    fn finish(&mut self) {
        assert!(self.driver.stop().success());
        check_pool(&self.driver.data_dir());
    }
}

/// Reads a stream to its end, or drops it after some messages.
async fn read<M>(
    mut stream: Streaming<M>,
    most: Option<usize>,
    parts: impl Fn(M) -> (i64, Vec<csi::BlockMetadata>),
) -> Result<Answer, Status> {
    let mut answer = Answer { capacity: 0, messages: Vec::new() };
    while most.is_none_or(|most| answer.messages.len() < most) {
        let Some(message) = stream.message().await? else { break };
        let (capacity, blocks) = parts(message);
        answer.capacity = capacity as u64;
        let extent = |one: &csi::BlockMetadata| (one.byte_offset as u64, one.size_bytes as u64);
        answer.messages.push(blocks.iter().map(extent).collect());
    }
    Ok(answer)
}
