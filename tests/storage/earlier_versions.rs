//! Pools from earlier versions, one of each kind, in `tests/data/pools-v1`. Their driver was killed
//! while the volume was attached. They contain the raw volume `v` of 1 MiB and four snapshots of
//! it, of which the first and the last are deleted; and `o1`, a snapshot of a deleted volume.
//! Blocks written: 0 to 3 before `s1`, 2 and 9 before `s2`, 3 before `s3`, 20 before `s4`, 21 after
//! it.

use std::path::Path;

use csi_loopback::backend::check::FindingKind;
use csi_loopback::backend::{Backend, Error, PoolKind, Snapshot, check};
use support::{ALL_KINDS, BLOCK, Pool, REPOSITORY, blocks, have_root, path, run, write_direct};

fn unpack(kind: PoolKind, into: &Path) {
    let archive = Path::new(REPOSITORY).join(format!("tests/data/pools-v1/{kind}.tar.gz"));
    run("tar", &["-xSzf", path(&archive), "-C", path(into), "--strip-components=1"]);
}

fn named(backend: &Backend, name: &str) -> Snapshot {
    let snapshots = backend.snapshots(&Default::default(), None, 0).unwrap().items;
    snapshots.into_iter().find(|snapshot| snapshot.name == name).unwrap()
}

#[test]
fn a_pool_of_an_earlier_version_keeps_its_chain_of_changes() {
    if !have_root() {
        return;
    }
    for kind in ALL_KINDS {
        let mut pool = Pool::with(kind, |config| {
            std::fs::create_dir(&config.data_dir).unwrap();
            unpack(kind, &config.data_dir);
            config.pool_size = None;
        });
        let backend = pool.backend();
        let (s2, s3, o1) = (named(backend, "s2"), named(backend, "s3"), named(backend, "o1"));
        let volume = backend.volumes(None, 0).unwrap().items.remove(0);
        assert_eq!(volume.name, "v");
        assert_eq!(blocks(backend.allocated(&s2.id).unwrap()), [0, 1, 2, 3, 9]);
        assert_eq!(blocks(backend.delta(&s2.id, &s3.id).unwrap()), [3]);
        assert!(blocks(backend.allocated(&o1.id).unwrap()).is_empty());
        assert_eq!(pool.read_snapshot(&s3)[9 * BLOCK as usize], 51);

        // The baseline of the next snapshot is the deleted s4, whose data exists.
        let attached = pool.attach(&volume.id);
        write_direct(&attached.target, 30 * BLOCK, &[1; BLOCK as usize]);
        let s5 = pool.snapshot("s5", &volume);
        pool.detach(&attached);
        let changed = blocks(pool.backend().delta(&s3.id, &s5.id).unwrap());
        match kind {
            // An archive does not preserve shared blocks, so more is reported than was changed.
            PoolKind::Reflink => assert!([20, 21, 30].iter().all(|block| changed.contains(block))),
            PoolKind::Image | PoolKind::Copy => assert_eq!(changed, [20, 21, 30]),
        }
        pool.backend().delete_snapshot(&s2.id).unwrap();
        assert!(matches!(pool.backend().snapshot(&s2.id), Err(Error::NotFound { .. })));
        pool.restart();
        assert_eq!(blocks(pool.backend().delta(&s2.id, &s3.id).unwrap()), [3]);
        pool.stop();
        // An archive does not preserve the immutable flag of files.
        let mut findings = check::check(pool.data_dir()).unwrap().findings;
        findings.retain(|found| kind == PoolKind::Image || found.kind != FindingKind::NotImmutable);
        assert!(findings.is_empty(), "{findings:?}");
    }
}
