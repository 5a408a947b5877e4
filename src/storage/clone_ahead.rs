//! Clones made ahead. After a snapshot with many extents, its data is cloned once more in the
//! background, to the file that becomes the next snapshot of the volume. That snapshot then shares
//! only what was written since: the kernel skips shared extents, 30 times faster than it shares
//! them.
//!
//! The clone belongs to the baseline of the volume. It contains only blocks of the baseline, so it
//! needs space for its extent map only, and it is removed before the data of the baseline is. Its
//! content is never trusted: taking a snapshot makes it equal to the volume, however complete it
//! is. So nothing needs to be done after a crash.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tracing::debug;

use super::error::{Context, Error, Result};
use super::extents::ExtentReader;
use super::fail_point;
use super::maintenance;
use super::pool::{self, Pool};
use super::store::length;

/// Minimum number of extents of a snapshot: cloning fewer takes about 2 ms.
const MIN_EXTENTS: usize = 128;

/// Maximum number of waiting clones. Each has an open file. Further snapshots get none.
const MAX_WAITING: usize = 64;

/// After each step, the worker pauses as long as the step took, but at most this long.
const MAX_PAUSE: Duration = Duration::from_millis(20);

/// The clones that are waiting or being made, by path, and the thread that makes them.
#[derive(Debug)]
pub struct ClonesAhead {
    jobs: Arc<Jobs>,
    waiting: Option<SyncSender<Arc<Job>>>,
    worker: Option<JoinHandle<()>>,
}

type Jobs = Mutex<HashMap<PathBuf, Arc<Job>>>;

#[derive(Debug)]
struct Job {
    /// Locked while the clone is made; `None` after that.
    source: Mutex<Option<File>>,
    path: PathBuf,
    stopped: AtomicBool,
}

impl ClonesAhead {
    pub fn start(pool: Arc<dyn Pool>) -> Result<Self> {
        let jobs = Arc::new(Jobs::default());
        let (waiting, next) = sync_channel(MAX_WAITING);
        let worker = thread::Builder::new().name("clone-ahead".to_owned()).spawn({
            let jobs = jobs.clone();
            move || work(pool.as_ref(), &jobs, &next)
        });
        let worker = worker.context(|| "starting a thread".to_owned())?;
        Ok(Self { jobs, waiting: Some(waiting), worker: Some(worker) })
    }

    /// Begins to clone the immutable `source` to `path`.
    pub fn begin(&self, source: File, path: PathBuf) {
        let source = Mutex::new(Some(source));
        let job = Arc::new(Job { source, path, stopped: AtomicBool::new(false) });
        lock(&self.jobs).insert(job.path.clone(), job.clone());
        let sent = self.waiting.as_ref().map(|waiting| waiting.try_send(job.clone()));
        if !matches!(sent, Some(Ok(()))) {
            lock(&self.jobs).remove(&job.path);
        }
    }

    /// Moves the clone at `path`, complete or not, to `to` and opens it. `None` if there is none.
    pub fn claim(&self, path: &Path, to: &Path) -> Result<Option<File>> {
        self.stop(path);
        match fs::rename(path, to) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            moved => moved.context(|| format!("renaming {}", path.display()))?,
        }
        // Like a new file.
        fail_point::reach("file.made")?;
        let opened = File::options().read(true).write(true).open(to);
        opened.map(Some).context(|| format!("opening {}", to.display()))
    }

    /// Removes the clone at `path` with `remove`. Succeeds if there is none.
    pub fn remove(&self, path: &Path, remove: fn(&Path) -> Result<()>) -> Result<()> {
        self.stop(path);
        remove(path)
    }

    /// Waits until the worker no longer uses the clone at `path`: at most one step and pause.
    pub fn stop(&self, path: &Path) {
        let job = lock(&self.jobs).remove(path);
        if let Some(job) = job {
            job.stopped.store(true, Ordering::Relaxed);
            lock(&job.source).take();
        }
    }
}

/// No thread may use the pool after its store is closed.
impl Drop for ClonesAhead {
    fn drop(&mut self) {
        self.waiting = None;
        lock(&self.jobs).values().for_each(|job| job.stopped.store(true, Ordering::Relaxed));
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
    }
}

/// The thread that makes the clones, one after the other.
fn work(pool: &dyn Pool, jobs: &Jobs, next: &Receiver<Arc<Job>>) {
    // Fail points count the steps of one operation.
    fail_point::skip_on_this_thread();
    while let Ok(job) = next.recv() {
        job.run(pool);
        lock(jobs).remove(&job.path);
    }
}

impl Job {
    fn run(&self, pool: &dyn Pool) {
        // The lock is held to the end.
        let mut locked = lock(&self.source);
        let Some(source) = locked.take_if(|_| !self.is_stopped()) else { return };
        let start = Instant::now();
        let made = self.make(pool, &source);
        if self.is_stopped() {
            return;
        }
        let path = self.path.display();
        match made {
            Ok(false) => {}
            Ok(true) => {
                debug!(%path, us = start.elapsed().as_micros() as u64, "made a clone ahead");
            }
            Err(error) => {
                debug!(%path, %error, "failed to make a clone ahead; the next snapshot takes longer");
                let _ = pool::remove(&self.path);
            }
        }
    }

    /// Returns whether a clone was made.
    fn make(&self, pool: &dyn Pool, source: &File) -> Result<bool> {
        let bytes = length(source)?;
        if !has_many_extents(source, bytes)? {
            return Ok(false);
        }
        check_room(pool)?;
        let target = pool::new_file(&self.path)?;
        pool.prepare_target(&target, bytes)?;
        let mut begun = Instant::now();
        pool.pre_clone(source, &target, &mut || {
            thread::sleep(begun.elapsed().min(MAX_PAUSE));
            begun = Instant::now();
            if self.is_stopped() {
                return Err(Error::Busy("stopped".to_owned()));
            }
            check_room(pool)
        })?;
        Ok(true)
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }
}

/// The extent map must not take the last space from pods.
fn check_room(pool: &dyn Pool) -> Result<()> {
    if maintenance::under_pressure(pool.room()?) {
        return Err(Error::Exhausted("the pool is nearly full".to_owned()));
    }
    Ok(())
}

fn has_many_extents(file: &File, bytes: u64) -> Result<bool> {
    let mut reader = ExtentReader::new(file, bytes);
    for _ in 0..MIN_EXTENTS {
        if reader.next_extent()?.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
