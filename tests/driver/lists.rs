//! Lists: pages, tokens and filters.

use csi_loopback::proto::csi::v1 as csi;
use support::MIB;
use support::driver::*;
use tonic::Code;

#[test]
fn lists_are_paged_correctly_across_deletions() {
    with_driver(|driver| {
        let volumes: Vec<_> =
            (0..7).map(|number| driver.volume(&format!("v{number}"), MIB, block())).collect();
        let snapshots: Vec<_> = volumes.iter().map(|id| driver.snapshot(id, id)).collect();
        let volume_page = |starting_token: &str| {
            let starting_token = starting_token.to_owned();
            let page = driver.ok(csi::ListVolumesRequest { max_entries: 2, starting_token });
            let ids = page.entries.into_iter().map(|entry| {
                assert!(!entry.status.unwrap().volume_condition.unwrap().abnormal);
                entry.volume.unwrap().volume_id
            });
            (ids.collect::<Vec<_>>(), page.next_token)
        };
        let snapshot_page = |starting_token: &str| {
            let starting_token = starting_token.to_owned();
            let request =
                csi::ListSnapshotsRequest { max_entries: 2, starting_token, ..Default::default() };
            let page = driver.ok(request);
            let ids = page.entries.into_iter().map(|entry| entry.snapshot.unwrap().snapshot_id);
            (ids.collect::<Vec<_>>(), page.next_token)
        };
        let walk = |page: &dyn Fn(&str) -> (Vec<String>, String), delete: &dyn Fn(&str)| {
            let (mut seen, mut token, mut pages) = (Vec::new(), String::new(), 0);
            loop {
                let (ids, next) = page(&token);
                assert!(!ids.is_empty() && ids.len() <= 2);
                // The volume that the token names, and the previous one.
                ids.iter().for_each(|id| delete(id));
                seen.extend(ids);
                pages += 1;
                if next.is_empty() {
                    return (seen, pages);
                }
                token = next;
            }
        };
        let (seen, pages) = walk(&volume_page, &|_| {});
        assert_eq!((seen, pages), (volumes.clone(), 4));
        let (seen, pages) =
            walk(&snapshot_page, &|id| assert!(driver.call(delete_snapshot(id)).is_ok()));
        assert_eq!((seen, pages), (snapshots, 4));
        let (seen, pages) =
            walk(&volume_page, &|id| assert!(driver.call(delete_volume(id)).is_ok()));
        assert_eq!((seen, pages), (volumes, 4));
        assert!(volume_ids(driver).is_empty() && all_snapshots(driver).is_empty());
        let long = "x".repeat(100_000);
        for token in ["x", "0", "-1", "vol-", "../../x", "a\0b", &long] {
            let starting_token = token.to_owned();
            let request = csi::ListVolumesRequest { max_entries: 1, starting_token };
            driver.refused(request, Code::Aborted, "starting_token");
            let starting_token = token.to_owned();
            let request = csi::ListSnapshotsRequest { starting_token, ..Default::default() };
            driver.refused(request, Code::Aborted, "starting_token");
        }
        let request = csi::ListVolumesRequest { max_entries: -1, ..Default::default() };
        driver.refused(request, Code::InvalidArgument, "max_entries");
        let request = csi::ListSnapshotsRequest { max_entries: -1, ..Default::default() };
        driver.refused(request, Code::InvalidArgument, "max_entries");
    });
}

#[test]
fn snapshots_are_found_by_id_and_by_volume() {
    with_driver(|driver| {
        let (v, w) = (driver.volume("v", MIB, block()), driver.volume("w", 2 * MIB, block()));
        let (a, b) = (driver.snapshot("a", &v), driver.snapshot("b", &v));
        let c = driver.snapshot("c", &w);
        let find = |snapshot_id: &str, source_volume_id: &str| {
            let request = csi::ListSnapshotsRequest {
                snapshot_id: snapshot_id.to_owned(),
                source_volume_id: source_volume_id.to_owned(),
                ..Default::default()
            };
            let found = snapshots_where(driver, request);
            found.into_iter().map(|snapshot| snapshot.snapshot_id).collect::<Vec<_>>()
        };
        assert_eq!(find("", ""), [a.clone(), b.clone(), c.clone()]);
        assert_eq!(find("", &v), [a.clone(), b.clone()]);
        assert_eq!(find("", &w), [c.as_str()]);
        assert_eq!(find(&b, ""), [b.as_str()]);
        assert_eq!(find(&b, &v), [b.as_str()]);
        for (snapshot, volume) in [(&b, w.as_str()), (&b, NO_VOLUME)] {
            assert!(find(snapshot, volume).is_empty());
        }
        assert!(find(NO_SNAPSHOT, "").is_empty() && find("", NO_VOLUME).is_empty());

        let get =
            |id: &str| csi::GetSnapshotRequest { snapshot_id: id.to_owned(), ..Default::default() };
        let found = driver.ok(get(&c)).snapshot.unwrap();
        assert_eq!((found.source_volume_id.as_str(), found.size_bytes as u64), (&*w, 2 * MIB));
        assert!(found.ready_to_use && found.creation_time.is_some());
        assert!(found.group_snapshot_id.is_empty());
        assert_eq!(driver.ok(create_snapshot("c", &w)).snapshot.unwrap(), found);
        driver.refused(create_snapshot("c", &v), Code::AlreadyExists, "name");
        driver.refused(get(NO_SNAPSHOT), Code::NotFound, NO_SNAPSHOT);
        driver.ok(delete_volume(&w));
        assert_eq!(find("", &w), [c.as_str()]);
        driver.ok(create_snapshot("a", &v));
        for _ in 0..2 {
            driver.ok(delete_snapshot(&a));
            driver.refused(get(&a), Code::NotFound, &a);
        }
        assert_eq!(find("", &v), [b.as_str()]);
        driver.ok(delete_snapshot(NO_SNAPSHOT));
        // The name is free again, for another snapshot.
        assert_ne!(driver.snapshot("a", &v), a);
    });
}
