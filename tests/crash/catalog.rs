//! A catalog that is damaged on disk but intact in the page cache is rewritten at a start, also if
//! that start is killed.

use csi_loopback::backend::{Error, PoolKind, check};
use support::driver::{all_snapshots, block};
use support::kernel::{damage_below_page_cache, drop_page_cache, keep_page_cache};
use support::{MIB, have_root};

use super::harness::{Fault, STEPS, Scene};

/// Names of the fail points of the rewrite.
const OWN: [&str; 2] = ["catalog.written_again", "catalog.replaced"];

/// The fail points of a start that rewrites the catalog. The driver is killed at the point
/// `die_at`.
pub fn rewrite(die_at: Option<&str>) -> Vec<String> {
    let mut scene = Scene::start(PoolKind::Reflink, &[]);
    let volume = scene.driver.volume(&scene.name("v", 0), MIB, block());
    let snapshot = scene.driver.snapshot(&scene.name("s", 0), &volume);
    assert!(scene.driver.stop().success());
    let disk = scene.driver.scratch().join("xfs.img");
    let data_dir = scene.driver.data_dir();
    let intact = keep_page_cache();
    damage_below_page_cache(&data_dir.join("catalog.redb"), &disk);
    assert!(matches!(check::check(&data_dir), Err(Error::Damaged(_))));
    match die_at {
        Some(name) => scene.plan(Fault::Kill, 1, name),
        None => scene.plan(Fault::Kill, 0, STEPS),
    }
    let started = scene.restart(|| {});
    let met = scene.met();
    if die_at.is_some() {
        started.unwrap_err();
        scene.wait_for_death();
        scene.driver.start_again();
    }
    drop(intact);
    let is_listed = |scene: &Scene| {
        let listed = all_snapshots(&scene.driver);
        assert!(listed.iter().any(|one| one.snapshot_id == snapshot), "{die_at:?}: {listed:?}");
    };
    is_listed(&scene);
    assert!(data_dir.join("catalog.damaged").exists());
    assert!(scene.driver.stop().success());
    drop_page_cache();
    scene.driver.start_again();
    is_listed(&scene);
    scene.check_pool();
    scene.end();
    met
}

#[test]
fn a_rewrite_of_the_catalog_is_repeated_after_a_kill() {
    if have_root() {
        OWN.iter().for_each(|name| drop(rewrite(Some(name))));
    }
}
