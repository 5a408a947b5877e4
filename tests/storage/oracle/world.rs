//! A run: every operation is done to the subject and to the mirror at once, and the laws are checked.

use std::thread;
use std::time::{Duration, SystemTime};

use csi_loopback::backend::{FsType, Source, Style};

use super::explore::{Counts, Precision};
use super::files::Files;
use super::laws::Answers;
use super::model::{Blocks, Content, Cut, Image, Inside, Volume, blocks_of};
use super::operation::{Ending, Erase, From, How, Look, Operation, Pick, Place, Write};
use super::subject::{Question, Subject};
use support::driver::ext4_grows_online;
use support::{BLOCK, MIB, discard, read_all, write_direct, zero};

/// Volumes that exist at once, apart from those made for a look.
const MOST_VOLUMES: usize = 3;
/// A raw volume is made with this size, in bytes, and grows by half at most.
const RAW_BYTES: u64 = 16 * MIB;

/// Up to so many, operations may wait for a second to end.
const PATIENT_OPERATIONS: u64 = 200;

pub struct World {
    subject: Box<dyn Subject>,
    /// What all volumes are used for: raw, or with a filesystem.
    fs_type: Option<FsType>,
    volumes: Vec<Volume>,
    answers: Answers,
    /// So many things have got a name, or a content.
    numbers: u64,
    counts: Counts,
    /// When a snapshot was last deleted, in seconds.
    last_deletion: u64,
    /// Whether each snapshot of a raw volume is read as soon as it is cut, too.
    reads_back: bool,
    /// What really differs between each snapshot and the one before, where they are read.
    differing: Vec<Blocks>,
}

/// Seconds of the clock.
fn seconds() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs()
}

fn size_of_new(fs_type: Option<FsType>) -> u64 {
    fs_type.map_or(RAW_BYTES, |fs_type| fs_type.min_bytes().max(32 * MIB))
}

impl World {
    /// Runs a sequence from the beginning, with a number of new volumes, to a clean end.
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

    /// Like [`World::run`], and returns what really differs between neighbours, in order of cutting.
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

    /// Takes a new volume into use, which has to hold what is said.
    fn adopt(&mut self, id: String, capacity: u64, inside: Inside) {
        let at = self.subject.attach(&id, self.fs_type);
        match &inside {
            Inside::Raw(image) => {
                assert!(read_all(&at) == image.bytes(), "{id} does not hold what it should");
            }
            Inside::Mounted(files) => assert!(Files::read(&at) == *files, "{id}: other files"),
        }
        let (cuts, touched) = (Vec::new(), Blocks::new());
        let volume = Volume { id, capacity, at, inside, cuts, touched, tracking: true, chain: 0 };
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
            Operation::Ask { volume, snapshots, look } => {
                self.ask(volume.of(count), snapshots, look);
            }
            Operation::Derive { volume, from } => self.derive(volume.of(count), from),
            Operation::DeleteVolume { volume, before_its_snapshots } => {
                if count > 1 {
                    self.delete_volume(volume.of(count), before_its_snapshots);
                }
            }
            Operation::Track { volume, on } => self.track(volume.of(count), on),
            Operation::Restart { ending, style } => self.restart(ending, style),
            Operation::Forget => self.forget(),
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
        // What is known of the newest snapshots is asked for again, perhaps in another style.
        self.check_newest(Style::Variable);
        self.subject.restart(ending, style);
        self.counts.restarts += 1;
        self.check_newest(style);
    }

    fn forget(&mut self) {
        // Deletions count by the second. Long runs do not wait for the next one; short ones do, so that
        // a sequence that is being cut down goes on to fail.
        while self.counts.operations < PATIENT_OPERATIONS && seconds() <= self.last_deletion {
            thread::sleep(Duration::from_millis(10));
        }
        self.subject.forget();
        // Which of them are old enough by now, the clock knows.
        let cuts = self.volumes.iter_mut().flat_map(|volume| &mut volume.cuts);
        for cut in cuts {
            cut.perhaps_dropped |= cut.perhaps_forgotten;
            cut.perhaps_forgotten |= cut.deleted;
        }
    }

    fn check_newest(&mut self, style: Style) {
        for volume in 0..self.volumes.len() {
            if let Some(newest) = self.volumes[volume].cuts.len().checked_sub(1) {
                let cut = &self.volumes[volume].cuts[newest];
                self.answers.check_cut(&*self.subject, cut, style);
                self.check_delta(volume, newest.saturating_sub(1), newest, style);
            }
        }
    }

    fn snapshot(&mut self, volume: usize) {
        let name = self.name();
        let id = self.subject.snapshot(&name, &self.volumes[volume].id);
        self.note_cut(volume, id, None);
    }

    /// Only one raw volume of a group may be written to at that moment: the others are taken out of
    /// use.
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
            self.note_cut(*volume, id, Some(group.clone()));
            self.counts.groups += 1;
        }
    }

    /// Adds a new snapshot to the mirror and checks what is said of it.
    fn note_cut(&mut self, volume: usize, id: String, group: Option<String>) {
        let content = match &self.volumes[volume].inside {
            Inside::Raw(image) => image.content().clone(),
            // What the filesystem does to its device is its own business.
            Inside::Mounted(_) => self.read(&id),
        };
        if self.reads_back {
            assert!(self.read(&id).holds_the_same(&content), "{id} holds something else");
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
        volume.cuts.push(Cut {
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

    /// The content of a snapshot, read through a volume that is made from it.
    fn read(&mut self, snapshot: &str) -> Content {
        let name = self.name();
        let copy = self.subject.copy(&name, Source::Snapshot(snapshot.to_owned()), None);
        let content = Content::read(&self.subject.attach(&copy, None));
        self.subject.detach(&copy);
        self.subject.delete_volume(&copy);
        content
    }

    /// Checks the newest snapshot of a volume against the one before it, and against the oldest.
    fn check_new(&mut self, volume: usize) {
        let cuts = &self.volumes[volume].cuts;
        let newest = cuts.len() - 1;
        self.answers.check_cut(&*self.subject, &cuts[newest], Style::Variable);
        let Some(before) = newest.checked_sub(1) else { return };
        if self.reads_back {
            let differing = cuts[newest].content.differing_from(&cuts[before].content);
            self.differing.push(differing);
        }
        self.check_delta(volume, 0, newest, Style::Variable);
        let Some(reported) = self.check_delta(volume, before, newest, Style::Variable) else {
            return;
        };
        let cut = &self.volumes[volume].cuts[newest];
        let differing = cut.content.differing_from(&self.volumes[volume].cuts[before].content);
        let nothing_rewritten = cut.touched.as_ref() == Some(&differing);
        let found = Precision { reported, differing: differing.len() as u64 };
        if self.subject.style(Style::Variable) != Style::Variable {
            // Rounded: that says nothing of how exact it is.
            return;
        }
        if nothing_rewritten {
            assert_eq!(found.reported, found.differing, "{} is not exact", cut.id);
            self.counts.exact += found;
        } else {
            self.counts.other += found;
        }
    }

    /// The number of blocks in a delta; `None` where it is rightly refused.
    fn check_delta(
        &mut self,
        volume: usize,
        base: usize,
        target: usize,
        style: Style,
    ) -> Option<u64> {
        let volume = &self.volumes[volume];
        let told = self.answers.check_delta(&*self.subject, volume, (base, target), style);
        match told {
            Some(_) => self.counts.deltas += 1,
            None => self.counts.refused += 1,
        }
        told.map(|told| told.blocks.len() as u64)
    }

    fn ask(&mut self, volume: usize, snapshots: [Pick; 3], look: Look) {
        let volume = &self.volumes[volume];
        if volume.cuts.is_empty() {
            return;
        }
        let mut three = snapshots.map(|pick| pick.of(volume.cuts.len()));
        three.sort_unstable();
        let [a, _, c] = three.map(|index| &volume.cuts[index]);
        self.answers.check_cut(&*self.subject, c, look.style);
        self.answers.check_three(&*self.subject, volume, three, look.style);
        for question in
            [Question::Allocated(c.id.clone()), Question::Delta(a.id.clone(), c.id.clone())]
        {
            self.answers.check_window(&*self.subject, &question, look);
        }
        self.counts.deltas += 3;
        self.counts.windows += 2;
    }

    fn delete_snapshot(&mut self, volume: usize, cut: usize) {
        let cut = &mut self.volumes[volume].cuts[cut];
        self.counts.deleted += 1;
        self.last_deletion = seconds();
        let Some(group) = cut.group.clone() else {
            self.subject.delete_snapshot(&cut.id);
            cut.deleted = true;
            return;
        };
        self.subject.delete_group(&group);
        let cuts = self.volumes.iter_mut().flat_map(|volume| &mut volume.cuts);
        cuts.filter(|cut| cut.group.as_ref() == Some(&group)).for_each(|cut| cut.deleted = true);
    }

    /// A clone of a volume, or a volume from its newest snapshot.
    fn derive(&mut self, from_volume: usize, from: From) {
        let volume = &self.volumes[from_volume];
        let newest = volume.cuts.iter().rfind(|cut| !cut.deleted && from == From::Snapshot);
        let (files, content) = match (newest, &volume.inside) {
            (Some(cut), _) => (cut.files.clone(), Some(cut.content.clone())),
            (None, Inside::Mounted(files)) => (Some(files.clone()), None),
            (None, Inside::Raw(image)) => (None, Some(image.content().clone())),
        };
        let capacity = newest.map_or(volume.capacity, |cut| cut.content.capacity());
        let source = match newest {
            Some(cut) => Source::Snapshot(cut.id.clone()),
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
                Inside::Raw(Image::of(bytes, &content.expect("what a raw volume holds is known")))
            }
        };
        self.adopt(id, capacity, inside);
        if self.volumes.len() > MOST_VOLUMES {
            self.delete_volume(from_volume, true);
        }
    }

    /// Deletes a volume; what is left of its snapshots goes too, in either order.
    fn delete_volume(&mut self, volume: usize, before_its_snapshots: bool) {
        let id = self.volumes[volume].id.clone();
        self.subject.detach(&id);
        if before_its_snapshots {
            self.subject.delete_volume(&id);
            // They outlive it.
            if let Some(newest) = self.volumes[volume].cuts.len().checked_sub(1) {
                self.check_delta(volume, 0, newest, Style::Variable);
            }
        }
        for cut in self.volumes[volume].alive() {
            if !self.volumes[volume].cuts[cut].deleted {
                self.delete_snapshot(volume, cut);
            }
        }
        if !before_its_snapshots {
            self.subject.delete_volume(&id);
        }
        self.volumes.remove(volume);
    }

    /// Whatever was last done to the volumes is in a snapshot too, and that in a restored volume.
    fn finish(&mut self) {
        for volume in 0..self.volumes.len() {
            self.snapshot(volume);
            self.check_newest(Style::Variable);
        }
        self.derive(0, From::Snapshot);
        self.subject.finish();
    }
}

/// Writes through the page cache, which a cut has to flush where nobody else did.
fn write_cached(device: &std::path::Path, offset: u64, bytes: &[u8], sync: bool) {
    use std::os::unix::fs::FileExt;

    let file = std::fs::File::options().write(true).open(device).unwrap();
    file.write_all_at(bytes, offset).unwrap();
    if sync {
        file.sync_data().unwrap();
    }
}
