//! Volumes with sectors of 512 bytes, and filesystems that need them on volumes that lack them.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;

use csi_loopback::backend::{
    BaseFilter, Capability, Error, FsType, SectorSize, Source, Volume, VolumeRequest,
};
use support::delta::differing_blocks;
use support::random::Random;
use support::*;

const SECTOR: u64 = 512;

fn small() -> VolumeRequest {
    VolumeRequest { sector_size: Some(SectorSize::Bytes512), ..request() }
}

fn sector_of(device: &Path) -> String {
    let output = Command::new("blockdev").args(["--getss", path(device)]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Writes sectors past the page cache of the device, which fails on larger sectors.
fn write_sectors(device: &Path, offset: u64, data: &[u8]) -> std::io::Result<()> {
    let mut memory = vec![0; data.len() + BLOCK as usize];
    let start = memory.as_ptr().align_offset(BLOCK as usize);
    memory[start..start + data.len()].copy_from_slice(data);
    let file = File::options().write(true).custom_flags(libc::O_DIRECT).open(device)?;
    file.write_all_at(&memory[start..start + data.len()], offset)
}

/// The content of a filesystem made on sectors of 512 bytes, with a file.
fn foreign_filesystem(directory: &Path, mkfs: &[&str], bytes: u64) -> Vec<u8> {
    let image = directory.join("foreign.img");
    File::create(&image).unwrap().set_len(bytes).unwrap();
    run(mkfs[0], &[&mkfs[1..], &[path(&image)]].concat());
    let at = directory.join("foreign");
    fs::create_dir_all(&at).unwrap();
    run("mount", &["-o", "loop", path(&image), path(&at)]);
    fs::write(at.join("file"), "hello").unwrap();
    kernel::unmount(&at);
    let content = fs::read(&image).unwrap();
    fs::remove_file(image).unwrap();
    content
}

fn stage_error(pool: &Pool, volume: &Volume, capability: &Capability) -> Error {
    let staging = pool.scratch().join("refused");
    pool.backend().stage(&volume.id, &staging, capability).unwrap_err()
}

fn from(source: Source, sector_size: Option<SectorSize>) -> VolumeRequest {
    VolumeRequest { source: Some(source), sector_size, ..request() }
}

#[test]
fn a_filesystem_of_512_byte_sectors_mounts_on_such_sectors() {
    let xfs = ["mkfs.xfs", "-q", "-f", "-s", "size=512"];
    let ext4 = ["mkfs.ext4", "-q", "-F", "-b", "1024"];
    for_each_pool(|pool| {
        let cases = [(FsType::Xfs, &xfs[..], "512", 320), (FsType::Ext4, &ext4[..], "1024", 64)];
        for (fs_type, mkfs, unit, mib) in cases {
            let content = foreign_filesystem(pool.scratch(), mkfs, mib * MIB);
            let volume = pool.volume(&format!("large-{fs_type}"), mib * MIB);
            let attached = pool.attach(&volume.id);
            let mut device = File::options().write(true).open(&attached.target).unwrap();
            device.write_all(&content).and_then(|()| device.sync_all()).unwrap();
            drop(device);
            pool.detach(&attached);
            let error = stage_error(pool, &volume, &mounted(fs_type));
            let message = error.to_string();
            assert!(matches!(error, Error::Precondition(_)), "{message}");
            assert!(
                message.contains("sectorSize: \"512\"")
                    && message.contains(&format!("units of {unit} bytes")),
                "{message}"
            );
            // As the message says.
            let snapshot = pool.snapshot(&format!("s-{fs_type}"), &volume);
            let source = Source::Snapshot(snapshot.id);
            let request = from(source, Some(SectorSize::Bytes512));
            let restored = pool.create(&format!("small-{fs_type}"), request);
            let attached = pool.attach_as(&restored.id, &mounted(fs_type));
            assert_eq!(fs::read(attached.target.join("file")).unwrap(), b"hello");
            fs::write(attached.target.join("more"), pattern(1, 1 << 20)).unwrap();
            // A freeze and the flush of the device's pages precede the copy.
            let group = [restored.id.clone()];
            let group = pool.backend().create_group(&format!("g-{fs_type}"), &group).unwrap();
            pool.detach(&attached);
            let source = Source::Snapshot(group.snapshots[0].id.clone());
            let again = pool.create(&format!("again-{fs_type}"), from(source, None));
            let attached = pool.attach_as(&again.id, &mounted(fs_type));
            assert!(fs::read(attached.target.join("more")).unwrap() == pattern(1, 1 << 20));
            pool.detach(&attached);
        }
    });
}

#[test]
fn copies_of_a_volume_inherit_its_sectors() {
    for_each_pool(|pool| {
        let volume = pool.create("v", VolumeRequest { required_bytes: 4 * MIB, ..small() });
        let plain = pool.volume("plain", 4 * MIB);
        let attached = pool.attach(&plain.id);
        assert!(write_sectors(&attached.target, SECTOR, &[7; 512]).is_err());
        pool.detach(&attached);
        let attached = pool.attach(&volume.id);
        assert_eq!(sector_of(&attached.target), "512");
        write_sectors(&attached.target, SECTOR, &[7; 512]).unwrap();
        let clone = pool.create("clone", from(Source::Volume(volume.id.clone()), None));
        let snapshot = pool.snapshot("s", &volume);
        // The next driver finds the device and the size again.
        pool.restart();
        write_sectors(&attached.target, 2 * SECTOR, &[8; 512]).unwrap();
        pool.detach(&attached);
        pool.backend().delete_volume(&volume.id).unwrap();
        let source = Source::Snapshot(snapshot.id);
        let restored = pool.create("restored", from(source.clone(), None));
        for copy in [clone, restored] {
            let attached = pool.attach(&copy.id);
            assert_eq!(sector_of(&attached.target), "512");
            let mut found = [0; 1024];
            File::open(&attached.target).unwrap().read_exact_at(&mut found, SECTOR).unwrap();
            assert!(found[..512] == [7; 512] && found[512..] == [0; 512]);
            pool.detach(&attached);
        }
        let larger = csi_loopback::backend::CreateVolume {
            name: "larger".to_owned(),
            request: from(source, Some(SectorSize::Bytes4096)),
        };
        let refused = pool.backend().create_volume(&larger).unwrap_err();
        assert!(matches!(refused, Error::Invalid { .. }), "{refused}");
    });
}

#[test]
#[ignore = "full tier"]
fn changes_of_512_byte_sectors_are_exact() {
    const BYTES: u64 = 16 * MIB;
    for_each_pool(|pool| {
        let mut random = Random::new(11);
        let volume = pool.create("v", VolumeRequest { required_bytes: BYTES, ..small() });
        let attached = pool.attach(&volume.id);
        let device = File::options().write(true).open(&attached.target).unwrap();
        let mut content = vec![0_u8; BYTES as usize];
        let mut states: Vec<(String, Vec<u8>)> = Vec::new();
        for round in 0..6_u64 {
            for number in 0..40 {
                let offset = random.below(BYTES / SECTOR) * SECTOR;
                let length = (1 + random.below(24)).min((BYTES - offset) / SECTOR) * SECTOR;
                let range = offset as usize..(offset + length) as usize;
                let bytes = pattern(round * 100 + number, length as usize);
                match random.below(6) {
                    0 => {
                        discard(&attached.target, offset, length);
                        content[range].fill(0);
                    }
                    // In the page cache of the device: CreateSnapshot flushes it.
                    1 => {
                        device.write_all_at(&bytes, offset).unwrap();
                        content[range].copy_from_slice(&bytes);
                    }
                    _ => {
                        write_sectors(&attached.target, offset, &bytes).unwrap();
                        content[range].copy_from_slice(&bytes);
                    }
                }
            }
            let snapshot = pool.snapshot(&format!("s{round}"), &volume);
            states.push((snapshot.id, content.clone()));
        }
        let backend = pool.backend();
        for (target, (id, after)) in states.iter().enumerate() {
            for (base, before) in &states[..target] {
                let delta = blocks(backend.delta(base, id).unwrap());
                let mut missed = differing_blocks(before, after);
                missed.retain(|block| !delta.contains(block));
                assert_eq!(missed, [0_u64; 0], "{base} {id}");
            }
            let allocated = blocks(backend.allocated(id).unwrap());
            let zeros = vec![0; after.len()];
            assert!(differing_blocks(&zeros, after).iter().all(|block| allocated.contains(block)));
        }
        // Every snapshot has its bytes.
        drop(device);
        pool.detach(&attached);
        let bases = pool.backend().bases(&BaseFilter::Volume(volume.id.clone()), None, 0).unwrap();
        assert_eq!(bases.items.len(), 6);
        for (id, after) in &states {
            let snapshot = pool.backend().snapshot(id).unwrap();
            assert!(pool.read_snapshot(&snapshot) == *after, "{id}");
        }
    });
}
