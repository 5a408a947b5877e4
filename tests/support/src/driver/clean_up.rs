//! Stops a driver and releases the volumes of its test, in every state of both.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use tonic::Code;

use super::{Driver, InUse, loops_named, mounts, request_detach_named, unpublishing, unstaging};
use crate::ImageFs;

/// Time limit for a release through the driver, before it is forced.
const CLEAN_UP: Duration = Duration::from_secs(10);

impl Driver {
    pub(super) fn clean_up(&mut self) {
        let in_use = std::mem::take(&mut *self.in_use());
        if !in_use.is_empty() {
            self.revive();
        }
        let until = Instant::now() + CLEAN_UP;
        // In reverse order.
        in_use.iter().rev().for_each(|one| self.undo(one, until));
        self.process = None;
        self.force_release(&in_use);
        // The directory can only be removed without immutable files.
        let _ = Command::new("chattr").args(["-R", "-i"]).arg(self.data_dir()).output();
    }

    /// Starts the driver if it does not run.
    fn revive(&mut self) {
        let running = self.process.as_mut().is_some_and(|process| process.ended().is_none());
        if running && self.channel.is_some() {
            return;
        }
        self.channel = None;
        if let Err(error) = self.start_with(&[]) {
            eprintln!("cleaning up without a driver: {error}");
        }
    }

    fn undo(&self, one: &InUse, until: Instant) {
        while self.channel.is_some() && Instant::now() < until {
            let undone = match one {
                InUse::Published(id, target) => self.send(unpublishing(id, target)).map(drop),
                InUse::Staged(id, staging) => self.send(unstaging(id, staging)).map(drop),
            };
            match undone {
                // Another call of the test may still hold the volume.
                Err(status) if status.code() == Code::Aborted => {
                    thread::sleep(Duration::from_millis(100));
                }
                Err(status) => return eprintln!("cleaning up {one:?}: {status:?}"),
                Ok(()) => return,
            }
        }
    }

    /// Unmounts everything below the private directory, and detaches the loop devices of these
    /// volumes, whose ids are unique. For volumes that the driver could not release.
    fn force_release(&self, in_use: &[InUse]) {
        let own = self.xfs.as_ref().map(ImageFs::path);
        let rest = mounts().into_iter().filter(|mount| {
            mount.target.starts_with(self.directory.path()) && Some(mount.target.as_path()) != own
        });
        for mount in rest.collect::<Vec<_>>().into_iter().rev() {
            eprintln!("cleaning up: {} was still mounted", mount.target.display());
            let _ = Command::new("umount").arg(&mount.target).status();
        }
        for InUse::Staged(id, _) | InUse::Published(id, _) in in_use {
            let devices = loops_named(id);
            if !devices.is_empty() {
                eprintln!("cleaning up: {id} was still attached to {devices:?}");
                request_detach_named(id);
            }
        }
    }
}
