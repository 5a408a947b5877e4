//! `snapshot mount`: files of a snapshot, on the driver's node.

use std::fs;
use std::process::Command;

use nix::sys::signal::Signal;
use support::cluster::programs::Process;
use support::driver::*;
use support::path;

fn volumes(driver: &Driver) -> usize {
    driver.cli_json(&["volume", "list"]).as_array().unwrap().len()
}

#[test]
fn a_mounted_snapshot_leaves_nothing_at_the_end() {
    with_driver(|driver| {
        let volume = driver.volume("data", 64 << 20, mounted("ext4"));
        let target = driver.publish(&volume, &mounted("ext4"));
        fs::write(target.join("file"), "monday").unwrap();
        driver.snapshot("monday", &volume);
        fs::write(target.join("file"), "tuesday").unwrap();
        let directory = driver.scratch().join("files");
        fs::create_dir(&directory).unwrap();
        let start = || {
            let mut command = Command::new(binary());
            command.args(["snapshot", "mount", "monday", path(&directory)]);
            command.env("CSI_ENDPOINT", driver.endpoint()).env("TMPDIR", driver.scratch());
            let mut process = Process::spawn("mount", command, driver.scratch());
            process.wait_for("the mount", |_| directory.join("file").exists().then_some(()));
            process
        };
        let mut process = start();
        assert_eq!(fs::read_to_string(directory.join("file")).unwrap(), "monday");
        let refused = fs::write(directory.join("file"), "wednesday").unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
        process.signal(Signal::SIGINT);
        assert!(process.wait(PATIENCE).unwrap().success(), "{}", process.log());
        assert!(mounts_at(&directory).is_empty() && directory.exists());
        assert_eq!(volumes(driver), 1);

        // The next command removes what a killed one has left.
        let mut process = start();
        process.signal(Signal::SIGKILL);
        process.wait(PATIENCE).unwrap();
        assert_eq!((volumes(driver), mounts_at(&directory).len()), (2, 1));
        let mut verify = Command::new(binary());
        verify.args(["snapshot", "verify", "monday", "--quiet"]).env("TMPDIR", driver.scratch());
        assert!(verify.env("CSI_ENDPOINT", driver.endpoint()).status().unwrap().success());
        assert_eq!((volumes(driver), mounts_at(&directory).len()), (1, 0));
        driver.take_down(&volume);
    });
}
