//! Volumes in use, interrupted creation of filesystems and pools, and lost or damaged data.

use std::thread::sleep;
use std::time::Instant;

use super::*;

#[test]
fn root_an_attachment_without_its_device_is_removed() {
    for_each_pool(|pool| {
        for (name, capability) in [("raw", raw()), ("ext4", mounted(FsType::Ext4))] {
            let volume = pool.volume(name);
            let target = pool.directory.path().join(format!("target-{name}"));
            // As after a reboot, or after a crash before the attach.
            let publication = Publication::on_host(capability.clone(), false);
            pool.put(&Attachment {
                volume_id: volume.id.clone(),
                staging_path: pool.directory.path().join("elsewhere"),
                capability: capability.clone(),
                published: [(target.clone(), publication)].into(),
                mounted: Default::default(),
            });
            pool.recover();
            let backend = pool.backend().clone();
            backend.unpublish(&volume.id, &target).unwrap();
            let path = pool.stage(&volume, &capability);
            assert!(pool.device(&volume).is_some());
            backend.unstage(&volume.id, &path).unwrap();
            assert!(pool.device(&volume).is_none());
            backend.delete_volume(&volume.id).unwrap();
        }
    });
}

/// A pod may still use a volume whose file was removed. It is unpublished and unstaged like any
/// other.
#[test]
fn root_an_attachment_without_its_file_is_kept() {
    for_each_pool(|pool| {
        let volume = pool.volume("v");
        let staged = pool.stage(&volume, &mounted(FsType::Ext4));
        let backing = pool.store().open_volume(&volume).unwrap();
        fs::remove_file(pool.store().pool.volume_path(&volume.id)).unwrap();
        pool.restart();
        let refused = pool.backend().delete_volume(&volume.id);
        let unstaged = pool.backend().unstage(&volume.id, &staged);
        let left = filesystem::mount_at(&staged).unwrap();
        if left.is_some() {
            unmount(&staged).unwrap();
        }
        let devices = LoopDevice::find(&backing).unwrap();
        LoopDevice::detach_all(&backing).unwrap();
        drop(backing);
        assert!(matches!(refused, Err(Error::Precondition(_))), "{refused:?}");
        assert!(unstaged.is_ok() && left.is_none(), "{unstaged:?} {left:?}");
        assert!(devices.is_empty(), "{devices:?}");
        pool.backend().delete_volume(&volume.id).unwrap();
        pool.recover();
    });
}

/// The filesystem is mounted in a container, or was: then only the freeze keeps it.
#[test]
fn root_a_frozen_filesystem_of_a_container_is_thawed() {
    for_each_pool(|pool| {
        for fs_type in FsType::ALL {
            let mut request = pool.request(fs_type.name());
            request.request.required_bytes = 300 * MIB;
            let volume = pool.backend().create_volume(&request).unwrap();
            let capability = mounted(fs_type);
            let staged = pool.stage(&volume, &capability);
            unmount(&staged).unwrap();
            let device = pool.device(&volume).unwrap();
            let publication = Publication {
                deferred: Some(Default::default()),
                ..Publication::on_host(capability.clone(), false)
            };
            let mut row: Attachment =
                pool.store().catalog.read().unwrap().get(&volume.id).unwrap().unwrap();
            row.mounted = crate::Mounted::AtTargets;
            row.published = [(pool.directory.path().join("target"), publication)].into();
            pool.put(&row);
            for is_running in [true, false] {
                let mut container = Some(container(&device, fs_type));
                let name = format!("{fs_type}-{is_running}");
                let _ = pool.put_unfinished(&name, &volume, None);
                let frozen = filesystem::open_mounted(&device).unwrap().unwrap();
                sys::freeze(&frozen).unwrap();
                drop(frozen);
                if !is_running {
                    container.take().map(end).unwrap();
                    assert_eq!(filesystem::mounted_type(&device).unwrap(), Some(fs_type));
                }
                // It can be joined while it is frozen.
                assert!(filesystem::join(&device, false).unwrap().is_some());
                pool.restart();
                if is_running {
                    let root = filesystem::open_mounted(&device).unwrap().unwrap();
                    let thawed = sys::thaw(&root).unwrap_err();
                    assert_eq!(thawed.raw_os_error(), Some(libc::EINVAL), "it was already thawed");
                    drop(root);
                    container.take().map(end).unwrap();
                }
                // The kernel completes the unmount later.
                let until = Instant::now() + Duration::from_secs(30);
                while filesystem::mounted_type(&device).unwrap().is_some() {
                    assert!(Instant::now() < until, "{fs_type} is still mounted");
                    sleep(Duration::from_millis(5));
                }
                pool.restart();
            }
            let backend = pool.backend().clone();
            backend.unpublish(&volume.id, &pool.directory.path().join("target")).unwrap();
            backend.unstage(&volume.id, &staged).unwrap();
        }
    });
}

fn end(mut container: std::process::Child) {
    container.kill().unwrap();
    container.wait().unwrap();
}

/// A process with the filesystem of a device mounted in its own mount namespace.
fn container(device: &LoopDevice, fs_type: FsType) -> std::process::Child {
    use std::io::Read;
    let script = "mount -t tmpfs none /mnt; mkdir /mnt/v; mount -t $1 $2 /mnt/v; echo up; exec cat";
    let mut child = Command::new("unshare")
        .args(["-m", "--propagation", "private", "sh", "-ec", script, "sh", fs_type.name()])
        .arg(device.path())
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = [0; 3];
    child.stdout.as_mut().unwrap().read_exact(&mut output).unwrap();
    assert_eq!(&output, b"up\n");
    child
}

#[test]
fn root_a_frozen_filesystem_is_thawed() {
    for_each_pool(|pool| {
        let mut request = pool.request("v");
        request.request.required_bytes = 32 * MIB;
        let volume = pool.backend().create_volume(&request).unwrap();
        let staged = pool.stage(&volume, &mounted(FsType::Ext4));
        let directory = File::open(&staged).unwrap();
        let frozen = || match sys::thaw(&directory) {
            Ok(()) => true,
            Err(e) => {
                assert_eq!(e.raw_os_error(), Some(libc::EINVAL));
                false
            }
        };
        // Frozen for a snapshot, a group, and a clone of a volume in use.
        sys::freeze(&directory).unwrap();
        assert!(frozen(), "the freeze is detected");
        for what in ["snapshot", "group", "clone"] {
            match what {
                "snapshot" => drop(pool.put_unfinished(what, &volume, None)),
                "group" => drop(put_group(pool, what, std::slice::from_ref(&volume))),
                _ => {
                    let mut request = pool.request(what);
                    request.request.source = Some(Source::Volume(volume.id.clone()));
                    request.request.required_bytes = 0;
                    let clone = pool.backend().create_volume(&request).unwrap();
                    pool.put(&Volume { phase: Phase::Creating, ..clone });
                }
            }
            sys::freeze(&directory).unwrap();
            pool.restart();
            assert!(!frozen(), "{what}");
            fs::write(staged.join("file"), what).unwrap();
            pool.recover();
        }
        let made = pool.snapshot("snapshot", &volume);
        assert!(pool.delta(&made, &made).is_empty());
        // A filesystem that another program froze remains frozen.
        sys::freeze(&directory).unwrap();
        pool.restart();
        assert!(frozen());
        drop(directory);
        pool.backend().unstage(&volume.id, &staged).unwrap();
    });
}

#[test]
fn root_an_unfinished_filesystem_is_created_again() {
    for_each_pool(|pool| {
        let volume = pool.volume("v");
        let capability = mounted(FsType::Ext4);
        // Parts of it are written, including the superblock.
        let staged = pool.stage(&volume, &capability);
        pool.backend().unstage(&volume.id, &staged).unwrap();
        let latest = pool.backend().volume(&volume.id).unwrap();
        let format = latest.format.map(|format| Format { unfinished: true, ..format });
        assert!(format.is_some());
        let file = pool.store().open_volume(&volume).unwrap();
        file.write_all_at(&[0xaa; 65536], 2 * BLOCK).unwrap();
        drop(file);
        pool.put(&Volume { format, ..latest });
        pool.recover();
        for _ in 0..2 {
            pool.stage(&volume, &capability);
            fs::write(staged.join("file"), "content").unwrap();
            let format = pool.backend().volume(&volume.id).unwrap().format.unwrap();
            assert!(!format.unfinished);
        }
        pool.restart();
        // A complete filesystem is never created again.
        pool.backend().unstage(&volume.id, &staged).unwrap();
        pool.stage(&volume, &capability);
        assert_eq!(fs::read(staged.join("file")).unwrap(), b"content");
        pool.backend().unstage(&volume.id, &staged).unwrap();
    });
}

#[test]
fn root_a_volume_without_snapshots_is_forgotten() {
    for_each_pool(|pool| {
        let volume = pool.volume("v");
        let a = pool.snapshot("a", &volume);
        let b = pool.snapshot("b", &volume);
        pool.backend().delete_volume(&volume.id).unwrap();
        let row = |row: &Snapshot| {
            let phase = SnapshotPhase::Deleted { at: 1 };
            Snapshot { phase, has_data: false, ..row.clone() }
        };
        // Both were deleted; the files of one are already removed.
        pool.put(&row(&a));
        pool.put(&row(&b));
        pool::remove(&pool.store().pool.snapshot_path(&a.id)).unwrap();
        pool::remove(&pool.store().pool.record_path(&a.id, 0)).unwrap();
        pool.recover();
        pool.assert_removed(&a);
        pool.assert_removed(&b);
    });
}

/// A damaged volume does not prevent the start or affect other volumes.
#[test]
fn root_damaged_data_does_not_prevent_a_start() {
    for_each_pool(|pool| {
        let broken = pool.volume("broken");
        let whole = pool.volume("whole");
        let a = pool.snapshot("a", &broken);
        let b = pool.snapshot("b", &whole);
        pool.put_unfinished("half", &broken, None);
        pool::remove(&pool.store().pool.snapshot_path(&a.id)).unwrap();
        fs::write(pool.store().pool.record_path(&b.id, 0), "CBT").unwrap();
        fs::remove_file(pool.store().pool.volume_path(&broken.id)).unwrap();
        pool.restart();
        let backend = pool.backend();
        assert!(backend.volume_condition(&broken.id).unwrap().is_abnormal());
        assert!(!backend.volume_condition(&whole.id).unwrap().is_abnormal());
        let refused = backend.stage(&broken.id, &pool.directory.path().join("s"), &raw());
        assert!(matches!(refused, Err(Error::Damaged(_))), "{refused:?}");
        assert!(matches!(backend.allocated(&b.id), Err(Error::Damaged(_))));
        pool.snapshot("c", &whole);
        backend.delete_volume(&broken.id).unwrap();
        backend.delete_snapshot(&a.id).unwrap();
        backend.delete_volume(&whole.id).unwrap();
        let report = check::check(&pool.config.data_dir).unwrap_err();
        assert!(matches!(report, Error::Precondition(_)), "{report}");
    });
}

#[test]
fn root_an_unfinished_catalog_is_created_again() {
    for_each_pool(|pool| {
        let path = pool.store().pool.root().join("catalog.redb");
        fs::remove_file(&path).unwrap();
        // redb had sized its file but not written the header.
        fs::write(path.with_extension("part"), vec![0; 327_680]).unwrap();
        pool.recover();
        pool.volume("v");
    });
}

#[test]
fn root_a_lost_catalog_is_not_replaced_by_an_empty_one() {
    for content in [None, Some(""), Some("text")] {
        for_each_pool(|pool| {
            pool.volume("v");
            let path = pool.store().pool.root().join("catalog.redb");
            fs::remove_file(&path).unwrap();
            content.iter().for_each(|content| fs::write(&path, content).unwrap());
            pool.backend = None;
            let refused = Backend::open(pool.config.clone()).map(drop);
            assert!(refused.is_err(), "{content:?}");
            let report = check::check(&pool.config.data_dir).map(drop);
            assert!(matches!(report, Err(Error::Damaged(_))), "{content:?}: {report:?}");
        });
    }
}

/// A small filesystem that can be filled.
struct Small {
    directory: TempDir,
}

impl Small {
    fn mount(kind: &str, bytes: u64) -> Self {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let small = Self { directory };
        let image = small.directory.path().join("image");
        File::create(&image).unwrap().set_len(bytes).unwrap();
        fs::create_dir(small.path()).unwrap();
        let run = |command: &mut Command| assert!(command.status().unwrap().success());
        run(Command::new(format!("mkfs.{kind}")).arg("-q").arg(&image));
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(small.path()));
        small
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("mounted")
    }

    /// Writes to `name` until the filesystem is full.
    fn fill(&self, name: &str) {
        let file = pool::new_file(&self.path().join(name)).unwrap();
        let mut at = 0;
        for size in [1 << 20, 4096, 1] {
            let chunk = vec![1; size];
            while file.write_all_at(&chunk, at).and_then(|()| file.sync_data()).is_ok() {
                at += size as u64;
            }
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.path()).status();
    }
}

#[test]
fn root_a_full_catalog_allows_deletions() {
    if !have_root() {
        return;
    }
    for (kind, bytes) in [("ext4", 16 * MIB), ("xfs", 320 * MIB)] {
        println!("on {kind}");
        let small = Small::mount(kind, bytes);
        let path = small.path().join("catalog.redb");
        let catalog = Catalog::open(&path, Default::default()).unwrap();
        let row = |number: u64| Volume {
            name: format!("volume-{number:04}-{}", "n".repeat(100)),
            // Large rows fill the space faster.
            source: Some(Source::Snapshot("s".repeat(3000))),
            ..crate::catalog::tests::volume(&format!("vol-{number:04}"))
        };
        let add = |number: u64| {
            catalog.write(|tx| tx.put(&row(number)).and_then(|()| tx.claim_name(&row(number))))
        };
        let remove = |number: u64| {
            catalog.write(|tx| {
                tx.release_name(&row(number)).and_then(|()| tx.remove::<Volume>(&row(number).id))
            })
        };
        (0..20).for_each(|number| add(number).unwrap());
        small.fill("filler");
        let mut count = 20;
        let refused = loop {
            match add(count) {
                Ok(()) => count += 1,
                Err(error) => break error,
            }
            assert!(count < 2000);
        };
        println!("refused after {count}: {refused:?}");
        assert!(matches!(refused, Error::Exhausted(_)), "{refused}");
        for _ in 0..5 {
            let refused = add(count);
            assert!(matches!(refused, Err(Error::Exhausted(_))), "{refused:?}");
        }
        let rows = catalog.read().unwrap().select(|_: &Volume| true).unwrap();
        assert_eq!(rows.len() as u64, count);
        // Existing rows can be changed and deleted.
        for number in 0..count {
            catalog
                .write(|tx| tx.put(&Volume { baseline: Some("b".into()), ..row(number) }))
                .unwrap();
        }
        for number in 0..count / 2 {
            remove(number).unwrap();
        }
        fs::remove_file(small.path().join("filler")).unwrap();
        add(0).unwrap();
        drop(catalog);
        let catalog = Catalog::open(&path, Default::default()).unwrap();
        let rows = catalog.read().unwrap().select(|_: &Volume| true).unwrap();
        assert_eq!(rows.len() as u64, count - count / 2 + 1);
    }
}
