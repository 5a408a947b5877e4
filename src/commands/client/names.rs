//! Names for ids. CSI does not return the name that a volume or snapshot was created with, but the
//! driver's ids contain it as a slug ([`ids`]).

use std::collections::{BTreeMap, HashMap};

use anyhow::{Context, Result, bail, ensure};
use tonic::{Code, Status};

use super::base;
use super::block_map::{BlockMap, Driver, Query, Window};
use super::connection::{Connection, refused};
use common::ids;
use grpc::proto::csi::v1 as csi;

/// Entries of one page of a list.
pub(super) const PAGE: i32 = 1000;

/// The name to print for an id: its slug, or the id itself if another driver created it.
pub fn name_of(id: &str) -> &str {
    ids::name_of(id).unwrap_or(id)
}

/// The volume with this id or name. An id that is not listed passes, so that the driver reports
/// what it knows of it.
///
/// # Errors
/// No volume or several volumes have that name.
pub async fn volume(connection: &Connection, reference: &str) -> Result<csi::Volume> {
    match find_volume(connection, reference).await? {
        Some(volume) => Ok(volume),
        None if is_id("vol-", reference) => {
            Ok(csi::Volume { volume_id: reference.to_owned(), ..csi::Volume::default() })
        }
        None => bail!("{}", no_volume(reference)),
    }
}

/// The volume with this id or name, which is listed.
///
/// # Errors
/// No volume or several volumes have that name or id.
pub async fn existing_volume(connection: &Connection, reference: &str) -> Result<csi::Volume> {
    find_volume(connection, reference).await?.with_context(|| no_volume(reference))
}

fn no_volume(reference: &str) -> String {
    format!("no volume named {reference:?}; `csi-loopback volume list` lists the volumes")
}

/// The volume with this id or name, if it is listed.
pub async fn find_volume(connection: &Connection, reference: &str) -> Result<Option<csi::Volume>> {
    let mut search = Search::new("volume", reference)?;
    each_volume(connection, |entry| {
        let volume = entry.volume.unwrap_or_default();
        search.offer(volume.volume_id.clone(), volume);
    })
    .await?;
    search.finish()
}

/// The id of the snapshot with this id or name. An id that is not listed passes: a deleted snapshot
/// can still be the base of a delta.
///
/// # Errors
/// No snapshot or several snapshots have that name.
pub async fn snapshot_id(connection: &Connection, reference: &str) -> Result<String> {
    match find_snapshot(connection, reference).await? {
        Some(snapshot) => Ok(snapshot.snapshot_id),
        None if is_id("snap-", reference) => Ok(reference.to_owned()),
        None => bail!("{}", no_snapshot(reference)),
    }
}

/// A snapshot, to list its blocks.
#[derive(Debug, Clone)]
pub struct Subject {
    id: String,
    /// In bytes.
    size: Option<u64>,
    origin: Origin,
}

/// Where the id of a snapshot is from.
#[derive(Debug, Clone, Copy)]
enum Origin {
    Listed,
    /// No snapshot with the user's text is listed.
    Unlisted,
    /// The user gave an id.
    Given,
}

impl Subject {
    /// A snapshot that the driver lists.
    pub fn of(snapshot: &csi::Snapshot) -> Self {
        let (id, size) = (snapshot.snapshot_id.clone(), size(snapshot));
        Self { id, size, origin: Origin::Listed }
    }

    /// A CSI id, which is not looked up.
    pub fn with_id(id: String) -> Self {
        Self { id, size: None, origin: Origin::Given }
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    /// What a user who gave a name instead of an id needs to know after a refusal.
    fn hint(&self) -> Option<String> {
        let id = &self.id;
        match self.origin {
            Origin::Listed => None,
            _ if is_id("snap-", id) => None,
            Origin::Unlisted => Some(format!(
                "the driver lists no snapshot named {id:?}, so this was sent as an id; `csi-loopback snapshot list` \
                 lists the snapshots, and `csi-loopback snapshot list --bases` the ids of deleted ones that can be a \
                 base"
            )),
            Origin::Given => Some(format!("{id:?} was sent as an id; --base-id accepts no name")),
        }
    }
}

/// Size of a snapshot in bytes; 0 means that the driver does not report it.
pub fn size(snapshot: &csi::Snapshot) -> Option<u64> {
    u64::try_from(snapshot.size_bytes).ok().filter(|bytes| *bytes > 0)
}

/// The snapshot with this name; any other text is an id, about which the driver decides: it may
/// know deleted snapshots.
///
/// # Errors
/// Several snapshots have that name.
pub async fn subject(connection: &Connection, reference: &str) -> Result<Subject> {
    Ok(match find_snapshot(connection, reference).await? {
        Some(snapshot) => Subject::of(&snapshot),
        None => Subject { id: reference.to_owned(), size: None, origin: Origin::Unlisted },
    })
}

/// Starts to list the blocks of `target`, or their changes since `base`.
///
/// # Errors
/// The driver refuses it before the first message.
pub async fn listing(
    connection: &Connection,
    base: Option<&Subject>,
    target: &Subject,
    window: Window,
) -> Result<BlockMap<Driver>> {
    let hint = base.and_then(Subject::hint).or_else(|| target.hint());
    BlockMap::open(connection, query(base, target), window, target.size, hint).await
}

/// What [`listing`] lists.
pub fn query(base: Option<&Subject>, target: &Subject) -> Query {
    let id = target.id.clone();
    match base {
        Some(base) => Query::Delta { base: base.id.clone(), target: id },
        None => Query::Allocated { snapshot: id },
    }
}

/// The snapshot with this id or name, which is listed.
///
/// # Errors
/// No snapshot or several snapshots have that name or id.
pub async fn existing_snapshot(connection: &Connection, reference: &str) -> Result<csi::Snapshot> {
    find_snapshot(connection, reference).await?.with_context(|| no_snapshot(reference))
}

fn no_snapshot(reference: &str) -> String {
    format!(
        "no snapshot named {reference:?}; `csi-loopback snapshot list` lists the snapshots, and \
         `csi-loopback snapshot list --bases` the ids of deleted ones that can be a base"
    )
}

/// The snapshot with this id or name, if it is listed. With a driver that cannot list snapshots,
/// every text is an id.
pub async fn find_snapshot(
    connection: &Connection,
    reference: &str,
) -> Result<Option<csi::Snapshot>> {
    let mut search = Search::new("snapshot", reference)?;
    let is_listed = offer_snapshots(connection, "", |snapshot| {
        search.offer(snapshot.snapshot_id.clone(), snapshot);
    })
    .await?;
    if is_listed {
        return search.finish();
    }
    let snapshot_id = reference.to_owned();
    Ok(Some(csi::Snapshot { snapshot_id, ready_to_use: true, ..csi::Snapshot::default() }))
}

/// Reads a list page by page: `page` gets a token, and returns that of the next one, or none.
pub(super) async fn pages(
    mut page: impl AsyncFnMut(String) -> Result<String, Status>,
) -> Result<(), Status> {
    let mut token = String::new();
    loop {
        token = page(token).await?;
        if token.is_empty() {
            return Ok(());
        }
    }
}

/// Calls `seen` for every volume, page by page.
pub async fn each_volume(
    connection: &Connection,
    mut seen: impl FnMut(csi::list_volumes_response::Entry),
) -> Result<()> {
    let listed = pages(async |starting_token| {
        let request = csi::ListVolumesRequest { max_entries: PAGE, starting_token };
        let page = connection.controller().list_volumes(request).await?.into_inner();
        page.entries.into_iter().for_each(&mut seen);
        Ok(page.next_token)
    });
    listed.await.map_err(refused)
}

/// Calls `seen` for every snapshot, page by page; of one volume unless `volume_id` is empty.
///
/// # Errors
/// The driver cannot list snapshots, or refuses.
pub async fn each_snapshot(
    connection: &Connection,
    volume_id: &str,
    seen: impl FnMut(csi::Snapshot),
) -> Result<()> {
    let is_listed = offer_snapshots(connection, volume_id, seen).await?;
    ensure!(is_listed, "the driver cannot list snapshots (ListSnapshots is UNIMPLEMENTED)");
    Ok(())
}

/// The same, but returns false for a driver that cannot list snapshots.
async fn offer_snapshots(
    connection: &Connection,
    volume_id: &str,
    mut seen: impl FnMut(csi::Snapshot),
) -> Result<bool> {
    let listed = pages(async |starting_token| {
        let request = csi::ListSnapshotsRequest {
            secrets: connection.secrets(),
            max_entries: PAGE,
            starting_token,
            source_volume_id: volume_id.to_owned(),
            ..csi::ListSnapshotsRequest::default()
        };
        let page = connection.controller().list_snapshots(request).await?.into_inner();
        page.entries.into_iter().filter_map(|entry| entry.snapshot).for_each(&mut seen);
        Ok(page.next_token)
    });
    match listed.await {
        Err(status) if status.code() == Code::Unimplemented => Ok(false),
        listed => listed.map(|()| true).map_err(refused),
    }
}

/// The snapshots of all volumes, or of one unless `volume_id` is empty, by volume and oldest first.
/// The order within a volume is the driver's; creation times only decide without it, because the
/// clock may have been set back.
pub async fn snapshots_in_order(
    connection: &Connection,
    volume_id: &str,
) -> Result<Vec<csi::Snapshot>> {
    let mut of_volumes: BTreeMap<String, Vec<csi::Snapshot>> = BTreeMap::new();
    each_snapshot(connection, volume_id, |snapshot| {
        of_volumes.entry(snapshot.source_volume_id.clone()).or_default().push(snapshot);
    })
    .await?;
    for (volume_id, snapshots) in &mut of_volumes {
        let order = match snapshots.len() {
            1 => Vec::new(),
            _ => base::chain_order(connection, volume_id).await,
        };
        let places: HashMap<String, usize> = order.into_iter().zip(0..).collect();
        snapshots.sort_by_cached_key(|snapshot| {
            let time = snapshot.creation_time.map(|time| (time.seconds, time.nanos));
            let id = snapshot.snapshot_id.clone();
            (places.get(&id).copied(), time, id)
        });
    }
    Ok(of_volumes.into_values().flatten().collect())
}

fn is_id(prefix: &str, reference: &str) -> bool {
    reference.starts_with(prefix) && ids::name_of(reference).is_some()
}

/// A search through a list. An exact id wins over names, wherever it is in the list.
pub(super) struct Search<T> {
    kind: &'static str,
    reference: String,
    slug: String,
    exact: Option<T>,
    named: Vec<(String, T)>,
}

impl<T> Search<T> {
    /// # Errors
    /// The name is empty.
    pub fn new(kind: &'static str, reference: &str) -> Result<Self> {
        if reference.is_empty() {
            bail!("the {kind} name is empty");
        }
        Ok(Self {
            kind,
            reference: reference.to_owned(),
            slug: ids::slug(reference),
            exact: None,
            named: Vec::new(),
        })
    }

    pub fn offer(&mut self, id: String, item: T) {
        if id == self.reference {
            self.exact = Some(item);
        } else if ids::name_of(&id) == Some(&self.slug) {
            self.named.push((id, item));
        }
    }

    /// # Errors
    /// Several have that name.
    pub fn finish(mut self) -> Result<Option<T>> {
        if self.exact.is_some() {
            return Ok(self.exact);
        }
        if self.named.len() > 1 {
            let ids: Vec<_> = self.named.iter().map(|(id, _)| id.as_str()).collect();
            bail!(
                "{} {}s are named {:?}; use an id: {}",
                ids.len(),
                self.kind,
                self.reference,
                ids.join(", ")
            );
        }
        Ok(self.named.pop().map(|(_, item)| item))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: &str = "vol-data-0123456789abcdef";

    fn search(reference: &str, ids: &[&str]) -> Result<Option<String>> {
        let mut search = Search::new("volume", reference)?;
        for id in ids {
            search.offer((*id).to_owned(), (*id).to_owned());
        }
        search.finish()
    }

    #[test]
    fn a_name_or_id_finds_its_volume_and_no_other() {
        const ODD: &str = "pvc / with spaces";
        let odd = &*format!("vol-{}-0123456789abcdef", ids::slug(ODD));
        let namesake = &*format!("vol-{DATA}-fedcba9876543210");
        let others = ["vol-data-2-0123456789abcdef", DATA, "vol-dat-0123456789abcdef", "data-1"];
        for (reference, ids, found) in [
            ("data", &others[..], Some(DATA)),
            ("dat a", &others, None),
            ("0123456789abcdef", &others, None),
            // Not a slug: found by its hash.
            (ODD, &[DATA, odd], Some(odd)),
            // An exact id wins over a volume of that name.
            (DATA, &[namesake, DATA], Some(DATA)),
            (DATA, &[DATA, namesake], Some(DATA)),
            (DATA, &[namesake], Some(namesake)),
            // Of another driver.
            ("pvc-7", &["pvc-70", "pvc-7"], Some("pvc-7")),
        ] {
            assert_eq!(search(reference, ids).unwrap().as_deref(), found, "{reference} {ids:?}");
        }
        assert_eq!((name_of("pvc-7"), name_of(DATA)), ("pvc-7", "data"));
    }

    #[test]
    fn an_ambiguous_name_is_an_error_that_lists_the_ids() {
        let other = "vol-data-fedcba9876543210";
        let error = search("data", &[DATA, other]).unwrap_err().to_string();
        assert!(error.contains(DATA) && error.contains(other), "{error}");
        assert!(search("", &[DATA]).is_err());
    }

    #[test]
    fn only_an_id_passes_without_being_listed() {
        assert!(is_id("snap-", "snap-a-0123456789abcdef"));
        for other in ["a", "snap-a", "vol-a-0123456789abcdef", "snap-a-0123456789ABCDEF"] {
            assert!(!is_id("snap-", other), "{other}");
        }
    }
}
