//! Linux interfaces that the standard library lacks.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use csi_loopback::backend::sys::fiemap;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use support::random::Random;

/// The number of extents of a file, from FIEMAP.
pub fn extents(file: &File) -> io::Result<u32> {
    let (mut count, mut at) = (0, 0);
    loop {
        let batch = fiemap(file, at, u64::MAX)?;
        let Some(last) = batch.last() else { return Ok(count) };
        count += batch.len() as u32;
        at = last.logical + last.length;
    }
}

/// The processor time of all threads of a process, including ended ones, from now on: utime and stime
/// of /proc/PID/stat, but in nanoseconds instead of ticks of 10 ms.
#[derive(Debug, Clone, Copy)]
pub struct CpuClock {
    clock: libc::clockid_t,
    begun: Duration,
}

impl CpuClock {
    pub fn of(pid: u32) -> Result<Self> {
        let mut clock = 0;
        // SAFETY: `clock` is alive for the call.
        let failed = unsafe { libc::clock_getcpuclockid(pid as libc::pid_t, &raw mut clock) };
        anyhow::ensure!(failed == 0, "no clock of process {pid}");
        Ok(Self::start(clock))
    }

    /// The clock of this process.
    pub fn own() -> Self {
        Self::start(libc::CLOCK_PROCESS_CPUTIME_ID)
    }

    fn start(clock: libc::clockid_t) -> Self {
        let stopped = Self { clock, begun: Duration::ZERO };
        Self { begun: stopped.spent(), ..stopped }
    }

    pub fn spent(self) -> Duration {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is alive for the call.
        unsafe { libc::clock_gettime(self.clock, &raw mut time) };
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32) - self.begun
    }
}

/// The processor time of all ended children that were waited for.
pub fn children_cpu() -> Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    let seconds = usage.user_time() + usage.system_time();
    Ok(Duration::from_micros(u64::try_from(seconds.num_microseconds())?))
}

/// The value of a line such as "VmHWM:  1234 kB" in a file of /proc/PID, in bytes.
pub fn memory(pid: u32, file: &str, name: &str) -> Result<u64> {
    let path = format!("/proc/{pid}/{file}");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let number = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Ok(number.with_context(|| format!("{path} has no {name}"))? << 10)
}

/// Resets VmHWM, so that it is the peak resident memory from now on.
pub fn reset_peak(pid: u32) -> Result<()> {
    fs::write(format!("/proc/{pid}/clear_refs"), "5").context("resetting the peak of memory")
}

/// Free bytes of the filesystem of `path`, after a syncfs.
pub fn free_bytes(path: &Path) -> Result<u64> {
    let directory = File::open(path)?;
    nix::unistd::syncfs(&directory)?;
    let statvfs = nix::sys::statvfs::fstatvfs(&directory)?;
    Ok(statvfs.blocks_free() * statvfs.fragment_size())
}

/// Drops a file from the page cache.
pub fn uncache(path: &Path) -> Result<()> {
    let file = File::open(path)?;
    file.sync_all()?;
    Ok(posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?)
}

/// Opens a file with O_DIRECT, which requires whole, aligned blocks.
pub fn open_direct(path: &Path) -> Result<File> {
    let mut options = File::options();
    let file = options.read(true).write(true).custom_flags(libc::O_DIRECT).open(path);
    file.with_context(|| format!("opening {} directly", path.display()))
}

/// 4 KiB with the alignment of direct I/O.
#[repr(C, align(4096))]
#[derive(Clone, Copy)]
pub struct Page(pub [u8; 4096]);

/// Pages of random data without zero or equal pages.
pub fn pages(count: usize, random: &mut Random) -> Vec<Page> {
    let mut page = Page([0; 4096]);
    let mut pages = Vec::with_capacity(count);
    for _ in 0..count {
        for word in page.0.chunks_exact_mut(8) {
            word.copy_from_slice(&random.next_u64().to_le_bytes());
        }
        pages.push(page);
    }
    pages
}

/// Writes aligned pages at a byte offset.
pub fn write_pages(file: &File, pages: &[Page], offset: u64) -> io::Result<()> {
    // SAFETY: a Page is 4096 bytes without padding, and any byte is a value of u8.
    let bytes =
        unsafe { std::slice::from_raw_parts(pages.as_ptr().cast::<u8>(), pages.len() * 4096) };
    file.write_all_at(bytes, offset)
}
