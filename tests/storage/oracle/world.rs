//! A run: applies every operation to the subject and to the mirror, and checks the invariants.

use std::thread;
use std::time::{Duration, SystemTime};

use csi_loopback::backend::{FsType, Source, Style};

use super::explore::{Counts, Precision};
use super::files::Files;
use super::invariants::Answers;
use super::model::{Blocks, Content, Image, Inside, SnapshotState, Volume, blocks_of};
use super::operation::{Ending, Erase, From, How, Operation, Pick, Place, QueryOptions, Write};
use super::subject::{Question, Subject};
use support::driver::ext4_grows_online;
use support::{BLOCK, MIB, discard, read_all, write_direct, zero};

/// Maximum number of volumes, except those for reading a snapshot.
const MOST_VOLUMES: usize = 3;
/// Initial size of a raw volume in bytes. It grows by half at most.
const RAW_BYTES: u64 = 16 * MIB;

/// Maximum number of operations with which a run may wait for the end of a second.
const PATIENT_OPERATIONS: u64 = 200;

pub struct World {
    subject: Box<dyn Subject>,
    /// The use of all volumes: raw or with a filesystem.
    fs_type: Option<FsType>,
    volumes: Vec<Volume>,
    answers: Answers,
    /// Counter for names and contents.
    numbers: u64,
    counts: Counts,
    /// Time of the last deletion of a snapshot, in seconds.
    last_deletion: u64,
    /// Whether each snapshot of a raw volume is also read immediately.
    reads_back: bool,
    /// The actual differences between each snapshot and the previous one, if they are read.
    differing: Vec<Blocks>,
}

/// The current time in seconds.
fn seconds() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs()
}

fn size_of_new(fs_type: Option<FsType>) -> u64 {
    fs_type.map_or(RAW_BYTES, |fs_type| fs_type.min_bytes().max(32 * MIB))
}

impl World {
    /// Runs a sequence with a number of new volumes, to a clean end.
    pub fn run(
        subject: Box<dyn Subject>,
        fs_type: Option<FsType>,
        volumes: usize,
        operations: &[Operation],
    ) -> Counts {
        let mut world = Self::new(subject, fs_type, volumes);
        operations.iter().for_each(|operation| world.apply(*operation));
        world.finish();
        world.counts
    }

    /// Like [`World::run`]. Returns the actual differences of adjacent snapshots, in order of
    /// creation.
    pub fn run_and_read(
        subject: Box<dyn Subject>,
        operations: &[Operation],
    ) -> (Counts, Vec<Blocks>) {
        let mut world = Self { reads_back: true, ..Self::new(subject, None, 2) };
        operations.iter().for_each(|operation| world.apply(*operation));
        world.finish();
        (world.counts, world.differing)
    }

    fn new(subject: Box<dyn Subject>, fs_type: Option<FsType>, volumes: usize) -> Self {
        let mut world = Self {
            subject,
            fs_type,
            volumes: Vec::new(),
            answers: Answers::default(),
            numbers: 0,
            counts: Counts::default(),
            last_deletion: 0,
            reads_back: false,
            differing: Vec::new(),
        };
        for _ in 0..volumes {
            let bytes = size_of_new(fs_type);
            let name = world.name();
            let id = world.subject.create(&name, bytes, fs_type);
            let inside = match fs_type {
                None => Inside::Raw(Image::empty(bytes)),
                Some(_) => Inside::Mounted(Files::default()),
            };
            world.adopt(id, bytes, inside);
        }
        world
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn name(&mut self) -> String {
        format!("o{}", self.number())
    }

    /// Attaches a new volume and checks its content.
    fn adopt(&mut self, id: String, capacity: u64, inside: Inside) {
        let at = self.subject.attach(&id, self.fs_type);
        match &inside {
            Inside::Raw(image) => {
                assert!(read_all(&at) == image.bytes(), "{id} does not hold what it should");
            }
            Inside::Mounted(files) => assert!(Files::read(&at) == *files, "{id}: other files"),
        }
        let (snapshots, touched) = (Vec::new(), Blocks::new());
        let volume =
            Volume { id, capacity, at, inside, snapshots, touched, tracking: true, chain: 0 };
        self.volumes.push(volume);
    }

    fn apply(&mut self, operation: Operation) {
        self.counts.operations += 1;
        let count = self.volumes.len();
        match operation {
            Operation::Write { volume, file, write } => {
                self.write(volume.of(count), file, write);
            }
            Operation::Erase { volume, file, place, how } => {
                self.erase(volume.of(count), file, place, how);
            }
            Operation::Reshape { volume, file, place, shape } => {
                let volume = &mut self.volumes[volume.of(count)];
                if let Inside::Mounted(files) = &mut volume.inside {
                    files.reshape(&volume.at, file, place, shape);
                }
            }
            Operation::Expand { volume, blocks } => self.expand(volume.of(count), blocks.into()),
            Operation::Snapshot { volume } => self.snapshot(volume.of(count)),
            Operation::Group { volumes } => self.group(&volumes.some_of(count)),
            Operation::DeleteSnapshot { volume, which } => {
                let volume = volume.of(count);
                let alive = self.volumes[volume].alive();
                if !alive.is_empty() {
                    self.delete_snapshot(volume, alive[which.of(alive.len())]);
                }
            }
            Operation::Query { volume, snapshots, options } => {
                self.query(volume.of(count), snapshots, options);
            }
            Operation::Derive { volume, from } => self.derive(volume.of(count), from),
            Operation::DeleteVolume { volume, before_its_snapshots } => {
                if count > 1 {
                    self.delete_volume(volume.of(count), before_its_snapshots);
                }
            }
            Operation::Track { volume, on } => self.track(volume.of(count), on),
            Operation::Restart { ending, style } => self.restart(ending, style),
            Operation::ForgetExpired => self.forget(),
        }
    }

    fn write(&mut self, volume: usize, file: Pick, write: Write) {
        let number = self.number();
        let Volume { at, inside, touched, .. } = &mut self.volumes[volume];
        let image = match inside {
            Inside::Raw(image) => image,
            Inside::Mounted(files) => return files.write(at, file, write, number),
        };
        let range = write.within(image.bytes().len() as u64);
        let there = &image.bytes()[range.start as usize..range.end as usize];
        let bytes = write.bytes(there, number);
        match write.how {
            How::Direct => write_direct(at, range.start, &bytes),
            How::Buffered | How::Mapped => write_cached(at, range.start, &bytes, write.sync),
        }
        image.write(range.start, &bytes);
        touched.extend(blocks_of(&range));
    }

    fn erase(&mut self, volume: usize, file: Pick, place: Place, how: Erase) {
        let Volume { at, inside, touched, .. } = &mut self.volumes[volume];
        let image = match inside {
            Inside::Raw(image) => image,
            Inside::Mounted(files) => return files.erase(at, file, place, how),
        };
        let range = place.within(image.bytes().len() as u64, BLOCK);
        let length = range.end - range.start;
        match how {
            Erase::Discard => discard(at, range.start, length),
            Erase::Punch => zero(at, range.start, length, true),
            Erase::Zero => zero(at, range.start, length, false),
        }
        image.erase(&range);
        touched.extend(blocks_of(&range));
    }

    fn expand(&mut self, volume: usize, blocks: u64) {
        if self.fs_type == Some(FsType::Ext4) && !ext4_grows_online() {
            return;
        }
        let most = size_of_new(self.fs_type) * 3 / 2;
        let volume = &mut self.volumes[volume];
        let bytes = (volume.capacity + blocks * BLOCK).min(most).max(volume.capacity);
        self.subject.expand(&volume.id, bytes, self.fs_type);
        volume.capacity = bytes;
        if let Inside::Raw(image) = &mut volume.inside {
            image.grow(bytes);
        }
    }

    fn track(&mut self, volume: usize, on: bool) {
        let volume = &mut self.volumes[volume];
        self.subject.track(&volume.id, on);
        if volume.tracking && !on {
            volume.chain += 1;
        }
        volume.tracking = on;
    }

    fn restart(&mut self, ending: Ending, style: Style) {
        // Queries the newest snapshots again, possibly in another style.
        self.check_newest(Style::Variable);
        self.subject.restart(ending, style);
        self.counts.restarts += 1;
        self.check_newest(style);
    }

    fn forget(&mut self) {
        // Retention has a resolution of one second. Short runs wait for the next second, so that a
        // sequence still fails while it is shrunk; long ones do not.
        while self.counts.operations < PATIENT_OPERATIONS && seconds() <= self.last_deletion {
            thread::sleep(Duration::from_millis(10));
        }
        self.subject.forget();
        // Depending on the clock, some are expired.
        let snapshots = self.volumes.iter_mut().flat_map(|volume| &mut volume.snapshots);
        for snapshot in snapshots {
            snapshot.perhaps_dropped |= snapshot.perhaps_forgotten;
            snapshot.perhaps_forgotten |= snapshot.deleted;
        }
    }

    fn check_newest(&mut self, style: Style) {
        for volume in 0..self.volumes.len() {
            if let Some(newest) = self.volumes[volume].snapshots.len().checked_sub(1) {
                let snapshot = &self.volumes[volume].snapshots[newest];
                self.answers.check_snapshot(&*self.subject, snapshot, style);
                self.check_delta(volume, newest.saturating_sub(1), newest, style);
            }
        }
    }

    fn snapshot(&mut self, volume: usize) {
        let name = self.name();
        let id = self.subject.snapshot(&name, &self.volumes[volume].id);
        self.note_snapshot(volume, id, None);
    }

    /// Only one raw volume of a group may be writable: the others are detached.
    fn group(&mut self, volumes: &[usize]) {
        let name = self.name();
        let others = if self.fs_type.is_none() { &volumes[1..] } else { &[] };
        for volume in others {
            self.subject.detach(&self.volumes[*volume].id);
        }
        let ids: Vec<&str> = volumes.iter().map(|index| &*self.volumes[*index].id).collect();
        let (group, members) = self.subject.group(&name, &ids);
        for volume in others {
            let volume = &mut self.volumes[*volume];
            volume.at = self.subject.attach(&volume.id, None);
        }
        for (volume, id) in volumes.iter().zip(members) {
            self.note_snapshot(*volume, id, Some(group.clone()));
            self.counts.groups += 1;
        }
    }

    /// Adds a new snapshot to the mirror and checks its results.
    fn note_snapshot(&mut self, volume: usize, id: String, group: Option<String>) {
        let content = match &self.volumes[volume].inside {
            Inside::Raw(image) => image.content().clone(),
            // The writes of a filesystem to its device are unknown.
            Inside::Mounted(_) => self.read(&id),
        };
        if self.reads_back {
            assert!(self.read(&id).holds_the_same(&content), "{id} has other content");
        }
        let volume_index = volume;
        let volume = &mut self.volumes[volume];
        let touched = volume.may_be_reported(&content);
        let files = match &volume.inside {
            Inside::Raw(_) => None,
            Inside::Mounted(files) => Some(files.clone()),
        };
        let chain = volume.chain;
        if !volume.tracking {
            volume.chain += 1;
        }
        volume.snapshots.push(SnapshotState {
            id,
            group,
            deleted: false,
            perhaps_forgotten: false,
            perhaps_dropped: false,
            chain,
            content,
            touched,
            files,
        });
        volume.touched.clear();
        self.counts.snapshots += 1;
        self.check_new(volume_index);
    }

    /// Reads the content of a snapshot through a volume created from it.
    fn read(&mut self, snapshot: &str) -> Content {
        let name = self.name();
        let copy = self.subject.copy(&name, Source::Snapshot(snapshot.to_owned()), None);
        let content = Content::read(&self.subject.attach(&copy, None));
        self.subject.detach(&copy);
        self.subject.delete_volume(&copy);
        content
    }

    /// Checks the newest snapshot of a volume against the previous and the oldest one.
    fn check_new(&mut self, volume: usize) {
        let snapshots = &self.volumes[volume].snapshots;
        let newest = snapshots.len() - 1;
        self.answers.check_snapshot(&*self.subject, &snapshots[newest], Style::Variable);
        let Some(before) = newest.checked_sub(1) else { return };
        if self.reads_back {
            let differing = snapshots[newest].content.differing_from(&snapshots[before].content);
            self.differing.push(differing);
        }
        self.check_delta(volume, 0, newest, Style::Variable);
        let Some(reported) = self.check_delta(volume, before, newest, Style::Variable) else {
            return;
        };
        let snapshot = &self.volumes[volume].snapshots[newest];
        let differing =
            snapshot.content.differing_from(&self.volumes[volume].snapshots[before].content);
        let nothing_rewritten = snapshot.touched.as_ref() == Some(&differing);
        let found = Precision { reported, differing: differing.len() as u64 };
        if self.subject.style(Style::Variable) != Style::Variable {
            // Rounded, so it is not exact.
            return;
        }
        if nothing_rewritten {
            assert_eq!(found.reported, found.differing, "{} is not exact", snapshot.id);
            self.counts.exact += found;
        } else {
            self.counts.other += found;
        }
    }

    /// The number of blocks in a delta. `None` if it is correctly refused.
    fn check_delta(
        &mut self,
        volume: usize,
        base: usize,
        target: usize,
        style: Style,
    ) -> Option<u64> {
        let volume = &self.volumes[volume];
        let found = self.answers.check_delta(&*self.subject, volume, (base, target), style);
        match found {
            Some(_) => self.counts.deltas += 1,
            None => self.counts.refused += 1,
        }
        found.map(|found| found.blocks.len() as u64)
    }

    fn query(&mut self, volume: usize, snapshots: [Pick; 3], options: QueryOptions) {
        let volume = &self.volumes[volume];
        if volume.snapshots.is_empty() {
            return;
        }
        let mut three = snapshots.map(|pick| pick.of(volume.snapshots.len()));
        three.sort_unstable();
        let [a, _, c] = three.map(|index| &volume.snapshots[index]);
        self.answers.check_snapshot(&*self.subject, c, options.style);
        self.answers.check_three(&*self.subject, volume, three, options.style);
        for question in
            [Question::Allocated(c.id.clone()), Question::Delta(a.id.clone(), c.id.clone())]
        {
            self.answers.check_window(&*self.subject, &question, options);
        }
        self.counts.deltas += 3;
        self.counts.windows += 2;
    }

    fn delete_snapshot(&mut self, volume: usize, snapshot: usize) {
        let snapshot = &mut self.volumes[volume].snapshots[snapshot];
        self.counts.deleted += 1;
        self.last_deletion = seconds();
        let Some(group) = snapshot.group.clone() else {
            self.subject.delete_snapshot(&snapshot.id);
            snapshot.deleted = true;
            return;
        };
        self.subject.delete_group(&group);
        let snapshots = self.volumes.iter_mut().flat_map(|volume| &mut volume.snapshots);
        snapshots
            .filter(|snapshot| snapshot.group.as_ref() == Some(&group))
            .for_each(|snapshot| snapshot.deleted = true);
    }

    /// A clone of a volume, or a volume from its newest snapshot.
    fn derive(&mut self, from_volume: usize, from: From) {
        let volume = &self.volumes[from_volume];
        let newest =
            volume.snapshots.iter().rfind(|snapshot| !snapshot.deleted && from == From::Snapshot);
        let (files, content) = match (newest, &volume.inside) {
            (Some(snapshot), _) => (snapshot.files.clone(), Some(snapshot.content.clone())),
            (None, Inside::Mounted(files)) => (Some(files.clone()), None),
            (None, Inside::Raw(image)) => (None, Some(image.content().clone())),
        };
        let capacity = newest.map_or(volume.capacity, |snapshot| snapshot.content.capacity());
        let source = match newest {
            Some(snapshot) => Source::Snapshot(snapshot.id.clone()),
            None => Source::Volume(volume.id.clone()),
        };
        match source {
            Source::Snapshot(_) => self.counts.restores += 1,
            Source::Volume(_) => self.counts.clones += 1,
        }
        let name = self.name();
        let id = self.subject.copy(&name, source, self.fs_type);
        let inside = match files {
            Some(files) => Inside::Mounted(files),
            None => {
                let bytes = read_all(&self.subject.attach(&id, None));
                self.subject.detach(&id);
                Inside::Raw(Image::of(
                    bytes,
                    &content.expect("the content of a raw volume is known"),
                ))
            }
        };
        self.adopt(id, capacity, inside);
        if self.volumes.len() > MOST_VOLUMES {
            self.delete_volume(from_volume, true);
        }
    }

    /// Deletes a volume and its snapshots, in either order.
    fn delete_volume(&mut self, volume: usize, before_its_snapshots: bool) {
        let id = self.volumes[volume].id.clone();
        self.subject.detach(&id);
        if before_its_snapshots {
            self.subject.delete_volume(&id);
            // The snapshots outlive the volume.
            if let Some(newest) = self.volumes[volume].snapshots.len().checked_sub(1) {
                self.check_delta(volume, 0, newest, Style::Variable);
            }
        }
        for snapshot in self.volumes[volume].alive() {
            if !self.volumes[volume].snapshots[snapshot].deleted {
                self.delete_snapshot(volume, snapshot);
            }
        }
        if !before_its_snapshots {
            self.subject.delete_volume(&id);
        }
        self.volumes.remove(volume);
    }

    /// The last changes are in a final snapshot and in a volume restored from it.
    fn finish(&mut self) {
        for volume in 0..self.volumes.len() {
            self.snapshot(volume);
            self.check_newest(Style::Variable);
        }
        self.derive(0, From::Snapshot);
        self.subject.finish();
    }
}

/// Writes through the page cache, which a snapshot must flush.
fn write_cached(device: &std::path::Path, offset: u64, bytes: &[u8], sync: bool) {
    use std::os::unix::fs::FileExt;

    let file = std::fs::File::options().write(true).open(device).unwrap();
    file.write_all_at(bytes, offset).unwrap();
    if sync {
        file.sync_data().unwrap();
    }
}
