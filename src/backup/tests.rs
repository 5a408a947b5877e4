//! Chains of backups of random volumes, without a driver: what is written is restored, interrupted
//! writers continue, and copies are equal.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use proptest::prelude::*;

use super::chunk;
use super::document::VERSION;
use super::manifest::{BackupId, Base, Intent, Manifest, Subject, samples};
use super::merge::Pages;
use super::repository::lock::{Kind, locked};
use super::repository::{Location, Repository};
use super::restore::Restore;
use super::target::Target;
use super::writer::Writer;
use crate::backend::Extent;
use crate::client::stop::Stop;

const BLOCK: u64 = 4096;

fn stop() -> Stop {
    Stop::unsignalled(Duration::from_secs(600))
}

async fn repository(directory: &Path, key: Option<&Path>) -> Repository {
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

fn intent(number: usize, capacity_bytes: u64, base: Option<&Manifest>) -> Intent {
    let subject = Subject {
        capacity_bytes,
        base: base.map(|base| Base {
            backup: base.id.clone(),
            snapshot_id: base.subject.snapshot_id.clone(),
            expires: None,
        }),
        ..samples::backup(number).subject
    };
    Intent { version: VERSION, id: samples::id(number), begun: String::new(), subject }
}

/// Writes the extents of `bytes`, a few blocks in a chunk; stops after `chunks` of them as a killed
/// process does.
async fn write(
    repository: &Repository,
    intent: &Intent,
    bytes: &[u8],
    extents: &[Extent],
    chunks: usize,
) -> Result<Option<Manifest>> {
    let device = tempfile::NamedTempFile::new()?;
    fs::write(device.path(), bytes)?;
    let device = File::open(device.path())?;
    repository.put_intent(intent).await?;
    let mut writer = Writer::resume(repository, intent).await?;
    let begin = writer.end();
    let coder = repository.coder(&intent.id)?;
    for part in extents.chunks(3).filter(|part| part[0].offset >= begin).take(chunks) {
        let coded = chunk::read(&device, part, !intent.subject.is_full(), &coder)?;
        writer.push(coded, part[part.len() - 1].end()).await?;
    }
    if chunks < usize::MAX {
        return Ok(None);
    }
    let manifest = writer.finish(intent, intent.begun.clone()).await?;
    repository.publish(&manifest).await?;
    Ok(Some(manifest))
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
    let backup = repository.find(&inventory, backup.id.as_str())?;
    let chain = repository.chain(&inventory, backup)?;
    locked(repository, Kind::Shared, "test", async |lock| {
        let target = Target::open(path, backup.subject.capacity_bytes)?;
        Restore::new(repository, &chain, target, resume)?.run(&stop(), lock).await
    })
    .await?;
    Ok(fs::read(path)?)
}

async fn chain_is_exact(states: &[Vec<u8>], also: &[bool], key: Option<&Path>) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let repository = repository(&directory.path().join("repository"), key).await;
    let mut backups: Vec<Manifest> = Vec::new();
    for (number, state) in states.iter().enumerate() {
        let base = number.checked_sub(1).map(|older| states[older].as_slice());
        let bytes = image(state);
        let intent = intent(number, bytes.len() as u64, backups.last());
        let extents = extents(base.unwrap_or_default(), state, also);
        write(&repository, &intent, &bytes, &extents, 2).await?;
        let manifest = write(&repository, &intent, &bytes, &extents, usize::MAX).await?;
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
        fs::write(
            &path,
            [&bytes[..bytes.len() / 2], &vec![0xee; bytes.len() / 2 + BLOCK as usize]].concat(),
        )?;
        assert!(restored(&repository, backup, &path, true).await? == expected);
        locked(&other, Kind::Shared, "test", async |lock| {
            super::copy::copy(&repository, &other, backup, &stop(), lock).await
        })
        .await?;
        fs::remove_file(&path)?;
        assert!(restored(&other, backup, &path, false).await? == bytes);
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
async fn an_interrupted_writer_continues_after_its_last_page() {
    let directory = tempfile::tempdir().unwrap();
    let repository = repository(directory.path(), None).await;
    // 600 chunks, more than a page holds.
    let state: Vec<u8> = (0..3600u32).map(|block| (block % 2) as u8).collect();
    let (bytes, all) = (image(&state), extents(&[], &state, &[]));
    let intent = intent(0, bytes.len() as u64, None);
    write(&repository, &intent, &bytes, &all, 590).await.unwrap();
    // A page is on its way in a task of its own.
    while repository.page(&intent.id, 0).await.unwrap().is_none() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let inventory = repository.inventory().await.unwrap();
    assert!(inventory.backups.is_empty(), "half a backup is none");
    assert_eq!(inventory.unfinished[0].1.as_ref(), Some(&intent));
    let writer = Writer::resume(&repository, &intent).await.unwrap();
    assert_eq!(writer.totals().chunks, 512);
    let backup = write(&repository, &intent, &bytes, &all, usize::MAX).await.unwrap().unwrap();
    assert_eq!((backup.pages, backup.totals.chunks), (2, 600));
    let mut pages = Pages::new(&repository, &backup);
    while pages.next().await.unwrap().is_some() {}
    let path = directory.path().join("image");
    assert!(restored(&repository, &backup, &path, false).await.unwrap() == bytes);
}

#[tokio::test]
async fn writers_share_a_repository_and_prune_does_not() {
    let directory = tempfile::tempdir().unwrap();
    let repository = repository(directory.path(), None).await;
    let refused =
        |error: anyhow::Error| assert!(error.to_string().contains("is in use by `one`"), "{error}");
    locked(&repository, Kind::Shared, "one", async |one| {
        one.claim(&samples::id(0)).await?;
        locked(&repository, Kind::Shared, "two", async |two| {
            two.claim(&samples::id(1)).await?;
            refused(two.claim(&samples::id(0)).await.unwrap_err());
            Ok(())
        })
        .await?;
        let alone = locked(&repository, Kind::Exclusive, "prune", async |_| Ok(())).await;
        refused(alone.unwrap_err());
        Ok(())
    })
    .await
    .unwrap();
    locked(&repository, Kind::Exclusive, "prune", async |lock| lock.check()).await.unwrap();
    assert!(repository.store.list("locks").await.unwrap().is_empty());
}

#[tokio::test]
async fn a_removed_backup_leaves_no_object() {
    let directory = tempfile::tempdir().unwrap();
    let repository = repository(directory.path(), None).await;
    let state = vec![1; 40];
    let (bytes, all) = (image(&state), extents(&[], &state, &[]));
    let intent = intent(0, bytes.len() as u64, None);
    let backup = write(&repository, &intent, &bytes, &all, usize::MAX).await.unwrap().unwrap();
    fs::write(
        directory.path().join("backups").join(backup.id.as_str()).join("packs/00000001#1"),
        b"x",
    )
    .unwrap();
    repository.remove(&backup.id).await.unwrap();
    repository.sweep().unwrap();
    assert_eq!(fs::read_dir(directory.path().join("backups")).unwrap().count(), 0);
    assert!(BackupId::generate(SystemTime::now()).unwrap() > backup.id);
}
