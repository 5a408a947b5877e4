use tempfile::TempDir;

use super::super::testing::have_root;
use super::*;

/// A new file of 1 MiB.
fn file(directory: &TempDir, name: &str) -> File {
    let path = directory.path().join(name);
    let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
    file.set_len(1 << 20).unwrap();
    file
}

/// Attaches a device to `first`, waits until the kernel has let it go, and attaches the same device
/// to `second`. Returns it as it was found with the first.
fn reassigned(first: &File, second: &File) -> LoopDevice {
    loop {
        let lifetime = Lifetime::LastUser { shares_blocks: true };
        let (device, handle) = LoopDevice::attach(first, lifetime, SectorSize::default()).unwrap();
        drop(handle);
        while !LoopDevice::find(first).unwrap().is_empty() {
            thread::sleep(Duration::from_millis(1));
        }
        let again = device.open(true).unwrap();
        match configure(&again, second, Lifetime::Explicit, SectorSize::default()) {
            // Another process took it first.
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => continue,
            configured => configured.unwrap(),
        };
        return device;
    }
}

#[test]
fn root_a_device_with_another_file_is_not_detached_or_used() {
    if !have_root() {
        return;
    }
    let directory = TempDir::with_prefix("csi-loopback-").unwrap();
    let (first, second) = (file(&directory, "first"), file(&directory, "second"));
    let device = reassigned(&first, &second);
    let (kept, released) = (device.keep(), device.release());
    let found = LoopDevice::find(&second).unwrap();
    let own = LoopDevice::ensure(&first, SectorSize::default());
    LoopDevice::detach_all(&first).unwrap();
    LoopDevice::detach_all(&second).unwrap();
    assert!(!kept.unwrap(), "the device of the other file was used");
    released.unwrap();
    assert_eq!(found.len(), 1, "the device of the other file was detached");
    assert_ne!(own.unwrap().path(), device.path());
    assert!(LoopDevice::find(&second).unwrap().is_empty());
}
