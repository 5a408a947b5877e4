//! Chains of backups of random volumes, without a driver: what is written is restored, interrupted
//! writers continue, and copies are equal.

use std::collections::HashSet;
use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use proptest::prelude::*;

use super::attempt::{self, Attempt, Overtaken};
use super::chunk;
use super::manifest::{Base, Manifest, Subject, samples};
use super::merge::{Changes, Pages};
use super::mount::Image;
use super::prune::{self, Plan};
use super::repository::format_1;
use super::repository::index;
use super::repository::names::{self, mark};
use super::repository::seal::KeyFile;
use super::repository::{Location, Repository};
use super::restore::Restore;
use super::retention::Rules;
use super::target::Target;
use crate::client::stop::Stop;
use storage::Extent;

const BLOCK: u64 = 4096;

fn stop() -> Stop {
    Stop::unsignalled(Duration::from_secs(600))
}

async fn repository(directory: &Path, key: Option<&Path>) -> Repository {
    let key = key.map(|file| KeyFile::read(file, "--key-file").unwrap());
    Repository::open(&Location::Directory(directory.to_owned()), true, key, None).await.unwrap()
}

/// The state of a volume: a value for each block. 0 is a block of zeros.
fn image(blocks: &[u8]) -> Vec<u8> {
    blocks.iter().flat_map(|value| [*value; BLOCK as usize]).collect()
}

/// The blocks that an incremental backup gets: those that differ, and some that do not.
fn extents(base: &[u8], target: &[u8], also: &[bool]) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::new();
    for (number, value) in target.iter().enumerate() {
        let old = base.get(number).copied().unwrap_or_default();
        if old != *value || also.get(number) == Some(&true) {
            let offset = number as u64 * BLOCK;
            match extents.last_mut() {
                Some(last) if last.end() == offset => last.length += BLOCK,
                _ => extents.push(Extent { offset, length: BLOCK }),
            }
        }
    }
    extents
}

fn subject(number: usize, capacity_bytes: u64, base: Option<&Manifest>) -> Subject {
    Subject {
        capacity_bytes,
        base: base.map(|base| Base {
            backup: base.id.clone(),
            snapshot_id: base.subject.snapshot_id.clone(),
            expires: None,
        }),
        ..samples::backup(number).subject
    }
}

/// Writes the extents of `bytes`, a few blocks in a chunk; stops after `chunks` of them as a killed
/// process does.
async fn write(
    repository: &Repository,
    subject: &Subject,
    bytes: &[u8],
    extents: &[Extent],
    chunks: usize,
) -> Result<Option<Manifest>> {
    let device = tempfile::NamedTempFile::new()?;
    fs::write(device.path(), bytes)?;
    let device = File::open(device.path())?;
    let inventory = repository.inventory().await?;
    let mut attempt = Attempt::new(repository, &inventory, subject.clone(), None).await?;
    let begin = attempt.writer.end();
    let coder = repository.coder(&attempt.intent.id)?;
    attempt.begin().await?;
    for part in extents.chunks(3).filter(|part| part[0].offset >= begin).take(chunks) {
        let coded = chunk::read(&device, part, !subject.is_full(), &coder)?;
        attempt.writer.push(coded, part[part.len() - 1].end()).await?;
    }
    if chunks < usize::MAX {
        return Ok(None);
    }
    Ok(Some(attempt.publish("2026-01-01T00:00:00Z".to_owned()).await?))
}

/// A full backup of a few blocks.
async fn small(repository: &Repository, number: usize, base: Option<&Manifest>) -> Manifest {
    let bytes = image(&[1; 40]);
    let subject = subject(number, bytes.len() as u64, base);
    let all = extents(&[], &[1; 40], &[]);
    write(repository, &subject, &bytes, &all, usize::MAX).await.unwrap().unwrap()
}

/// Restores a backup to a target that holds something else.
async fn restored(
    repository: &Repository,
    backup: &Manifest,
    path: &Path,
    resume: bool,
) -> Result<Vec<u8>> {
    let inventory = repository.inventory().await?;
    // Its manifest in this repository: pages of another have other hashes.
    let mut all = inventory.backups.iter();
    let backup = all.find(|one| one.origin() == backup.origin()).unwrap();
    let chain = inventory.chain(backup)?;
    let target = Target::open(path, backup.subject.capacity_bytes)?;
    Restore::new(repository, &chain, target, resume)?.run(&stop()).await?;
    Ok(fs::read(path)?)
}

/// Restores to a device that holds `held`, but for some blocks: only what differs is written.
async fn restored_in_place(
    repository: &Repository,
    (held, held_bytes): (&Manifest, &[u8]),
    (backup, bytes): (&Manifest, &[u8]),
    also: &[bool],
    path: &Path,
) -> Result<()> {
    // The device may have grown.
    let blocks = held_bytes.len().max(bytes.len()) / BLOCK as usize + 1;
    let mut device = held_bytes.to_vec();
    device.resize(blocks * BLOCK as usize, 0);
    let mut first = Vec::new();
    for number in (0..blocks).filter(|number| also.get(*number) == Some(&true)) {
        let at = number * BLOCK as usize;
        device[at..at + BLOCK as usize].fill(0xdd);
        first.push(Extent { offset: at as u64, length: BLOCK });
    }
    fs::write(path, &device)?;
    let inventory = repository.inventory().await?;
    let (chain, held) = (inventory.chain(backup)?, inventory.chain(held)?);
    let changes = Changes { first, listing: None };
    let target = Target::open(path, bytes.len() as u64)?;
    let restore = Restore::in_place(repository, &chain, target, &held, changes)?;
    let done = restore.run(&stop()).await?;
    let mut expected = bytes.to_vec();
    expected.resize(device.len(), 0);
    assert!(fs::read(path)? == expected);
    let differs = device.chunks(BLOCK as usize).zip(expected.chunks(BLOCK as usize));
    let differs = differs.filter(|(old, new)| old != new && new[0] != 0).count() as u64;
    assert_eq!(done.written_bytes, differs * BLOCK);
    Ok(())
}

/// Holds parts of a mounted image, in any order, against its bytes.
async fn check_parts(repository: &Repository, backup: &Manifest, bytes: &[u8]) -> Result<()> {
    let chain = repository.inventory().await?.chain(backup)?;
    let mut image = Image::new(repository, chain, &stop())?;
    let size = bytes.len() as u64;
    for (offset, length) in [
        (0, 5000),
        (size - 1, 5000),
        (size / 2 + 13, 3 * 4096),
        (size / 3, 1),
        (size, 4096),
        (size / 7, u32::MAX),
        (u64::MAX, 1),
        (100, 700),
    ] {
        let from = usize::try_from(offset.min(size))?;
        let until = usize::try_from(offset.saturating_add(length.into()).min(size))?;
        assert!(image.read(offset, length).await? == bytes[from..until], "{offset}");
    }
    Ok(())
}

async fn chain_is_exact(states: &[Vec<u8>], also: &[bool], key: Option<&Path>) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let repository = repository(&directory.path().join("repository"), key).await;
    let mut backups: Vec<Manifest> = Vec::new();
    for (number, state) in states.iter().enumerate() {
        // The fourth begins a chain of its own.
        let base = number.checked_sub(1).filter(|_| number != 3);
        let bytes = image(state);
        let subject = subject(number, bytes.len() as u64, base.map(|older| &backups[older]));
        let base = base.map(|older| states[older].as_slice());
        let extents = extents(base.unwrap_or_default(), state, also);
        write(&repository, &subject, &bytes, &extents, 2).await?;
        let manifest = write(&repository, &subject, &bytes, &extents, usize::MAX).await?;
        backups.extend(manifest);
    }
    let other = self::repository(&directory.path().join("copy"), None).await;
    for (state, backup) in states.iter().zip(&backups) {
        let path = directory.path().join("image");
        let bytes = image(state);
        // Of what an earlier one left, larger by a block.
        fs::write(&path, vec![0xee; bytes.len() + BLOCK as usize])?;
        let mut expected = bytes.clone();
        expected.resize(bytes.len() + BLOCK as usize, 0);
        assert!(restored(&repository, backup, &path, false).await? == expected);
        let (half, _) = bytes.split_at(bytes.len() / 2);
        fs::write(&path, [half, &vec![0xee; bytes.len() / 2 + BLOCK as usize]].concat())?;
        assert!(restored(&repository, backup, &path, true).await? == expected);
        assert!(super::copy::copy(&repository, &other, backup, &stop()).await?);
        assert!(!super::copy::copy(&repository, &other, backup, &stop()).await?);
        fs::remove_file(&path)?;
        assert!(restored(&other, backup, &path, false).await? == bytes);
        check_parts(&repository, backup, &bytes).await?;
        for (held, held_state) in backups.iter().zip(states) {
            let (held, wanted) = ((held, &*image(held_state)), (backup, &*bytes));
            restored_in_place(&repository, held, wanted, also, &path).await?;
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn a_chain_of_random_volumes_restores_exactly(
        first in proptest::collection::vec(0..3u8, 2..80),
        changes in proptest::collection::vec(
            (proptest::collection::vec((0..80usize, 0..3u8), 0..30), 0..4usize), 0..5),
        also in proptest::collection::vec(proptest::bool::weighted(0.1), 80),
        encrypted in any::<bool>(),
    ) {
        let mut states = vec![first];
        for (writes, growth) in changes {
            let mut state = states[states.len() - 1].clone();
            state.resize(state.len() + growth, 0);
            for (block, value) in writes {
                if let Some(slot) = state.get_mut(block) {
                    *slot = value;
                }
            }
            states.push(state);
        }
        let key = tempfile::NamedTempFile::new().unwrap();
        fs::write(key.path(), [5; 32]).unwrap();
        let key = encrypted.then_some(key.path());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(chain_is_exact(&states, &also, key)).unwrap();
    }
}

#[tokio::test]
async fn a_later_attempt_continues_after_the_last_page() {
    let directory = tempfile::tempdir().unwrap();
    let repository = repository(directory.path(), None).await;
    // 600 chunks, more than a page holds.
    let state: Vec<u8> = (0..3600u32).map(|block| (block % 2) as u8).collect();
    let (bytes, all) = (image(&state), extents(&[], &state, &[]));
    let subject = subject(0, bytes.len() as u64, None);
    write(&repository, &subject, &bytes, &all, 590).await.unwrap();
    let inventory = repository.inventory().await.unwrap();
    assert!(inventory.backups.is_empty(), "half a backup is none");
    let first = inventory.unfinished[0].0.clone();
    // A page is on its way in a task of its own.
    while repository.page(&first, 0).await.unwrap().is_none() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let inventory = repository.inventory().await.unwrap();
    let attempt = Attempt::new(&repository, &inventory, subject.clone(), None).await.unwrap();
    assert_eq!(attempt.writer.totals().chunks, 512);
    // The first writer may live, and writes on to its own pages.
    repository.put_pack(&first, 1, vec![9; 100].into()).await.unwrap();
    let backup = write(&repository, &subject, &bytes, &all, usize::MAX).await.unwrap().unwrap();
    assert_eq!((backup.pages(), backup.totals.chunks), (2, 600));
    assert_eq!(*backup.attempt_of(0), first);
    let mut pages = Pages::new(&repository, &backup);
    while pages.next().await.unwrap().is_some() {}
    let path = directory.path().join("image");
    assert!(restored(&repository, &backup, &path, false).await.unwrap() == bytes);
    check_parts(&repository, &backup, &bytes).await.unwrap();
    // What a backup uses is not abandoned.
    let far = SystemTime::now() + Duration::from_secs(1 << 30);
    let inventory = repository.inventory().await.unwrap();
    let rules = Rules { keep_last: Some(1), ..Rules::default() };
    assert_eq!(prune::plan(&inventory, rules, far), Plan::default());
}

#[tokio::test]
async fn a_marked_backup_is_no_base_and_does_not_exist() {
    let directory = tempfile::tempdir().unwrap();
    let repository = repository(directory.path(), None).await;
    let backup = small(&repository, 0, None).await;
    let inventory = repository.inventory().await.unwrap();
    assert!(attempt::exist(&repository, &inventory, &[&backup]).await.unwrap());
    let next = subject(1, backup.subject.capacity_bytes, Some(&backup));
    let mut attempt = Attempt::new(&repository, &inventory, next, None).await.unwrap();
    // By a prune on another machine, after the look at the repository.
    repository.put_mark(&mark(backup.id.as_str(), "other")).await.unwrap();
    assert!(!attempt::exist(&repository, &inventory, &[&backup]).await.unwrap());
    assert!(attempt.begin().await.unwrap_err().is::<Overtaken>());
    let later = repository.inventory().await.unwrap();
    assert!(!later.is_sound(later.find(backup.id.as_str()).unwrap()));
}

#[tokio::test]
async fn an_attempt_that_was_pruned_is_not_acknowledged() {
    let directory = tempfile::tempdir().unwrap();
    let repository = repository(directory.path(), None).await;
    let bytes = image(&[1; 40]);
    let subject = subject(0, bytes.len() as u64, None);
    let inventory = repository.inventory().await.unwrap();
    let mut attempt = Attempt::new(&repository, &inventory, subject, None).await.unwrap();
    attempt.begin().await.unwrap();
    let id = attempt.intent.id.clone();
    // The writer is suspended for more than a day.
    let far = SystemTime::now() + Duration::from_secs(2 * 86_400);
    let rules = Rules { keep_last: Some(1), ..Rules::default() };
    let pruned = prune::run(&repository, |all, _| Ok(prune::plan(all, rules, far))).await.unwrap();
    assert_eq!(pruned.unfinished, [id]);
    let error = attempt.publish(String::new()).await.unwrap_err().to_string();
    assert!(error.contains("a prune has removed this attempt"), "{error}");
    assert!(repository.inventory().await.unwrap().backups.is_empty());
}

#[tokio::test]
async fn a_removed_backup_leaves_no_object() {
    let directory = tempfile::tempdir().unwrap();
    let repository = repository(directory.path(), None).await;
    let first = small(&repository, 0, None).await;
    let second = small(&repository, 1, Some(&first)).await;
    let staged = directory.path().join(names::pack(&second.id, 7) + "#1");
    fs::write(staged, b"x").unwrap();
    let rules = Rules { keep_last: Some(0), remove_last: true, ..Default::default() };
    let pruned =
        prune::run(&repository, |all, now| Ok(prune::plan(all, rules, now))).await.unwrap();
    // What counts from another goes first.
    assert_eq!(pruned.remove, [second.id, first.id]);
    assert_eq!(fs::read_dir(directory.path().join("backups")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(directory.path().join("marks")).unwrap().count(), 0);
}

/// Fails if a command sees other backups with the index than without.
async fn check_index(repository: &Repository, damaged: usize) -> usize {
    let indexed = repository.inventory().await.unwrap();
    let read = repository.unindexed_inventory().await.unwrap();
    assert!(indexed.backups == read.backups, "the index shows other backups");
    assert_eq!((indexed.damaged.len(), read.damaged.len()), (damaged, damaged));
    indexed.copied.len()
}

#[tokio::test]
async fn an_index_saves_reads_and_hides_no_change() {
    let directory = tempfile::tempdir().unwrap();
    let key = directory.path().join("key");
    fs::write(&key, [7; 32]).unwrap();
    let place = directory.path().join("repository");
    let repository = repository(&place, Some(&key)).await;
    let many = index::MANY + 1;
    for number in 0..many {
        small(&repository, number % 8, None).await;
    }
    assert_eq!(check_index(&repository, 0).await, 0);
    let indexes = || fs::read_dir(place.join("index")).unwrap().flatten().collect::<Vec<_>>();
    let inventory = repository.inventory().await.unwrap();
    repository.update_index(&inventory, &HashSet::new()).await;
    assert_eq!(check_index(&repository, 0).await, many);
    // Few new ones are read, and a manifest that was replaced is not taken from the index.
    small(&repository, 0, None).await;
    let inventory = repository.inventory().await.unwrap();
    repository.update_index(&inventory, &HashSet::new()).await;
    let manifest = place.join(names::object(&inventory.backups[0].id, "manifest"));
    let whole = fs::read(&manifest).unwrap();
    fs::write(&manifest, vec![0; whole.len()]).unwrap();
    assert_eq!(check_index(&repository, 1).await, many - 1);
    fs::write(&manifest, whole).unwrap();
    assert_eq!(check_index(&repository, 0).await, many - 1);
    // An index that is damaged or gone is none.
    let only = indexes()[0].path();
    let bytes = fs::read(&only).unwrap();
    fs::write(&only, &bytes[..bytes.len() - 1]).unwrap();
    assert_eq!(check_index(&repository, 0).await, 0);
    // A prune that removes many leaves one index, of the others.
    fs::copy(&only, place.join("index/0")).unwrap();
    fs::write(&only, &bytes).unwrap();
    let rules = Rules { keep_last: Some(1), ..Default::default() };
    prune::run(&repository, |all, now| Ok(prune::plan(all, rules, now))).await.unwrap();
    assert_eq!(check_index(&repository, 0).await, 1);
    assert_eq!(indexes().len(), 1);
}

#[tokio::test]
async fn two_first_writers_with_one_key_both_restore() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("repository");
    let key = directory.path().join("key");
    fs::write(&key, [1; 32]).unwrap();
    let one = repository(&place, Some(&key)).await;
    let first = small(&one, 0, None).await;
    // As if the other writer had not seen the first one's master key.
    let keys = place.join("keys");
    let hidden = directory.path().join("hidden");
    fs::rename(&keys, &hidden).unwrap();
    let two = repository(&place, Some(&key)).await;
    let second = small(&two, 1, None).await;
    for slot in fs::read_dir(&hidden).unwrap() {
        let slot = slot.unwrap();
        fs::rename(slot.path(), keys.join(slot.file_name())).unwrap();
    }
    let both = repository(&place, Some(&key)).await;
    let image = directory.path().join("image");
    for backup in [first, second] {
        restored(&both, &backup, &image, false).await.unwrap();
    }
}

#[tokio::test]
async fn a_repository_of_format_1_is_refused_or_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let old = directory.path().join("backups/20260101T000000000Z-00000000");
    fs::create_dir_all(&old).unwrap();
    fs::write(old.join("manifest"), "").unwrap();
    let text = r#"{"version":1,"id":"0","created":"","encryption":null}"#;
    let hash = super::document::Hash::of(text.as_bytes());
    let document = format!("{{\"hash\":\"{hash}\",\"repository\":{text}}}\n");
    fs::write(directory.path().join("repository.json"), document).unwrap();
    let location = Location::Directory(directory.path().to_owned());
    for create in [false, true] {
        let refused = Repository::open(&location, create, None, None).await;
        let error = refused.err().unwrap().to_string();
        assert!(error.contains("format 1") && error.contains("another directory"), "{error}");
        assert!(error.contains("--replace-format-1"), "{error}");
    }
    format_1::replace(&location, None).await.unwrap();
    assert!(!old.join("manifest").exists());
    let new = repository(directory.path(), None).await;
    let backup = small(&new, 0, None).await;
    // Another process, which saw format 1 before, removes only what is left of that.
    fs::create_dir_all(directory.path().join("locks")).unwrap();
    fs::write(directory.path().join("locks/0"), "").unwrap();
    format_1::replace(&location, None).await.unwrap();
    assert!(!directory.path().join("locks/0").exists());
    restored(&new, &backup, &directory.path().join("image"), false).await.unwrap();
    assert!(format_1::replace(&Location::Directory("/no/such/place".into()), None).await.is_ok());
}

#[tokio::test]
async fn a_backup_counts_from_the_change_id_of_its_base() {
    let directory = tempfile::tempdir().unwrap();
    let repository = repository(directory.path(), None).await;
    let (bytes, all) = (image(&[1; 4]), extents(&[], &[1; 4], &[]));
    let size = bytes.len() as u64;
    for (number, change_id, id) in [(0, None, "s0"), (1, Some("52 21/7"), "52 21/7")] {
        let change_id = change_id.map(str::to_owned);
        let full = Subject { change_id, ..subject(number, size, None) };
        let full = write(&repository, &full, &bytes, &all, usize::MAX).await.unwrap().unwrap();
        let inventory = repository.inventory().await.unwrap();
        let next = subject(number + 2, size, Some(&full));
        let attempt = Attempt::new(&repository, &inventory, next, None).await.unwrap();
        assert_eq!(attempt.base_id(), Some(id));
    }
}
