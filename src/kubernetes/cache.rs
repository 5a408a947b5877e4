//! A cache of objects of one kind, filled by a watch, so that a lookup costs no call to the API
//! server. While the watch is not running (the API server is unavailable, or the role does not
//! permit watches), every lookup queries the API server: a result is never older than the last
//! report of a running watch, and a watch whose connection is silently broken ends after
//! [`SILENCE`](super::client::SILENCE). The only exception is [`Cache::with_recent`], which would
//! list all objects for each lookup and therefore reuses a list for some seconds.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::pin::pin;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use kube::api::ListParams;
use kube::runtime::controller::Controller;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, reflector};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::{Mutex, watch};
use tokio::time::sleep;
use tokio_stream::StreamExt;

use super::cached::{Cached, Kept};
use super::client::{WATCH, within};
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// Timeout of one call to the API server.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum objects in one page of a list. An object has up to 1.5 MiB, and a page is in memory
/// several times while it is decoded.
const PAGE: u32 = 25;
/// Maximum age of a list that [`Cache::with_recent`] reuses.
const LIST_TTL: Duration = Duration::from_secs(5);
/// Pauses after a broken watch: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// An object of the API server, as a type.
pub trait Object:
    Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static
{
}

impl<K> Object for K where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static
{
}

/// Namespace (empty for cluster-scoped objects) and name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    pub namespace: String,
    pub name: String,
}

/// A secondary key of objects.
pub type Index<K> = fn(&K) -> Option<Cow<'_, str>>;

/// Returns the API of a namespace.
type Of<K> = Arc<dyn Fn(&str) -> Api<K> + Send + Sync>;

/// The clients of a cache. Separate clients have separate rate limits, so that lookups do not delay
/// the watch, which shares its client with leases and other work of the role itself.
#[derive(Clone)]
pub struct Clients {
    pub watch: Client,
    /// For lookups and lists while the watch is not running.
    pub lookups: Client,
}

impl From<&Client> for Clients {
    fn from(client: &Client) -> Self {
        Self { watch: client.clone(), lookups: client.clone() }
    }
}

/// The objects of one watch. Clones share them.
pub struct Cache<K: Cached> {
    state: Arc<RwLock<State<K>>>,
    index: Index<K>,
    of: Of<K>,
    /// For lists without the watch.
    all: Api<K>,
    listed: Arc<Mutex<Option<Listed<K>>>>,
    changes: watch::Sender<u64>,
}

/// A list of all objects, or the error of the attempt.
struct Listed<K> {
    began: Instant,
    indexed: Result<HashMap<String, Vec<Arc<K>>>, Arc<kube::Error>>,
}

impl<K> Listed<K> {
    fn with(&self, value: &str) -> Result<Vec<Arc<K>>, Arc<kube::Error>> {
        let indexed = self.indexed.as_ref().map_err(Arc::clone)?;
        Ok(indexed.get(value).cloned().unwrap_or_default())
    }
}

impl<K: Cached> Clone for Cache<K> {
    fn clone(&self) -> Self {
        let Self { state, index, of, all, listed, changes } = self;
        Self {
            state: state.clone(),
            index: *index,
            of: of.clone(),
            all: all.clone(),
            listed: listed.clone(),
            changes: changes.clone(),
        }
    }
}

struct State<K: Cached> {
    live: bool,
    objects: HashMap<Arc<Key>, K::Kept>,
    indexed: HashMap<Box<str>, Vec<Arc<Key>>>,
}

impl<K: Cached> Default for State<K> {
    fn default() -> Self {
        Self { live: false, objects: HashMap::new(), indexed: HashMap::new() }
    }
}

impl<K: Cached> Cache<K> {
    /// Starts a watch of what `all` and `select` cover. `of` returns the API of a namespace.
    pub fn start(
        all: Api<K>,
        of: impl Fn(&str) -> Api<K> + Send + Sync + 'static,
        select: watcher::Config,
        index: Index<K>,
        shutdown: Shutdown,
    ) -> Self {
        Self::watching(all.clone(), all, of, select, index, shutdown)
    }

    /// Like [`Cache::start`], with a separate client in `watched`, which only watches.
    fn watching(
        watched: Api<K>,
        all: Api<K>,
        of: impl Fn(&str) -> Api<K> + Send + Sync + 'static,
        select: watcher::Config,
        index: Index<K>,
        shutdown: Shutdown,
    ) -> Self {
        let (state, changes) = (Arc::default(), watch::Sender::new(0));
        let listed = Arc::new(Mutex::new(None));
        let cache = Self { state, index, of: Arc::new(of), all, listed, changes };
        task::spawn(cache.clone().follow(watched, bounded(select), shutdown));
        cache
    }

    /// The watch's report: the object, or that it does not exist. `None` while the watch is not
    /// running.
    pub fn cached(&self, key: &Key) -> Option<Option<Arc<K>>> {
        let state = self.read();
        match state.objects.get(key).filter(|_| state.live) {
            Some(kept) => kept.object().map(Some),
            None => state.live.then_some(None),
        }
    }

    /// The object, from the watch or else from the API server.
    pub async fn get(&self, key: &Key) -> kube::Result<Option<Arc<K>>> {
        match self.cached(key).flatten() {
            Some(object) => Ok(Some(object)),
            // It may be newer than the watch's last report.
            None => self.fetch(key).await,
        }
    }

    /// The object as the API server returns it now.
    pub async fn fetch(&self, key: &Key) -> kube::Result<Option<Arc<K>>> {
        let api = (self.of)(&key.namespace);
        Ok(in_time(api.get_opt(&key.name)).await?.map(Arc::new))
    }

    /// The watch's objects with this value of the index. `None` while the watch is not running.
    pub fn cached_with(&self, value: &str) -> Option<Vec<Arc<K>>> {
        let state = self.read();
        if state.live { state.with(value) } else { None }
    }

    /// The number of objects that [`Cache::cached_with`] returns.
    pub fn count_with(&self, value: &str) -> Option<usize> {
        let state = self.read();
        state.live.then(|| state.indexed.get(value).map_or(0, Vec::len))
    }

    /// Like [`Cache::cached_with`], but also after the watch broke: then from its last report.
    pub fn last_cached_with(&self, value: &str) -> Vec<Arc<K>> {
        self.read().with(value).unwrap_or_default()
    }

    /// The objects with this value of the index, from the watch or else from the API server.
    pub async fn with(&self, value: &str) -> kube::Result<Vec<Arc<K>>> {
        match self.cached_with(value) {
            Some(cached) => Ok(cached),
            None => self.fetch_with(value).await,
        }
    }

    /// The objects with this value of the index as the API server returns them now. Lists all
    /// objects.
    pub async fn fetch_with(&self, value: &str) -> kube::Result<Vec<Arc<K>>> {
        let matches = |one: &K| (self.index)(one).as_deref() == Some(value);
        let found = list(&self.all, ListParams::default(), matches).await?;
        Ok(found.into_iter().map(Arc::new).collect())
    }

    /// Like [`Cache::with`], but while the watch is not running, concurrent callers share one list
    /// of all objects: otherwise each lookup would list all objects. Objects that are found may be
    /// some seconds old; objects that are not found are missing in a list that started after the
    /// call. If a list fails, all callers that waited for it fail, so that none waits for more than
    /// two lists.
    pub async fn with_recent(&self, value: &str) -> Result<Vec<Arc<K>>, Arc<kube::Error>> {
        if let Some(cached) = self.cached_with(value) {
            return Ok(cached);
        }
        let called = Instant::now();
        let mut listed = self.listed.lock().await;
        if let Some(list) = &*listed {
            let found = list.with(value);
            let is_found = found.as_ref().is_ok_and(|found| !found.is_empty());
            if list.began > called || (is_found && list.began.elapsed() < LIST_TTL) {
                return found;
            }
        }
        let began = Instant::now();
        let indexed = self.list().await.map_err(Arc::new);
        listed.insert(Listed { began, indexed }).with(value)
    }

    async fn list(&self) -> kube::Result<HashMap<String, Vec<Arc<K>>>> {
        let mut indexed: HashMap<_, Vec<_>> = HashMap::new();
        for mut object in list(&self.all, ListParams::default(), |_| true).await? {
            object.shrink();
            if let Some(value) = (self.index)(&object).map(Cow::into_owned) {
                indexed.entry(value).or_default().push(Arc::new(object));
            }
        }
        Ok(indexed)
    }

    /// All objects. `None` while the watch is not running.
    pub fn all(&self) -> Option<Vec<Arc<K>>> {
        let state = self.read();
        if state.live { state.all() } else { None }
    }

    /// Whether the watch is running.
    pub fn is_live(&self) -> bool {
        self.read().live
    }

    /// Changes with every report of the watch.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    async fn follow(self, watched: Api<K>, select: watcher::Config, shutdown: Shutdown) {
        let mut pause = FIRST_PAUSE;
        loop {
            tokio::select! {
                error = self.watch(&watched, &select) => {
                    self.write().live = false;
                    if has_run(&error) {
                        pause = FIRST_PAUSE;
                    }
                    tracing::warn!(kind = %K::kind(&()), %error, "the watch broke; querying the API server until it runs again");
                }
                () = shutdown.ending() => return,
            }
            tokio::select! {
                () = sleep(pause) => pause = (pause * 2).min(LONGEST_PAUSE),
                () = shutdown.ending() => return,
            }
        }
    }

    /// Applies the events of one watch until it breaks.
    async fn watch(&self, watched: &Api<K>, select: &watcher::Config) -> watcher::Error {
        let mut events = pin!(watcher::watcher(watched.clone(), select.clone()));
        let mut listed = State::default();
        loop {
            match events.next().await {
                Some(Ok(Event::Init)) => listed = State::default(),
                Some(Ok(Event::InitApply(object))) => listed.put(object, self.index),
                Some(Ok(Event::InitDone)) => self.replace(std::mem::take(&mut listed)),
                Some(Ok(Event::Apply(object))) => self.put(object),
                Some(Ok(Event::Delete(object))) => self.remove(&key(&object)),
                Some(Err(error)) => return error,
                None => return watcher::Error::NoResourceVersion,
            }
        }
    }

    fn replace(&self, listed: State<K>) {
        // Dropped when readers can go on.
        let _former = std::mem::replace(&mut *self.write(), State { live: true, ..listed });
        self.changed();
    }

    fn put(&self, object: K) {
        self.write().put(object, self.index);
        self.changed();
    }

    fn remove(&self, key: &Key) {
        self.write().remove(key, self.index);
        self.changed();
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    fn read(&self) -> RwLockReadGuard<'_, State<K>> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State<K>> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Cached> State<K> {
    fn put(&mut self, mut object: K, index: Index<K>) {
        object.shrink();
        let key = Arc::new(key(&object));
        self.remove(&key, index);
        if let Some(value) = index(&object) {
            self.indexed.entry(value.into()).or_default().push(key.clone());
        }
        self.objects.insert(key, K::Kept::of(object));
    }

    /// `None` if one is unusable, as for [`State::with`].
    fn all(&self) -> Option<Vec<Arc<K>>> {
        self.objects.values().map(Kept::object).collect()
    }

    /// `None` if one is unusable: a shorter answer could hide an owner.
    fn with(&self, value: &str) -> Option<Vec<Arc<K>>> {
        let keys = self.indexed.get(value).into_iter().flatten();
        keys.map(|key| self.objects.get(key)?.object()).collect()
    }

    fn remove(&mut self, key: &Key, index: Index<K>) {
        let Some(kept) = self.objects.remove(key) else { return };
        let remains = |keys: &mut Vec<Arc<Key>>| {
            keys.retain(|one| **one != *key);
            !keys.is_empty()
        };
        let Some(object) = kept.object() else {
            // Its value is unknown.
            return self.indexed.retain(|_, keys| remains(keys));
        };
        let Some(value) = index(&object) else { return };
        if self.indexed.get_mut(&*value).is_some_and(|keys| !remains(keys)) {
            self.indexed.remove(&*value);
        }
    }
}

/// A watch that the API server ends regularly, which proves that the connection works, with small
/// pages.
pub fn bounded(select: watcher::Config) -> watcher::Config {
    select.timeout(WATCH).page_size(PAGE)
}

/// A controller of all objects of `api`.
pub fn controller<K: Cached>(api: Api<K>) -> Controller<K> {
    let (reader, writer) = reflector::store();
    let events = watcher::watcher(api, bounded(watcher::Config::default())).modify(K::shrink);
    Controller::for_stream(reflector(writer, events).applied_objects(), reader)
}

/// Whether a watch had started before it broke. Each attempt first lists all objects, so a watch
/// that cannot start (no permission, or the API server is unavailable) is retried with a growing
/// pause.
fn has_run(error: &watcher::Error) -> bool {
    use watcher::Error::{InitialListFailed, WatchStartFailed};
    !matches!(error, InitialListFailed(_) | WatchStartFailed(_))
}

/// A cache of all objects in the cluster, for a namespaced kind.
pub fn of_all_namespaces<K>(
    clients: impl Into<Clients>,
    index: Index<K>,
    shutdown: Shutdown,
) -> Cache<K>
where
    K: Cached + Resource<Scope = kube::core::NamespaceResourceScope>,
{
    let Clients { watch, lookups } = clients.into();
    let all = Api::all(lookups.clone());
    let of = move |namespace: &str| Api::namespaced(lookups.clone(), namespace);
    Cache::watching(Api::all(watch), all, of, watcher::Config::default(), index, shutdown)
}

/// A cache of the objects that `select` selects, for a cluster-scoped kind.
pub fn of_cluster<K>(
    clients: impl Into<Clients>,
    select: watcher::Config,
    index: Index<K>,
    shutdown: Shutdown,
) -> Cache<K>
where
    K: Cached + Resource<Scope = kube::core::ClusterResourceScope>,
{
    let Clients { watch, lookups } = clients.into();
    let all: Api<K> = Api::all(lookups);
    let one = all.clone();
    Cache::watching(Api::all(watch), all, move |_| one.clone(), select, index, shutdown)
}

impl Key {
    pub fn cluster(name: &str) -> Self {
        Self::new("", name)
    }

    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.to_owned(), name: name.to_owned() }
    }
}

fn key(object: &impl ResourceExt) -> Key {
    Key { namespace: object.namespace().unwrap_or_default(), name: object.name_any() }
}

/// Lists the objects that `select` and `matches` select, page by page.
pub async fn list<K: Object>(
    api: &Api<K>,
    select: ListParams,
    matches: impl Fn(&K) -> bool,
) -> kube::Result<Vec<K>> {
    let mut found = Vec::new();
    let mut page = select.limit(PAGE);
    loop {
        let list = in_time(api.list(&page)).await?;
        found.extend(list.items.into_iter().filter(&matches));
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page.continue_token = Some(token),
            None => return Ok(found),
        }
    }
}

/// A call to the API server, with [`CALL_TIMEOUT`].
pub async fn in_time<T>(call: impl Future<Output = kube::Result<T>>) -> kube::Result<T> {
    within(CALL_TIMEOUT, call).await
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ServiceAccount;
    use serde_json::json;
    use tokio::task::JoinSet;

    use super::*;
    use crate::fake_api::{FakeApi, WATCHED};
    use crate::snapshot::{self, VolumeSnapshotContent};

    const CONTENTS: &str = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents";

    fn put(api: &FakeApi, handle: &str) {
        let object = json!({
            "metadata": { "name": handle },
            "spec": { "driver": "d", "deletionPolicy": "Delete", "source": {}, "volumeSnapshotRef": {} },
            "status": { "snapshotHandle": handle },
        });
        api.put(&format!("{CONTENTS}/{handle}"), object);
    }

    /// A cache without a watch, which this API server does not permit.
    fn contents(api: &FakeApi) -> Cache<VolumeSnapshotContent> {
        let (_phase, shutdown) = Shutdown::manual();
        let select = watcher::Config::default().labels(WATCHED);
        of_cluster(&api.client(), select, snapshot::handle, shutdown)
    }

    #[tokio::test]
    async fn without_a_watch_concurrent_lookups_share_one_list() {
        let api = FakeApi::default();
        (0..10).for_each(|number| put(&api, &format!("handle-{number}")));
        let contents = contents(&api);
        let mut all = JoinSet::new();
        // The other half looks up handles that do not exist.
        for number in 0..20 {
            let contents = contents.clone();
            all.spawn(async move {
                let handle = format!("handle-{number}");
                (number, contents.with_recent(&handle).await.unwrap().len())
            });
        }
        for (number, found) in all.join_all().await {
            assert_eq!(found, usize::from(number < 10), "handle-{number}");
        }
        let lists = || api.calls(&format!("GET {CONTENTS}"));
        // One list for the callers who waited when it started, and one for those who came later and
        // found nothing.
        assert_eq!(lists(), 2);
        // A later caller starts a new list only if it finds nothing.
        assert_eq!(contents.with_recent("handle-1").await.unwrap().len(), 1);
        assert_eq!(lists(), 2);
        assert!(contents.with_recent("handle-10").await.unwrap().is_empty());
        assert_eq!(lists(), 3);
    }

    #[tokio::test]
    async fn without_a_watch_a_failed_list_fails_all_waiting() {
        let api = FakeApi::default();
        put(&api, "first");
        api.fail();
        let contents = contents(&api);
        let mut all = JoinSet::new();
        for _ in 0..20 {
            let contents = contents.clone();
            all.spawn(async move { contents.with_recent("first").await.is_err() });
        }
        assert!(all.join_all().await.into_iter().all(|failed| failed));
        assert_eq!(api.calls(&format!("GET {CONTENTS}")), 2);
    }

    #[tokio::test]
    async fn without_a_watch_a_newer_object_is_found() {
        let api = FakeApi::default();
        put(&api, "first");
        let contents = contents(&api);
        assert_eq!(contents.with_recent("first").await.unwrap().len(), 1);
        put(&api, "second");
        assert_eq!(contents.with_recent("second").await.unwrap().len(), 1);
    }

    /// What a cache keeps of a ServiceAccount in these tests: nothing of "lost".
    pub struct Forgetful(Option<Arc<ServiceAccount>>);

    impl Kept<ServiceAccount> for Forgetful {
        fn of(account: ServiceAccount) -> Self {
            Self((account.name_any() != "lost").then(|| Arc::new(account)))
        }

        fn object(&self) -> Option<Arc<ServiceAccount>> {
            self.0.clone()
        }
    }

    impl Cached for ServiceAccount {
        type Kept = Forgetful;

        fn shrink(&mut self) {}
    }

    #[test]
    fn a_list_without_an_unusable_object_is_not_returned() {
        let index: Index<ServiceAccount> =
            |account| account.metadata.namespace.as_deref().map(Cow::Borrowed);
        let mut state = State::default();
        let account = |namespace: &str, name: &str| {
            let metadata = json!({ "namespace": namespace, "name": name });
            serde_json::from_value(json!({ "metadata": metadata })).unwrap()
        };
        for name in ["first", "lost", "second"] {
            state.put(account("shop", name), index);
        }
        state.put(account("bank", "first"), index);
        let count = |state: &State<_>, value: &str| state.with(value).map(|found| found.len());
        assert_eq!((count(&state, "shop"), count(&state, "bank")), (None, Some(1)));
        assert!(state.all().is_none());
        // Its removal makes the lists whole again.
        state.remove(&Key::new("shop", "lost"), index);
        assert_eq!((count(&state, "shop"), count(&state, "bank")), (Some(2), Some(1)));
        assert_eq!(state.all().unwrap().len(), 3);
        for name in ["first", "second"] {
            state.remove(&Key::new("shop", name), index);
        }
        assert_eq!((count(&state, "shop"), state.indexed.len()), (Some(0), 1));
    }

    #[test]
    fn a_watch_that_cannot_start_is_retried_with_backoff() {
        let refused = || kube::Error::Service("403".into());
        assert!(!has_run(&watcher::Error::WatchStartFailed(refused())));
        assert!(!has_run(&watcher::Error::InitialListFailed(refused())));
        assert!(has_run(&watcher::Error::WatchFailed(refused())));
        assert!(has_run(&watcher::Error::NoResourceVersion));
    }
}
