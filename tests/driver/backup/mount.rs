//! `backup mount`: a backup as a file.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use support::driver::*;
use support::ops::Device;
use support::random::Random;
use support::{MIB, path};

use super::{Rig, two_backups};

/// A mount and its command.
pub struct Mount {
    child: Child,
    directory: PathBuf,
}

impl Mount {
    /// Mounts, and waits until the image exists.
    pub fn new(rig: &Rig<'_>, backup: &str) -> Self {
        let directory = rig.driver.scratch().join("mount");
        let _ = fs::create_dir(&directory);
        let arguments = ["backup", "mount", backup, path(&directory), "--output", "ndjson"];
        let mut command = rig.command(&arguments);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut mount = Self { child, directory };
        support::kernel::wait_for("the image is mounted", || {
            let ended = mount.child.try_wait().unwrap();
            ended.is_some() || mount.image().exists()
        });
        assert!(mount.image().exists());
        mount
    }

    pub fn image(&self) -> PathBuf {
        self.directory.join("image")
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    /// Waits for the end, after which nothing is mounted; returns what the command printed.
    pub fn ended(mut self) -> (ExitStatus, Value, String) {
        let status = self.child.wait().unwrap();
        assert_eq!(fs::read_dir(&self.directory).unwrap().count(), 0, "the mount remains");
        let [out, error] = [
            std::io::read_to_string(self.child.stdout.take().unwrap()).unwrap(),
            std::io::read_to_string(self.child.stderr.take().unwrap()).unwrap(),
        ];
        (status, serde_json::from_str(&out).unwrap(), error)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = Command::new("umount").args(["-l", "-q", path(&self.directory)]).output();
    }
}

/// Holds the image, in order and in random parts, against the bytes of the snapshot.
pub fn check(rig: &Rig<'_>, image: &Path, snapshot: &str) {
    rig.holds(image, snapshot);
    let bytes = &rig.images[snapshot];
    support::kernel::drop_page_cache();
    let (file, mut random) = (File::open(image).unwrap(), Random::new(5));
    for _ in 0..100 {
        let from = random.below(bytes.len() as u64);
        let length = (1 + random.below(300_000)).min(bytes.len() as u64 - from);
        let mut part = vec![0; usize::try_from(length).unwrap()];
        file.read_exact_at(&mut part, from).unwrap();
        let from = usize::try_from(from).unwrap();
        assert!(part == bytes[from..from + part.len()], "{from}");
    }
}

#[test]
fn a_mounted_backup_is_its_image_and_ends_with_the_command() {
    with_driver(|driver| {
        let mut rig = Rig::new(driver, "v", 24 * MIB);
        rig.encrypt(Some([9; 32]));
        for (snapshot, writes) in [("a", 200), ("b", 40)] {
            rig.snapshot(snapshot, writes);
            rig.create(snapshot, &[]);
        }
        let directory = driver.scratch().join("mount");
        for signal in [Some(Signal::SIGINT), Some(Signal::SIGTERM), None] {
            let mount = Mount::new(&rig, "b");
            let image = mount.image();
            check(&rig, &image, "b");
            assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
            assert_eq!(image.metadata().unwrap().permissions().mode() & 0o777, 0o400);
            let error = File::options().write(true).open(&image).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(nix::libc::EROFS));
            match signal {
                Some(signal) => mount.signal(signal),
                None => support::run("umount", &[path(&directory)]),
            }
            let (status, shown, error) = mount.ended();
            assert!(status.success() && error.is_empty(), "{status}: {error}");
            super::assert_documented(&shown);
            assert_eq!(shown["image"], path(&image));
        }
        // A loop device uses the image, and does not keep the command.
        let mount = Mount::new(&rig, "a");
        let device = Device::attach(&mount.image(), &["--read-only"]);
        check(&rig, Path::new(device.path()), "a");
        mount.signal(Signal::SIGTERM);
        let (status, _, error) = mount.ended();
        assert!(status.success() && error.contains("is in use"), "{error}");
        drop(device);
        // The guide unmounts lazily: a program that looks at loop devices keeps the image open.
        let mount = Mount::new(&rig, "a");
        let device = Device::attach(&mount.image(), &["--read-only"]);
        support::run("umount", &["--lazy", path(&directory)]);
        check(&rig, Path::new(device.path()), "a");
        drop(device);
        let (status, _, error) = mount.ended();
        assert!(status.success() && error.is_empty(), "{status}: {error}");
        // What a killed command leaves.
        let mount = Mount::new(&rig, "b");
        rig.refused(&["backup", "mount", "a", path(&directory)], "is not empty");
        mount.signal(Signal::SIGKILL);
        let mut mount = mount;
        mount.child.wait().unwrap();
        rig.refused(&["backup", "mount", "a", path(&directory)], "run `umount ");
        support::run("umount", &[path(&directory)]);
        drop(mount);
        check(&rig, &Mount::new(&rig, "a").image(), "a");
        rig.refused(&["backup", "mount", "a", "/no/such"], "name an empty directory");
        rig.refused(&["backup", "mount", "nothing", path(&directory)], "no backup");
    });
}

#[test]
#[ignore = "full tier"]
fn a_backup_in_a_bucket_is_mounted() {
    with_driver(|driver| {
        let Some(server) = super::s3::Server::start() else { return };
        let mut rig = Rig::new(driver, "v", 8 * MIB);
        rig.repository[1] = "s3://bucket/mounted".to_owned();
        rig.environment = server.environment();
        for (name, value) in [("AWS_ACCESS_KEY_ID", "id"), ("AWS_SECRET_ACCESS_KEY", "key")] {
            rig.environment.push((name.to_owned(), value.to_owned()));
        }
        rig.snapshot("a", 60);
        rig.create("a", &[]);
        let mount = Mount::new(&rig, "a");
        check(&rig, &mount.image(), "a");
        // The server is gone: reads fail, and the command still ends.
        drop(server);
        support::kernel::drop_page_cache();
        mount.signal(Signal::SIGTERM);
        assert!(mount.ended().0.success());
    });
}

#[test]
#[ignore = "full tier"]
fn a_damaged_pack_is_an_io_error_of_the_mount() {
    with_driver(|driver| {
        let rig = two_backups(driver, "v");
        let packs = rig.files_in("packs");
        let largest = packs.iter().max_by_key(|pack| pack.metadata().unwrap().len()).unwrap();
        let mut bytes = fs::read(largest).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(largest, bytes).unwrap();
        let mount = Mount::new(&rig, "b");
        let (image, wanted) = (File::open(mount.image()).unwrap(), &rig.images["b"]);
        let mut failed = 0;
        let mut block = vec![0; 4096];
        for at in (0..wanted.len()).step_by(4096) {
            match image.read_exact_at(&mut block, at as u64) {
                Ok(()) => assert!(block == wanted[at..at + 4096], "{at}"),
                Err(error) => {
                    assert_eq!(error.raw_os_error(), Some(nix::libc::EIO));
                    failed += 1;
                }
            }
        }
        // A chunk is damaged, and the others are read.
        assert!(failed > 0 && failed < wanted.len() / 4096 / 2, "{failed}");
        drop(image);
        mount.signal(Signal::SIGTERM);
        let (status, _, error) = mount.ended();
        let name = largest.strip_prefix(rig.directory()).unwrap();
        assert!(status.success() && error.contains(path(name)), "{error}");
        assert!(error.contains("is damaged") && error.lines().count() < 5, "{error}");
    });
}
