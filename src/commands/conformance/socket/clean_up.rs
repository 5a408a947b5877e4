//! What a run made, and its removal. Each is noted before the call that makes it, and forgotten
//! after the call that removes it.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use super::super::door::{Done, Refusal, Volume};
use super::super::world::lock;
use super::SocketDoor;
use super::paths::Place;
use grpc::proto::csi::v1 as csi;

/// An object of a run. Requests have secrets, so that it is never printed as a whole.
#[derive(Clone)]
pub enum Made {
    /// The id is unknown until the call has returned.
    Volume {
        id: Option<String>,
        request: Box<csi::CreateVolumeRequest>,
    },
    Snapshot {
        id: Option<String>,
        request: Box<csi::CreateSnapshotRequest>,
    },
    Attached(Volume),
    /// A directory for the directories of volumes.
    Parent(PathBuf),
    /// A directory for the volume of this name.
    Directory(Place, String, PathBuf),
    Staged(Volume, PathBuf),
    Published(Volume, PathBuf),
}

impl Made {
    pub fn is_volume(&self, id: &str) -> bool {
        matches!(self, Self::Volume { id: Some(own), .. } if own == id)
    }

    pub fn is_snapshot(&self, id: &str) -> bool {
        matches!(self, Self::Snapshot { id: Some(own), .. } if own == id)
    }

    fn has_no_id(&self) -> bool {
        matches!(self, Self::Volume { id: None, .. } | Self::Snapshot { id: None, .. })
    }

    /// Whether it belongs to the use of the volume of this name on a node.
    fn is_use(&self, name: &str) -> bool {
        match self {
            Self::Volume { .. } | Self::Snapshot { .. } | Self::Parent(_) => false,
            Self::Directory(_, of, _) => of == name,
            Self::Attached(of) | Self::Staged(of, _) | Self::Published(of, _) => of.name == name,
        }
    }

    /// How the user finds it.
    fn describe(&self) -> String {
        match self {
            Self::Volume { id, request } => match id {
                Some(id) => format!("volume {id:?}"),
                None => format!("perhaps a volume named {:?}", request.name),
            },
            Self::Snapshot { id, request } => match id {
                Some(id) => format!("snapshot {id:?}"),
                None => format!("perhaps a snapshot named {:?}", request.name),
            },
            Self::Attached(volume) => format!("the attachment of volume {:?}", volume.id),
            Self::Parent(path) | Self::Directory(_, _, path) => {
                format!("directory {}", path.display())
            }
            Self::Staged(volume, path) => {
                format!("volume {:?}, staged at {}", volume.id, path.display())
            }
            Self::Published(volume, path) => {
                format!("volume {:?}, published at {}", volume.id, path.display())
            }
        }
    }
}

impl SocketDoor {
    pub(super) fn note(&self, made: Made) {
        lock(&self.made).push(made);
    }

    /// Notes the id of the newest object of this name.
    pub(super) fn identify(&self, name: &str, known: &str) {
        for made in lock(&self.made).iter_mut().rev() {
            match made {
                Made::Volume { id, request } if request.name == name => {
                    *id = Some(known.to_owned());
                    return;
                }
                Made::Snapshot { id, request } if request.name == name => {
                    *id = Some(known.to_owned());
                    return;
                }
                _ => {}
            }
        }
    }

    /// Undoes the use of a volume.
    pub(super) fn unpublish(&self, volume: &Volume) -> Done<()> {
        let uses: Vec<Made> =
            lock(&self.made).iter().filter(|made| made.is_use(&volume.name)).cloned().collect();
        for made in uses.iter().rev() {
            self.remove(made)?;
            self.forget(made);
        }
        Ok(())
    }

    /// Forgets the newest object if the driver has refused to make it.
    pub(super) fn forget_if_final(&self, refusal: &Refusal) {
        if matches!(refusal, Refusal::Final(_)) {
            lock(&self.made).pop_if(|made| made.has_no_id());
        }
    }

    pub(super) fn forget(&self, done: &Made) {
        let mut made = lock(&self.made);
        let text = done.describe();
        if let Some(at) = made.iter().rposition(|made| made.describe() == text) {
            made.remove(at);
        }
    }

    /// Removes everything that the run made. Returns what remains, each with the reason.
    pub(super) fn remove_all(&self) -> Vec<String> {
        self.calls.stop.is_cleaning.store(true, Ordering::Relaxed);
        let until = std::time::Instant::now() + super::CLEAN_UP;
        let mut remaining = Vec::new();
        // Twice: a snapshot can keep its volume.
        for is_last in [false, true] {
            let all: Vec<Made> = lock(&self.made).iter().rev().cloned().collect();
            for made in all {
                if std::time::Instant::now() >= until {
                    remaining.push(format!("{}: no time", made.describe()));
                    continue;
                }
                match self.remove(&made) {
                    Ok(()) => self.forget(&made),
                    Err(refusal) if is_last => {
                        remaining.push(format!("{}: {refusal}", made.describe()));
                    }
                    Err(_) => {}
                }
            }
        }
        remaining
    }

    fn remove(&self, made: &Made) -> Done<()> {
        match made {
            Made::Published(volume, target) => self.remove_target(volume, target),
            Made::Staged(volume, staging) => self.unstage(volume, staging),
            Made::Directory(place, _, path) => place.remove(&self.paths, path),
            Made::Parent(path) => {
                // Another run may use it.
                let _ = std::fs::remove_dir(path);
                Ok(())
            }
            Made::Attached(volume) => self.detach(volume),
            Made::Snapshot { id: Some(id), .. } => self.remove_snapshot(id),
            Made::Volume { id: Some(id), .. } => self.remove_volume(id),
            // The call may have made it: the same call returns its id.
            Made::Snapshot { id: None, request } => match self.request_snapshot(request) {
                Ok(snapshot) => self.remove_snapshot(&snapshot.snapshot_id),
                Err(refusal) => nothing_made(refusal),
            },
            Made::Volume { id: None, request } => {
                match self.request_volume(request.as_ref().clone()) {
                    Ok(volume) => self.remove_volume(&volume.volume_id),
                    Err(refusal) => nothing_made(refusal),
                }
            }
        }
    }
}

/// A refused call has made nothing.
fn nothing_made(refusal: Refusal) -> Done<()> {
    match &refusal {
        Refusal::Final(_) => Ok(()),
        _ => Err(refusal),
    }
}
